"""Rows read out of caches of all dtypes and strides, bit for bit."""

from __future__ import annotations

import os
import random

import numpy as np
import pytest
import torch
from support.worker_rig import row_kind

from slotstream.connector.reading import gather
from slotstream.connector.reading.gather import RowGather
from slotstream.connector.reading.row_source import CachedRows
from slotstream.connector.reading.staging_memory import StagingMemory
from slotstream.connector.sending.row_check import INFINITY, Segment, count_bad_rows
from slotstream.connector.sending.staging_area import Words, control_bytes
from slotstream.connector.sending.staging_pool import StagingShape


def _bits(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Every pattern of bits that a dtype can hold, NaNs of all kinds and denormals among them."""
    count = int(np.prod(shape)) * dtype.itemsize
    raw = np.random.default_rng(0).integers(0, 256, count, dtype=np.uint8)
    return torch.from_numpy(raw).view(dtype).view(shape)


def _gather(cache: torch.Tensor, memory: StagingMemory, index: Words, into: list[Segment]) -> Words:
    """Read these slots of a cache; the rows' peaks."""
    source = CachedRows(cache, row_kind(cache.shape[1]), cache.shape[3])
    gather = RowGather(cache.device, memory)
    number, peaks = gather.gather(source._select, index, into, None)
    assert memory.area.done == number == 1
    assert isinstance(peaks, np.ndarray)
    return peaks


def _into(staging_slot: int, rows: int) -> Segment:
    return Segment("a", 0, rows, staging_slot)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("hidden", [8, 6, 5, 1], ids=["words", "half words", "odd", "one"])
@pytest.mark.parametrize("layout", ["blocks first", "layers first", "slots first", "part of more", "behind others"])
def test_rows_are_copied_bit_for_bit(dtype: torch.dtype, hidden: int, layout: str) -> None:
    blocks, layers, block_size = 9, 3, 4
    match layout:
        case "blocks first":
            cache = _bits((blocks, layers, block_size, hidden), dtype)
        case "layers first":
            cache = _bits((layers, blocks, block_size, hidden), dtype).permute(1, 0, 2, 3)
        case "slots first":
            cache = _bits((blocks, block_size, layers, hidden), dtype).permute(0, 2, 1, 3)
        case "part of more":
            cache = _bits((blocks, layers, block_size, hidden + 3), dtype)[..., :hidden]
        case _:
            cache = _bits((blocks * layers * block_size * hidden + 1,), dtype)[1:].view(blocks, layers, block_size, hidden)
    row_bytes = layers * hidden * dtype.itemsize
    memory = StagingMemory(StagingShape(4, 0, 4096, row_bytes), torch.device("cpu"))
    slots = np.array([35, 0, 7, 7, 18, 4], dtype=np.int64)
    peaks = _gather(cache, memory, slots, [_into(2, 4), _into(0, 2)])
    rows = [cache[slot // block_size, :, slot % block_size].contiguous().view(torch.uint8) for slot in slots.tolist()]
    assert bytes(memory.tensor(2, 4 * row_bytes).numpy()) == b"".join(bytes(row.numpy()) for row in rows[:4])
    assert bytes(memory.tensor(0, 2 * row_bytes).numpy()) == b"".join(bytes(row.numpy()) for row in rows[4:])
    name = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}[dtype]
    for row, peak in zip(rows, peaks, strict=True):
        values = row.view(dtype).float()
        largest = torch.tensor([peak], dtype=torch.int64).to(torch.int32 if dtype == torch.float32 else torch.int16).view(dtype)
        assert torch.equal(largest.isfinite(), values.isfinite().all()[None])
        assert (count_bad_rows(0, np.array([peak]), INFINITY[name]) is None) == bool(values.isfinite().all() and values.any())
        if largest.isfinite():
            assert largest.float() == values.abs().max()


@pytest.mark.parametrize("seed", range(20))
def test_slots_next_to_each_other_get_their_own_rows(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(seed)
    monkeypatch.setattr(gather, "COPY_BYTES", rng.choice((5, 24, 40, 1 << 20)))  # Nothing says that pieces end with a row.
    cache = _bits((16, 1, 4, 4), torch.bfloat16)
    row_bytes, rows_a_slot = 8, 3
    memory = StagingMemory(StagingShape(12, 0, row_bytes * rows_a_slot, row_bytes), torch.device("cpu"))
    memory.memory.zero_()
    destinations = [_into(slot, rng.choice((1, 3, 3, 3))) for slot in sorted(rng.sample(range(12), 7))]
    if seed % 5 == 0:
        rng.shuffle(destinations)
    slots = np.array([rng.randrange(64) for _ in range(sum(to.rows for to in destinations))])
    _gather(cache, memory, slots, destinations)
    wanted = bytearray(memory.shape.nbytes)
    rows = iter(slots.tolist())
    for to in destinations:
        for at in range(to.staging_slot * rows_a_slot, to.staging_slot * rows_a_slot + to.rows):
            slot = next(rows)
            wanted[at * row_bytes : (at + 1) * row_bytes] = bytes(cache[slot // 4, 0, slot % 4].view(torch.uint8).numpy())
    assert bytes(memory.area.slots) == wanted


def test_shared_staging_goes_with_its_owner() -> None:
    memory = StagingMemory(StagingShape(4, 0, 4096, 8), torch.device("cpu"), shared=True)
    fd = memory.fd
    assert os.fstat(fd).st_size == 4 * 4096 + control_bytes(memory.shape)
    del memory
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_slots_that_are_filled_in_a_row_are_one_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = _bits((16, 1, 4, 4), torch.bfloat16)
    memory = StagingMemory(StagingShape(12, 0, 24, 8), torch.device("cpu"))
    copied: list[tuple[int, int]] = []
    tensor = memory.tensor

    def note(slot: int, nbytes: int) -> torch.Tensor:
        copied.append((slot, nbytes))
        return tensor(slot, nbytes)

    monkeypatch.setattr(memory, "tensor", note)
    into = [_into(slot, rows) for slot, rows in ((1, 3), (2, 3), (3, 2), (4, 3), (6, 3), (7, 1))]
    _gather(cache, memory, np.arange(15), into)
    assert copied == [(1, 64), (4, 24), (6, 32)]
