"""Batches out of rows in memory: each row is at its place, with numpy and without."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy
import pytest
import torch

from slotstream.client import arrays
from slotstream.client.arrays import NumpyArrays, TorchArrays

# Rows of the first part at places 3, 0 and 4, those of the second at 2 and 1.
_PARTS: Sequence[tuple[list[int], list[int]]] = (([5, 0, 5], [3, 0, 4]), ([1, 2], [2, 1]))


# Elements of a row and layer: small rows are copied by indexing, large ones one by one.
both_sizes = pytest.mark.parametrize("hidden", [3, 1024])


def _rows(seed: int, dtype: torch.dtype, hidden: int = 3) -> torch.Tensor:
    return torch.randn(6, 2, hidden, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _wanted(held: Sequence[torch.Tensor]) -> torch.Tensor:
    found = torch.empty(5, 2, held[0].shape[-1])
    for rows, (wanted, places) in zip(held, _PARTS, strict=True):
        for row, place in zip(wanted, places, strict=True):
            found[place] = rows[row]
    return found


@both_sizes
@pytest.mark.parametrize("has_numpy", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_tensors_are_the_same_with_numpy_and_without_it(
    dtype: torch.dtype, has_numpy: bool, hidden: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arrays, "_has_numpy", lambda: has_numpy)
    held = [_rows(1, dtype, hidden), _rows(2, dtype, hidden)]
    laid = TorchArrays(None, None).gather([(rows, *part) for rows, part in zip(held, _PARTS, strict=True)])
    assert laid.dtype == dtype
    assert torch.equal(laid.to(torch.float32), _wanted(held))


@pytest.mark.parametrize("has_numpy", [True, False])
def test_samples_of_several_dtypes_become_what_holds_both(has_numpy: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrays, "_has_numpy", lambda: has_numpy)
    held = [_rows(1, torch.bfloat16), _rows(2, torch.float16)]
    laid = TorchArrays(None, None).gather([(rows, *part) for rows, part in zip(held, _PARTS, strict=True)])
    assert laid.dtype == torch.float32
    assert torch.equal(laid, _wanted(held))


def test_a_large_batch_has_memory_of_its_own_that_can_be_written() -> None:
    rows = torch.randn(700, 2, 1024, generator=torch.Generator().manual_seed(1))
    order = torch.randperm(700, generator=torch.Generator().manual_seed(2))
    laid = TorchArrays(None, None).gather([(rows, order.tolist(), range(700))])
    assert laid.numel() * laid.element_size() >= 4 << 20
    assert torch.equal(laid, rows[order])
    laid += 1
    assert torch.equal(laid, rows[order] + 1)


@both_sizes
@pytest.mark.parametrize(
    ("dtypes", "stored"),
    [
        ((torch.bfloat16, torch.bfloat16), "uint16"),
        ((torch.float16, torch.float16), "float16"),
        ((torch.bfloat16, torch.float16), "float32"),
        ((torch.float32, torch.bfloat16), "float32"),
    ],
)
def test_numpy_arrays_hold_rows_as_they_are_stored_unless_several_dtypes_meet(
    dtypes: tuple[torch.dtype, torch.dtype], stored: str, hidden: int
) -> None:
    def as_numpy(rows: torch.Tensor) -> Any:
        return rows.view(torch.uint16).numpy() if rows.dtype == torch.bfloat16 else rows.numpy()

    held = [_rows(1, dtypes[0], hidden), _rows(2, dtypes[1], hidden)]
    made = NumpyArrays()
    laid = made.gather([(as_numpy(rows), *part) for rows, part in zip(held, _PARTS, strict=True)])
    assert laid.dtype == numpy.dtype(stored)
    assert numpy.array_equal(made.layer(laid, 1), _wanted(held)[:, 1].numpy())
