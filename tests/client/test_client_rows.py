"""Rows as a stream: each once an epoch, in an order that seed, epoch and ids decide, resumed where its reader was."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from support.ingest_client import IngestClient
from support.numbered import NumberedSample, store
from support.server import ServerProcess
from support.synthetic import SyntheticSample
from support.trainer import in_a_trainer, read_rows_and_resume, read_rows_by_rank, read_rows_in_a_group

from slotstream.client import BadLayers, ConfigError, RowStream, SampleNotFound, ServerUnavailable, connect, rows
from slotstream.wire.errors import BadParams, ServerDraining

LENGTHS = [250, 10, 640, 1, 99, 1000] * 50  # 100,000 rows.


@pytest.fixture(scope="module")
def many(server: ServerProcess) -> str:
    """A namespace of 100,000 rows in 300 samples."""
    with IngestClient(server.address) as ingest:
        store(ingest, "many", LENGTHS)
    return "many"


def numbers(batches: Any) -> list[int]:
    return [int(number) for batch in batches for number in batch[:, 0]]


def taken(stream: RowStream, count: int) -> list[int]:
    """Rows of the first batches; the iteration ends there."""
    batches = iter(stream)
    return numbers(next(batches) for _ in range(count))


def of(samples: Sequence[NumberedSample]) -> set[int]:
    return {sample.first + row for sample in samples for row in range(sample.num_tokens)}


def test_an_epoch_has_each_row_once_in_the_order_of_its_seed(server: ServerProcess, many: str) -> None:
    def epoch(seed: int, number: int = 0) -> list[int]:
        stream = rows(4, 512, client=server.address, namespace=many, seed=seed, buffer_rows=4000)
        stream.set_epoch(number)
        return numbers(stream)

    first = epoch(1)
    assert len(first) == 100_000
    assert set(first) == set(range(100_000))
    assert epoch(1) == first
    assert epoch(2) != first
    assert epoch(1, 1) != first
    neighbours = sum(abs(a - b) < 2 for a, b in pairwise(first))
    assert neighbours < 1000  # Of rows in their own order, all are.


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_ranks_share_the_rows(server: ServerProcess, many: str, world_size: int, drop_last: bool) -> None:
    with connect(server.address) as client:
        as_of = client.moment()
        shares = [
            list(rows(4, 256, client=client, namespace=many, rank=r, world_size=world_size, as_of=as_of, drop_last=drop_last))
            for r in range(world_size)
        ]
    found = [number for share in shares for number in numbers(share)]
    assert len(found) == len(set(found))
    if drop_last:
        assert len({len(share) for share in shares}) == 1
        assert all(len(batch) == 256 for share in shares for batch in share)
        assert len(found) > 95_000
    else:
        assert len(found) == 100_000


_SHARES = [(2, 2)]  # A start of a worker is seconds of processor.
_ALL_SHARES = [(world_size, workers) for world_size in (1, 2, 3, 4) for workers in (0, 1, 2, 3, 4)]


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("shares", "drop_last"),
    [
        pytest.param(_SHARES, True, id="a few"),
        pytest.param(_ALL_SHARES, True, id="every number", marks=pytest.mark.extended),
        pytest.param(_ALL_SHARES, False, id="every number, each row once", marks=pytest.mark.extended),
    ],
)
def test_workers_of_ranks_share_the_rows(
    server: ServerProcess, many: str, shares: list[tuple[int, int]], drop_last: bool
) -> None:
    found_by_share = in_a_trainer(read_rows_by_rank, server.address, many, shares, drop_last, limit_s=60.0 * len(shares))
    for (world_size, workers), by_rank in found_by_share.items():
        found = [number for batches in by_rank for number in numbers(batches)]
        assert len(found) == len(set(found)), (world_size, workers)
        if drop_last:
            assert len({len(batches) for batches in by_rank}) == 1, (world_size, workers)
            assert all(len(batch) == 256 for batches in by_rank for batch in batches)
        else:
            assert len(found) == 100_000, (world_size, workers)


@pytest.mark.parametrize("taken_first", [0, 1, 57, 100])
def test_it_goes_on_amid_a_buffer_as_if_nothing_had_been(server: ServerProcess, many: str, taken_first: int) -> None:
    def stream() -> RowStream:
        return rows(4, 333, client=server.address, namespace=many, seed=3, buffer_rows=5000)

    whole = numbers(stream())
    begun = stream()
    begun.set_epoch(0)
    before = taken(begun, taken_first)
    state = json.dumps(begun.state_dict())
    assert len(state) < 1000
    resumed = stream()
    resumed.load_state_dict(json.loads(state))
    assert before + numbers(resumed) == whole
    assert resumed.state_dict()["rows"] == 100_000
    assert numbers(resumed) == whole  # The next epoch is a whole one again.


def test_it_goes_on_when_samples_came_and_went(server: ServerProcess, ingest: IngestClient, namespace: str) -> None:
    samples = store(ingest, namespace, [40] * 300)

    def stream(seed: int = 3) -> RowStream:
        return rows(4, 100, client=server.address, namespace=namespace, seed=seed, buffer_rows=1000)

    whole = numbers(stream())
    begun = stream()
    before = taken(begun, 31)
    state = json.loads(json.dumps(begun.state_dict()))
    gone = samples[7::100]
    with connect(server.address) as client:
        for sample in gone:
            client.delete(sample.sample_id, namespace=namespace)
    store(ingest, namespace, [40] * 20, first=100_000)
    resumed = stream()
    resumed.load_state_dict(state)
    left = [number for number in whole[len(before) :] if number not in of(gone)]
    assert numbers(resumed) == left
    assert resumed.deleted_rows == len(whole) - len(before) - len(left)
    # Its next epoch is of its own moment. So is another stream's, in which the samples that came moved no row either.
    again = numbers(resumed)
    assert [number for number in again if number < 100_000] == [number for number in whole if number not in of(gone)]
    assert len(again) == 12_000 + 20 * 40 - 3 * 40


def test_what_is_deleted_under_way_takes_its_own_rows(server: ServerProcess, ingest: IngestClient, namespace: str) -> None:
    samples = store(ingest, namespace, [40] * 300)
    whole = numbers(rows(4, 100, client=server.address, namespace=namespace, buffer_rows=1000))
    stream = rows(4, 100, client=server.address, namespace=namespace, buffer_rows=1000)
    batches = iter(stream)
    before = numbers(next(batches) for _ in range(20))
    unseen = [sample for sample in samples if not of([sample]) & set(before)]
    with connect(server.address) as client:
        for sample in unseen[::50]:
            client.delete(sample.sample_id, namespace=namespace)
        # Another sample under the name of one that is gone is not what was committed then.
        ingest.store(NumberedSample(unseen[0].sample_id, namespace=namespace, num_tokens=7, first=500_000))
        after = numbers(batches)
    missing = set(whole) - set(before) - set(after)
    assert missing <= of(unseen[::50])
    assert before + after == [number for number in whole if number not in missing]
    assert len(missing) == stream.deleted_rows > 0


def test_ranks_whose_batches_were_deleted_say_so(server: ServerProcess, ingest: IngestClient, namespace: str) -> None:
    samples = store(ingest, namespace, [40] * 100)
    with connect(server.address) as client:
        as_of = client.moment()
        streams = [
            rows(4, 50, client=client, namespace=namespace, rank=r, world_size=2, as_of=as_of, drop_last=True) for r in range(2)
        ]
        for sample in samples[:30]:
            client.delete(sample.sample_id, namespace=namespace)
        for stream in streams:
            with pytest.raises(SampleNotFound, match="rows of this rank were deleted"):
                list(stream)
        alone = rows(4, 50, client=client, namespace=namespace, drop_last=True)
        client.delete(samples[30].sample_id, namespace=namespace)
        assert len(list(alone)) == 69 * 40 // 50  # One rank owes others nothing.


def test_an_epoch_is_what_was_committed_at_its_moment(server: ServerProcess, ingest: IngestClient, namespace: str) -> None:
    late = NumberedSample("late", namespace=namespace, num_tokens=10, first=1000)
    store(ingest, namespace, [10] * 3)
    number = ingest.open(late)  # Created before the moment, and committed after it.
    ingest.send_rows(number, late)
    with connect(server.address) as client:
        as_of = client.moment()
        ingest.commit(number, late)
        store(ingest, namespace, [10], first=2000)
        stream = rows(4, 10, client=client, namespace=namespace, as_of=as_of)
        assert stream.as_of == as_of
        assert set(numbers(stream)) == set(range(30))
        assert len(numbers(rows(4, 10, client=client, namespace=namespace))) == 50
        with pytest.raises(ConfigError, match="not over yet"):
            rows(4, 10, client=client, namespace=namespace, as_of=client.moment() + 10**12)


def test_several_ranks_must_have_one_moment(server: ServerProcess, many: str) -> None:
    with pytest.raises(ConfigError, match="as_of"):
        rows(4, 10, client=server.address, namespace=many, rank=0, world_size=2)
    with pytest.raises(ConfigError, match="rank 2"):
        rows(4, 10, client=server.address, namespace=many, rank=2, world_size=2, as_of=1)
    with pytest.raises(ConfigError, match="together"):
        rows(4, 10, client=server.address, namespace=many, rank=1)


def test_a_process_group_takes_the_moment_of_rank_0(
    server: ServerProcess, ingest: IngestClient, namespace: str, tmp_path: Path
) -> None:
    store(ingest, namespace, [40] * 20)
    with connect(server.address) as client:
        as_of = client.moment()
    asked: list[tuple[str, tuple[int | None, ...]]] = [
        (namespace, (None, None)),
        (namespace, (as_of, as_of)),
        (namespace, (as_of, as_of - 1)),
        (f"{namespace}-empty", (None, None)),
    ]
    found, given, differ, empty = read_rows_in_a_group(server.address, tmp_path / "meeting", asked)
    for answers in (found, given):
        assert sorted(number for _, numbers in answers for number in numbers) == list(range(800))
        assert all(numbers for _, numbers in answers)
        assert len({moment for moment, _ in answers}) == 1
    assert given[0][0] == as_of < found[0][0]
    assert all("different moments" in answer for _, answer in differ)
    assert all("no committed sample" in answer for _, answer in empty)


@pytest.mark.parametrize("workers", [0, 1, pytest.param(3, marks=pytest.mark.extended)])  # torchdata waits 5 s a worker.
def test_a_loader_that_collects_the_workers_state_resumes(
    server: ServerProcess, ingest: IngestClient, namespace: str, workers: int
) -> None:
    pytest.importorskip("torchdata.stateful_dataloader")
    store(ingest, namespace, [100] * 150)
    before, after = in_a_trainer(read_rows_and_resume, server.address, namespace, workers)
    assert len(before) == 20
    assert sorted(numbers(before + after)) == list(range(15_000))


def test_a_state_of_another_place_or_stream_is_refused(server: ServerProcess, many: str) -> None:
    def stream(**changes: Any) -> RowStream:
        return rows(4, **{"batch": 100, "client": server.address, "namespace": many, **changes})

    good = stream().state_dict()
    stream().load_state_dict(good)
    for changes in ({"seed": 1}, {"batch": 99}, {"drop_last": True}, {"buffer_rows": 99}, {"tags": {"a": "b"}, "wait_s": 0}):
        if "tags" not in changes:
            with pytest.raises(ValueError, match="other samples, layers"):
                stream(**changes).load_state_dict(good)
    as_of = good["as_of"]
    with pytest.raises(ValueError, match="keep ranks and workers"):
        stream(rank=0, world_size=2, as_of=as_of).load_state_dict(good)
    with pytest.raises(ValueError, match="keep ranks and workers"):
        stream().load_state_dict({**good, "place": [0, 1, 0, 2]})
    with pytest.raises(ValueError, match="later moment"):
        stream(as_of=as_of - 1).load_state_dict(good)
    for change in ({"version": 2}, {"mark": "x"}, {"rows": None}, {"place": 7}):
        with pytest.raises(ValueError, match="state"):
            stream().load_state_dict({**good, **change})
    with pytest.raises(ValueError, match="state"):
        stream().load_state_dict({})


def test_an_empty_namespace_names_those_that_are_not(server: ServerProcess, ingest: IngestClient, namespace: str) -> None:
    store(ingest, namespace, [10])
    with pytest.raises(SampleNotFound, match=f"in namespace '{namespace}-typo'.*hold samples:.*{namespace}"):
        rows(4, 10, client=server.address, namespace=f"{namespace}-typo")
    with pytest.raises(SampleNotFound, match="fits the filters"):
        rows(4, 10, client=server.address, namespace=namespace, tags={"no": "such"})


def test_it_waits_for_a_first_sample(server: ServerProcess, ingest: IngestClient, namespace: str) -> None:
    later = threading.Timer(0.5, store, (ingest, namespace, [10]))
    later.start()
    assert sorted(numbers(rows(4, 10, client=server.address, namespace=namespace, wait_s=60))) == list(range(10))
    later.join()


def test_what_comes_out(server: ServerProcess, ingest: IngestClient, namespace: str) -> None:
    final = {"layer_names": '["1", "2", "final"]'}
    sample = SyntheticSample("s", namespace=namespace, layer_ids=(1, 2, 5), num_tokens=30, metadata=final)
    ingest.store(sample)

    def batch(layers: Any, **options: Any) -> Any:
        (only,) = rows(layers, 100, client=server.address, namespace=namespace, **options)
        return only

    def expected(positions: Any, layer_id: int) -> torch.Tensor:
        return torch.tensor([[sample.value(int(row), layer_id, k) for k in range(16)] for row in positions])

    both = batch(["final", 1], columns=["positions", "token_ids", "sample_ids"])
    positions = both["positions"]
    assert list(both) == ["final", 1, "positions", "token_ids", "sample_ids"]
    assert sorted(positions.tolist()) == list(range(30)) != positions.tolist()
    assert torch.equal(both["token_ids"], positions + 1000)
    assert both["sample_ids"] == [f"{namespace}/s"] * 30
    assert both[1].dtype is torch.bfloat16
    assert both[1].is_contiguous()
    assert torch.equal(both[1], expected(positions, 1).bfloat16())
    assert torch.equal(both["final"], expected(positions, 5).bfloat16())
    one = batch("final", dtype="float32")
    assert one.dtype is torch.float32
    assert torch.equal(one, both["final"].float())
    assert torch.equal(batch(5, dtype=torch.float16, device="cpu"), both["final"].half())
    assert list(batch([2])) == [2]
    array = batch("final", numpy=True)
    assert array.dtype == numpy.float32
    assert numpy.array_equal(array, one.numpy())
    with_columns = batch(1, numpy=True, columns=["token_ids"])
    assert list(with_columns) == [1, "token_ids"]
    assert with_columns["token_ids"].dtype == numpy.int64


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
def test_numpy_rows_are_float32_of_any_stored_dtype(
    server: ServerProcess, ingest: IngestClient, namespace: str, dtype: str
) -> None:
    sample = SyntheticSample("s", namespace=namespace, dtype=dtype, num_tokens=9)
    ingest.store(sample)
    (batch,) = rows([4], 100, client=server.address, namespace=namespace, numpy=True, columns=["positions"])
    wanted = [[sample.value(int(row), 4, k) for k in range(16)] for row in batch["positions"]]
    assert numpy.array_equal(batch[4], numpy.array(wanted, dtype=numpy.float32))


_WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None
from slotstream.client import rows
batches = list(rows(4, 100, client=sys.argv[1], namespace=sys.argv[2], numpy=True))
print(sum(len(batch) for batch in batches), batches[0].dtype)
try:
    rows(4, 100, client=sys.argv[1], namespace=sys.argv[2])
except ImportError as error:
    print(error)
"""


def test_numpy_needs_no_torch(server: ServerProcess, ingest: IngestClient, namespace: str) -> None:
    store(ingest, namespace, [250])
    command = [sys.executable, "-c", _WITHOUT_TORCH, server.address, namespace]
    out = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout.splitlines()
    assert out[0] == "250 float32"
    assert "slotstream[torch]" in out[1]


def test_a_layer_that_a_sample_lacks_is_refused_before_anything_is_read(
    server: ServerProcess, ingest: IngestClient, namespace: str
) -> None:
    ingest.store(
        SyntheticSample("a", namespace=namespace, num_tokens=3),
        SyntheticSample("b", namespace=namespace, layer_ids=(1, 2), num_tokens=3),
    )
    with pytest.raises(BadLayers, match=r"sample .*/b has no layer 4: its layers are 1, 2"):
        rows(4, 10, client=server.address, namespace=namespace)
    with pytest.raises(BadLayers, match="has no layer 'final'"):
        rows(["final"], 10, client=server.address, namespace=namespace)
    ingest.store(SyntheticSample("c", namespace=namespace, hidden_size=32, num_tokens=3, tags={"wide": "yes"}))
    with pytest.raises(BadLayers, match="the samples of one model"):
        rows(1, 10, client=server.address, namespace=namespace)
    assert next(iter(rows(4, 10, client=server.address, namespace=namespace, tags={"wide": "yes"}))).shape == (3, 32)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"layers": []}, "layers"),
        ({"layers": [1, 1]}, "layers"),
        ({"batch": 0}, "batch"),
        ({"batch": 2.5}, "batch"),
        ({"buffer_rows": 0}, "buffer_rows"),
        ({"columns": ["nothing"]}, "columns"),
        ({"wait_s": -1}, "wait_s"),
        ({"numpy": True, "dtype": "float16"}, "float32"),
        ({"dtype": "float17"}, "float17"),
    ],
    ids=str,
)
def test_options_that_cannot_be_are_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        rows(**{"layers": 4, "batch": 10, "client": "127.0.0.1:1", **changes})


def test_a_server_that_was_away_costs_the_trainer_nothing(tmp_path: Path) -> None:
    with ServerProcess(tmp_path / "data") as server:
        with IngestClient(server.address) as ingest:
            store(ingest, "n", [100] * 200)
        stream = rows(4, 100, client=server.address, namespace="n", buffer_rows=1000)
        hasty = rows(4, 100, client=server.address, namespace="n", buffer_rows=1000, retry_s=0)
        batches, others = iter(stream), iter(hasty)
        found = numbers([next(batches)])
        next(others)
        server.stop()
        with pytest.raises((ServerDraining, ServerUnavailable)):  # In the middle of a call, or before the next one.
            list(others)
        back: list[ServerProcess] = []
        starts = threading.Timer(1.0, lambda: back.append(ServerProcess(tmp_path / "data", address=server.address)))
        starts.start()
        found += numbers(batches)
        starts.join()
        assert sorted(found) == list(range(20_000))
        with back[0]:
            pass


def test_following_hands_out_what_is_stored_and_what_commits(
    server: ServerProcess, ingest: IngestClient, namespace: str
) -> None:
    def stream() -> RowStream:
        return rows(4, 50, client=server.address, namespace=namespace, follow=True)

    first = stream()
    batches = iter(first)
    late = NumberedSample("late", namespace=namespace, num_tokens=50, first=1000)
    number = ingest.open(late)
    ingest.send_rows(number, late)  # Created before the others, committed after them.
    store(ingest, namespace, [100])
    assert sorted(numbers([next(batches), next(batches)])) == list(range(100))
    ingest.commit(number, late)
    assert sorted(numbers([next(batches)])) == list(range(1000, 1050))
    state = json.loads(json.dumps(first.state_dict()))
    store(ingest, namespace, [50], first=2000)
    resumed = stream()
    resumed.load_state_dict(state)
    again = iter(resumed)
    found = numbers([next(again)])
    while 2000 not in found:  # What was handed out last may come again; nothing is left out.
        found += numbers([next(again)])
    assert set(found) >= set(range(2000, 2050))
    assert not set(found) & set(range(100))


def test_the_loss_mask_comes_along(server: ServerProcess, ingest: IngestClient, namespace: str) -> None:
    masked = NumberedSample("masked", namespace=namespace, num_tokens=30, first=100)
    mask = bytes(row % 3 == 0 for row in range(30))
    number = ingest.open(masked, columns=["loss_mask"])
    ingest.send_rows(number, masked)
    ingest.commit(number, masked, columns={"loss_mask": mask})
    options: dict[str, Any] = {"client": server.address, "namespace": namespace, "columns": ["loss_mask", "positions"]}
    for batch in rows([4], 12, **options):
        assert batch["loss_mask"].dtype is torch.bool
        assert batch["loss_mask"].tolist() == [row % 3 == 0 for row in batch["positions"].tolist()]
    (whole,) = rows([4], 100, numpy=True, **options)
    assert whole["loss_mask"].dtype == numpy.bool_
    assert whole["loss_mask"].sum() == 10
    store(ingest, namespace, [5])
    with pytest.raises(BadParams, match="without a loss mask"):
        list(rows([4], 100, **options))
