"""Several workers and several engines on one server: each row is sent once, is right, and says where it comes from."""

from __future__ import annotations

import contextlib
import os
import random
import signal
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from support.descendants import descendants
from support.files import files_below
from support.idle import assert_idle
from support.outage import metric, scrape
from support.random_load import check, random_requests, run
from support.stack import Stack, stack
from support.waiting import wait_until
from support.workload import LAYER_IDS, Ask, assert_rows_are_true, send, text_tokens

from slotstream.client import Client, connect
from slotstream.connector.facade import SlotStreamConnector, SlotStreamMetadata
from slotstream.connector.options import SENDERS
from slotstream.connector.plan import SampleFinish, StepPlan

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

TWO_CPUS = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}
REQUESTS = 60
ENDS_S = 120.0  # From the death of a rank until vLLM has ended.
_EXTRACTION = {
    "method": "extract_hidden_states",
    "num_speculative_tokens": 1,
    "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": LAYER_IDS}},
}


def _assert_idle(running: Stack) -> None:
    """As `assert_idle`, after a step or two of every engine: a request alone may always go to the same one."""
    send(running.vllm_port, [Ask(text_tokens(random.Random(i), 5), {"capture": False}) for i in range(8)])
    assert_idle(running)


def _assert_a_random_load_is_captured_right(running: Stack, client: Client, *, outputs: bool) -> None:
    """Prefix hits, chunks, windows and hang-ups: what is stored is right, what is missing has its reason."""
    requests = [r for r in random_requests(1, REQUESTS, "load") if outputs or not r.wants_output]
    outcomes = run(running.vllm_port, requests, at_once=24)
    _assert_idle(running)
    states = Counter(check(client, r, o, "dense") for r, o in zip(requests, outcomes, strict=True))
    assert states["committed"] >= len(requests) // 2, states


def _outputs(rng: random.Random, count: int, namespace: str) -> list[Ask]:
    params = {"namespace": namespace, "include_output_tokens": True}
    return [Ask(text_tokens(rng, rng.randrange(1, 300)), params | {"sample_id": f"o{i}"}, max_tokens=50) for i in range(count)]


def _check_outputs(running: Stack, client: Client, asks: Sequence[Ask]) -> list[str]:
    """Send them and check their rows, the text's too; returns the engine that each was captured by."""
    engines = []
    for ask, answer in zip(asks, send(running.vllm_port, asks), strict=True):
        sample = client.get(ask.params["sample_id"], namespace=ask.params["namespace"])
        assert sample.token_ids.tolist() == ask.prompt + answer.tokens[:-1]
        assert_rows_are_true(sample)
        engines.append(sample.metadata["engine_id"])
    return engines


@pytest.mark.extended
@pytest.mark.parametrize("sender", SENDERS)
def test_one_of_two_tensor_parallel_workers_sends_every_row_once(
    truth_models: dict[str, Path], tmp_path: Path, sender: str
) -> None:
    options = ["--tensor-parallel-size=2", "--num-gpu-blocks-override=160"]  # Too few blocks to go on when any are lost.
    with (
        stack(tmp_path, truth_models["dense"], LAYER_IDS, *options, env=TWO_CPUS, sender=sender) as running,
        connect(running.address) as client,
    ):
        assert running.engine is not None
        assert running.engine.log.read_text().count("slotstream: layers") == 1
        assert metric(scrape(running.metrics_port), "slotstream_ingest_streams") == 1
        asks = _outputs(random.Random(1), 30, "outputs")
        assert len(set(_check_outputs(running, client, asks))) == 1
        _assert_idle(running)
        page = scrape(running.vllm_port)
        rows = sum(info.num_tokens for info in client.list(namespace="outputs"))
        assert metric(page, "slotstream_connector_rows_total") == rows
        assert metric(page, "slotstream_connector_samples_committed_total") == len(asks)
        # Prompts only: that load samples at random, and vLLM's CPU workers then draw tokens that differ from rank to rank (seen
        # in 0.32 with extraction and a connector that does nothing), so that the text's rows are of no token at all.
        _assert_a_random_load_is_captured_right(running, client, outputs=False)


@pytest.mark.extended
@pytest.mark.parametrize("sender", SENDERS)
def test_each_of_two_data_parallel_engines_sends_its_own_and_says_which_it_is(
    truth_models: dict[str, Path], tmp_path: Path, sender: str
) -> None:
    options = ["--data-parallel-size=2", "--num-gpu-blocks-override=160"]
    with (
        stack(tmp_path, truth_models["dense"], LAYER_IDS, *options, env=TWO_CPUS, sender=sender) as running,
        connect(running.address) as client,
    ):
        asks = _outputs(random.Random(2), 40, "outputs")
        captured_by = Counter(_check_outputs(running, client, asks))
        _assert_idle(running)
        assert metric(scrape(running.metrics_port), "slotstream_ingest_streams") == 2
        page = scrape(running.vllm_port)
        rows = Counter[str]()
        for info in client.list(namespace="outputs"):
            rows[info.metadata["engine_id"]] += info.num_tokens
        # vLLM gives each engine the same id with its rank behind it, and labels each engine's metrics with the rank.
        by_rank = {engine_id.rsplit("_dp", 1)[1]: engine_id for engine_id in captured_by}
        assert sorted(by_rank) == ["0", "1"]
        for rank, engine_id in by_rank.items():
            assert metric(page, "slotstream_connector_rows_total", engine=rank) == rows[engine_id]
            assert metric(page, "slotstream_connector_samples_committed_total", engine=rank) == captured_by[engine_id]
            assert metric(page, "slotstream_connector_link_up", engine=rank) == 1
        _assert_a_random_load_is_captured_right(running, client, outputs=True)


@pytest.mark.extended
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_killed_ends_vllm_and_costs_nothing_that_was_committed(
    truth_models: dict[str, Path], tmp_path: Path, rank: int
) -> None:
    """Rank 0 sends the rows; the other has none. What was arriving fails, and both can be started again."""
    with (
        stack(tmp_path, truth_models["dense"], LAYER_IDS, "--tensor-parallel-size=2", env=TWO_CPUS) as running,
        connect(running.address) as client,
    ):
        assert running.engine is not None
        asks = _outputs(random.Random(3), 12, "before")
        _check_outputs(running, client, asks)
        # More than are computed at a time: some are always in the middle.
        long = [
            Ask([5], {"namespace": "cut", "sample_id": f"c{i}", "include_output_tokens": True}, max_tokens=1000)
            for i in range(48)
        ]
        with ThreadPoolExecutor(1) as pool:
            cut = pool.submit(send, running.vllm_port, long)
            wait_until(lambda: metric(scrape(running.metrics_port), "slotstream_open_samples") >= 4)
            workers = sorted(descendants(running.engine.process.pid, "VLLM::Worker"))
            assert len(workers) == 2
            os.kill(workers[rank], signal.SIGKILL)
            running.engine.process.wait(ENDS_S)
            with contextlib.suppress(Exception):  # Nobody answers them any more.
                cut.result()
        wait_until(lambda: metric(scrape(running.metrics_port), "slotstream_open_samples") == 0)
        for ask in asks:
            assert_rows_are_true(client.get(ask.params["sample_id"], namespace="before"))
        codes = {info.error_code for info in client.list(namespace="cut")}
        assert codes & {"ABORTED", "INTERRUPTED"}  # As the worker's side said before it ended, or else the server.
        assert codes <= {"ABORTED", "INTERRUPTED", None}
        assert not files_below(tmp_path / "data", ".partial")


def test_pipeline_parallel_is_refused_by_vllm_before_there_is_a_connector(truth_models: dict[str, Path]) -> None:
    """`extract_hidden_states` runs a draft model, and that one knows no pipeline stages."""
    from vllm.engine.arg_utils import EngineArgs

    arguments = EngineArgs(
        model=str(truth_models["dense"]),
        max_model_len=1024,
        pipeline_parallel_size=2,
        speculative_config=_EXTRACTION,
    )
    with pytest.raises(NotImplementedError, match="Pipeline parallelism is not supported for this model"):
        arguments.create_engine_config()


def test_a_worker_that_has_no_hidden_states_does_nothing_and_fails_nothing(truth_models: dict[str, Path]) -> None:
    """What a pipeline stage but the last would be, and what every tensor-parallel worker but the first is."""
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorRole
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

    transfer = KVTransferConfig(
        kv_connector="SlotStreamConnector", kv_connector_module_path="slotstream.connector", kv_role="kv_producer"
    )
    arguments = EngineArgs(
        model=str(truth_models["dense"]),
        max_model_len=1024,
        speculative_config=_EXTRACTION,
        kv_transfer_config=transfer,
    )
    spec = FullAttentionSpec(block_size=32, num_kv_heads=2, head_size=64, dtype=torch.bfloat16)
    caches = KVCacheConfig(num_blocks=4, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layers.0.attn"], spec)])
    vllm_config = arguments.create_engine_config()
    connector = SlotStreamConnector(vllm_config, KVConnectorRole.WORKER, caches)
    connector.register_kv_caches({"layers.0.attn": torch.zeros(2, 4, 32, 2, 64)})
    plan = StepPlan((), (), (SampleFinish("r", (1,), {}),), (), ("r",))
    for metadata in (SlotStreamMetadata(plan, vllm_config.kv_transfer_config.engine_id), KVConnectorMetadata()):
        connector.bind_connector_metadata(metadata)
        connector.start_load_kv(None)
        connector.save_kv_layer("layers.0.attn", torch.zeros(1), None)
        connector.wait_for_save()
        assert connector.get_finished({"r"}) == (None, None)
        assert connector.build_connector_worker_meta() is None
        assert connector.get_kv_connector_stats() is None
        connector.clear_connector_metadata()
    connector.shutdown()
