"""Without compilation vLLM's CUDA norms overwrite what they are given: a layer 0 that is only another name of it, too."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from support import tiny_qwen3
from support.offline import capture, generate
from support.reference import assert_rows_are_those_of_transformers
from support.workload import text_tokens

from slotstream.client import connect
from slotstream.demo.processes import free_port, start_server

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]


@pytest.mark.parametrize("source", ["layers", pytest.param("extract_hidden_states", marks=pytest.mark.extended)])
def test_layer_0_is_the_embedding_where_norms_add_in_place(source: str, tmp_path: Path) -> None:
    model = tiny_qwen3.make(tmp_path / "model")
    prompts = [text_tokens(random.Random(7), n) for n in (1, 200)]
    port = free_port()
    address = f"127.0.0.1:{port}"
    ids = [0, 1, tiny_qwen3.LAYERS]
    asked: dict[str, Any] = capture(address, [*ids, "final"])
    if source == "extract_hidden_states":
        del asked["kv_transfer_config"]["kv_connector_extra_config"]["layers"]
        asked["speculative_config"] = {
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": ids}},
        }
    with start_server(tmp_path / "data", tmp_path / "server.log", port), connect(address) as client:
        params = [{"sample_id": f"p{i}"} for i in range(len(prompts))]
        in_place = "support.norms_in_place.NormsInPlace"
        generate(tmp_path / "engine", model, prompts, 4, params=params, worker_extension_cls=in_place, **asked)
        for i in range(len(prompts)):
            assert_rows_are_those_of_transformers(client.get(f"p{i}", wait_s=30), model)
