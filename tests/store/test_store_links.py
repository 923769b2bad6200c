"""Links, pipes and devices that somebody put into the data directory: nothing outside is read, written or removed."""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from store.store_kit import Sample, crash, read_all

from slotstream.store.directory.looking import verify_directory
from slotstream.store.disk.confined_paths import ConfinedPaths
from slotstream.store.records import State
from slotstream.store.samples import SampleStore
from slotstream.wire.errors import ConfigError, Damaged, SampleFailed, SampleNotFound, SlotStreamError

S = Sample()
OTHER = Sample("other", seed=3)
SECRET = b"not slotstream's own"


def _snapshot(directory: Path) -> dict[str, tuple[int, bytes]]:
    return {
        str(path.relative_to(directory)): (path.lstat().st_mode, path.read_bytes() if path.is_file() else b"")
        for path in sorted(directory.rglob("*"))
    }


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """A directory of somebody else's, which every test must leave as it is."""
    place = tmp_path / "outside"
    (place / S.key.shard).mkdir(parents=True)
    (place / "secret").write_bytes(SECRET)
    (place / S.key.shard / f"{S.key.sample_id}.safetensors").write_bytes(SECRET)
    (place / S.key.shard / f"{S.key.sample_id}.0123456789abcdef.partial").write_bytes(SECRET)
    return place


def _namespace(data: Path, outside: Path) -> None:
    _put_aside(data, data / S.key.namespace).symlink_to(outside)


def _shard(data: Path, outside: Path) -> None:
    _put_aside(data, S.key.directory(data)).symlink_to(outside / S.key.shard)


def _put_aside(data: Path, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():
        path.rename(data.parent / f"aside-{path.name}")
    return path


DIRECTORIES = [pytest.param(_namespace, id="namespace"), pytest.param(_shard, id="shard")]
Trick = Callable[[Path, Path], None]


@pytest.mark.parametrize("trick", DIRECTORIES)
def test_nothing_is_written_through_a_directory_that_is_a_link(tmp_path: Path, outside: Path, trick: Trick) -> None:
    before = _snapshot(outside)
    data = tmp_path / "data"
    data.mkdir()
    trick(data, outside)
    store = SampleStore.open(data)
    with pytest.raises(SlotStreamError) as caught:
        S.put(store)
    assert caught.value.code == "IO_ERROR"
    assert str(outside) not in str(caught.value)
    Sample("elsewhere", namespace="sound").put(store)  # Others notice nothing.
    store.close()
    assert _snapshot(outside) == before


@pytest.mark.parametrize("clean", [True, False], ids=["clean", "crashed"])
@pytest.mark.parametrize("trick", DIRECTORIES)
def test_nothing_is_read_swept_or_deleted_through_a_directory_that_became_a_link(
    tmp_path: Path, outside: Path, trick: Trick, clean: bool
) -> None:
    data = tmp_path / "data"
    store = SampleStore.open(data)
    S.put(store)
    # The very file, so that only the link tells it from the sample's own.
    whole = S.key.path(data).read_bytes()
    (outside / S.key.shard / f"{S.key.sample_id}.safetensors").write_bytes(whole)
    before = _snapshot(outside)
    trick(data, outside)
    with pytest.raises(Damaged):
        store.reader(S.key)
    assert store.verify(S.key).damage in ("MISSING", "UNREADABLE")
    with pytest.raises(SlotStreamError):
        Sample(seed=9).put(store)
    store.close() if clean else crash(store)
    store = SampleStore.open(data)
    with pytest.raises((Damaged, SampleFailed)):
        store.reader(S.key)
    assert [v.sample_id for v in store.verify_all() if not v.damage] == []
    assert [v.damage for v in verify_directory(data, namespace=S.key.namespace) if not v.damage] == []
    store.delete(S.key)
    store.close()
    assert _snapshot(outside) == before


def _symlink(path: Path, outside: Path) -> None:
    path.symlink_to(outside / S.key.shard / path.name)


def _hard_link(path: Path, outside: Path) -> None:
    path.hardlink_to(outside / "secret")


def _pipe(path: Path, outside: Path) -> None:
    os.mkfifo(path)


def _device(path: Path, outside: Path) -> None:
    try:
        os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 5))  # /dev/zero: a read of it never ends.
    except PermissionError:
        pytest.skip("may not make a device here")


def _directory(path: Path, outside: Path) -> None:
    path.mkdir()


@pytest.mark.parametrize("clean", [True, False], ids=["clean", "crashed"])
@pytest.mark.parametrize("trick", [_symlink, _hard_link, _pipe, _device, _directory], ids=lambda trick: trick.__name__)
def test_a_file_that_became_something_else_is_never_served(tmp_path: Path, outside: Path, trick: Trick, clean: bool) -> None:
    data = tmp_path / "data"
    store = SampleStore.open(data)
    S.put(store)
    OTHER.put(store)
    path = S.key.path(data)
    (outside / S.key.shard / path.name).write_bytes(path.read_bytes())
    before = _snapshot(outside)
    path.unlink()
    trick(path, outside)
    for _ in range(2):
        with pytest.raises(Damaged):
            store.reader(S.key)
        assert store.verify(S.key).damage in ("TRUNCATED", "UNREADABLE", "HASH_MISMATCH")
        store.close() if clean else crash(store)
        store = SampleStore.open(data)
    assert read_all(store, OTHER.key)[0] == OTHER.data
    if trick is not _directory:
        store.delete(S.key)
        assert not os.path.lexists(path)
        S.put(store)
        assert read_all(store, S.key)[0] == S.data
    store.close()
    assert _snapshot(outside) == before


def test_a_hard_link_to_another_namespaces_sample_is_not_served(tmp_path: Path) -> None:
    data = tmp_path / "data"
    store = SampleStore.open(data)
    theirs = Sample("x", namespace="theirs", seed=4)
    mine = Sample("x", namespace="mine", seed=5)
    theirs.put(store)
    mine.put(store)
    mine.key.path(data).unlink()
    mine.key.path(data).hardlink_to(theirs.key.path(data))
    with pytest.raises(Damaged):
        store.reader(mine.key)
    # Put there for an id that the catalogue does not know, it is not adopted either.
    unknown = Sample("x", namespace="new").key.path(data)
    unknown.parent.mkdir(parents=True)
    unknown.hardlink_to(theirs.key.path(data))
    crash(store)
    store = SampleStore.open(data)
    with pytest.raises(SampleNotFound):
        store.reader(Sample("x", namespace="new").key)
    assert read_all(store, theirs.key)[0] == theirs.data
    store.close()


def test_links_among_arriving_samples_are_removed_and_not_followed(tmp_path: Path, outside: Path) -> None:
    data = tmp_path / "data"
    store = SampleStore.open(data)
    OTHER.put(store)
    crash(store)
    directory = S.key.directory(data)
    directory.mkdir(parents=True, exist_ok=True)
    before = _snapshot(outside)
    (directory / "s.0000000000000001.partial").symlink_to(outside / "secret")
    (directory / "s.0000000000000002.partial").hardlink_to(outside / "secret")
    os.mkfifo(directory / "s.0000000000000003.partial")
    SampleStore.open(data).close()
    assert _snapshot(outside) == before


@pytest.mark.parametrize("name", ["catalog.sqlite", "catalog.sqlite-wal", "catalog.sqlite-shm", ".lock"])
def test_the_stores_own_files_are_no_links(tmp_path: Path, outside: Path, name: str) -> None:
    data = tmp_path / "data"
    data.mkdir()
    before = _snapshot(outside)
    (data / name).symlink_to(outside / "secret")
    with pytest.raises(ConfigError):
        SampleStore.open(data)
    assert _snapshot(outside) == before


def test_the_data_directory_itself_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "data").symlink_to("disk")
    store = SampleStore.open(tmp_path / "data")
    S.put(store)
    assert read_all(store, S.key)[0] == S.data
    store.close()
    assert S.key.path(tmp_path / "disk").is_file()


def test_a_directory_that_becomes_a_link_during_an_upload_fails_its_commit(tmp_path: Path, outside: Path) -> None:
    data = tmp_path / "data"
    store = SampleStore.open(data)
    before = _snapshot(outside)
    upload = S.send(store)
    _shard(data, outside)
    with pytest.raises(SlotStreamError):
        upload.commit(S.rows, S.token_ids)
    record = store.stat(S.key)
    assert record is not None
    assert record.state is State.FAILED
    store.close()
    assert _snapshot(outside) == before


def test_many_threads_leave_no_descriptor_behind(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    inside = ConfinedPaths(tmp_path)
    open_before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208

    def walk() -> None:
        for target in ("a/b/c", "a/none/c", "a/b", "x") * 50:
            try:
                with inside.at(tmp_path / target) as (name, fd):
                    assert fd is not None
                    assert "/" not in name
            except FileNotFoundError:
                assert "none" in target

    threads = [threading.Thread(target=walk) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(os.listdir("/proc/self/fd")) == open_before  # noqa: PTH208


@pytest.mark.parametrize("path", ["../x", "a/../../x", "a/.."])
def test_a_path_never_leaves_by_its_parent(tmp_path: Path, path: str) -> None:
    with pytest.raises(OSError, match="leaves its directory"), ConfinedPaths(tmp_path).at(tmp_path / path):
        pass
