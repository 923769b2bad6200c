"""Rows read out of caches of all dtypes and strides, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from slotstream.connector.gather import Destination, RowGather
from slotstream.connector.staging import StagingPool


def _bits(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Every pattern of bits that a dtype can hold, NaNs of all kinds and denormals among them."""
    count = int(np.prod(shape)) * dtype.itemsize
    raw = np.random.default_rng(0).integers(0, 256, count, dtype=np.uint8)
    return torch.from_numpy(raw).view(dtype).view(shape)


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
    pool = StagingPool(4, 4096, torch.device("cpu"))
    slots = np.array([35, 0, 7, 7, 18, 4], dtype=np.int64)
    gathered = RowGather(cache, pool).gather(slots, [Destination(2, 4), Destination(0, 2)], None)
    gathered.wait()
    rows = [cache[slot // block_size, :, slot % block_size].contiguous().view(torch.uint8) for slot in slots.tolist()]
    row_bytes = layers * hidden * dtype.itemsize
    assert bytes(pool.buffer(2, 4 * row_bytes)) == b"".join(bytes(row.numpy()) for row in rows[:4])
    assert bytes(pool.buffer(0, 2 * row_bytes)) == b"".join(bytes(row.numpy()) for row in rows[4:])
    assert gathered.peaks.shape == (6,)
    assert gathered.peaks.dtype == dtype
