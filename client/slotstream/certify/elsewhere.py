"""For extractors that this command does not start: the truth model and prompts for them, and a check of what they wrote."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

from slotstream.certify import files, load
from slotstream.certify.report import Gap, Report, Steps
from slotstream.certify.sizes import Sizes
from slotstream.truth import model as truth_model
from slotstream.truth.compare import Truth

_TOKENS_MAX, _STEP_TOKENS = 1024, 512


def make(out: Path, kind: truth_model.Kind, requests: int, seed: int) -> list[str]:
    """Write the truth model of this kind and so many prompts to `out`, a new folder; what there is, in words."""
    truth = Truth(kind)
    out.mkdir(parents=True)
    truth_model.make(out / files.MODEL, kind)
    prompts = load.mixed(random.Random(seed), requests, Sizes(_TOKENS_MAX, _STEP_TOKENS, 1, None))
    files.write_prompts(out, truth, {request.name: request.prompt for request in prompts})
    return [
        f"{out / files.MODEL}: a {kind} model of {truth.layers} layers and {truth.hidden} elements a row and layer",
        f"{out / files.PROMPTS}: {len(prompts)} prompts, as token ids",
    ]


def check_files(
    folder: Path, made: Path | None, kind: truth_model.Kind | None, layers: Sequence[int | str] | None, steps: Steps
) -> Report:
    """Every row of the files in a folder. `made`: what `make` wrote, so that lost samples are seen. Raises ConfigError."""
    truth, prompts = Truth(kind or "dense"), dict[str, list[int]]()
    if made is not None:
        truth, prompts = files.read_prompts(made)
    found = files.files_below(folder)
    told = files.layers_of(found, layers, truth)
    report = Report(str(folder), truth.kind, truth.layers, [truth.name_of(layer_id) for layer_id in told.layer_ids])
    report.notes.append(f"the layers are told by {told.by}")
    with steps("comparing rows", len(found)) as step:
        files.check(folder, found, told, truth, prompts, report.findings, step)
    if not prompts:
        report.gaps.append(Gap("lost samples", "without --truth nobody knows how many there must be"))
    if not truth.tells_layers:
        report.gaps.append(Gap("which layer a row is of", f"rows of the {truth.kind} truth model spell their token alone"))
    report.gaps.append(Gap("preemption, chunked prompts and shared prefixes", "files do not say what their engine did"))
    return report
