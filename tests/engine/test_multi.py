"""slotstream beside other connectors, under vLLM's MultiConnector: one that stores the same rows, and two that load."""

from __future__ import annotations

import random
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from support import tiny_qwen3
from support.outage import metric, scrape
from support.siblings import multi_options
from support.stack import support_importable
from support.workload import LAYER_IDS, MODEL_NAME, assert_rows_are_true, random_prompts, text_tokens
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import load_hidden_states

from slotstream.client import Client, SampleState, connect
from slotstream.demo.processes import (
    SMALL_ENGINE,
    complete,
    extraction_options,
    free_port,
    start_server,
    start_vllm,
)

pytestmark = [pytest.mark.vllm, pytest.mark.extended, pytest.mark.timeout(900)]

QWEN_LAYER_IDS = [0, 1, 3, tiny_qwen3.LAYERS]


class Engine:
    """A vLLM with slotstream and its siblings, and a client of slotstream's server."""

    def __init__(self, port: int, client: Client) -> None:
        self.port = port
        self.client = client

    def ask(self, prompt: list[int], params: dict[str, Any], max_tokens: int = 4) -> tuple[list[int], dict[str, Any]]:
        """A completion, greedy: its tokens, and what all connectors said."""
        body = {
            "model": MODEL_NAME,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "kv_transfer_params": params,
        }
        answer = complete(self.port, body, timeout_s=120.0)
        return answer["choices"][0]["token_ids"], answer["kv_transfer_params"]

    def capture(
        self, sample_id: str, prompt: list[int], *, max_tokens: int = 4, loads: dict[str, Any] | None = None, **params: Any
    ) -> str:
        """A completion captured: checks every row and returns "right", or the code of the error that was answered."""
        ours = {"sample_id": sample_id, **params}
        tokens, said = self.ask(prompt, {"slotstream": ours, **(loads or {})}, max_tokens)
        assert len(tokens) == max_tokens
        if "error" in said["slotstream"]:
            assert said["slotstream"]["num_tokens"] == 0
            return str(said["slotstream"]["error"]["code"])
        sample = self.client.get(sample_id)
        whole = prompt + tokens[:-1] if params.get("include_output_tokens") else prompt
        start, stop = params.get("tokens", (0, None))
        assert sample.token_ids.tolist() == whole[start:stop]
        assert_rows_are_true(sample)
        return "right"

    def forget_prefixes(self) -> None:
        """Empty vLLM's own prefix cache."""
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}/reset_prefix_cache", method="POST")
        with urllib.request.urlopen(request, timeout=30.0) as answer:
            assert answer.status == 200

    def assert_nothing_is_held(self) -> None:
        """Every request is gone, and so are their blocks: nothing leaked, and nothing freed twice, which ends vLLM."""
        for _ in range(100):
            self.ask([5, 6, 7], {"slotstream": {"capture": False}})
            page = scrape(self.port)
            busy = metric(page, "vllm:num_requests_running") + metric(page, "vllm:kv_cache_usage_perc")
            if busy == 0:
                return
        raise AssertionError(page)


def engine(
    work: Path,
    model: Path,
    layer_ids: list[int],
    siblings: list[dict[str, Any]],
    *options: str,
    extract: bool = True,
    **env: str,
) -> Iterator[Engine]:
    server, port = free_port(), free_port()
    chosen = [
        *SMALL_ENGINE,
        *options,
        f"--served-model-name={MODEL_NAME}",
        *(extraction_options(layer_ids) if extract else ()),
        *multi_options(f"127.0.0.1:{server}", *siblings, **({} if extract else {"layers": layer_ids})),
    ]
    env |= support_importable() | {"VLLM_SERVER_DEV_MODE": "1"}
    with (
        start_server(work / "data", work / "server.log", server),
        start_vllm(model, work / "vllm.log", port, *chosen, env=env),
        connect(f"127.0.0.1:{server}") as client,
    ):
        yield Engine(port, client)


@pytest.fixture(scope="module")
def storing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """Beside vLLM's example connector for hidden states."""
    work = tmp_path_factory.mktemp("storing")
    sibling = {
        "kv_connector": "HiddenStatesOnCpu",
        "kv_connector_module_path": "support.siblings",
        "kv_connector_extra_config": {"shared_storage_path": str(work / "theirs")},
    }
    yield from engine(work, tiny_qwen3.make(work / "model"), QWEN_LAYER_IDS, [sibling])


def beside_loaders(work: Path, model: Path, *, extract: bool = True) -> Iterator[Engine]:
    """See `loading`. `extract`: see `engine`."""
    example = {
        "kv_connector": "ExampleOnRequest",
        "kv_connector_module_path": "support.siblings",
        "kv_connector_extra_config": {"shared_storage_path": str(work / "theirs")},
    }
    pretend = {"kv_connector": "PretendLoader", "kv_connector_module_path": "support.siblings"}
    options = ("--disable-hybrid-kv-cache-manager", "--num-gpu-blocks-override=64", "--max-num-batched-tokens=1024")
    yield from engine(work, model, LAYER_IDS, [pretend, example], *options, extract=extract)


@pytest.fixture(scope="module")
def loading(truth_models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """Beside vLLM's example connector that loads prompts it has seen, and one that only says that it loads.

    The former wants a prompt in one step, and knows no KV-cache groups. There is room for 64 blocks of 32 tokens.
    """
    yield from beside_loaders(tmp_path_factory.mktemp("loading"), truth_models["dense"])


@pytest.fixture(scope="module")
def holding(truth_models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """Two tensor-parallel workers, beside a connector for which each of them reports: too few blocks to lose any."""
    sibling = {"kv_connector": "EveryRankHolds", "kv_connector_module_path": "support.siblings"}
    options = ("--tensor-parallel-size=2", "--num-gpu-blocks-override=160")
    work = tmp_path_factory.mktemp("holding")
    yield from engine(work, truth_models["dense"], LAYER_IDS, [sibling], *options, VLLM_CPU_OMP_THREADS_BIND="0|1")


def test_both_connectors_store_the_same_rows(storing: Engine) -> None:
    """Twice: the second time nearly everything is a prefix hit."""
    prompts = random_prompts(random.Random(41), 24)

    def one(turn: int, i: int) -> tuple[list[int], dict[str, Any]]:
        params = {"slotstream": {"sample_id": f"t{turn}-{i}"}, "include_output_tokens": i % 2 == 1}
        return storing.ask(prompts[i], params, max_tokens=40 if i % 2 else 4)

    for turn in range(2):
        with ThreadPoolExecutor(24) as pool:
            answers = list(pool.map(lambda i, turn=turn: one(turn, i), range(len(prompts))))
        for i, (tokens, said) in enumerate(answers):
            assert set(said) == {"slotstream", "hidden_states_path"}
            assert "error" not in said["slotstream"]
            ours, theirs = storing.client.get(f"t{turn}-{i}"), load_hidden_states(said["hidden_states_path"])
            assert ours.token_ids.tolist() == prompts[i] + (tokens[:-1] if i % 2 else [])
            assert torch.equal(ours.token_ids, theirs["token_ids"])
            assert ours.hidden_states.shape == (len(ours.token_ids), len(QWEN_LAYER_IDS), tiny_qwen3.HIDDEN)
            assert torch.equal(ours.hidden_states, theirs["hidden_states"])
            assert bool(ours.hidden_states.flatten(1).any(1).all())
    storing.assert_nothing_is_held()
    assert [info.state for info in storing.client.list()] == [SampleState.COMMITTED] * 2 * len(prompts)


def test_rows_of_loaded_tokens_are_not_stored(loading: Engine) -> None:
    rng = random.Random(42)
    prompt, suffix = text_tokens(rng, 200), text_tokens(rng, 40)
    assert loading.capture("computed", prompt) == "right"
    assert loading.capture("hit", prompt) == "right"
    plain, _ = loading.ask(prompt, {"slotstream": {"sample_id": "plain"}})
    loading.forget_prefixes()
    loaded, said = loading.ask(prompt, {"slotstream": {"sample_id": "loaded"}, "example": True})
    assert loaded == plain
    assert said["slotstream"]["error"]["code"] == "ROWS_NOT_COMPUTED"
    assert "192 tokens were loaded" in said["slotstream"]["error"]["message"]
    # What was loaded is now in vLLM's own cache, where it looks like what was computed.
    assert loading.capture("beside", prompt[:192] + suffix) == "ROWS_NOT_COMPUTED"
    assert loading.capture("other", text_tokens(rng, 150), include_output_tokens=True, max_tokens=40) == "right"


def test_a_window_beside_what_was_loaded_is_captured(loading: Engine) -> None:
    prompt = text_tokens(random.Random(43), 200)
    assert loading.capture("whole", prompt, loads={"pretend": 128}) == "ROWS_NOT_COMPUTED"
    loading.forget_prefixes()
    assert loading.capture("in", prompt, loads={"pretend": 128}, tokens=[100, 150]) == "ROWS_NOT_COMPUTED"
    loading.forget_prefixes()
    assert loading.capture("after", [*prompt[:-1], 9], loads={"pretend": 128}, tokens=[128, 200]) == "right"
    assert loading.capture("after-hit", [*prompt[:-1], 9], tokens=[128, 200]) == "right"
    loading.forget_prefixes()
    # As a decoding engine has it: the whole prompt came from outside, and its last token is computed once more.
    outputs = {"include_output_tokens": True, "max_tokens": 60}
    assert loading.capture("output", [*prompt[:-1], 10], loads={"pretend": 200}, tokens=[199, None], **outputs) == "right"


def test_a_random_load_stores_no_wrong_row_and_leaves_nothing_behind(loading: Engine) -> None:
    """More requests than there is room for: loads, hits of what was loaded, preemptions; blocks are used again and again."""
    rng = random.Random(44)
    shared = text_tokens(rng, 512)

    def one(i: int, seed: int) -> str:
        rng = random.Random(seed)
        prompt = shared[: rng.choice([0, 64, 256, 500])] + text_tokens(rng, rng.choice([1, 31, 33, 100, 300]))
        loads = {"pretend": rng.choice([0, 0, 0, 32, 100, 128, 10_000]), "at_once": rng.random() < 0.3}
        outputs = rng.random() < 0.5
        max_tokens = rng.choice([4, 60])
        window = [rng.randrange(len(prompt)), None] if rng.random() < 0.3 else [0, None]
        return loading.capture(
            f"r{i}", prompt, loads=loads, max_tokens=max_tokens, include_output_tokens=outputs, tokens=window
        )

    with ThreadPoolExecutor(16) as pool:
        found = list(pool.map(one, range(120), [rng.randrange(1 << 30) for _ in range(120)]))
    assert set(found) == {"right", "ROWS_NOT_COMPUTED"}
    loading.assert_nothing_is_held()
    page = scrape(loading.port)
    assert metric(page, "vllm:num_preemptions_total") > 0
    loading.forget_prefixes()
    # Blocks that once were loaded into are computed anew.
    for i in range(6):
        assert loading.capture(f"later{i}", text_tokens(rng, 900)) == "right"
    committed = [info for info in loading.client.list() if info.state is SampleState.COMMITTED]
    assert len(committed) >= found.count("right") + 6


def test_blocks_are_freed_beside_a_connector_for_which_every_worker_reports(holding: Engine) -> None:
    """vLLM then waits for as many reports of a request as there are workers, ours included, and counts them together."""
    rng = random.Random(45)
    prompts = [text_tokens(rng, rng.randrange(1, 300)) for _ in range(48)]

    def one(i: int) -> str:
        outputs = i % 4 != 3  # Three of four are held by us, every second one by the sibling, some by both.
        return holding.capture(
            f"h{i}", prompts[i], max_tokens=4 + 36 * (i % 3 == 0), include_output_tokens=outputs, loads={"hold": i % 2 == 0}
        )

    with ThreadPoolExecutor(16) as pool:
        assert set(pool.map(one, range(len(prompts)))) == {"right"}
    holding.assert_nothing_is_held()
