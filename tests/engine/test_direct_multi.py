"""The option `layers` beside connectors that load KV, and with a quantized KV cache: rows are right, or refused with a code."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from engine.test_multi import Engine, beside_loaders, engine
from support.idle import assert_idle
from support.outage import metric, scrape
from support.stack import stack
from support.workload import LAYER_IDS, Ask, assert_rows_are_true, random_prompts, send, text_tokens

from slotstream.client import connect

pytestmark = [pytest.mark.vllm, pytest.mark.extended, pytest.mark.timeout(900)]

FROM_OUTSIDE = {"do_remote_prefill": True}  # As a decoding engine has it: such a request is not told to compute all its tokens.


@pytest.fixture(scope="module")
def loading(truth_models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """Beside vLLM's example connector that loads prompts it has seen, and one that only says that it loads."""
    yield from beside_loaders(tmp_path_factory.mktemp("loading"), truth_models["dense"], extract=False)


@pytest.fixture(scope="module")
def offloading(truth_models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """Beside vLLM's connector that offloads KV to memory, and loads it back when its prompt comes again."""
    sibling = {
        "kv_connector": "OffloadingConnector",
        "kv_connector_extra_config": {
            "spec_name": "OffloadOnCpu",
            "spec_module_path": "support.siblings",
            "cpu_bytes_to_use": 256 << 20,
        },
    }
    work = tmp_path_factory.mktemp("offloading")
    options = ("--num-gpu-blocks-override=64", "--max-num-batched-tokens=1024")
    yield from engine(work, truth_models["dense"], LAYER_IDS, [sibling], *options, extract=False)


def test_a_captured_request_computes_what_could_be_loaded(loading: Engine) -> None:
    rng = random.Random(42)
    prompt = text_tokens(rng, 200)
    assert loading.capture("computed", prompt) == "right"
    plain, _ = loading.ask(prompt, {"slotstream": {"sample_id": "plain"}})
    loading.forget_prefixes()
    loaded, _ = loading.ask(prompt, {"slotstream": {"sample_id": "none", "capture": False}, "example": True})
    assert loaded == plain
    assert loading.capture("hit", prompt) == "right"  # What was loaded is in vLLM's own cache now.
    loading.forget_prefixes()
    assert loading.capture("again", prompt, loads={"example": True}) == "right"
    for how in ({"pretend": 128}, {"pretend": 128, "at_once": True}, {"pretend": 10_000}):
        loading.forget_prefixes()
        name = f"pretend{how['pretend']}{'at_once' in how}"
        assert loading.capture(name, prompt, loads=how) == "right"
        assert loading.capture(f"{name}-window", prompt, loads=how, tokens=[100, 150]) == "right"
        assert loading.capture(f"{name}-output", prompt, loads=how, include_output_tokens=True, max_tokens=40) == "right"


def test_rows_of_tokens_that_come_from_outside_are_refused(loading: Engine) -> None:
    prompt = text_tokens(random.Random(43), 200)
    loads: dict[str, Any] = {"pretend": 128, **FROM_OUTSIDE}
    loading.forget_prefixes()
    assert loading.capture("outside", prompt, loads=loads) == "ROWS_NOT_COMPUTED"
    loading.forget_prefixes()
    assert loading.capture("outside-in", prompt, loads=loads, tokens=[100, 150]) == "ROWS_NOT_COMPUTED"
    loading.forget_prefixes()
    assert loading.capture("outside-after", prompt, loads=loads, tokens=[128, 200]) == "right"
    loading.forget_prefixes()
    whole: dict[str, Any] = {"pretend": 200, **FROM_OUTSIDE}
    outputs = {"include_output_tokens": True, "max_tokens": 60}
    assert loading.capture("outside-output", prompt, loads=whole, tokens=[199, None], **outputs) == "right"


def test_a_random_load_beside_loaders_stores_no_wrong_row(loading: Engine) -> None:
    rng = random.Random(44)
    shared = text_tokens(rng, 512)

    def one(i: int, seed: int) -> str:
        rng = random.Random(seed)
        prompt = shared[: rng.choice([0, 64, 256, 500])] + text_tokens(rng, rng.choice([1, 31, 33, 100, 300]))
        loads = {"pretend": rng.choice([0, 0, 0, 32, 100, 128, 10_000]), "at_once": rng.random() < 0.3}
        if rng.random() < 0.3:
            loads |= FROM_OUTSIDE
        outputs, max_tokens = rng.random() < 0.5, rng.choice([4, 60])
        window = [rng.randrange(len(prompt)), None] if rng.random() < 0.3 else [0, None]
        how: dict[str, Any] = {"include_output_tokens": outputs, "tokens": window}
        return loading.capture(f"r{i}", prompt, loads=loads, max_tokens=max_tokens, **how)

    with ThreadPoolExecutor(16) as pool:
        found = list(pool.map(one, range(120), [rng.randrange(1 << 30) for _ in range(120)]))
    assert set(found) == {"right", "ROWS_NOT_COMPUTED"}
    loading.assert_nothing_is_held()


def test_rows_beside_offloading_are_right(offloading: Engine) -> None:
    """More prompts than there are blocks for, again and again: uncaptured ones come back from memory, captured ones do not."""
    rng = random.Random(45)
    prompts = [text_tokens(rng, rng.choice([33, 200, 500, 900])) for _ in range(12)]

    def one(i: int) -> str:
        prompt = prompts[i % len(prompts)]
        if i % 3 == 0:
            offloading.ask(prompt, {"slotstream": {"capture": False}}, max_tokens=8)
            return "right"
        window = [64, None] if i % 5 == 0 and len(prompt) > 64 else [0, None]
        outputs = i % 2 == 0
        return offloading.capture(f"o{i}", prompt, max_tokens=40, include_output_tokens=outputs, tokens=window)

    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(one, range(72))) == {"right"}
    offloading.assert_nothing_is_held()
    page = scrape(offloading.port)
    loaded = [line for line in page.splitlines() if line.startswith("vllm:") and "offload" in line and "_to_" in line.lower()]
    assert metric(page, "vllm:external_prefix_cache_hits_total") > 0, loaded


@pytest.mark.parametrize("kind", ["fp8", "fp8_e5m2"])
def test_rows_with_a_quantized_kv_cache_are_right(kind: str, truth_models: dict[str, Path], tmp_path: Path) -> None:
    rng = random.Random(46)
    prompts = random_prompts(rng, 12)
    asks = [
        Ask(prompt, {"namespace": kind, "sample_id": f"s{i}", "include_output_tokens": i % 2 == 0}, max_tokens=20)
        for i, prompt in enumerate(prompts)
    ]
    with (
        stack(tmp_path, truth_models["dense"], LAYER_IDS, f"--kv-cache-dtype={kind}") as running,
        connect(running.address) as client,
    ):
        for ask, answer in zip(asks, send(running.vllm_port, asks), strict=True):
            assert answer.said is not None
            assert "error" not in answer.said, answer.said
            sample = client.get(ask.params["sample_id"], namespace=kind)
            whole = ask.prompt + (answer.tokens[:-1] if ask.params["include_output_tokens"] else [])
            assert sample.token_ids.tolist() == whole
            assert_rows_are_true(sample)
        assert_idle(running)
