"""Rows of the truth model compared with the truth: which are wrong, and what each of them looks like instead."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from slotstream.truth import model as truth_model

Tensor = torch.Tensor
_ROWS_AT_ONCE = 2048  # In float32 of a hidden size of 256, 2 MiB a layer.


@dataclass(frozen=True, slots=True)
class Truth:
    """Which truth model: its kind, how many layers it has, and its hidden size."""

    kind: truth_model.Kind = "dense"
    layers: int = truth_model.LAYERS
    hidden: int = truth_model.HIDDEN

    @property
    def final_id(self) -> int:
        """The id of the last norm's output."""
        return self.layers + 1

    @property
    def tells_layers(self) -> bool:
        """Whether rows say which layer they are of."""
        return self.kind in ("dense", "swa")

    def name_of(self, layer_id: int) -> str:
        """What people call a layer."""
        return "final" if layer_id == self.final_id else str(layer_id)


@dataclass(frozen=True, slots=True)
class WrongRow:
    """One row that is not that of its token, and in which layers. `why`: one sentence about the first of them."""

    row: int
    token_id: int
    layers: tuple[str, ...]
    why: str


def compare(
    rows: torch.Tensor, token_ids: torch.Tensor, layer_ids: Sequence[int], truth: Truth, *, named: int
) -> tuple[int, list[WrongRow]]:
    """How many of `rows`, [tokens, len(layer_ids), hidden], are not those of `token_ids` [tokens]; the first `named`.

    A row of a token that the model does not know is wrong.
    """
    count, found = 0, list[WrongRow]()
    for first in range(0, len(token_ids), _ROWS_AT_ONCE):
        part, ids = rows[first : first + _ROWS_AT_ONCE], token_ids[first : first + _ROWS_AT_ONCE]
        known = (ids >= 0) & (ids < truth_model.VOCAB)
        wrong = truth_model.wrong_elements(part, ids * known, layer_ids, kind=truth.kind, layers=truth.layers)
        wrong[~known] = True
        for row in wrong.flatten(1).any(1).nonzero().flatten().tolist():
            count += 1
            if len(found) < named:
                found.append(_described(first + row, part[row], int(ids[row]), wrong[row], layer_ids, truth))
    return count, found


def _described(
    number: int, row: torch.Tensor, token_id: int, wrong: torch.Tensor, layer_ids: Sequence[int], truth: Truth
) -> WrongRow:
    """`row` and `wrong`: [layers, hidden]."""
    bad = wrong.any(1).nonzero().flatten().tolist()
    why = _why(row[bad[0]], token_id, layer_ids[bad[0]], wrong[bad[0]], truth)
    return WrongRow(number, token_id, tuple(truth.name_of(layer_ids[at]) for at in bad), why)


def _why(vector: torch.Tensor, token_id: int, layer_id: int, wrong: torch.Tensor, truth: Truth) -> str:
    what = f"layer {truth.name_of(layer_id)}"
    if not 0 <= token_id < truth_model.VOCAB:
        return f"{what}: the model has no token {token_id}"
    elements = wrong.nonzero().flatten().tolist()
    if not vector.isfinite().all():
        return f"{what}: element {int((~vector.isfinite()).nonzero()[0])} is not finite"
    if not vector.any():
        return f"{what}: all zeros"
    known = recognise(vector, truth)
    if known is not None and known[0] != token_id:
        return f"{what}: this is the row of token {known[0]}, not of {token_id}"
    if known is not None:
        return f"{what}: this is layer {truth.name_of(known[1])} of the same token"
    wanted = truth_model.expected(torch.tensor([token_id]), [layer_id], kind=truth.kind, layers=truth.layers)[0, 0]
    if len(elements) == 1:
        at = elements[0]
        return f"{what}: element {at} is {float(vector[at])!r}, not {float(wanted[at])!r}"
    return f"{what}: {len(elements)} of {len(vector)} elements are wrong, the first is {elements[0]}"


def recognise(vector: torch.Tensor, truth: Truth) -> tuple[int, int] | None:
    """Of which token and layer `vector` [hidden] is the row, exactly; None where it is of none."""
    bits = 2 ** torch.arange(truth_model.ID_BITS)
    token_id = int(((vector[: truth_model.ID_BITS].float() > 0).long() * bits).sum())
    if token_id >= truth_model.VOCAB:
        return None
    ids = torch.tensor([token_id])
    told = float(vector[truth_model.LAYER_COLUMN])
    within = int(told) if truth.tells_layers and 0 <= told <= truth.layers else truth.layers
    for layer_id in (within, truth.final_id):
        one = vector.view(1, 1, -1)
        if not truth_model.wrong_elements(one, ids, [layer_id], kind=truth.kind, layers=truth.layers).any():
            return token_id, layer_id
    return None


def told_layers(rows: torch.Tensor, truth: Truth) -> list[int | None]:
    """Which layer most of `rows`, [tokens, layers, hidden], spell in each place; None where they spell none."""
    counts: list[dict[int, int]] = [{} for _ in range(rows.shape[1])]
    for row in rows:
        for at, vector in enumerate(row):
            known = recognise(vector, truth)
            if known is not None:
                counts[at][known[1]] = counts[at].get(known[1], 0) + 1
    return [max(count, key=lambda layer_id: count[layer_id]) if count else None for count in counts]
