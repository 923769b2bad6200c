"""The benchmarks run, at sizes that say nothing of speed; each has its `make` target and its section in their README."""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
from collections import Counter
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
    "cluster": "bench-cluster",
    "readers": "bench-readers",
    "looking": "bench-looking",
    "gpu": "bench-gpu",
    "online": "bench-online",
    "capture": "bench-capture",
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


_SERVERS = ("files", "1 with objects", "2 with objects")


@pytest.mark.postgres
@pytest.mark.objects
@pytest.mark.extended
def test_cluster(tmp_path: Path) -> None:
    options = ["--catalogue", "300,600", "--questions", "2", "--samples-mib", "1,2", "--total-mib", "4", "--rounds", "1"]
    figures = _figures(tmp_path, "cluster.py", *options)
    assert [line["sample_mib"] for line in figures["servers"]] == [1, 2]
    assert all(line[name][what] >= 0 for line in figures["servers"] for name in _SERVERS for what in ("store", "read"))
    assert [row["samples"] for row in figures["catalogue"]] == [300, 600]
    assert {"stat", "page", "page of a rare tag", "oldest 64"} <= {verdict["what"] for verdict in figures["verdicts"]}


@pytest.mark.extended
def test_looking(tmp_path: Path) -> None:
    options = ["--samples", "100,200", "--looks", "20", "--visitors", "4", "--every-s", "1", "--run-s", "1", "--rounds", "2"]
    figures = _figures(tmp_path, "looking.py", *options)
    assert [row["look"] for row in figures["looks"]] == ["ls", "the page's list", "look-up by the caller's id"]
    assert all(row["100 samples, ms"] > 0 and row["ratio"] > 0 for row in figures["looks"])
    assert all(one["pages"] >= 4 for one in figures["visits"]["rounds"])
    assert len(figures["visits"]["ratios"]) == 2


@pytest.mark.extended
def test_scale(tmp_path: Path) -> None:
    options = ["--connectors", "1,8", "--catalogue", "1000,2000", "--mib", "16", "--rounds", "1"]
    figures = _figures(tmp_path, "scale.py", *options)
    assert [row["connectors"] for row in figures["connectors"]] == ["1", "8"]
    assert [row["samples"] for row in figures["catalogue"]] == [1000, 2000]
    assert all(row["after a kill / clean"] > 0 for row in figures["catalogue"])
    assert len(figures["sizes"]) == 4


@pytest.mark.extended
def test_ingest(tmp_path: Path) -> None:
    figures = _figures(tmp_path, "ingest.py", "--samples", "2", "--rounds", "1", "--streams", "2")
    ours = {f"slotstream, {transport}{streams}" for transport in ("gRPC", "NIXL") for streams in ("", " x2")}
    assert {verdict["name"] for verdict in figures["verdicts"]} == ours
    assert all(verdict["ratio"] > 0 for verdict in figures["verdicts"])
    compared = {(one["name"], one["to"]) for one in figures["streams"]}
    assert compared == {("slotstream, gRPC x2", "slotstream, gRPC"), ("slotstream, NIXL x2", "slotstream, NIXL")}


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
    options = ["--workers", "2", "--streams", "1,2", "--connector-streams", "2", "--mib", "32", "--rounds", "1"]
    figures = _figures(tmp_path, "workers.py", *options)
    assert [(pair["transport"], pair["streams"]) for pair in figures["connectors"]] == [("grpc", 2), ("nixl", 2)]
    assert {(case["copiers"], case["sources"]) for case in figures["copies"]} == {(1, 1), (2, 1), (2, 2), (1, 0), (2, 0)}
    assert all(speed > 0 for case in figures["copies"] for speed in case["gb_per_s"])
    pairs = {(pair["transport"], pair["streams"]): pair for pair in figures["pairs"]}
    assert {("grpc", 1), ("grpc", 2)} <= pairs.keys()
    for pair in pairs.values():
        (one,), (many,) = pair["one"], pair["many"]
        assert pair["ratios"] == [many["gb_per_s"] / one["gb_per_s"]]
    assert not list(tmp_path.glob("slotstream-bench-*"))


def _turn(contender: str, number: int, ms: float, **watch: object) -> dict[str, Any]:
    """A turn of online.py in which everything takes `ms`."""
    same = dict.fromkeys(("mean", "p50", "p90", "p99"), ms)
    quiet = {"preemptions": 0, "kv_used_max": 0.5, "steps": {}, "hooks": {}}
    return {
        "run": 0,
        "group": 0,
        "round": number,
        "load": "open-10",
        "contender": contender,
        "ttft_ms": same,
        "itl_ms": same,
        "e2e_ms": same,
        "goodput": 1.0,
        "tokens_per_s": 1000 / ms,
        "output_tokens": 1000,
        "cpu_s": {"engine/EngineCore/main": ms, "engine/EngineCore/python": ms},
        "failed": 0,
        "not_stored": 0,
        "watch": quiet | watch,
    }


def _merged(tmp_path: Path, *runs: list[dict[str, Any]]) -> tuple[str, dict[str, Any]]:
    """What `online.py --merge` says of runs with these turns, and what it writes."""
    files = []
    for number, turns in enumerate(runs):
        files.append(tmp_path / f"run{number}.json")
        files[-1].write_text(json.dumps({"runs": [{"options": {"kv_cache_gib": 14}}], "turns": turns}))
    out = tmp_path / "all.json"
    command = [sys.executable, str(_BENCHMARKS / "online.py"), "--json", str(out), "--merge", *map(str, files)]
    said = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout
    figures: dict[str, Any] = json.loads(out.read_text())
    return said, figures


def test_online_compares_turns_of_the_same_round_and_leaves_void_rounds_out(tmp_path: Path) -> None:
    one = [_turn("none", 0, 10.0), _turn("grpc", 0, 11.0), _turn("none", 1, 20.0), _turn("grpc", 1, 24.0)]
    two = [_turn("none", 0, 40.0), _turn("grpc", 0, 46.0)]
    void = [
        *(_turn("none", 2, 10.0), _turn("grpc", 2, 90.0, preemptions=1)),
        *(_turn("none", 3, 10.0, kv_used_max=0.9), _turn("grpc", 3, 90.0)),
        *(_turn("none", 4, 10.0), _turn("grpc", 4, 90.0) | {"not_stored": 1}),
    ]
    said, figures = _merged(tmp_path, [*one, *void], two)
    assert "open-10: 3 rounds; 3 void (the first for 1 preemptions in a turn of grpc)" in said
    # exp(mean of log 1.1, 1.2, 1.15), and 4.303 times the standard error around it.
    assert re.search(r"^TTFT p50 +20 ms +1\.149 \(1\.032 to 1\.280\)$", said, re.M)
    assert "grpc: NOT met: TTFT p50 1.149" in said
    assert re.search(r"^open-10 +none +EngineCore 20.00$", said, re.M)
    assert {turn["run"] for turn in figures["turns"]} == {0, 1}
    assert len(figures["turns"]) == 12


def test_online_puts_an_older_run_beside_a_newer_one(tmp_path: Path) -> None:
    _merged(tmp_path, [_turn("none", 0, 10.0), _turn("grpc", 0, 20.0), _turn("again", 0, 10.1)])
    older = tmp_path / "run0.json"
    newer = tmp_path / "newer.json"
    newer.write_text(
        json.dumps({"runs": [{"options": {"kv_cache_gib": 14}}], "turns": [_turn("none", 0, 8.0), _turn("grpc", 0, 9.0)]})
    )
    command = [sys.executable, str(_BENCHMARKS / "online.py"), "--merge", str(newer), "--merge-before", str(older)]
    said = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout
    heads = [line.split() for line in said.splitlines() if "no capture" in line]
    assert heads == [["no", "capture", "grpc", "grpc-before", "again", "grpc", "/", "grpc-before"]]
    assert re.search(r"^TTFT p50 +9 ms +1\.125 +2\.000 +1\.010 +-$", said, re.M)


def test_online_meets_a_target_only_if_the_interval_does(tmp_path: Path) -> None:
    def rounds(*slower: float) -> list[dict[str, Any]]:
        pairs = [(_turn("none", at, 10.0), _turn("nixl", at, 10.0 * by)) for at, by in enumerate(slower)]
        return [turn for pair in pairs for turn in pair]

    assert "nixl: every target met" in _merged(tmp_path, rounds(1.02, 1.021, 1.019))[0]
    assert "nixl: NOT met: TTFT p50 1.018" in _merged(tmp_path, rounds(0.95, 1.02, 1.09))[0]


def test_online_says_what_ratios_would_be_on_a_processor_that_is_as_fast_in_each_turn(tmp_path: Path) -> None:
    def turn(who: str, number: int, slowness: float, cost: float) -> dict[str, Any]:
        took = {"wall_us": {"mean": 30e3 * slowness * cost}, "cpu_us": {"mean": 30e3 * slowness}}
        mixed = {"count": 9, **took, "parts_us": {"forward": {"mean": 28e3 * slowness}}}
        return _turn(who, number, 60.0 * slowness * cost, steps={"mixed": mixed})

    pairs = [(1.0, 1.5), (1.6, 1.0), (1.1, 1.2), (1.0, 1.0), (1.3, 1.9)]
    turns = [
        turn(who, at, slow, cost)
        for at, pair in enumerate(pairs)
        for who, slow, cost in zip(("none", "nixl"), pair, (1.0, 1.02), strict=True)
    ]
    first, second = _merged(tmp_path, turns)[0].split("how long the forward pass")
    assert re.search(r"^TTFT p50 +\S+ ms +1\.\d+ \(0\.\d+ to 1\.\d+\)$", first, re.M)
    assert re.search(r"^forward +1\.084 ", second, re.M)
    for name in ("its step", "TTFT p50", "ITL p99"):
        assert re.search(rf"^{name} +1\.020 \(1\.020 to 1\.020\)$", second, re.M)
    few = _merged(tmp_path, turns[:8])[0].split("how long the forward pass")[1]
    assert re.search(r"^TTFT p50 +-$", few, re.M)


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("contenders", [["none", "nixl"], ["none", "nixl", "grpc"]])
def test_online_has_each_contender_take_each_turn_equally_often(contenders: list[str], again: bool) -> None:
    asked = f"import json, online; print(json.dumps([online.turns_of(n, {contenders}, again={again}) for n in range(48)]))"
    said = subprocess.run([sys.executable, "-c", asked], check=True, capture_output=True, cwd=_BENCHMARKS, timeout=120).stdout
    orders: list[list[str]] = json.loads(said)
    assert {len(order) for order in orders} == {len(contenders), len(contenders) + again}
    for length in {len(order) for order in orders}:
        places = Counter((at, who) for order in orders if len(order) == length for at, who in enumerate(order))
        assert len(set(places.values())) == 1
        pairs = Counter(pair for order in orders if len(order) == length for pair in itertools.combinations(order, 2))
        assert all(pairs[pair] == pairs[pair[::-1]] for pair in pairs)


@pytest.mark.vllm
@pytest.mark.extended
def test_online(tmp_path: Path) -> None:
    small = [
        "--shape",
        "tiny",
        "--layers",
        "1,4",
        "--contenders",
        "grpc,again",
        "--loads",
        "closed-2,open-4,hooks-1024",
        "--rounds",
        "1",
    ]
    small += ["--waves", "2", "--open-s", "1", "--prompt-tokens", "64", "--output-tokens", "16", "--pin"]
    figures = _figures(tmp_path, "online.py", *small)
    turns = {(turn["load"], turn["contender"]): turn for turn in figures["turns"]}
    assert turns.keys() == {(load, who) for load in ("closed-2", "open-4", "hooks-1024") for who in ("none", "grpc", "again")}
    for (load, who), turn in turns.items():
        assert turn["failed"] == 0
        assert turn["not_stored"] == 0
        assert turn["core"] in os.sched_getaffinity(0)
        assert turn["core"] == turns[load, "none"]["core"]
        assert turn["ttft_ms"]["p50"] > 0
        assert turn["itl_ms"]["mean"] > 0
        watch = turn["watch"]
        assert watch["preemptions"] == 0
        assert 0 < watch["kv_used_max"] < 0.85
        decode = watch["steps"]["decode"]
        assert decode["wall_us"]["mean"] >= decode["ours_wall_us"]["mean"]
        assert {"schedule", "execute_model", "sample_tokens", "update_from_output"} <= decode["parts_us"].keys()
        clocked = who == "grpc" and load == "hooks-1024"  # Clocks cost more than some hooks: what people wait for goes without.
        assert bool(watch["hooks"]) == (decode["ours_wall_us"]["mean"] > 0) == clocked
        assert any(name.startswith("engine/EngineCore/") for name in turn["cpu_s"]), turn["cpu_s"]
        if load == "hooks-1024":
            assert watch["prompts_of_1024"]["count"] > 0
        if clocked:
            assert {"build_connector_meta", "wait_for_save", "take"} <= watch["hooks"].keys()
        if who == "grpc":
            assert sum(turn["samples"].values()) == {"closed-2": 4, "open-4": 4, "hooks-1024": 6}[load]
    asked = {(turn["load"], turn["requests"], turn["output_tokens"]) for turn in figures["turns"]}
    assert len(asked) == 3, "equal seeds, equal requests"


@pytest.mark.vllm
@pytest.mark.extended
def test_online_kernels(tmp_path: Path) -> None:
    small = ["--shape", "tiny", "--layers", "1,4", "--contenders", "grpc", "--kernels", "--output-tokens", "400"]
    looks = _figures(tmp_path, "online.py", *small)["kernels"]
    assert {(look["contender"], look["at_s"]) for look in looks} == {
        (who, at) for who in ("none", "grpc") for at in (1, 2, 4, 6)
    }
    ours = [look["kernels_us"] for look in looks if look["contender"] == "grpc" and look["steps"]]
    theirs = [look["kernels_us"] for look in looks if look["contender"] == "none" and look["steps"]]
    assert all("aten::index_copy_" in one for one in ours), "rows are written in each step"
    assert not any("aten::index_copy_" in one for one in theirs)
    assert all(look["gaps_us"] > 0 for look in looks if look["steps"])
    assert ours
    assert theirs
