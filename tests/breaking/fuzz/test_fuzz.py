"""Every target over its corpus and some thousand inputs more; `make fuzz` has the millions."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import fuzz_server
import pytest
from fuzz_harness import SCRATCH, Source, damaged
from fuzz_targets import TARGETS
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from run import inputs, main

from slotstream.client.reading import RowBlock, RowReader
from slotstream.server.samples import many
from slotstream.store.sample.ranges import RangeSet
from slotstream.store.sample.reading import SampleReader
from slotstream.v1 import samples_pb2
from slotstream.wire import frames, names
from slotstream.wire.errors import Damaged, SlotStreamError

_EXAMPLES = 2500  # Over all targets, by their shares.
_GAPS = RangeSet.gaps
_ALL = sum(target.share for target in TARGETS.values())
ENGINES = [
    "hypothesis",
    pytest.param(
        "atheris",
        marks=pytest.mark.skipif(importlib.util.find_spec("atheris") is None, reason="atheris has no wheel for this Python"),
    ),
]


@pytest.mark.parametrize("name", TARGETS)
def test_the_corpus(name: str) -> None:
    """Inputs that reach what a parser has, and those that once broke it."""
    target = TARGETS[name]
    assert target.corpus, "a target without a corpus begins from nothing: run.py --corpus makes one"
    for data in target.corpus:
        assert len(data) <= target.bytes_max
        target.check(data)


@pytest.mark.parametrize("name", TARGETS)
def test_some_inputs(name: str) -> None:
    target = TARGETS[name]

    @settings(
        max_examples=max(20, _EXAMPLES * target.share // _ALL),
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(data=inputs(st, target))
    def check(data: bytes) -> None:
        target.check(data)

    check()


@pytest.mark.parametrize("engine", ENGINES)
def test_the_command(tmp_path: Path, engine: str) -> None:
    command = [sys.executable, str(Path(__file__).with_name("run.py")), "addresses", "page_tokens", "--runs", "1000"]
    done = subprocess.run(
        [*command, "--engine", engine, "--findings", str(tmp_path / "found")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(f"sound ({engine})") == 2
    assert not (tmp_path / "found").exists()


@pytest.mark.parametrize("engine", ENGINES)
def test_a_run_leaves_no_directory_behind(tmp_path: Path, engine: str) -> None:
    command = [sys.executable, str(Path(__file__).with_name("run.py")), "catalogues", "--runs", "5", "--engine", engine]
    (tmp_path / "scratch").mkdir()
    env = {**os.environ, SCRATCH: str(tmp_path / "scratch")}
    subprocess.run([*command, "--findings", str(tmp_path / "found")], env=env, check=True, timeout=240)
    assert not list((tmp_path / "scratch").iterdir())


_BROKEN = """
import sys
sys.path.insert(0, {directory!r})
import run, fuzz_targets, fuzz_harness
def check(data):
    assert data[:1] != b"\\xff", "it was found"
fuzz_targets.TARGETS["names"] = fuzz_harness.Target("names", check, 1, 16)
run.main(sys.argv[1:])
"""


def test_what_breaks_is_found_and_kept(tmp_path: Path) -> None:
    """With the engine that is always there: a target that fails ends the process, and the input is on disk."""
    found = tmp_path / "found"
    for directory in (found, tmp_path / "new"):
        directory.mkdir()
    options = ["names", "--worker", "hypothesis", "--runs", "5000", "--seed", "1", "--notes", str(tmp_path / "notes")]
    done = subprocess.run(
        [sys.executable, "-c", _BROKEN.format(directory=str(Path(__file__).parent)), *options, "--findings", str(found)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    assert "it was found" in done.stderr
    (kept,) = found.iterdir()
    assert kept.read_bytes()[:1] == b"\xff"


def test_an_unknown_target_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["nothing"]) == 2
    assert "known: ['frames'" in capsys.readouterr().err


def test_a_source_ends_in_first_choices() -> None:
    source = Source(b"\x05\x01\x00")
    assert [source.below(4), source.below(1 << 16), source.below(9), source.pick("abc"), source.take(3)] == [1, 1, 0, "a", b""]


def test_damage_is_what_was_asked_for() -> None:
    data = bytes(range(100))
    assert damaged(data, Source(b"")) == data
    assert damaged(data, Source(b"\x00\x0a\x00\x00")) == data[:10]
    assert damaged(data, Source(b"\x04\x02\x00\x00\x01XY")) == data[:2] + b"XY" + data[4:]


def _overwrites(ranges: RangeSet, start: int, stop: int) -> list[tuple[int, int]]:
    return [(start, stop)] if start else _GAPS(ranges, start, stop)


def _unchecked(reader: SampleReader, group: int) -> bytes:
    header = reader.file.header
    start = group * reader.file.hash_rows
    rows = min(reader.file.hash_rows, header.num_tokens - start)
    return bytes(reader._read(rows * header.row_bytes, header.header_bytes + start * header.row_bytes))


def _of_the_next(number: int, error: SlotStreamError) -> tuple[bytes]:
    return (samples_pb2.ReadReply(error=samples_pb2.ReadError(read=number + 1, code=error.code)).SerializeToString(),)


def _any_block(self: RowReader, frame: bytes) -> RowBlock:
    reply, data = frames.decode_reply(frame)
    rows = min(reply.rows.rows, self.stop - self.next_row)
    return RowBlock(self.next_row, rows, data[: rows * self.row_bytes])


@pytest.mark.parametrize(
    ("name", "owner", "attribute", "broken"),
    [
        pytest.param("ingest", RangeSet, "gaps", _overwrites, id="later rows overwrite earlier ones"),
        pytest.param("damage", SampleReader, "read_group", _unchecked, id="rows are served unchecked"),
        pytest.param("names", names, "_SAMPLE_ID", re.compile(r"[^/]*"), id="any name without a slash is an id"),
        pytest.param("frames", frames, "_CHUNK_TAG", 0x12, id="an open is taken for a chunk"),
        pytest.param("reads", SampleReader, "positions", lambda self, layer_ids: [0] * len(layer_ids), id="other layers"),
        pytest.param("many", many, "_error_reply", _of_the_next, id="an error is of another read"),
        pytest.param("many_replies", RowReader, "_block_of", _any_block, id="rows are not those that were asked for"),
    ],
)
def test_a_target_sees_what_is_wrong(
    monkeypatch: pytest.MonkeyPatch, name: str, owner: object, attribute: str, broken: object
) -> None:
    for harness in ("_ingest_harness", "_reads_harness"):  # What a broken one leaves in its store is nobody else's.
        monkeypatch.setattr(fuzz_server, harness, cache(getattr(fuzz_server, harness).__wrapped__))
    monkeypatch.setattr(owner, attribute, broken)
    target = TARGETS[name]
    with pytest.raises((AssertionError, Damaged)):
        list(map(target.check, target.corpus))
