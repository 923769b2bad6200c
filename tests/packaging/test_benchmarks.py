"""The benchmarks run: at sizes that say nothing of speed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.extended
_BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def _figures(tmp_path: Path, script: str, *options: str) -> dict[str, Any]:
    out = tmp_path / "figures.json"
    command = [sys.executable, str(_BENCHMARKS / script), "--work-dir", str(tmp_path), "--json", str(out), *options]
    subprocess.run(command, check=True, timeout=240)
    figures: dict[str, Any] = json.loads(out.read_text())
    return figures


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


def test_scale(tmp_path: Path) -> None:
    options = ["--connectors", "1,8", "--catalogue", "1000,2000", "--mib", "16", "--rounds", "1"]
    figures = _figures(tmp_path, "scale.py", *options)
    assert [row["connectors"] for row in figures["connectors"]] == ["1", "8"]
    assert [row["samples"] for row in figures["catalogue"]] == [1000, 2000]
    assert len(figures["sizes"]) == 4


def test_ingest(tmp_path: Path) -> None:
    figures = _figures(tmp_path, "ingest.py", "--samples", "2", "--rounds", "1")
    assert {verdict["name"] for verdict in figures["verdicts"]} == {"slotstream, gRPC", "slotstream, NIXL"}
    assert all(verdict["ratio"] > 0 for verdict in figures["verdicts"])
