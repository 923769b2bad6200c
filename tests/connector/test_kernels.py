"""The Triton kernels in Triton's interpreter: what they do to memory is what the CPU's own way does."""

from __future__ import annotations

import random
import sys
from typing import Any

import pytest
import torch
from support.worker_rig import row_kind

from slotstream.connector.plan import TableUpdate
from slotstream.connector.reading import page_table, row_write
from slotstream.connector.reading.launches import Launches
from slotstream.connector.reading.page_table import TableWriter
from slotstream.connector.reading.row_pages import RowPages
from slotstream.connector.row_pool import pool_shape

triton = pytest.importorskip("triton")

SLOTS = 40 * 8
_ROW_KERNEL = "slotstream.connector.reading.row_kernel"  # Whether it is interpreted is settled when it is imported.


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton.knobs.runtime, "interpret", True)
    monkeypatch.delitem(sys.modules, _ROW_KERNEL, raising=False)
    monkeypatch.setattr(row_write, "_launch", Launches(row_write.make_kernel))


def _pages(rows: int, layers: int, hidden: int, block_size: int) -> RowPages:
    pages = RowPages(rows, row_kind(layers), hidden, torch.bfloat16, torch.device("cpu"))
    pages.cut(pool_shape(rows, block_size), SLOTS)
    return pages


@pytest.mark.parametrize("layers", [1, 4, 19])
@pytest.mark.parametrize("hidden", [8, 5, 1030])
@pytest.mark.parametrize("slot_dtype", [torch.int64, torch.int32])
@pytest.mark.usefixtures("interpreted")
def test_one_launch_writes_the_rows_of_all_layers_and_notes_each_once(
    layers: int, hidden: int, slot_dtype: torch.dtype
) -> None:
    rng = random.Random(layers * hidden)
    ways = [_pages(64, layers, hidden, 8) for _ in range(2)]
    for pages in ways:
        pages.step.fill_(7)
        pages.table[:6] = torch.tensor([3, -1, 0, 7, 1000, 5])
    slots = torch.tensor([*rng.sample(range(48), 12), -1, SLOTS, SLOTS + 100], dtype=slot_dtype)
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randn(len(slots) + 3, hidden, generator=generator).to(torch.bfloat16) for _ in range(layers)]
    row_write._write_on_cpu(ways[0], rows, slots)
    row_write._write_on_gpu(ways[1], rows, slots, len(slots))
    assert torch.equal(ways[0].pool, ways[1].pool)
    assert torch.equal(ways[0].stamps, ways[1].stamps)
    written = sum(int(slot) // 8 in (0, 2, 3, 5) for slot in slots)  # Entries of the table that name a page there is.
    assert (ways[0].stamps[:, 1] == 7).sum() == written > 4
    assert (ways[0].stamps[ways[0].stamps[:, 1] == 7, 2:] > 0).all()


class _Writer(TableWriter):
    """On the CPU, but with the kernel."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._on_cpu = False
        self.waits = 0

    def _wait(self) -> None:
        self.waits += 1


@pytest.mark.usefixtures("interpreted")
def test_the_device_makes_the_changes_that_the_plans_ask_for() -> None:
    """Longer ones than a place of the ring holds, or the kernel moves at a time; and more of them than the ring has places."""
    rng = random.Random(5)
    table, step = torch.full((3000,), -1, dtype=torch.int32), torch.zeros(1, dtype=torch.int64)
    other_table, other_step = table.clone(), step.clone()
    writers = [TableWriter(table, step, places=3, entries=600), _Writer(other_table, other_step, places=3, entries=600)]
    wanted = table.clone()
    for number in range(1, 12):
        entries = {
            at: rng.randrange(-1, 5000) for at in rng.sample(range(3000), rng.choice([0, 1, 2, 256, 257, 600, 601, 1500]))
        }
        for at, page in entries.items():
            wanted[at] = page
        for writer in writers:
            writer.write(TableUpdate((1 << 40) + number, entries, clear=False, live=0))
        assert torch.equal(table, wanted)
        assert torch.equal(other_table, wanted)
        assert step.item() == other_step.item() == (1 << 40) + number
    assert writers[1].waits == 0  # type: ignore[attr-defined]


def test_a_place_of_the_ring_that_the_device_has_not_read_is_waited_for() -> None:
    table, step = torch.full((30,), -1, dtype=torch.int32), torch.zeros(1, dtype=torch.int64)
    writer = _Writer(table, step, places=2, entries=4)
    writer.write_on_gpu = lambda place, count: None  # type: ignore[method-assign]
    for number in range(1, 3):
        writer.write(TableUpdate(number, {1: number}, clear=False, live=1))
    assert writer.waits == 0
    writer.write(TableUpdate(3, {1: 3}, clear=False, live=1))
    assert writer.waits == 1


class _Compiled:
    """Of a kernel; `launched` is what Triton's launcher would be told."""

    function, packed_metadata = "function", "metadata"

    def __init__(self) -> None:
        self.launched: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *arguments: self

    def run(self, *arguments: Any) -> None:
        self.launched.append(arguments)


def test_once_compiled_a_kernel_is_told_addresses_and_rows_that_are_not_aligned_go_the_long_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 70 + device, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 7, raising=False)
    compiled = _Compiled()
    monkeypatch.setattr(row_write, "_launch", Launches(lambda: compiled))
    pages = _pages(64, 2, 8, 8)
    rows, slots = [torch.zeros(5, 8, dtype=torch.bfloat16) for _ in range(2)], torch.arange(5)
    for _ in range(2):
        row_write._write_on_gpu(pages, rows, slots, 5)
    tensors = (pages.pool, pages.stamps, pages.step)
    tail = (pages.table.data_ptr(), 40, 8, *(tensor.data_ptr() for tensor in tensors), 8, 2, 8, 0x7FFF, 1024)
    told = (tuple(row.data_ptr() for row in rows), slots.data_ptr(), *tail)
    assert compiled.launched == [(5, 2, 1, 77, "function", "metadata", None, None, None, *told)]
    row_write._write_on_gpu(pages, [torch.zeros(48, dtype=torch.bfloat16)[4:44].view(5, 8), rows[1]], slots, 5)
    assert len(compiled.launched) == 1
    other = _pages(64, 2, 8, 8)
    row_write._write_on_gpu(other, rows, slots, 5)
    assert compiled.launched[1][11] == other.table.data_ptr()
    writer = _Writer(pages.table, pages.step, places=3, entries=4)
    change = _Compiled()
    writer._launch = Launches(lambda: change)
    writer._read_words[:] = 0
    for number in range(1, 3):
        writer.write(TableUpdate(number, {5: 1}, clear=False, live=1))
    assert change.launched == [(1, 1, 1, 77, "function", "metadata", None, None, None, *writer._addresses, 1, 1, 4, 256)]


class _Hopper:
    """As much of Triton's driver as compiling needs."""

    def get_current_target(self) -> Any:
        return triton.backends.compiler.GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0


def test_the_kernels_compile_for_a_gpu_and_move_16_bytes_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    def memory(dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(64, dtype=dtype)

    rows = tuple(memory(torch.int16) for _ in range(4))
    words, table = memory(torch.int64), memory(torch.int32)
    monkeypatch.setattr(triton.runtime.driver, "_active", _Hopper())
    monkeypatch.delitem(sys.modules, _ROW_KERNEL, raising=False)
    write = row_write.make_kernel().warmup(
        rows, words, table, 50, 40, rows[0], words, words, 16, 4, 4096, 0x7FFF, 1024, grid=(1, 4, 1)
    )
    change = page_table.make_kernel().warmup(table, words, words, words, 3, 100, 1024, 256, grid=(1, 1, 1))
    assert "st.global.v4.b32" in write.asm["ptx"]
    assert write.asm["cubin"]
    # The number is written behind everything that was read before it, for a look from the host.
    assert "atom.global.sys.release.exch.b64" in change.asm["ptx"]
