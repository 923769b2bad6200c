"""The spool's files: what was written is read, any other change to them is noticed, and only one owner holds each."""

from __future__ import annotations

import os
import random
import stat
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slotstream.connector.sending.spool import files as spool_files
from slotstream.connector.sending.spool.files import OwnedDir, Place, SpooledSample, SpoolFile
from slotstream.v1 import ingest_pb2 as pb
from slotstream.wire.hashing import xxh3

OPENED = pb.OpenSample(namespace="n", sample_id="s", dtype="BF16", layer_ids=[1], hidden_size=8, rows_max=9, tags={"a": "b"})
COMMIT = pb.CommitSample(row_count=9, token_ids=range(9))
ROWS = random.Random(0).randbytes(9 * 16)


@pytest.fixture
def owned(tmp_path: Path) -> OwnedDir:
    return spool_files.create_dir(tmp_path / "spool")


def _write(owned: OwnedDir, sample_id: str = "s") -> tuple[SpoolFile, list[int]]:
    """A whole sample in three chunks; where each of its records ends."""
    file = SpoolFile(1, "n", sample_id, owned)
    spool_files.append(file, pb.IngestRequest(open=OPENED), None)
    ends = [file.nbytes]
    for first in (0, 3, 6):
        data = memoryview(ROWS)[first * 16 : (first + 3) * 16]
        header = pb.ChunkHeader(first_row=first, rows=3, xxh3=xxh3(data))
        assert spool_files.append(file, pb.IngestRequest(chunk=header), data) == file.nbytes - 48
        ends.append(file.nbytes)
    spool_files.append(file, pb.IngestRequest(commit=COMMIT), None)
    return file, [*ends, file.nbytes]


def _rows(file: SpoolFile, found: SpooledSample) -> bytes | None:
    """The rows that a file gives back; None when some are not what was written."""
    parts = []
    for header, place in found.chunks:
        into = memoryview(bytearray(place.nbytes))
        if not spool_files.read_data(file, place, into):
            return None
        parts.append((header.first_row, bytes(into)))
    return b"".join(part for _, part in sorted(parts))


def test_what_was_written_is_read(owned: OwnedDir) -> None:
    file, ends = _write(owned)
    found = spool_files.read_index(file)
    assert (found.opened, found.commit, found.abort, found.damaged) == (OPENED, COMMIT, None, False)
    assert _rows(file, found) == ROWS
    assert file.path.stat().st_size == file.nbytes == ends[-1]
    assert stat.S_IMODE(file.path.stat().st_mode) == 0o600
    assert stat.S_IMODE(owned.path.stat().st_mode) == 0o700


def test_a_file_cut_anywhere_is_an_unfinished_sample_and_no_damage(owned: OwnedDir) -> None:
    file, ends = _write(owned)
    raw = file.path.read_bytes()
    for length in range(len(raw)):
        file.path.write_bytes(raw[:length])
        found = spool_files.read_index(file)
        assert not found.damaged
        assert found.commit is None
        assert (found.opened is not None) == (length >= ends[0])
        assert len(found.chunks) == sum(length >= end for end in ends[1:4])
        assert _rows(file, found) == ROWS[: 48 * len(found.chunks)]


@settings(max_examples=300, deadline=None)
@given(at=st.integers(0, 10_000), flip=st.integers(1, 255))
def test_a_flipped_byte_is_noticed(tmp_path_factory: pytest.TempPathFactory, at: int, flip: int) -> None:
    owned = spool_files.create_dir(tmp_path_factory.mktemp("flipped"))
    file, _ = _write(owned)
    raw = bytearray(file.path.read_bytes())
    raw[at % len(raw)] ^= flip
    file.path.write_bytes(raw)
    found = spool_files.read_index(file)
    assert found.damaged or found.commit is None or _rows(file, found) is None
    owned.give_up()


@settings(max_examples=300, deadline=None)
@given(raw=st.binary(max_size=200))
def test_any_bytes_are_read_without_a_fault(tmp_path_factory: pytest.TempPathFactory, raw: bytes) -> None:
    owned = spool_files.create_dir(tmp_path_factory.mktemp("any"))
    file = SpoolFile(1, "n", "s", owned)
    file.path.write_bytes(raw)
    found = spool_files.read_index(file)
    assert found.commit is None
    owned.give_up()


@pytest.mark.parametrize(
    "requests",
    [
        pytest.param([pb.IngestRequest(commit=COMMIT)], id="a commit of nothing"),
        pytest.param([pb.IngestRequest(open=OPENED)] * 2, id="opened twice"),
        pytest.param([pb.IngestRequest(open=OPENED), *[pb.IngestRequest(commit=COMMIT)] * 2], id="committed twice"),
        pytest.param([pb.IngestRequest(open=OPENED), pb.IngestRequest(hello=pb.Hello())], id="a message of another kind"),
        pytest.param([pb.IngestRequest(open=OPENED), pb.IngestRequest()], id="a message of no kind"),
        pytest.param(
            [pb.IngestRequest(open=OPENED), pb.IngestRequest(chunk=pb.ChunkHeader(rows=3))], id="a chunk without its rows"
        ),
    ],
)
def test_records_that_make_no_sample_are_damage(owned: OwnedDir, requests: list[pb.IngestRequest]) -> None:
    file = SpoolFile(1, "n", "s", owned)
    for request in requests:
        spool_files.append(file, request, None)
    assert spool_files.read_index(file).damaged


def test_a_record_that_found_no_room_leaves_the_file_as_it_was(owned: OwnedDir, monkeypatch: pytest.MonkeyPatch) -> None:
    file, _ = _write(owned)
    before, write = file.path.read_bytes(), os.pwritev

    def half(fd: int, parts: list[bytes], offset: int) -> int:
        return write(fd, [b"".join(parts)[:20]], offset)

    monkeypatch.setattr(os, "pwritev", half)
    with pytest.raises(OSError, match="No space left"):
        spool_files.append(file, pb.IngestRequest(open=OPENED), None)
    assert (file.path.read_bytes(), file.nbytes, file.broken) == (before, len(before), False)


def test_only_the_dead_are_adopted(tmp_path: Path, owned: OwnedDir) -> None:
    base = tmp_path / "spool"
    _write(owned, "s.with-dots_1")
    (base / "notes").mkdir()
    (base / ("0" * 32)).mkdir()  # Its owner died before it had a lock.
    assert list(spool_files.adopt_dirs(base)) == []
    assert sorted(entry.name for entry in base.iterdir()) == sorted([owned.path.name, "notes"])
    os.close(owned.lock_fd)  # As its owner's death does.
    (owned.path / "unknown").write_text("not ours")
    ((adopted, (file,)),) = spool_files.adopt_dirs(base)
    assert (file.namespace, file.sample_id, file.path.name) == ("n", "s.with-dots_1", "0000000001~n~s.with-dots_1.spool")
    assert list(spool_files.adopt_dirs(base)) == []  # It is ours now.
    assert _rows(file, spool_files.read_index(file)) == ROWS
    file.path.unlink()
    adopted.give_up()
    assert (owned.path / "unknown").read_text() == "not ours"


def test_a_link_is_no_file_of_ours(tmp_path: Path, owned: OwnedDir) -> None:
    secret = tmp_path / "secret"
    secret.write_text("secret")
    file = SpoolFile(1, "n", "s", owned)
    file.path.symlink_to(secret)
    with pytest.raises(OSError, match="symbolic link"):
        spool_files.append(file, pb.IngestRequest(open=OPENED), None)
    with pytest.raises(OSError, match="symbolic link"):
        spool_files.read_data(file, Place(0, 6, 0), memoryview(bytearray(6)))
    assert secret.read_text() == "secret"
    os.close(owned.lock_fd)
    assert [files for _, files in spool_files.adopt_dirs(owned.path.parent)] == [[]]


@pytest.mark.parametrize("lock", ["a link", "a directory", "no lock that may be read"])
def test_a_lock_that_is_none_stops_no_other_owner(tmp_path: Path, lock: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The names sort before, between and after."""
    base = tmp_path / "spool"
    names = iter("123")
    monkeypatch.setattr("slotstream.connector.sending.spool.files.uuid.uuid4", lambda: SimpleNamespace(hex=next(names) * 32))
    for _ in range(3):
        owned = spool_files.create_dir(base)
        _write(owned)
        os.close(owned.lock_fd)
    bad = base / ("2" * 32) / "lock"
    bad.unlink()
    if lock == "a link":
        bad.symlink_to(tmp_path)
    elif lock == "a directory":
        bad.mkdir()
    else:
        bad.symlink_to(bad)
    skipped: list[Path] = []
    adopted = list(spool_files.adopt_dirs(base, lambda path, error: skipped.append(path)))
    assert [owned.path.name[0] for owned, _ in adopted] == ["1", "3"]
    assert skipped == [bad.parent]
    assert list(bad.parent.glob("*.spool"))  # For a later look.
