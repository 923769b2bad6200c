"""The benchmarks run, at sizes that say nothing of speed; each has its `make` target and its section in their README."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

_ROOT = Path(__file__).parents[2]
_BENCHMARKS = _ROOT / "benchmarks"
# What `make` calls them; the others are parts of these.
_TARGETS = {
    "ingest": "bench",
    "transport": "bench-transport",
    "worker": "bench-worker",
    "workers": "bench-workers",
    "scale": "bench-scale",
    "gpu": "bench-gpu",
}


def test_each_benchmark_has_one_target_and_one_section_with_one_table() -> None:
    programs = {path.stem for path in _BENCHMARKS.glob("*.py") if "argparse.ArgumentParser" in path.read_text()}
    assert programs == {*_TARGETS, "plot"}
    called = re.findall(r"^(bench[a-z-]*):.*\n\t\$\(call BENCH,(\w+)\)$", (_ROOT / "Makefile").read_text(), re.M)
    assert {name: target for target, name in called} == _TARGETS
    assert len(called) == len(_TARGETS)
    _, *sections = re.split(r"^## ", (_BENCHMARKS / "README.md").read_text(), flags=re.M)
    tables = {section.partition("\n")[0]: len(re.findall(r"^\| *-", section, re.M)) for section in sections}
    of_benchmarks = {title: count for title, count in tables.items() if title.startswith("`make bench")}
    assert of_benchmarks == {f"`make {target}`": 1 for target in _TARGETS.values()}


@pytest.mark.parametrize("name", [*_TARGETS])
def test_each_says_what_can_be_chosen(name: str) -> None:
    command = [sys.executable, str(_BENCHMARKS / f"{name}.py"), "--help"]
    said = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout
    assert "--json FILE" in said
    assert f"benchmarks/{name}.py" in said


def _figures(tmp_path: Path, script: str, *options: str) -> dict[str, Any]:
    out = tmp_path / "figures.json"
    command = [sys.executable, str(_BENCHMARKS / script), "--work-dir", str(tmp_path), "--json", str(out), *options]
    subprocess.run(command, check=True, timeout=240)
    figures: dict[str, Any] = json.loads(out.read_text())
    return figures


@pytest.mark.extended
def test_transport(tmp_path: Path) -> None:
    names = "raw TCP,gRPC TCP,gRPC unix,NIXL CMA,write + fdatasync,gRPC TCP stored,gRPC unix stored"
    figures = _figures(tmp_path, "transport.py", "--only", names, "--streams", "2", "--mib", "32", "--rounds", "1")
    speeds = {cell["contender"]: cell["rounds"][0]["gb_per_s"] for cell in figures["cells"]}
    assert {"raw TCP", "gRPC TCP", "gRPC unix", "gRPC TCP stored", "gRPC unix stored"} <= speeds.keys() <= set(names.split(","))
    assert min(speeds.values()) > 0
    assert {"mmap + copy", "get, TCP", "get, unix"} <= {read["name"] for read in figures["reads"]}
    judged = {verdict["what"] for verdict in figures["verdicts"]}
    assert "gRPC TCP stored / the slower of gRPC TCP and write + fdatasync, 2 streams" in judged
    assert "get, TCP / mmap + copy, whole samples" in judged


@pytest.mark.extended
def test_scale(tmp_path: Path) -> None:
    options = ["--connectors", "1,8", "--catalogue", "1000,2000", "--mib", "16", "--rounds", "1"]
    figures = _figures(tmp_path, "scale.py", *options)
    assert [row["connectors"] for row in figures["connectors"]] == ["1", "8"]
    assert [row["samples"] for row in figures["catalogue"]] == [1000, 2000]
    assert len(figures["sizes"]) == 4


@pytest.mark.extended
def test_ingest(tmp_path: Path) -> None:
    figures = _figures(tmp_path, "ingest.py", "--samples", "2", "--rounds", "1")
    assert {verdict["name"] for verdict in figures["verdicts"]} == {"slotstream, gRPC", "slotstream, NIXL"}
    assert all(verdict["ratio"] > 0 for verdict in figures["verdicts"])


@pytest.mark.extended
def test_worker(tmp_path: Path) -> None:
    small = ["--samples", "2", "--rows", "64", "--chunks", "2", "--work-ms", "1", "--steps", "5", "--rounds", "1"]
    # A sender process that gets no core for a second refuses samples, which ends the benchmark; this machine also runs tests.
    figures = _figures(tmp_path, "worker.py", *small, "--senders", "thread")
    assert {"nothing sent", "gRPC, a thread"} <= figures["rounds"].keys()
    for name, (figure,) in figures["rounds"].items():
        assert figure["wall"] > 0, name
        assert figure["own"] > 0, name


@pytest.mark.extended
def test_workers(tmp_path: Path) -> None:
    figures = _figures(tmp_path, "workers.py", "--workers", "2", "--streams", "1,2", "--mib", "32", "--rounds", "1")
    pairs = {(pair["transport"], pair["streams"]): pair for pair in figures["pairs"]}
    assert {("grpc", 1), ("grpc", 2)} <= pairs.keys()
    for pair in pairs.values():
        (one,), (many,) = pair["one"], pair["many"]
        assert pair["ratios"] == [many["gb_per_s"] / one["gb_per_s"]]
    assert not list(tmp_path.glob("slotstream-bench-*"))
