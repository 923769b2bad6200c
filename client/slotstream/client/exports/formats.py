"""What each trainer's files hold: which rows of a sample, under which names. One table.

Trainers of drafts take one row that stands for the model's last, and others beside it. Layer L, the number of the model's
layers, is that row before the last norm, and "final" is the row after it. Which one a trainer takes is told here alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from slotstream.client.exports import files
from slotstream.client.exports.files import Rows
from slotstream.client.info import SampleInfo
from slotstream.wire.errors import BadLayers
from slotstream.wire.names import FINAL

BEFORE_NORM, AFTER_NORM = "before", "after"
_SHOWN = {BEFORE_NORM: "the row before the last norm", AFTER_NORM: "the row after the last norm"}


@dataclass(frozen=True, slots=True)
class Format:
    """bases: the rows that may stand for the last one, of which the first that a sample has counts; (): all layers are alike.

    others: how many layers it takes beside that one; 0: one or more. write: a sample's file.
    """

    suffix: str
    write: Callable[[Rows, Path], None]
    bases: tuple[str, ...] = ()
    others: int = 0
    needs_mask: bool = False


FORMATS: Final = {
    "speculators": Format(".safetensors", files.write_safetensors, (BEFORE_NORM,), needs_mask=True),
    "specforge": Format(".ckpt", files.write_specforge, (AFTER_NORM,), others=3, needs_mask=True),
    "modelopt": Format(".pt", files.write_modelopt, (AFTER_NORM, BEFORE_NORM), others=3, needs_mask=True),
    "safetensors": Format(".safetensors", files.write_safetensors),
    "npz": Format(".npz", files.write_npz),
}


def layers_of(name: str, info: SampleInfo, named: Sequence[int | str] | None) -> tuple[int, ...]:
    """The ids of a sample's layers in the order of the file: the one that stands for the last comes last.

    named: the layers wanted (beside that one); None: all that the sample has. Raises BadLayers, in a sentence, where the sample
    lacks one.
    """
    kind, where = FORMATS[name], f"sample {info.namespace}/{info.sample_id}"
    has_final = info.layer_names[-1:] == (FINAL,)
    final = info.layer_ids[-1] if has_final else None
    has = f"its layers are {', '.join(info.layer_names)}"
    wanted = [final if layer == FINAL else layer for layer in named or ()]
    if lacking := [layer for layer, found in zip(named or (), wanted, strict=True) if found not in info.layer_ids]:
        raise BadLayers(f"{where} has no layer {lacking[0]}: {has}")
    ids = [layer for layer in wanted if isinstance(layer, int)] if named else list(info.layer_ids)
    if not kind.bases:
        return tuple(ids)
    last = _last_layer(info, where)
    found = {BEFORE_NORM: last if last in info.layer_ids else None, AFTER_NORM: final}
    base = next((found[base] for base in kind.bases if found[base] is not None), None)
    if base is None:
        lacks = " nor ".join(_called(base, last) for base in kind.bases)
        raise BadLayers(f"{where} has no layer {lacks}, which {name} takes: {has}; capture it with that layer, too")
    # What stands for the last row is no other layer, under either of its names.
    others = [layer for layer in ids if layer != base and (named or layer not in (last, final))]
    if not others or (kind.others and not named and len(others) != kind.others):
        count = kind.others or "one or more"
        raise BadLayers(f"{where} has {len(others)} layers beside that, and {name} takes {count}: name them; {has}")
    return (*others, base)


def _called(base: str, last: int) -> str:
    return f"{last if base == BEFORE_NORM else FINAL} ({_SHOWN[base]})"


def _last_layer(info: SampleInfo, where: str) -> int:
    said = info.metadata.get("num_hidden_layers", "")
    if not said.isdecimal():
        raise BadLayers(f"{where} does not say how many layers its model has, so no row of it is known to be the last")
    return int(said)
