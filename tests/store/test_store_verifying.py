"""Checks: each class of damage, with and without a server, without changing anything."""

from __future__ import annotations

import shutil
import sqlite3
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
from store.store_kit import Sample, crash, tree

from slotstream.store.directory.looking import verify_directory
from slotstream.store.samples import SampleStore
from slotstream.wire.errors import BadSampleId, ConfigError, SampleNotFound


def _flip(path: Path, offset: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[offset] ^= 1
    path.write_bytes(raw)


def _header(path: Path) -> None:
    """One space of the header's padding becomes a tab: still the same JSON."""
    raw = bytearray(path.read_bytes())
    raw[7 + struct.unpack("<Q", raw[:8])[0]] = ord("\t")
    path.write_bytes(raw)


CASES = [
    pytest.param(lambda path: None, "", id="sound"),
    pytest.param(Path.unlink, "MISSING", id="gone"),
    pytest.param(lambda path: path.write_bytes(path.read_bytes()[:-1]), "TRUNCATED", id="truncated"),
    pytest.param(lambda path: path.write_bytes(b""), "TRUNCATED", id="empty"),
    pytest.param(lambda path: path.write_bytes(path.read_bytes() + b"x"), "UNREADABLE", id="padded"),
    pytest.param(lambda path: path.write_bytes(b"x" * path.stat().st_size), "UNREADABLE", id="not safetensors"),
    pytest.param(lambda path: _flip(path, -1), "HASH_MISMATCH", id="token ids"),
    pytest.param(lambda path: _flip(path, -81), "HASH_MISMATCH", id="rows"),
    pytest.param(_header, "HASH_MISMATCH", id="header"),
]


@pytest.mark.files_only
@pytest.mark.parametrize(("damage", "found"), CASES)
def test_each_class_of_damage(store: SampleStore, damage: Callable[[Path], None], found: str) -> None:
    Sample("a").put(store)
    Sample("b").put(store)
    damage(Sample("a").path(store))
    for verdicts in (store.verify_all(), verify_directory(store.data_dir)):
        assert {v.sample_id: v.damage for v in verdicts} == {"a": found, "b": ""}
    for verdict in (store.verify(Sample("a").key), *verify_directory(store.data_dir, sample_id="a")):
        assert verdict.damage == found
        assert bool(verdict.message) == bool(found)
        assert bool(verdict.bytes_checked) != bool(found)


@pytest.mark.files_only
def test_files_that_nobody_committed_are_foreign(store: SampleStore) -> None:
    sample = Sample("a")
    sample.put(store)
    arriving = Sample("arriving").send(store)
    path = sample.path(store)
    shutil.copy(path, path.parent / "copy.safetensors")
    (store.data_dir / "default" / "notes.txt").write_text("hello")
    (store.data_dir / "top").write_text("")
    foreign = {("", "top"), ("default", "notes.txt"), ("default", f"{sample.key.shard}/copy.safetensors")}
    for verdicts in (list(store.verify_all()), list(verify_directory(store.data_dir))):
        assert {(v.namespace, v.sample_id) for v in verdicts if v.damage == "FOREIGN"} == foreign
        assert [v.sample_id for v in verdicts if v.damage == ""] == ["a"]
    assert {v.sample_id for v in verify_directory(store.data_dir, namespace="other")} == set()
    arriving.commit(10, sample.token_ids)


@pytest.mark.files_only
def test_a_namespace_can_be_checked_alone(store: SampleStore) -> None:
    Sample("a").put(store)
    Sample("b", namespace="other").put(store)
    assert [v.sample_id for v in store.verify_all("other")] == ["b"]
    assert [v.sample_id for v in verify_directory(store.data_dir, namespace="other")] == ["b"]


def _listing(directory: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in directory.iterdir()}


@pytest.mark.parametrize("end", [SampleStore.close, crash, lambda store: None], ids=["stopped", "crashed", "running"])
def test_a_directory_is_checked_without_touching_it(tmp_path: Path, end: Callable[[SampleStore], None]) -> None:
    store = SampleStore.open(tmp_path)
    Sample("a").put(store)
    end(store)
    before = _listing(tmp_path)
    assert [(v.sample_id, v.damage) for v in verify_directory(tmp_path)] == [("a", "")]
    after = _listing(tmp_path)
    assert after.keys() == before.keys()
    assert after["catalog.sqlite"] == before["catalog.sqlite"]


@pytest.mark.files_only
def test_a_copy_of_a_running_store_can_be_checked(store: SampleStore, tmp_path: Path) -> None:
    Sample("a").put(store)
    copy = tmp_path / "copy"
    shutil.copytree(store.data_dir, copy)
    (copy / "catalog.sqlite-shm").unlink()
    before = sorted(path.name for path in copy.iterdir())
    assert [(v.sample_id, v.damage) for v in verify_directory(copy)] == [("a", "")]
    assert sorted(path.name for path in copy.iterdir()) == before


@pytest.mark.parametrize("catalogue", ["lost", "corrupt"])
def test_files_are_checked_by_themselves_without_a_catalogue(tmp_path: Path, catalogue: str) -> None:
    store = SampleStore.open(tmp_path)
    for sample_id in "abc":
        Sample(sample_id).put(store)
    store.close()
    _flip(Sample("a").path(store), -81)
    Sample("b").path(store).write_bytes(b"not a sample")
    if catalogue == "lost":
        (tmp_path / "catalog.sqlite").unlink()
    else:
        (tmp_path / "catalog.sqlite").write_bytes(b"garbage" * 1000)
    found = {v.sample_id: v.damage for v in verify_directory(tmp_path)}
    if catalogue == "corrupt":
        assert found.pop("catalog.sqlite") == "UNREADABLE"
    assert found == {"a": "HASH_MISMATCH", "b": "UNREADABLE", "c": ""}
    assert {v.damage for v in verify_directory(tmp_path, sample_id="c")} >= {""}


def test_a_row_that_was_lost_leaves_a_foreign_file_even_when_it_was_committed_just_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slotstream.store.upkeep.verifying._SETTLE_S", 0.2)
    store = SampleStore.open(tmp_path)
    Sample("a").put(store)
    store.close()
    db = sqlite3.connect(tmp_path / "catalog.sqlite")
    db.execute("DELETE FROM samples")
    db.commit()
    db.close()
    assert [v.damage for v in verify_directory(tmp_path)] == ["FOREIGN"]


@pytest.mark.files_only
def test_what_cannot_be_checked(store: SampleStore, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no data directory"):
        list(verify_directory(tmp_path / "nowhere"))
    with pytest.raises(SampleNotFound):
        list(verify_directory(store.data_dir, sample_id="unknown"))
    with pytest.raises(BadSampleId):
        list(verify_directory(store.data_dir, sample_id="../x"))
    with pytest.raises(SampleNotFound):
        store.verify(Sample().key)
    assert tree(store.data_dir) == {}
