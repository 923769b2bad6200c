"""The worker half and its pump: rows read at the slots of the plan, checked against the device's own slot mapping."""

from __future__ import annotations

import gc
import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.waiting import wait_until
from support.worker_rig import BLOCK_SIZE, BLOCKS, ROW_BYTES, Rig, WatchedSink, cached_rows, config, make_rig, opened

from slotstream.connector.counters import SENDER_GAUGES
from slotstream.connector.faults import SampleFault
from slotstream.connector.plan import SampleAbort, SampleFinish, StepPlan
from slotstream.connector.reading import staging_memory
from slotstream.connector.reading.row_source import CachedRows
from slotstream.connector.reading.staging_plan import StagingPlan
from slotstream.connector.sending.row_check import BadRowCount
from slotstream.connector.sending.staging_pool import default_staging_bytes
from slotstream.transport.base import Acked, Committed, Failed, LinkDown, LinkUp, RowChunk
from slotstream.v1 import ingest_pb2
from slotstream.wire.columns import RowFormat
from slotstream.wire.errors import ConfigError


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = make_rig()
    yield made
    made.worker.close()


def test_a_prompt_in_one_step_arrives_whole(rig: Rig) -> None:
    rig.capture("a", 30)
    assert rig.sink.verdict(1) == Committed(1, duplicate=False)
    assert rig.stored(1) == rig.rows("a", 0, 30)
    commit = rig.sink.samples[1].committed
    assert commit is not None
    assert list(commit.token_ids) == list(range(30))


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_any_steps_of_any_requests_give_exactly_their_rows(data: st.DataObject) -> None:
    """Chunked prompts and prefix hits of several requests, their tokens interleaved in any order in the slot mapping."""
    rig = make_rig(data.draw(st.integers(0, 1 << 16)), chunk_bytes=4096)
    try:
        lengths = data.draw(st.lists(st.integers(1, BLOCKS * BLOCK_SIZE // 4 - BLOCK_SIZE), min_size=1, max_size=3))
        done = {f"r{i}": 0 for i in range(len(lengths))}
        total = dict(zip(done, lengths, strict=True))
        for req_id, tokens in total.items():
            rig.table(req_id, tokens)
            hit = data.draw(st.integers(0, tokens - 1))
            rig.write(rig.slots(req_id, 0, hit))
            done[req_id] = hit
        number = {req_id: i + 1 for i, req_id in enumerate(total)}
        sent = dict.fromkeys(total, 0)
        opens = tuple(opened(req_id, tokens) for req_id, tokens in total.items())
        while any(done[r] < total[r] for r in total):
            rows, finishes, mapping = [], [], []
            for req_id, tokens in total.items():
                left = tokens - done[req_id]
                scheduled = min(left, data.draw(st.sampled_from([64, 17, 4, 0])))  # 0: not this request, not this step.
                if scheduled == 0:
                    continue
                stop = done[req_id] + scheduled
                mapping += rig.slots(req_id, done[req_id], stop)
                rows.append(cached_rows(req_id, sent[req_id], stop, done[req_id], rig.tables[req_id]))
                if stop == tokens:
                    finishes.append(SampleFinish(req_id, tuple(range(tokens))))
                sent[req_id] = done[req_id] = stop
            rig.write(mapping)
            padded = [*mapping, -1, -1]
            random.Random(len(mapping)).shuffle(padded)
            rig.step(StepPlan(opens, tuple(rows), tuple(finishes)), padded)
            opens = ()
        for req_id in total:
            assert isinstance(rig.sink.verdict(number[req_id]), Committed)
            assert rig.stored(number[req_id]) == rig.rows(req_id, 0, total[req_id])
    finally:
        rig.worker.close()


class _OrderSink(WatchedSink):
    """Notes in which order samples got rows, and were committed."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[tuple[str, int]] = []

    def submit(self, chunk: RowChunk) -> None:
        self.said.append(("rows", chunk.sample))
        super().submit(chunk)

    def commit(self, request: ingest_pb2.CommitSample) -> None:
        self.said.append(("commit", request.sample))
        super().commit(request)


def test_a_sample_is_committed_behind_its_own_rows_and_not_behind_all_of_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = make_rig(sink=_OrderSink())
    monkeypatch.setattr(rig.worker, "_staging", replace(rig.worker._staging, rows_per_batch=10))
    tokens = {"one": 8, "spread": 30, "open": 8, "last": 8}
    tables = {req_id: rig.table(req_id, count) for req_id, count in tokens.items()}
    mapping = [slot for req_id, count in tokens.items() for slot in rig.slots(req_id, 0, count)]
    rig.write(mapping)
    plan = StepPlan(
        tuple(opened(req_id, count) for req_id, count in tokens.items()),
        tuple(cached_rows(req_id, 0, tokens[req_id], 0, table) for req_id, table in tables.items()),
        tuple(SampleFinish(req_id, tuple(range(tokens[req_id]))) for req_id in ("last", "spread", "one")),
    )
    rig.step(plan, mapping)
    for number, req_id in ((1, "one"), (2, "spread"), (4, "last")):
        assert isinstance(rig.sink.verdict(number), Committed)
        assert rig.stored(number) == rig.rows(req_id, 0, tokens[req_id])
    rig.worker.close()
    said = rig.sink.said
    assert said == [
        *[("rows", 1), ("commit", 1)],
        *[("rows", 2)] * 3,
        ("commit", 2),
        ("rows", 3),
        *[("rows", 4), ("commit", 4)],
    ]


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda slots: slots[:-1], id="a slot that the device did not write"),
        pytest.param(lambda slots: [*slots, slots[0]], id="a slot written twice"),
        pytest.param(lambda slots: [s + BLOCK_SIZE for s in slots], id="all rows one block away"),
        pytest.param(lambda slots: [-1] * len(slots), id="nothing but padding"),
    ],
)
def test_slots_that_are_not_the_block_tables_fail_that_sample_and_no_other(
    rig: Rig, damage: Callable[[list[int]], list[int]]
) -> None:
    tables = {req_id: rig.table(req_id, 6) for req_id in ("good", "bad")}
    plan = StepPlan(
        tuple(opened(req_id, 6) for req_id in tables),
        tuple(cached_rows(req_id, 0, 6, 0, table) for req_id, table in tables.items()),
        tuple(SampleFinish(req_id, (0,) * 6) for req_id in tables),
    )
    good, bad = rig.slots("good", 0, 6), rig.slots("bad", 0, 6)
    rig.step(plan, [*good, *(s for s in damage(bad) if s not in good)])
    assert isinstance(rig.sink.verdict(1), Committed)
    verdict = rig.sink.verdict(2)
    assert isinstance(verdict, Failed)
    assert verdict.code == "SLOT_MISMATCH"
    assert not rig.sink.samples[2].rows


def _capture_with_bad_rows(rig: Rig, *, finish: bool = True) -> None:
    """30 rows in several chunks: 4 and 5 are zeros, 20 holds a NaN, 29 an infinity."""
    table = rig.table("a", 30)
    slots = rig.slots("a", 0, 30)
    rig.write(slots)
    for row, value in ((4, 0.0), (5, -0.0)):
        rig.cache[slots[row] // BLOCK_SIZE, :, slots[row] % BLOCK_SIZE] = value
    for row, value in ((20, float("nan")), (29, float("-inf"))):
        rig.cache[slots[row] // BLOCK_SIZE, 1, slots[row] % BLOCK_SIZE, 3] = value
    finishes = (SampleFinish("a", (0,) * 30),) if finish else ()
    rig.step(StepPlan((opened("a", 30),), (cached_rows("a", 0, 30, 0, table),), finishes), slots)


def test_rows_that_no_healthy_model_writes_are_counted_and_marked() -> None:
    rig = make_rig(chunk_bytes=4096)
    try:
        _capture_with_bad_rows(rig)
        assert isinstance(rig.sink.verdict(1), Committed)
        commit = rig.sink.samples[1].committed
        assert commit is not None
        assert dict(commit.metadata) == dict(commit.metadata) | {"zero_rows": "2", "nonfinite_rows": "2", "first_bad_row": "4"}
        stats = rig.worker.take_stats()
        assert (stats["zero_rows"], stats["nonfinite_rows"]) == (2, 2)
        rig.capture("healthy", 20)
        rig.sink.verdict(2)
        commit = rig.sink.samples[2].committed
        assert commit is not None
        assert "zero_rows" not in commit.metadata
    finally:
        rig.worker.close()


def test_bad_rows_of_a_sample_that_failed_are_forgotten_with_it(rig: Rig) -> None:
    """The scheduler drops such a capture: no finish and no abort ever comes for it."""
    _capture_with_bad_rows(rig, finish=False)
    wait_until(lambda: rig.sink.samples.keys() == {1} and len(rig.sink.samples[1].rows) == 30)
    rig.sink._on_event(Failed(1, "DAMAGED", "the disk is broken"))
    wait_until(lambda: bool(rig.worker.take_faults()))
    wait_until(lambda: not [thing for thing in gc.get_objects() if type(thing) is BadRowCount])
    rig.free("a")
    rig.capture("a", 8)  # A request of the same name.
    assert isinstance(rig.sink.verdict(2), Committed)
    commit = rig.sink.samples[2].committed
    assert commit is not None
    assert "zero_rows" not in commit.metadata


def test_or_fail_their_sample() -> None:
    rig = make_rig(bad_rows="fail")
    try:
        _capture_with_bad_rows(rig)
        assert rig.sink.verdict(1) == Failed(1, "BAD_ROWS", "row 4 holds only zeros")
    finally:
        rig.worker.close()


def test_a_step_without_extraction_fails_its_samples(rig: Rig) -> None:
    table = rig.table("a", 5)
    rig.step(StepPlan((opened("a", 5),), (cached_rows("a", 0, 5, 0, table),)), None)
    verdict = rig.sink.verdict(1)
    assert isinstance(verdict, Failed)
    assert verdict.code == "ROWS_NOT_COMPUTED"


def test_a_block_table_that_is_too_short_fails_the_sample(rig: Rig) -> None:
    table = rig.table("a", 4)
    rig.step(StepPlan((opened("a", 9),), (cached_rows("a", 0, 9, 0, table),)), [0])
    verdict = rig.sink.verdict(1)
    assert isinstance(verdict, Failed)
    assert verdict.code == "SLOT_MISMATCH"


def test_an_abort_reaches_the_server_and_later_rows_do_not(rig: Rig) -> None:
    table = rig.table("a", 8)
    rig.step(StepPlan((opened("a", 8),), (cached_rows("a", 0, 4, 0, table),)), rig.slots("a", 0, 4))
    rig.step(StepPlan(aborts=(SampleAbort("a", "ABORTED", "it ended"),)), None)
    rig.step(StepPlan(rows=(cached_rows("a", 4, 8, 4, table),)), rig.slots("a", 4, 8))
    assert rig.sink.verdict(1) == Failed(1, "ABORTED", "it ended")
    assert sorted(rig.sink.samples[1].rows) == [0, 1, 2, 3]


def test_a_step_that_wants_nothing_costs_nothing(rig: Rig) -> None:
    rig.capture("a", 8)
    rig.sink.verdict(1)
    rig.worker.take_stats()
    for _ in range(50):
        rig.step(StepPlan(), [0, 1, 2])
    assert rig.worker.take_stats() == {}


def test_releases_are_reported_once_the_step_after_their_rows_were_read(rig: Rig) -> None:
    rig.worker.bind(StepPlan(releases=("a",)))
    assert rig.worker.take_releases() == set()  # vLLM asks before this step's rows are read.
    rig.worker.execute()
    rig.worker.bind(StepPlan())
    assert rig.worker.take_releases() == {"a"}
    assert rig.worker.take_releases() == set()


class _MuteSink(WatchedSink):
    """Takes everything and never says a word of it."""

    def __init__(self) -> None:
        super().__init__()
        self.taken = threading.Semaphore(0)

    def submit(self, chunk: RowChunk) -> None:
        self.taken.release()

    def commit(self, request: ingest_pb2.CommitSample) -> None:
        return

    def start_again(self) -> None:
        """A new stream, on which nothing is known."""
        self._on_event(LinkUp("again"))


def _fill(rig: Rig, full: Callable[[dict[str, float]], bool]) -> int:
    """Capture samples of 8 rows until the stats say so; how many."""
    for i in range(1000):
        if i % 8 == 0:
            rig._unused = random.Random(i).sample(range(BLOCKS), BLOCKS)
        rig.capture(f"r{i}", 8)
        if not (stats := rig.worker.take_stats()):  # The pump has not counted this one yet.
            continue
        assert stats["staging_bytes_in_use"] <= stats["staging_bytes_limit"] <= 1 << 20
        if full(stats):
            return i + 1
    raise AssertionError("staging never filled")


def test_full_staging_fails_samples_and_a_lost_link_none_that_can_be_sent_again() -> None:
    sink = _MuteSink()
    rig = make_rig(sink=sink, staging_bytes=1 << 20, chunk_bytes=4096, on_full="fail_sample")
    try:
        count = _fill(rig, lambda stats: stats["staging_bytes_in_use"] == stats["staging_bytes_limit"])
        rig.capture("late", 8)
        verdict = sink.verdict(count + 1)
        assert isinstance(verdict, Failed)
        assert verdict.code == "STAGING_FULL"
        for _ in range(count):
            assert sink.taken.acquire(timeout=30.0)
        sink._on_event(LinkDown("gone"))
        wait_until(lambda: not rig.worker._sender._outbox.link_up)
        rig.capture("away", 8)
        faults: list[SampleFault] = []
        while len(faults) < 2:
            faults += rig.worker.take_faults()
        assert {(f.req_id, f.code) for f in faults} == {("late", "STAGING_FULL"), ("away", "SERVER_UNAVAILABLE")}
        sink.start_again()
        for _ in range(count):
            assert sink.taken.acquire(timeout=30.0)
        opened_again = [sample.opened.sample_id for sample in sink.samples.values()]
        assert opened_again[:count] == [f"r{i}" for i in range(count)]
        reported = sink.verdict(2 * count + 2)  # After those that were opened twice, and the late one.
        assert isinstance(reported, Failed)
        assert (sink.samples[reported.sample].opened.sample_id, reported.code) == ("away", "SERVER_UNAVAILABLE")
    finally:
        rig.worker.close()


def test_a_server_that_hangs_is_waited_for_once() -> None:
    sink = _MuteSink()
    rig = make_rig(sink=sink, staging_bytes=1 << 20, chunk_bytes=4096, wait_s_max=1.0)
    try:
        _fill(rig, lambda s: "stall_seconds" in s and s["staging_bytes_in_use"] == s["staging_bytes_limit"])
        # The wait passed without a word from the server: no further step waits until there is one.
        assert not rig.worker._sender.taking_rows
        sink._on_event(Acked((1,)))
        while rig.worker._sender._pool.in_use == rig.worker._sender._pool.num_slots:
            pass
        assert rig.worker._sender.taking_rows
    finally:
        rig.worker.close()


def test_options_that_do_not_fit_the_model_are_known_before_there_is_one() -> None:
    """A slot also holds a step's slot mapping: of 32,768 tokens, eight of them are more than the option gives."""
    with pytest.raises(ConfigError, match="staging_bytes must be at least 2097152: 8 chunks of 262144 bytes"):
        StagingPlan.of(config(staging_bytes=1 << 20, chunk_bytes=4096), 1 << 15)
    with pytest.raises(ConfigError, match="a row takes 9437184 bytes, and a message 8388608: capture fewer layers"):
        StagingPlan.of(replace(config(), row_format=RowFormat.of("BF16", 3, 3 << 19)), 16)


@pytest.mark.parametrize("chunk_bytes", [4096, 5000, 64 << 10, 1 << 20])
@pytest.mark.parametrize("tokens", [16, 4096, 65536])
def test_no_staging_is_wasted_whatever_a_message_carries(chunk_bytes: int, tokens: int) -> None:
    plan = StagingPlan.of(config(staging_bytes=16 << 20, chunk_bytes=chunk_bytes), tokens)
    assert plan.shape.slot_bytes - plan.rows_per_slot * ROW_BYTES < ROW_BYTES + 8
    assert plan.rows_per_slot * ROW_BYTES <= max(chunk_bytes, 8 * tokens)


def test_staging_holds_a_few_steps_unless_an_option_says_how_much() -> None:
    assert default_staging_bytes(3 * 64 * ROW_BYTES) == 512 << 20
    # Four layers of 4096 bf16, steps of 8192 tokens and 1024 requests; then 16 layers.
    assert default_staging_bytes(3 * (8192 + 2048) * 4 * 8192) == 1 << 30
    assert default_staging_bytes(3 * (8192 + 2048) * 16 * 8192) == 2 << 30
    rig = make_rig(staging_bytes=None)
    try:
        rig.capture("a", 6)
        assert isinstance(rig.sink.verdict(1), Committed)
        slot_bytes = rig.worker._sender._pool.slot_bytes
        assert rig.worker.take_stats()["staging_bytes_limit"] == (512 << 20) // slot_bytes * slot_bytes
        # The engine core's half tells the row pool's: a zero from here would hide them.
        assert set(rig.worker._sender.gauges()) == set(SENDER_GAUGES)
    finally:
        rig.worker.close()


def test_memory_that_is_not_to_be_had_stops_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(nbytes: int, device: torch.device) -> torch.Tensor:
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(staging_memory, "_private", no_memory)
    with pytest.raises(ConfigError, match=r"4 MiB of host memory .*: CUDA error: out of memory; set .* staging_bytes lower"):
        make_rig()


def test_a_cache_of_another_shape_stops_the_start() -> None:
    with pytest.raises(ConfigError, match="hidden-state cache has shape"):
        CachedRows(torch.zeros(4, 2, 4, 8, dtype=torch.bfloat16), config().row_kind, 8)
    assert ROW_BYTES == 48
