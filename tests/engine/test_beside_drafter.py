"""A real drafter beside `layers`: it gets bit for bit what it gets without us, and drafts the same; our rows are right."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from support import tiny_eagle3, tiny_qwen3
from support.offline import Generated, capture, generate
from support.reference import assert_rows_are_those_of_transformers
from support.threads import same_threads
from support.workload import text_tokens

from slotstream.client import connect
from slotstream.demo.processes import free_port, start_server

pytestmark = [pytest.mark.vllm, pytest.mark.extended, pytest.mark.timeout(3600)]

PROMPTS = [text_tokens(random.Random(61), n) for n in (1, 5, 64, 65, 200, 411)]
MAX_TOKENS = 80
FINAL_ID = tiny_qwen3.LAYERS + 1


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_qwen3.make(tmp_path_factory.mktemp("random") / "qwen3", repeats=True)


def _run(work: Path, model: Path, speculative: dict[str, Any], **more: Any) -> tuple[Generated, list[str]]:
    """What was generated, and what the drafter got and gave, call by call."""
    drafts = work.with_suffix(".drafts")
    env = {"SLOTSTREAM_TEST_DRAFTS": str(drafts), **same_threads()}
    watched: dict[str, Any] = {"worker_extension_cls": "support.watched_drafter.WatchedDrafter"}
    found = generate(work, model, PROMPTS, MAX_TOKENS, env=env, speculative_config=speculative, **watched, **more)
    return found, drafts.read_text().splitlines()


def _captured(
    tmp_path: Path, name: str, model: Path, speculative: dict[str, Any], layers: list[int | str]
) -> tuple[Generated, list[str]]:
    """The same beside a capture of prompts and outputs, whose samples are compared with transformers."""
    port = free_port()
    address = f"127.0.0.1:{port}"
    with start_server(tmp_path / f"{name}-data", tmp_path / f"{name}.log", port), connect(address) as client:
        params = [{"sample_id": f"p{i}", "include_output_tokens": True} for i in range(len(PROMPTS))]
        found, drafts = _run(tmp_path / name, model, speculative, params=params, **capture(address, layers))
        for i, (prompt, text) in enumerate(zip(PROMPTS, found.texts, strict=True)):
            sample = client.get(f"p{i}")
            assert sample.token_ids.tolist() == prompt + text[:-1]
            assert list(sample.layer_ids) == [FINAL_ID if layer == "final" else layer for layer in layers]
            assert_rows_are_those_of_transformers(sample, model)
    return found, drafts


def _assert_same(alone: tuple[Generated, list[str]], beside: tuple[Generated, list[str]]) -> None:
    assert beside[0].texts == alone[0].texts
    assert len(alone[1]) > MAX_TOKENS / 4
    assert beside[1] == alone[1]
    assert beside[0].drafts == alone[0].drafts
    assert alone[0].drafts["vllm:spec_decode_num_accepted_tokens"] > 0


def test_eagle3_gets_its_layers_in_its_order_whichever_are_ours(model: Path, tmp_path: Path) -> None:
    """It asks for 4, 1 and 2. None of ours is among them, or some are."""
    drafter = tiny_eagle3.make(tmp_path / "eagle3", model, [4, 1, 2])
    speculative = {"method": "eagle3", "model": str(drafter), "num_speculative_tokens": 3}
    alone = _run(tmp_path / "alone", model, speculative)
    _assert_same(alone, _captured(tmp_path, "others", model, speculative, [0, 3, "final"]))
    _assert_same(alone, _captured(tmp_path, "shared", model, speculative, [1, 3, 4]))


def test_ngram_drafts_are_what_they_are_without_us(model: Path, tmp_path: Path) -> None:
    speculative = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
    alone = _run(tmp_path / "alone", model, speculative)
    _assert_same(alone, _captured(tmp_path, "beside", model, speculative, [1, 3, "final"]))
