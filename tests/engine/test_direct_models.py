"""`layers` of other kinds of models, against transformers: what can be captured is right, what cannot is refused at start."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from support import tiny_kinds, tiny_llava, tiny_qwen3
from support.offline import capture, generate, refusal
from support.reference import assert_final_says_the_text, assert_rows_are_those_of_transformers
from support.workload import text_tokens

from slotstream.client import Sample, connect
from slotstream.demo.processes import free_port, start_server

pytestmark = [pytest.mark.vllm, pytest.mark.extended, pytest.mark.timeout(1800)]

PROMPTS = [text_tokens(random.Random(81), n) for n in (1, 5, 127, 128, 200, 411)]
NOBODY = "127.0.0.1:1"


def _captured(tmp_path: Path, model: Path, layers: list[int | str], **engine: Any) -> list[Sample]:
    """Samples of prompts in steps of 128 tokens, every second one with its output."""
    port = free_port()
    address = f"127.0.0.1:{port}"
    with start_server(tmp_path / "data", tmp_path / "server.log", port), connect(address) as client:
        params = [{"sample_id": f"p{i}", "include_output_tokens": i % 2 == 1} for i in range(len(PROMPTS))]
        found = generate(tmp_path / "engine", model, PROMPTS, 40, params=params, **engine, **capture(address, layers))
        samples = [client.get(f"p{i}") for i in range(len(PROMPTS))]
    for i, (prompt, text, sample) in enumerate(zip(PROMPTS, found.texts, samples, strict=True)):
        assert sample.token_ids.tolist() == prompt + (text[:-1] if i % 2 else [])
        assert len(sample.layer_ids) == len(layers)
    return samples


def test_final_of_latent_attention_is_what_the_text_is_read_of(tmp_path: Path) -> None:
    """Not compared with transformers: on vLLM's CPU build its own two ways through such a model give different rows."""
    model = tiny_kinds.make(tmp_path / "mla", "mla")
    samples = _captured(tmp_path, model, [*range(1, tiny_kinds.LAYERS + 1), "final"])
    for prompt, sample in zip(PROMPTS[1::2], samples[1::2], strict=True):
        assert_final_says_the_text(sample, model, len(prompt))


def test_a_layer_that_a_model_cannot_give_stops_the_start(tmp_path: Path) -> None:
    """vLLM's DeepSeek adds a residual to what is embedded, and there is none yet."""
    model = tiny_kinds.make(tmp_path / "mla", "mla")
    said = refusal(tmp_path / "engine", model, **capture(NOBODY, [0, 2]))
    why = "slotstream cannot start: DeepseekV2ForCausalLM does not run when it is to give its layers [0, 2] (TypeError: "
    assert said.count(why) == 1  # In one line, and not only at the end of a traceback.


def test_every_layer_of_gated_delta_nets(tmp_path: Path) -> None:
    model = tiny_kinds.make(tmp_path / "gdn", "gdn")
    for sample in _captured(tmp_path, model, [*range(tiny_kinds.LAYERS + 1), "final"]):
        # A state that adds up over hundreds of tokens rounds in more places: 0.02 in the middle, 0.1 at worst. The experts of
        # the last layer change the stream by a fifth.
        assert_rows_are_those_of_transformers(sample, model, error_max=0.15, other_error_min=0.15)


def test_every_layer_of_a_model_on_transformers_code(tmp_path: Path) -> None:
    model = tiny_qwen3.make(tmp_path / "qwen3")
    layers = [*range(1, tiny_qwen3.LAYERS + 1), "final"]
    for sample in _captured(tmp_path, model, layers, model_impl="transformers"):
        assert_rows_are_those_of_transformers(sample, model)


def test_media_models_on_transformers_code_give_final_and_no_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in tiny_llava.loadable().items():
        monkeypatch.setenv(name, value)
    model = tiny_llava.make(tmp_path / "llava")
    said = refusal(tmp_path / "refused", model, model_impl="transformers", **capture(NOBODY, [1, 3]))
    assert "slotstream cannot start: TransformersMultiModalForCausalLM does not give its layers [1, 3] as vLLM says" in said
    assert 'only "layers": ["final"] can be captured of it' in said
    port = free_port()
    address = f"127.0.0.1:{port}"
    with start_server(tmp_path / "data", tmp_path / "server.log", port), connect(address) as client:
        asked = {"params": [{"sample_id": "s"}], "model_impl": "transformers", **capture(address, ["final"])}
        generate(tmp_path / "engine", model, PROMPTS[-1:], 4, **asked)
        sample = client.get("s")
        assert sample.token_ids.tolist() == PROMPTS[-1]
        assert sample.layer_names == ("final",)
