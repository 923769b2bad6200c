"""Offline inference: `LLM.generate` in a process of its own, with the parameters in `SamplingParams.extra_args`."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.workload import LAYER_IDS, MODEL_NAME, assert_rows_are_true, text_tokens

from slotstream.client import connect
from slotstream.demo.processes import SMALL_ENGINE_ENV, free_port, start_server

pytestmark = [pytest.mark.vllm, pytest.mark.extended, pytest.mark.timeout(600)]

_SCRIPT = """
import json, sys
from vllm import LLM, SamplingParams

if __name__ == "__main__":
    asked = json.loads(sys.argv[1])
    llm = LLM(
        asked["model"],
        served_model_name=asked["name"],
        enforce_eager=True,
        block_size=32,
        max_model_len=1024,
        max_num_batched_tokens=64,
        max_num_seqs=16,
        speculative_config={
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": asked["layer_ids"]}},
        },
        kv_transfer_config={
            "kv_connector": "SlotStreamConnector",
            "kv_connector_module_path": "slotstream.connector",
            "kv_role": "kv_producer",
            "kv_connector_extra_config": {"server": asked["server"], "include_output_tokens": True},
        },
    )
    params = [
        SamplingParams(
            temperature=0,
            max_tokens=9,
            ignore_eos=True,
            extra_args={"kv_transfer_params": {"slotstream": {"sample_id": f"offline-{i}"}}},
        )
        for i in range(len(asked["prompts"]))
    ]
    answers = llm.generate([{"prompt_token_ids": p} for p in asked["prompts"]], params, use_tqdm=False)
    said = [(list(a.outputs[0].token_ids), a.kv_transfer_params["slotstream"]["sample_id"]) for a in answers]
    print("SAID " + json.dumps(said), flush=True)
"""


def test_every_sample_of_a_batch_is_there_when_the_process_has_ended(truth_models: dict[str, Path], tmp_path: Path) -> None:
    rng = random.Random(1)
    prompts = [text_tokens(rng, n) for n in (1, 64, 65, 300, 900)]
    (tmp_path / "offline.py").write_text(_SCRIPT)
    port = free_port()
    asked: dict[str, Any] = {
        "model": str(truth_models["dense"]),
        "name": MODEL_NAME,
        "layer_ids": LAYER_IDS,
        "server": f"127.0.0.1:{port}",
        "prompts": prompts,
    }
    with start_server(tmp_path / "data", tmp_path / "server.log", port), connect(asked["server"]) as client:
        command = ["/usr/bin/env", *(f"{k}={v}" for k, v in SMALL_ENGINE_ENV.items()), sys.executable, "offline.py"]
        ended = subprocess.run([*command, json.dumps(asked)], cwd=tmp_path, capture_output=True, text=True, timeout=400)
        assert ended.returncode == 0, ended.stderr[-3000:]
        said = json.loads(next(line for line in ended.stdout.splitlines() if line.startswith("SAID "))[5:])
        for i, (prompt, (tokens, sample_id)) in enumerate(zip(prompts, said, strict=True)):
            assert sample_id == f"offline-{i}"
            sample = client.get(sample_id, wait_s=0)
            assert sample.token_ids.tolist() == prompt + tokens[:-1]
            assert_rows_are_true(sample)
