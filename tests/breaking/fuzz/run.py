"""The fuzzing command: `python tests/breaking/fuzz/run.py [TARGET ...] [--runs N | --seconds S]`; `make fuzz` calls it.

Each target runs in a process of its own, from the corpus in the repository, guided by coverage where atheris is installed
and by hypothesis's own search where it is not. What breaks is written to --findings, and `run.py TARGET --input FILE` shows
it again.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import logging
import os
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_HERE = Path(__file__).parent
sys.path.insert(0, str(_HERE))

from fuzz_harness import SCRATCH, Footprint, Target, mutated, scratch_base  # noqa: E402

_INPUT_S_MAX = 60  # An input that takes longer hangs: the slowest take a second on a busy machine.
_RESIDENT_MIB_MAX = 2048
_LEAK_BYTES = 192 << 20  # Growth over the last three quarters of a run; the engine's own corpus takes some.
_LEAK_COUNT = 8  # Descriptors, or threads.
_EVERY = 200  # Inputs between two looks at the footprint, unless they are slow.


class _Watch:
    """Counts inputs and looks at what the process holds; the parent reads its notes, also after a crash."""

    def __init__(self, target: Target, notes: Path, runs: int) -> None:
        self._target = target
        self._notes = notes
        self._warm_at = max(_EVERY, runs // 4)
        self._inputs = 0
        self._warm: Footprint | None = None
        self._noted_at = 0.0

    def __call__(self, data: bytes) -> None:
        self._target.check(data)
        self._inputs += 1
        if self._inputs % _EVERY == 0 or time.monotonic() - self._noted_at > 0.2:
            self.note()

    def note(self) -> None:
        self._noted_at = time.monotonic()
        now = Footprint.now()
        if self._warm is None and self._inputs >= self._warm_at:
            self._warm = now
        warm = self._warm or now
        said = {
            "inputs": self._inputs,
            "resident_mib": now.resident_bytes >> 20,
            "grown_bytes": now.resident_bytes - warm.resident_bytes,
            "grown_descriptors": now.descriptors - warm.descriptors,
            "grown_threads": now.threads - warm.threads,
        }
        self._notes.write_text(json.dumps(said))


def _targets() -> dict[str, Target]:
    from fuzz_targets import TARGETS

    return TARGETS


def _work_atheris(arguments: argparse.Namespace) -> None:
    import atheris

    with atheris.instrument_imports(include=["slotstream"], enable_loader_override=False):
        target = _targets()[arguments.targets[0]]
    watch = _Watch(target, arguments.notes, arguments.runs)
    limit = f"-max_total_time={arguments.seconds}" if arguments.seconds else f"-runs={arguments.runs}"
    options = (
        limit,
        f"-max_len={target.bytes_max}",
        f"-timeout={_INPUT_S_MAX}",
        f"-rss_limit_mb={_RESIDENT_MIB_MAX}",
        f"-seed={arguments.seed}",
        f"-artifact_prefix={arguments.findings}/{target.name}-",
        "-print_final_stats=0",
        "-verbosity=1",
        str(arguments.found),
        str(target.corpus_dir),
    )
    atheris.Setup([sys.argv[0], *options], watch)
    atheris.Fuzz()


def _work_hypothesis(arguments: argparse.Namespace) -> None:
    from hypothesis import HealthCheck, Phase, given, seed, settings
    from hypothesis import strategies as st

    target = _targets()[arguments.targets[0]]
    watch = _Watch(target, arguments.notes, arguments.runs)
    for data in target.corpus:
        watch(data)
    deadline = time.monotonic() + arguments.seconds if arguments.seconds else None
    batch = 1000 if deadline else arguments.runs
    number = arguments.seed
    while True:

        @seed(number)
        @settings(
            max_examples=batch,
            deadline=_INPUT_S_MAX * 1000,
            database=None,
            phases=(Phase.generate, Phase.shrink),
            suppress_health_check=list(HealthCheck),
        )
        @given(data=inputs(st, target))
        def run(data: bytes) -> None:
            (arguments.findings / f"{target.name}-last").write_bytes(data)
            watch(data)

        run()
        number += 1
        if deadline is None or time.monotonic() >= deadline:
            break
    (arguments.findings / f"{target.name}-last").unlink()
    watch.note()


def inputs(st: Any, target: Target) -> Any:
    """hypothesis strategy: bytes, and what is in the corpus with a few changes."""
    known = st.sampled_from(target.corpus or [b""])
    changed = st.builds(lambda data, rng: mutated(data, rng, target.bytes_max), known, st.randoms(use_true_random=False))
    return st.one_of(st.binary(max_size=target.bytes_max), changed, changed)


# The parent.


def _run(name: str, runs: int, arguments: argparse.Namespace, engine: str) -> str:
    """Fuzzes one target in a process of its own; the line of the table, which says FAILED when something was found."""
    # The worker's own directories are in it: atheris ends a process without Python's `atexit`.
    with tempfile.TemporaryDirectory(prefix="slotstream-fuzz-run-", dir=scratch_base()) as work:
        notes, found = Path(work) / "notes", Path(work) / "found"
        found.mkdir()
        command = [sys.executable, str(_HERE / "run.py"), name, "--worker", engine, "--runs", str(runs), "--notes", str(notes)]
        command += ["--seed", str(arguments.seed), "--seconds", str(arguments.seconds), "--found", str(found)]
        began = time.monotonic()
        done = subprocess.run(
            [*command, "--findings", str(arguments.findings)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, SCRATCH: work},
            check=False,
        )
        took = time.monotonic() - began
        said: dict[str, int] = json.loads(notes.read_text()) if notes.exists() else {}
        if arguments.keep:
            shutil.copytree(found, Path(arguments.keep) / name, dirs_exist_ok=True)
    problem = _problem(done.returncode, said)
    if problem:
        print(done.stdout.decode(errors="replace")[-6000:], file=sys.stderr)
    count = said.get("inputs", 0)
    line = f"{name:14} {count:>9} inputs {count / took:>9.0f}/s {said.get('resident_mib', 0):>6} MiB "
    return line + (f"FAILED: {problem}" if problem else f"sound ({engine})")


def _problem(code: int, said: dict[str, int]) -> str:
    if code:
        return f"the process ended with {code}; its finding is in --findings"
    if not said.get("inputs"):
        return "nothing was checked"
    if said.get("grown_bytes", 0) > _LEAK_BYTES:
        return f"memory grew by {said['grown_bytes'] >> 20} MiB"
    for what in ("descriptors", "threads"):
        if said.get(f"grown_{what}", 0) > _LEAK_COUNT:
            return f"{said[f'grown_{what}']} {what} were left behind"
    return ""


def _arcs(target: Target, data: bytes) -> set[tuple[str, int, int]]:
    """The jumps between lines of slotstream that an input causes, in any thread."""
    found: set[tuple[str, int, int]] = set()

    def trace(frame: Any, event: str, argument: Any) -> Any:
        path = frame.f_code.co_filename
        if "/slotstream/" not in path:
            return None
        last = frame.f_lineno

        def line(inner: Any, event: str, argument: Any) -> Any:
            nonlocal last
            found.add((path, last, inner.f_lineno))
            last = inner.f_lineno
            return line

        return line

    threading.settrace(trace)
    sys.settrace(trace)
    try:
        target.check(data)
    finally:
        sys.settrace(None)
        threading.settrace(None)
    return found


def _minimise(target: Target, extra: Path | None) -> None:
    """Makes the corpus the seeds, and the smallest inputs that together reach all that it and `extra` reach beyond them.

    Files named found-... once broke something, and stay.
    """
    found = {path.name: path.read_bytes() for path in target.corpus_dir.glob("found-*")}
    seeds = {*target.seeds()} - {*found.values()}
    pool = {*target.corpus, *seeds} - {*found.values()}
    if extra is not None:
        pool |= {path.read_bytes() for path in extra.glob("*")}
    for data in pool:
        target.check(data)  # Imports and caches are filled before anything counts.
        break
    reached: set[tuple[str, int, int]] = set()
    kept: list[bytes] = []
    for data in sorted(pool, key=lambda data: (data not in seeds, len(data), data)):
        arcs = _arcs(target, data)
        if arcs - reached or data in seeds:
            reached |= arcs
            kept.append(data)
    shutil.rmtree(target.corpus_dir, ignore_errors=True)
    target.corpus_dir.mkdir(parents=True)
    for name, data in found.items():
        (target.corpus_dir / name).write_bytes(data)
    for number, data in enumerate(kept):
        (target.corpus_dir / f"{number:03}").write_bytes(data)
    print(f"{target.name}: {len(pool)} inputs, {len(kept)} kept, {len(reached)} jumps")


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("targets", nargs="*", help="which targets; all of them by default")
    parser.add_argument("--runs", type=int, default=100_000, help="inputs over all targets, split by their shares")
    parser.add_argument("--seconds", type=int, default=0, help="seconds for each target, instead of a number of inputs")
    parser.add_argument("--seed", type=int, default=0, help="of the engine; 0: any, and it is printed")
    parser.add_argument("--engine", choices=("auto", "atheris", "hypothesis"), default="auto")
    parser.add_argument(
        "--findings", type=Path, default=Path("fuzz-findings"), help="directory for inputs that break something"
    )
    parser.add_argument("--keep", help="directory for inputs that reached something new")
    parser.add_argument("--input", type=Path, help="check this one input of the one target named")
    parser.add_argument("--corpus", nargs="?", const="", help="make the corpus minimal, with the inputs below this directory")
    for hidden in ("--worker", "--notes", "--found"):
        parser.add_argument(hidden, help=argparse.SUPPRESS, type=str if hidden == "--worker" else Path)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _arguments(argv)
    if arguments.worker:
        (_work_atheris if arguments.worker == "atheris" else _work_hypothesis)(arguments)
        return 0
    targets = _targets()
    names = arguments.targets or list(targets)
    if unknown := sorted(set(names) - targets.keys()):
        print(f"unknown targets {unknown}; known: {list(targets)}", file=sys.stderr)
        return 2
    if arguments.input is not None:
        targets[names[0]].check(arguments.input.read_bytes())
        return 0
    if arguments.corpus is not None:
        for name in names:
            _minimise(targets[name], Path(arguments.corpus) / name if arguments.corpus else None)
        return 0
    arguments.seed = arguments.seed or random.SystemRandom().randrange(1, 1 << 31)
    arguments.findings.mkdir(parents=True, exist_ok=True)
    installed = importlib.util.find_spec("atheris") is not None
    engine = arguments.engine if arguments.engine != "auto" else "atheris" if installed else "hypothesis"
    print(f"seed {arguments.seed}", flush=True)
    shares = sum(targets[name].share for name in names)
    failed = False
    for name in names:
        line = _run(name, max(1, arguments.runs * targets[name].share // shares), arguments, engine)
        failed |= "FAILED" in line
        print(line, flush=True)
    if not any(arguments.findings.iterdir()):
        arguments.findings.rmdir()
    return int(failed)


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)  # Every refused input would say so.
    sys.exit(main())
