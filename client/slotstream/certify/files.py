"""Safetensors files of another extractor, whose engine ran the truth model: every row, and every prompt's file."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slotstream.certify.findings import UNASKED, UNREADABLE, WRONG_LAYERS, Findings
from slotstream.truth.compare import Truth, told_layers
from slotstream.truth.rows_file import NoRows, RowsFile
from slotstream.wire.errors import ConfigError
from slotstream.wire.names import FINAL

PROMPTS = "prompts.jsonl"
MODEL = "model"
_TRUTH = "truth.json"
FILES_MAX = 1_000_000
_VOTING_ROWS = 16  # Of a file, where the rows themselves must tell their layers.
_VOTING_FILES = 64


@dataclass(frozen=True, slots=True)
class Told:
    """Which layers the files have, in their order, and who says so. `own`: a file that says its own has those."""

    layer_ids: list[int]
    by: str
    own: bool = False


def files_below(folder: Path) -> list[Path]:
    """The safetensors files in a folder and below it, but for hidden ones. Raises ConfigError where there is none."""
    if not folder.is_dir():
        raise ConfigError(f"{folder} is no folder")
    found = [
        path
        for path in sorted(folder.rglob("*.safetensors"))
        if not any(part.startswith(".") for part in path.relative_to(folder).parts)
    ]
    if not found:
        raise ConfigError(f"there is no .safetensors file in {folder}")
    if len(found) > FILES_MAX:
        raise ConfigError(f"{len(found)} files are more than the {FILES_MAX} that are checked in one run")
    return found


def layers_of(files: Sequence[Path], asked: Sequence[int | str] | None, truth: Truth) -> Told:
    """Which layers the files have: as asked, else as they say, else as their rows do. Raises ConfigError."""
    if asked is not None:
        ids = [truth.final_id if layer == FINAL else int(layer) for layer in asked]
        if wrong := [layer_id for layer_id in ids if not 0 <= layer_id <= truth.final_id]:
            raise ConfigError(f"layers {wrong} are none of a model of {truth.layers} layers")
        return Told(ids, "--layers")
    votes: list[Counter[int]] = []
    for path in files[:_VOTING_FILES]:
        try:
            with RowsFile(path) as file:
                if "layer_ids" in file.metadata:
                    return Told(_own_layers(file.metadata), "the files' metadata", own=True)
                spelt = told_layers(file.rows(0, min(_VOTING_ROWS, file.shape[0])), truth)
        except NoRows:
            continue
        votes += [Counter() for _ in range(len(spelt) - len(votes))]
        for vote, layer_id in zip(votes, spelt, strict=False):
            vote.update([] if layer_id is None else [layer_id])
    ids = [vote.most_common(1)[0][0] for vote in votes if vote]
    if not ids or len(ids) != len(votes) or (truth.tells_layers and len(set(ids)) != len(ids)):
        raise ConfigError("neither the files nor their rows say which layers they have: name them with --layers")
    return Told(sorted(ids), "the rows themselves, in ascending order")


def check(
    folder: Path,
    files: Sequence[Path],
    told: Told,
    truth: Truth,
    prompts: Mapping[str, Sequence[int]],
    findings: Findings,
    step: Callable[[], None],
) -> None:
    """Every row of every file; and that each of `prompts`, id -> token ids, has a file."""
    left = {name: tuple(tokens) for name, tokens in prompts.items()}  # Two may be equal.
    unknown: list[tuple[str, tuple[int, ...]]] = []
    for path in files:
        name = path.relative_to(folder).as_posix()
        tokens = _check(name, path, told, truth, findings)
        if tokens is not None and prompts:
            mine = max((n for n, p in left.items() if tokens[: len(p)] == p), key=lambda n: len(left[n]), default=None)
            if mine is None:
                unknown.append((name, tokens))
            else:
                findings.output_rows += len(tokens) - len(left.pop(mine))
        step()
    for name, tokens in unknown:
        _unknown(name, tokens, left, findings)
    for name, prompt in left.items():
        findings.missing(name, len(prompt), "no file has this prompt")


def _unknown(name: str, tokens: tuple[int, ...], left: dict[str, tuple[int, ...]], findings: Findings) -> None:
    """A file that begins with no prompt: perhaps with most of one."""

    def alike(prompt: str) -> int:
        return sum(a == b for a, b in zip(left[prompt], tokens, strict=False))

    nearest = max(left, key=alike, default=None)
    if nearest is None or alike(nearest) * 2 < min(len(left[nearest]), len(tokens)):
        findings.add(UNASKED, name, None, "its token ids are those of no prompt, or of one that another file has")
        return
    near = left.pop(nearest)
    findings.tokens_differ(name, tokens[: len(near)], near)
    findings.lost += max(0, len(near) - len(tokens))


def _check(name: str, path: Path, told: Told, truth: Truth, findings: Findings) -> tuple[int, ...] | None:
    """The file's token ids; None where it has no rows to compare."""
    try:
        with RowsFile(path) as file:
            layer_ids = _own_layers(file.metadata) if told.own and "layer_ids" in file.metadata else told.layer_ids
            token_ids = file.token_ids
            if not findings.fits(name, file.shape, len(token_ids), layer_ids, truth):
                return tuple(token_ids.tolist())
            if max(layer_ids) > truth.final_id:
                message = f"layer {max(layer_ids)} is none of a model of {truth.layers} layers"
                findings.add(WRONG_LAYERS, name, None, message)
                return tuple(token_ids.tolist())
            findings.samples += 1
            for first, rows in file.parts():
                ids = token_ids[first : first + len(rows)]
                findings.compare(name, rows, ids, layer_ids, truth, first)
            return tuple(token_ids.tolist())
    except NoRows as error:
        findings.add(UNREADABLE, name, None, str(error))
        return None


def _own_layers(metadata: Mapping[str, str]) -> list[int]:
    """Raises NoRows."""
    try:
        ids = json.loads(metadata["layer_ids"])
        if isinstance(ids, list) and ids and all(type(layer_id) is int and layer_id >= 0 for layer_id in ids):
            return ids
    except ValueError:
        pass
    raise NoRows(f"layer_ids of its metadata are no list of layers: {metadata['layer_ids'][:80]!r}")


def write_prompts(folder: Path, truth: Truth, prompts: Mapping[str, Sequence[int]]) -> None:
    """What `read_prompts` reads."""
    (folder / _TRUTH).write_text(json.dumps({"kind": truth.kind, "layers": truth.layers, "hidden": truth.hidden}) + "\n")
    lines = [json.dumps({"id": name, "token_ids": list(tokens)}) + "\n" for name, tokens in prompts.items()]
    (folder / PROMPTS).write_text("".join(lines))


def read_prompts(folder: Path) -> tuple[Truth, dict[str, list[int]]]:
    """The truth model that `--make` wrote to this folder, and its prompts. Raises ConfigError."""
    try:
        said: dict[str, Any] = json.loads((folder / _TRUTH).read_text())
        lines = [json.loads(line) for line in (folder / PROMPTS).read_text().splitlines()]
        return Truth(**said), {str(line["id"]): [int(token) for token in line["token_ids"]] for line in lines}
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"{folder} is not what slotstream certify --make wrote: {error}") from error
