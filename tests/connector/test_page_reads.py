"""Reads of row pages as a GPU does them, with copies that a test carries out: what goes where, and that faults are found."""

from __future__ import annotations

import ctypes
import inspect
import itertools
import random
import textwrap
from array import array
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from support.calls import calls
from support.waiting import wait_until
from support.worker_rig import HIDDEN, LAYER_IDS, WatchedSink, config, opened, row_kind

from slotstream.connector.plan import PagePlace, RowPlan, SampleFinish, StepPlan, TableUpdate
from slotstream.connector.reading import page_reads
from slotstream.connector.reading.gather import RowGather
from slotstream.connector.reading.located import page_words
from slotstream.connector.reading.page_reads import Copies, PageReads
from slotstream.connector.reading.row_pages import RowPages
from slotstream.connector.reading.row_write import write_rows
from slotstream.connector.reading.staging_memory import StagingMemory
from slotstream.connector.reading.staging_plan import StagingPlan
from slotstream.connector.reading.worker import WorkerHalf
from slotstream.connector.row_pool import pool_shape
from slotstream.connector.sending.row_check import Segment, note_words, rows_in_pages
from slotstream.connector.sending.sender import in_thread
from slotstream.connector.sending.staging_pool import StagingShape
from slotstream.transport.base import Committed, Failed

CPU = torch.device("cpu")
PAGE_ROWS = 8


class _Device:
    """A `Copier` that does what it was given when it is told to, or at once."""

    def __init__(self) -> None:
        self.at_once = True
        self.copies: list[int] = []
        """Of each read: how many copies its rows took."""
        self.holds: list[int] = []
        self.behind_model: list[bool] = []
        """Of each read: whether it waits for the model."""
        self._waiting: list[tuple[list[tuple[int, int, int]], int]] = []

    def prepare(self, done_word: int) -> None:
        self._done = ctypes.c_int64.from_address(done_word)

    def remember_stream(self) -> None:
        pass

    def copy(self, rows: Copies, notes: Copies, number: int, *, behind_model: bool) -> None:
        self.behind_model.append(behind_model)
        self.copies.append(rows.count)
        asked = [(c.to[at], c.source[at], c.nbytes[at]) for c in (rows, notes) for at in range(c.count)]
        self._waiting.append((asked, number))
        if self.at_once:
            self.go_on()

    def go_on(self) -> None:
        for copies, number in self._waiting:
            for to, source, nbytes in copies:
                ctypes.memmove(to, source, nbytes)
            self._done.value = number
        self._waiting.clear()

    def clear(self) -> None:
        self._waiting.clear()

    def hold_model(self, number: int) -> None:
        self.holds.append(number)

    def settle(self) -> None:
        self.go_on()


class _GpuPages(RowPages):
    """Row pages that are read as a GPU's are."""

    def __init__(self, device: _Device, rows: int) -> None:
        super().__init__(rows, config(layers=list(LAYER_IDS)).row_kind, HIDDEN, torch.bfloat16, CPU)
        self.cut(pool_shape(rows, PAGE_ROWS), 64 * PAGE_ROWS)
        self.reads_by = device

    def use_staging(self, memory: StagingMemory) -> None:
        self.memory = memory
        self._reads = PageReads(self.pool, self.stamps, memory, self.shape.page_rows, self.reads_by)


class _Rig:
    """A worker over such pages. A request has entries of the page table from its own on, and the pages of the same numbers."""

    def __init__(self, rows: int = 128, **options: object) -> None:
        self.device = _Device()
        self.config = config(layers=list(LAYER_IDS), **options)
        self.pages = _GpuPages(self.device, rows)
        self.sink = WatchedSink()
        self.worker = WorkerHalf(self.config, self.pages, in_thread(self.config, [self.sink]), StagingPlan.of(self.config, 64))
        self._steps = itertools.count(1)

    def read(self, names: dict[str, int], rows: int = PAGE_ROWS) -> dict[str, bytes]:
        """Give each request its page, write its rows, and read them, all in one step; what was written."""
        step = next(self._steps)
        entries = {page: page for at in names.values() for page in self._pages(at, rows)}
        plan = StepPlan(
            tuple(opened(name, rows) for name in names),
            tuple(RowPlan(name, 0, rows, 0, self._place(at, rows, step)) for name, at in names.items()),
            tuple(SampleFinish(name, tuple(range(rows))) for name in names),
            table=TableUpdate(step, entries, clear=False, live=len(entries)),
        )
        slots = [at * PAGE_ROWS + row for at in names.values() for row in range(rows)]
        generator = torch.Generator().manual_seed(step)
        layers = [torch.randn(len(slots), HIDDEN, generator=generator).to(torch.bfloat16) for _ in LAYER_IDS]
        self.worker.bind(plan)
        write_rows(self.pages, layers, torch.tensor(slots))
        self.worker.execute()
        whole = torch.stack(layers, 1).view(torch.uint8).flatten(1).numpy()
        return {name: whole[at : at + rows].tobytes() for name, at in zip(names, range(0, len(whole), rows), strict=True)}

    def _pages(self, at: int, rows: int) -> range:
        return range(at, at + -(-rows // PAGE_ROWS))

    def _place(self, at: int, rows: int, step: int) -> PagePlace:
        pages = array("q", self._pages(at, rows))
        return PagePlace(pages, pages, array("q", [step] * len(pages)))

    def stored(self, number: int) -> bytes:
        rows = self.sink.samples[number].rows
        return b"".join(rows[at] for at in sorted(rows))


@pytest.fixture
def rig() -> Iterator[_Rig]:
    made = _Rig()
    yield made
    made.worker.close()


def test_one_read_is_one_number_however_many_samples_it_has_and_pages_next_to_each_other_are_one_copy(rig: _Rig) -> None:
    names = {f"r{i}": i for i in range(12)}
    wanted = rig.read(names, rows=5)
    for number, name in enumerate(names, 1):
        assert isinstance(rig.sink.verdict(number), Committed)
        assert rig.stored(number) == wanted[name]
    assert rig.device.copies == [12]
    assert rig.pages.memory.area.done == 1
    rig.read({"long": 3}, rows=3 * PAGE_ROWS)
    assert isinstance(rig.sink.verdict(13), Committed)
    assert rig.device.copies == [12, 1]
    assert rig.pages.memory.area.done == 2


def test_rows_that_are_known_to_be_computed_are_read_at_once_but_behind_what_clears_the_pool(rig: _Rig) -> None:
    def read(*computed: bool) -> bool:
        rows = [RowPlan(f"r{at}", 0, 8, 0, rig._place(at, 8, 1), known) for at, known in enumerate(computed)]
        rig.worker.bind(plan := StepPlan(rows=tuple(rows)))
        rig.worker.execute()
        assert plan
        return rig.device.behind_model[-1]

    assert read(True)  # The first one.
    assert not read(True, True)
    assert read(True, False)
    assert not read(True)
    rig.worker.wake()
    assert read(True)
    assert not read(True)


@pytest.mark.parametrize(
    ("requests", "rows", "calls_max"),
    [
        pytest.param(1, 1024, 100, id="a prompt"),
        pytest.param(1, 32, 100, id="one"),
        pytest.param(16, 32, 400, id="as many as a plan"),
    ],
)
def test_a_read_makes_few_calls_on_the_engines_thread_and_none_of_torchs(requests: int, rows: int, calls_max: int) -> None:
    """Beside the device's own: for that a GPU takes two events, one wait and three calls."""
    rig = _Rig(16 << 10, chunk_bytes=64 << 10)
    rig.device.at_once = False
    try:
        pages = -(-rows // PAGE_ROWS)
        names = [range(number * pages, (number + 1) * pages) for number in range(requests)]
        places = [PagePlace(array("q", at), array("q", at), array("q", [1] * pages)) for at in names]
        plan = StepPlan(rows=tuple(RowPlan(f"r{number}", 0, rows, 0, place) for number, place in enumerate(places)))
        found = []
        for of in ("", "", "torch"):  # The first one is what makes caches.
            rig.worker.bind(plan)
            found.append(calls(rig.worker.execute, of))
        assert len(rig.device.copies) == 3
        assert 0 < found[1] <= calls_max
        assert found[2] == 0
    finally:
        rig.device.clear()
        rig.worker.close()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("hidden", [HIDDEN, 5])
def test_every_pattern_of_bits_goes_over_as_it_is(dtype: torch.dtype, hidden: int) -> None:
    raw = np.random.default_rng(0).integers(0, 256, 64 * 3 * hidden * dtype.itemsize, dtype=np.uint8)
    rows = torch.from_numpy(raw).view(dtype).view(64, 3, hidden)
    words_a_note = note_words(3)
    stamps = torch.arange(64 * words_a_note).view(64, words_a_note)
    pages = RowPages(64, row_kind(3), hidden, dtype, CPU)
    pages.cut(pool_shape(64, PAGE_ROWS), 512)
    pages.pool.copy_(rows)
    pages.stamps.copy_(stamps)
    row_bytes = 3 * hidden * dtype.itemsize
    shape = StagingShape(6, 0, -(-row_bytes * 20 // 8) * 8, row_bytes, words_a_note)
    plans = [RowPlan("a", 5, 37, 0, PagePlace((3, 0, 7, 1, 2), (0, 1, 2, 3, 4), (1,) * 5))]
    plans.append(RowPlan("b", 16, 17, 3, PagePlace((5,), (9,), (1,))))
    located = pages.locate(plans, 16)
    assert [(part.req_id, part.first_row, part.rows) for part in located.parts] == [
        ("a", 0, 16),
        ("a", 16, 16),
        ("b", 3, 1),
    ]
    segments = [
        Segment(part.req_id, part.first_row, part.rows, slot) for part, slot in zip(located.parts, (4, 0, 2), strict=True)
    ]
    words = page_words(located, located.parts, segments, PAGE_ROWS)
    index, _, _ = rows_in_pages(np.array(words), len(segments), PAGE_ROWS)
    written = []
    for as_on_a_gpu in (True, False):  # As torch does it, too.
        memory = StagingMemory(shape, CPU)
        if as_on_a_gpu:
            PageReads(pages.pool, pages.stamps, memory, PAGE_ROWS, _Device()).read(words, segments, 5)
        else:
            RowGather(CPU, memory).gather(pages._select, index, segments, None, pages._select_stamps)
        area = memory.area
        rows_there = [bytes(memory.tensor(s.staging_slot, s.rows * row_bytes).numpy()) for s in segments]
        notes = [area.notes[s.staging_slot, : s.rows].tolist() for s in segments]
        written.append((area.done, rows_there, notes))
    assert written[0] == written[1]
    first = [*range(29, 32), *range(8), *range(56, 61)]
    assert index[: len(first)].tolist() == first
    assert written[0][1][0] == rows[first].view(torch.uint8).numpy().tobytes()
    assert written[0][2][0] == stamps[first].tolist()


@pytest.mark.parametrize("seed", range(20))
def test_rows_are_copied_in_their_order_and_together_where_they_lie_together(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(seed)
    parts, pages, words, segments = rng.choice((1, 2, 9)), array("q"), array("q"), []
    pages_max = rng.choice((1, 3, 100))
    monkeypatch.setattr(page_reads, "COPY_BYTES", pages_max * PAGE_ROWS * 8)
    monkeypatch.setattr(page_reads, "_ROOM", 4)  # More copies than at first have room.
    for number in range(parts):
        offset, rows = rng.randrange(PAGE_ROWS), rng.randrange(1, 60)
        shared = bool(number) and rng.random() < 0.3  # Two parts of one request, and the page where they meet.
        words.extend((parts - number, len(pages) - shared, offset, rows))
        segments.append(Segment("", 0, rows, parts - number))
        count = (offset + rows - 1) // PAGE_ROWS + 1 - shared
        begin = rng.randrange(900)
        pages.extend(range(begin, begin + count) if rng.random() < 0.5 else (rng.randrange(1000) for _ in range(count)))
    words += pages * 3  # Entries and steps are no matter here.
    pool = torch.arange(1000 * PAGE_ROWS).view(-1, 1)
    stamps = -pool.repeat(1, 3)
    memory = StagingMemory(StagingShape(10, 2, 4096, 8, 3), CPU)
    device = _Device()
    PageReads(pool, stamps, memory, PAGE_ROWS, device).read(words, segments, 11)
    index, _, _ = rows_in_pages(np.array(words), parts, PAGE_ROWS)
    found = [memory.area.words(to.staging_slot)[: to.rows] for to in segments]
    assert np.concatenate(found).tolist() == index.tolist()
    notes = np.concatenate([memory.area.notes[to.staging_slot, : to.rows] for to in segments])
    assert notes.tolist() == stamps[index].tolist()
    at = np.split(index, np.cumsum([to.rows for to in segments])[:-1])
    runs = [1 + int((np.diff(rows) != 1).sum()) for rows in at]
    assert device.copies[0] >= sum(runs)
    if pages_max == 100:
        assert device.copies[0] == sum(runs)


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(("page * size + behind", "page * size + behind + 1"), id="another row"),
        pytest.param(("page = pages[at]", "page = pages[0]"), id="one page for all"),
        pytest.param(("words[part : part + PART_WORDS]", "words[:PART_WORDS]"), id="one part for all"),
        pytest.param(("words[part : part + PART_WORDS]", "words[part : part + PART_WORDS]; slot += 1"), id="another slot"),
        pytest.param(("words[part : part + PART_WORDS]", "words[part : part + PART_WORDS]; left -= 1"), id="a row too few"),
        pytest.param(
            ("words[part : part + PART_WORDS]", "words[part : part + PART_WORDS]; left -= size"), id="a page left out"
        ),
        pytest.param(("range(0, parts *", "range(PART_WORDS, parts *"), id="a part left out"),
        pytest.param(("count += 1", "count = 1"), id="copies left out"),
    ],
)
def test_a_read_that_goes_wrong_stores_nothing(fault: tuple[str, str], rig: _Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    source = textwrap.dedent(inspect.getsource(PageReads._list_copies))
    assert source.count(fault[0]) == 1
    space = dict(vars(page_reads))
    exec(source.replace(*fault), space)
    monkeypatch.setattr(PageReads, "_list_copies", space["_list_copies"])
    rig.pages.stamps.copy_(torch.arange(rig.pages.stamps.numel()).view_as(rig.pages.stamps))  # What others left there.
    rig.read({"a": 7, "b": 3}, rows=2 * PAGE_ROWS - 3)
    verdicts = [rig.sink.verdict(1), rig.sink.verdict(2)]
    failed = [verdict.code for verdict in verdicts if isinstance(verdict, Failed)]
    assert failed
    assert set(failed) == {"SLOT_MISMATCH"}
    for number, verdict in enumerate(verdicts, 1):
        if isinstance(verdict, Failed):
            assert not rig.sink.samples[number].rows


def test_a_number_that_is_written_before_its_rows_is_found_out(rig: _Rig) -> None:
    """Also where the same slots of staging held the same rows before, and what was noted of them."""
    wanted = rig.read({"a": 7})
    assert isinstance(rig.sink.verdict(1), Committed)
    assert rig.stored(1) == wanted["a"]
    wait_until(lambda: rig.worker._sender._pool.in_use == 0)  # type: ignore[attr-defined]
    rig.device.at_once = False
    again = RowPlan("b", 0, PAGE_ROWS, 0, PagePlace((7,), (7,), (1,)))
    rig.worker.bind(StepPlan((opened("b", PAGE_ROWS),), (again,)))
    rig.worker.execute()
    rig.pages.memory.area.done_word[0] = 2
    failed = rig.sink.verdict(2)
    assert isinstance(failed, Failed)
    assert failed.code == "SLOT_MISMATCH"
    rig.device.settle()


def test_a_page_that_is_given_away_while_it_is_read_is_waited_for_on_the_device(rig: _Rig) -> None:
    rig.device.at_once = False
    rig.read({"a": 7})
    give = TableUpdate(9, {1: 6, 7: -1}, clear=False, live=1)
    rig.worker.bind(StepPlan(table=give))
    assert not rig.device.holds  # Page 7 is taken away from its entry, and page 6 is not read.
    rig.worker.bind(StepPlan(table=TableUpdate(10, {2: 7}, clear=False, live=2)))
    assert rig.device.holds == [1]
    rig.device.go_on()
    rig.worker.bind(StepPlan(table=TableUpdate(11, {3: 7, 2: -1}, clear=False, live=2)))
    assert rig.device.holds == [1]
    assert isinstance(rig.sink.verdict(1), Committed)


def test_a_page_is_waited_for_up_to_its_own_last_read_and_not_for_later_reads(rig: _Rig) -> None:
    """A pool of two steps' rows gives each page to the next step but one: that must not wait for the reads of the last."""
    rig.device.at_once = False
    for name, at in (("a", 7), ("b", 3), ("c", 2)):  # Reads 1, 2 and 3.
        rig.read({name: at})
    assert not rig.device.holds
    rig.worker.bind(StepPlan(table=TableUpdate(9, {1: 7}, clear=False, live=1)))
    rig.worker.bind(StepPlan(table=TableUpdate(10, {4: 3, 5: 7, 6: -1}, clear=False, live=2)))
    assert rig.device.holds == [1, 2]
    rig.device.go_on()
    assert all(isinstance(rig.sink.verdict(number), Committed) for number in (1, 2, 3))


def test_a_page_that_was_written_over_before_it_was_read_fails_its_sample(rig: _Rig) -> None:
    """Notes come behind the rows: they say who wrote last."""
    rig.device.at_once = False
    rig.read({"a": 7})
    other = TableUpdate(9, {1: 7, 7: -1}, clear=False, live=1)
    rig.worker.bind(StepPlan(table=other))
    assert rig.device.holds == [1]  # Which this device does not do.
    write_rows(rig.pages, [torch.ones(PAGE_ROWS, HIDDEN, dtype=torch.bfloat16) for _ in LAYER_IDS], torch.arange(8, 16))
    rig.device.go_on()
    failed = rig.sink.verdict(1)
    assert isinstance(failed, Failed)
    assert failed.code == "SLOT_MISMATCH"


def test_before_the_pool_is_written_over_as_a_whole_every_read_is_waited_for(rig: _Rig) -> None:
    rig.device.at_once = False
    rig.read({"a": 7})
    rig.read({"b": 3})
    rig.worker.wake()
    assert rig.device.holds == [2]
