"""The write and the read of row pages on the CPU: what goes where, what is left out, and what the device notes beside it."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.worker_rig import HIDDEN, LAYER_IDS, WatchedSink, config, opened, row_kind

from slotstream.connector.plan import BlockPlace, PagePlace, RowPlan, SampleFinish, StepPlan, TableUpdate
from slotstream.connector.reading.row_pages import RowPages
from slotstream.connector.reading.row_write import write_rows
from slotstream.connector.reading.staging_plan import StagingPlan
from slotstream.connector.reading.worker import WorkerHalf
from slotstream.connector.row_pool import PAGE_ROWS_MAX, page_rows_of, pool_rows, pool_shape
from slotstream.connector.sending.row_check import StampEvidence
from slotstream.connector.sending.sender import in_thread
from slotstream.connector.vllm_config import RowKind
from slotstream.transport.base import Committed, Failed
from slotstream.wire.columns import RowFormat
from slotstream.wire.errors import ConfigError, InternalFault, SlotMismatch

CPU = torch.device("cpu")
SLOTS = 40 * 8


def make_pages(
    rows: int = 64, layers: int = 2, hidden: int = 4, block_size: int = 8, made_for: RowKind | None = None
) -> RowPages:
    pages = RowPages(rows, made_for or row_kind(layers), hidden, torch.bfloat16, CPU)
    pages.cut(pool_shape(rows, block_size), SLOTS)
    return pages


def give(pages: RowPages, step: int, entries: dict[int, int], *, clear: bool = False) -> None:
    pages.begin_step(StepPlan(table=TableUpdate(step, entries, clear, live=sum(page >= 0 for page in entries.values()))))


def hidden_of(count: int, layers: int = 2, hidden: int = 4, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(count, hidden, generator=generator).to(torch.bfloat16) for _ in range(layers)]


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 1 << 32), hidden=st.sampled_from([4, 5, 8]), block_size=st.sampled_from([4, 8, 33]))
def test_a_row_is_stored_where_its_slot_has_a_page_and_nowhere_else(seed: int, hidden: int, block_size: int) -> None:
    rng = random.Random(seed)
    pages = make_pages(198, 2, hidden, block_size)
    size = pages.shape.page_rows
    entries = {entry: rng.randrange(-1, pages.shape.pages) for entry in rng.sample(range(SLOTS // size), 6)}
    for page in range(pages.shape.pages):  # A page is one entry's.
        owners = [entry for entry, owner in entries.items() if owner == page]
        entries.update(dict.fromkeys(owners[1:], -1))
    give(pages, 7, entries)
    count = rng.randrange(1, 60)
    slots = rng.sample(range(SLOTS // size * size), count)
    slots = [slot if rng.random() < 0.9 else -1 for slot in slots]
    rows, padding = hidden_of(count, hidden=hidden, seed=seed % 1000), rng.randrange(0, 5)
    more = [torch.cat([layer, layer.new_full((padding, hidden), 99)]) for layer in rows]  # Graphs pad rows,
    write_rows(pages, more, torch.tensor(slots))
    wanted = torch.zeros_like(pages.pool)
    stamps = torch.full_like(pages.stamps, -1)
    for at, slot in enumerate(slots):
        page = entries.get(slot // size, -1) if slot >= 0 else -1
        if page >= 0:
            wanted[page * size + slot % size] = torch.stack([layer[at] for layer in rows])
            peaks = [int((layer[at].view(torch.int16) & 0x7FFF).max()) for layer in rows]
            stamps[page * size + slot % size] = torch.tensor([slot, 7, *peaks])
    assert torch.equal(pages.pool, wanted)
    assert torch.equal(pages.stamps, stamps)


def test_slots_beyond_the_rows_and_pages_beyond_the_pool_are_left_out() -> None:
    pages = make_pages()
    give(pages, 1, {0: 0, 1: 1})
    pages.table[2] = 1000  # What no plan says: the write asks all the same.
    write_rows(pages, hidden_of(4), torch.arange(16))  # And slots, too.
    write_rows(pages, hidden_of(4), torch.tensor([16, 17, SLOTS, SLOTS + 5]))
    write_rows(pages, hidden_of(0), torch.arange(8))
    assert pages.stamps[:, 0].tolist() == [0, 1, 2, 3] + [-1] * 60


def test_pages_are_given_and_taken_and_what_was_forgotten_counts_no_more() -> None:
    pages = make_pages()
    give(pages, 1, {3: 2, 4: 5})
    write_rows(pages, hidden_of(8), torch.arange(24, 32))
    give(pages, 2, {3: -1})
    assert (pages.table >= 0).nonzero().flatten().tolist() == [4]
    assert pages.stamps[16:24, :2].tolist() == [[slot, 1] for slot in range(24, 32)]
    give(pages, 3, {0: 1}, clear=True)
    assert (pages.table >= 0).nonzero().flatten().tolist() == [0]
    assert (pages.stamps < 0).all()
    pages.forget()
    assert (pages.table < 0).all()


def test_once_capture_is_off_no_page_is_given_and_no_row_is_read() -> None:
    pages = make_pages()
    give(pages, 1, {3: 2})
    write_rows(pages, hidden_of(8), torch.arange(24, 32))
    plan = RowPlan("r", 0, 8, 0, PagePlace((2,), (3,), (1,)))
    assert [part.rows for part in pages.locate([plan], 100).parts] == [8]
    pages.switch_off()
    located = pages.locate([plan], 100)
    assert not located.parts
    ((req_id, error),) = located.failed
    assert (req_id, type(error)) == ("r", InternalFault)
    assert "capture is off until vLLM restarts" in str(error)
    give(pages, 2, {4: 1})
    write_rows(pages, hidden_of(8), torch.arange(32, 40))
    assert (pages.table < 0).all()
    assert (pages.stamps < 0).all()


@pytest.mark.parametrize(
    ("stamps", "sound"),
    [
        pytest.param([[5, 3], [6, 3]], True, id="as planned"),
        pytest.param([[5, 3], [6, 9]], True, id="written again later"),
        pytest.param([[5, 3], [6, 2]], False, id="what was there before the page was given"),
        pytest.param([[5, 3], [7, 3]], False, id="another's slot"),
        pytest.param([[-1, -1], [6, 3]], False, id="never written"),
    ],
)
def test_a_row_is_right_only_if_the_device_wrote_it_for_its_slot_since_the_page_was_given(
    stamps: list[list[int]], sound: bool
) -> None:
    notes = np.array([[*stamp, 1] for stamp in stamps])
    evidence = StampEvidence(np.array([5, 6]), np.array([3, 3]), notes)
    assert (evidence.problem(0, 2) is None) == sound
    if not sound:
        assert isinstance(evidence.problem(0, 2), SlotMismatch)


@pytest.mark.parametrize(
    "place",
    [
        pytest.param(PagePlace((1,), (0,), (1,)), id="too few pages"),
        pytest.param(PagePlace((1, 8), (0, 1), (1, 1)), id="a page that does not exist"),
        pytest.param(PagePlace((1, -1), (0, 1), (1, 1)), id="no page"),
        pytest.param(BlockPlace((1, 2), 0), id="blocks"),
    ],
)
def test_a_plan_that_cannot_be_right_fails_its_sample(place: Any) -> None:
    good = RowPlan("b", 0, 3, 0, PagePlace((1,), (0,), (1,)))
    located = make_pages().locate([RowPlan("a", 0, 12, 0, place), good], 100)
    assert [(req_id, type(error)) for req_id, error in located.failed] == [("a", SlotMismatch)]
    assert [(part.req_id, part.rows) for part in located.parts] == [("b", 3)]


class _Rig:
    """A worker half over row pages."""

    def __init__(self, made_for: RowKind | None = None, **options: object) -> None:
        self.config = config(layers=list(LAYER_IDS), **options)
        self.pages = make_pages(128, hidden=HIDDEN, made_for=made_for or self.config.row_kind)
        self.sink = WatchedSink()
        self.worker = WorkerHalf(self.config, self.pages, in_thread(self.config, [self.sink]), StagingPlan.of(self.config, 64))

    def step(self, plan: StepPlan, slots: list[int]) -> list[torch.Tensor]:
        self.worker.bind(plan)
        rows = hidden_of(len(slots), len(LAYER_IDS), HIDDEN, seed=len(slots))
        write_rows(self.pages, rows, torch.tensor(slots))
        self.worker.execute()
        return rows


def test_rows_go_from_the_forward_pass_to_the_sender_byte_for_byte() -> None:
    rig = _Rig(chunk_bytes=4096)
    try:
        table = TableUpdate(1, {10: 4, 3: 0}, clear=True, live=2)
        place = PagePlace((4, 0), (10, 3), (1, 1))
        plan = StepPlan(
            (opened("a", 13),), (RowPlan("a", 0, 13, 0, place),), (SampleFinish("a", tuple(range(13))),), table=table
        )
        rows = rig.step(plan, [*range(80, 88), *range(24, 29)])
        assert isinstance(rig.sink.verdict(1), Committed)
        stored = b"".join(rig.sink.samples[1].rows[at] for at in sorted(rig.sink.samples[1].rows))
        assert stored == torch.stack(rows, 1).contiguous().view(torch.uint8).numpy().tobytes()
    finally:
        rig.worker.close()


def test_a_row_that_the_device_did_not_write_fails_its_sample_and_no_other() -> None:
    rig = _Rig()
    try:
        table = TableUpdate(1, {0: 0, 1: 1}, clear=False, live=2)
        plan = StepPlan(
            (opened("short", 8), opened("whole", 8)),
            (RowPlan("short", 0, 8, 0, PagePlace((0,), (0,), (1,))), RowPlan("whole", 0, 8, 0, PagePlace((1,), (1,), (1,)))),
            (SampleFinish("short", tuple(range(8))), SampleFinish("whole", tuple(range(8)))),
            table=table,
        )
        rig.step(plan, [*range(7), *range(8, 16)])
        failed = rig.sink.verdict(1)
        assert isinstance(failed, Failed)
        assert failed.code == "SLOT_MISMATCH"
        assert isinstance(rig.sink.verdict(2), Committed)
    finally:
        rig.worker.close()


@pytest.mark.parametrize(
    "made_for",
    [
        pytest.param(RowKind("another", LAYER_IDS, "BF16"), id="another engine"),
        pytest.param(RowKind("", (0, 1, 2), "BF16"), id="other layers"),
        pytest.param(RowKind("", LAYER_IDS, "F16"), id="another dtype"),
    ],
)
def test_pages_that_were_made_for_something_else_are_not_touched_and_their_samples_fail(made_for: RowKind) -> None:
    rig = _Rig(made_for)
    try:
        give(rig.pages, 1, {0: 0})
        place = PagePlace((0,), (0,), (1,))
        plan = StepPlan(
            (opened("a", 8),),
            (RowPlan("a", 0, 8, 0, place),),
            (SampleFinish("a", tuple(range(8))),),
            table=TableUpdate(2, {0: 0, 1: 1}, clear=True, live=2),
        )
        rig.step(plan, [*range(8)])
        failed = rig.sink.verdict(1)
        assert isinstance(failed, Failed)
        assert failed.code == "SLOT_MISMATCH"
        assert str(list(made_for.layer_ids)) in failed.message
        assert (rig.pages.table >= 0).nonzero().flatten().tolist() == [0]
    finally:
        rig.worker.close()


def test_after_a_fault_and_after_a_sleep_nothing_on_the_device_counts() -> None:
    rig = _Rig()
    try:
        give(rig.pages, 1, {0: 0})
        write_rows(rig.pages, hidden_of(8, len(LAYER_IDS), HIDDEN), torch.arange(8))
        rig.worker.wake()
        assert (rig.pages.table < 0).all()
        assert (rig.pages.stamps < 0).all()
        give(rig.pages, 2, {0: 0})
        rig.worker.fail_plan(StepPlan((opened("a", 8),)))
        assert (rig.pages.table < 0).all()
    finally:
        rig.worker.close()


def test_captures_that_failed_leave_nothing_in_the_worker() -> None:
    """Samples that the sender gave up get neither a finish nor an abort from the scheduler half."""
    rig = _Rig()
    try:
        before = {name: len(value) for name, value in vars(rig.worker).items() if isinstance(value, dict | set | list)}
        for number in range(50):
            plan = StepPlan((opened(f"r{number}", 100),), (RowPlan(f"r{number}", 0, 8, 0, PagePlace((0,), (0,), (9,))),))
            rig.step(plan, [])
        rig.step(StepPlan((opened("last", 100),)), [])
        after = {name: len(value) for name, value in vars(rig.worker).items() if isinstance(value, dict | set | list)}
        assert {name: size for name, size in after.items() if size > before[name] + 1} == {}
    finally:
        rig.worker.close()


def _engine(tokens: int, requests: int) -> Any:
    class Scheduler:
        max_num_batched_tokens, max_num_seqs = tokens, requests

    class Config:
        scheduler_config = Scheduler

    return Config


def test_the_pool_holds_a_step_and_the_output_rows_that_wait_up_to_2_gib() -> None:
    small = config(layers=list(LAYER_IDS))
    assert pool_rows(small, _engine(8192, 64)) == 8192 + 64 * (128 + 2 * PAGE_ROWS_MAX)
    few = config(layers=list(LAYER_IDS), output_rows_per_chunk=10)
    assert pool_rows(few, _engine(8192, 64)) == 8192 + 64 * (10 + 2 * PAGE_ROWS_MAX)
    large = replace(small, row_format=RowFormat.of("BF16", 4, 4096), layer_ids=tuple(range(4)))  # 32 KiB a row.
    assert pool_rows(large, _engine(8192, 1024)) == (2 << 30) // (32 << 10)
    assert pool_rows(large, _engine(1 << 17, 8)) == 1 << 17  # One step always has room.
    assert pool_rows(config(layers=list(LAYER_IDS), row_pool_bytes=1 << 20), _engine(8192, 64)) == (1 << 20) // 48


def test_a_pool_of_less_than_eight_pages_stops_the_start() -> None:
    small = replace(
        config(layers=list(LAYER_IDS), row_pool_bytes=1 << 16), row_format=RowFormat.of("BF16", len(LAYER_IDS), 4096)
    )
    with pytest.raises(ConfigError, match="row_pool_bytes must be at least 6291456: 8 pages of 32 rows"):
        pool_rows(small, _engine(8192, 64))


@pytest.mark.parametrize(
    ("block_size", "rows"), [(16, 16), (32, 32), (128, 32), (1056, 32), (528, 24), (33, 11), (1, 1), (37, 1)]
)
def test_a_page_divides_its_block(block_size: int, rows: int) -> None:
    assert page_rows_of(block_size) == rows


def test_device_memory_that_is_not_to_be_had_stops_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(*args: object, **kwargs: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")

    monkeypatch.setattr(torch, "zeros", no_memory)
    with pytest.raises(
        ConfigError, match=r"1 MiB of device memory for the row pool .*set connector option row_pool_bytes lower"
    ):
        RowPages(64, row_kind(2), 4, torch.bfloat16, CPU)
