"""Who may read the catalogue, and what a start makes of a directory that was copied while a server wrote into it."""

from __future__ import annotations

import stat
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from store.store_kit import Sample, crash, read_all

from slotstream.store.catalogue.queries import ListQuery
from slotstream.store.records import State
from slotstream.store.samples import SampleStore


def _modes(directory: Path) -> dict[str, int]:
    return {path.name: stat.S_IMODE(path.stat().st_mode) for path in directory.glob("catalog.sqlite*")}


def test_others_may_not_read_the_catalogue(tmp_path: Path) -> None:
    store = SampleStore.open(tmp_path)
    Sample("a").put(store)
    assert _modes(tmp_path) == {f"catalog.sqlite{part}": 0o640 for part in ("", "-wal", "-shm", ".seal")}
    crash(store)
    # As an earlier version left them; and one that somebody keeps to themselves.
    for path in tmp_path.glob("catalog.sqlite*"):
        path.chmod(0o644)
    (tmp_path / "catalog.sqlite.seal").chmod(0o600)
    (tmp_path / "catalog.sqlite.corrupt-1").touch(0o666)
    store = SampleStore.open(tmp_path)
    Sample("b").put(store)
    modes = _modes(tmp_path)
    assert modes.pop("catalog.sqlite.seal") == 0o600
    assert set(modes.values()) == {0o640}
    store.close()
    assert read_all(SampleStore.open(tmp_path), Sample("a").key)[0] == Sample("a").data


def _all(source: Path, target: Path) -> None:
    # It fails for what went away meanwhile.
    subprocess.run(["cp", "-a", f"{source}/.", str(target)], check=False, stderr=subprocess.DEVNULL)


def _as_the_page_says(source: Path, target: Path) -> None:
    command = ["rsync", "-a", "--exclude=catalog.sqlite*", "--exclude=*.partial", f"{source}/", str(target)]
    try:
        subprocess.run(command, check=False, stderr=subprocess.DEVNULL)
    except FileNotFoundError:
        _all(source, target)
        for path in [*target.glob("catalog.sqlite*"), *target.rglob("*.partial")]:
            path.unlink()


@pytest.mark.parametrize("copy", [_all, _as_the_page_says])
def test_a_copy_of_a_live_directory_serves_nothing_wrong_and_names_what_is_missing(
    tmp_path: Path, copy: Callable[[Path, Path], None]
) -> None:
    store = SampleStore.open(tmp_path / "live")
    samples = {f"s{number}": Sample(f"s{number}", seed=number, rows=40) for number in range(400)}
    names = list(samples)
    for name in names[:200]:
        samples[name].put(store)
    ends = threading.Event()
    stored, deleted = names[:200], list[str]()

    def work() -> None:
        for name in names[200:]:
            if ends.is_set():
                return
            samples[name].put(store)
            stored.append(name)
            deleted.append(stored[0])  # From here on it may be gone.
            store.delete(samples[stored.pop(0)].key)

    worker = threading.Thread(target=work)
    worker.start()
    for round_ in range(3):
        before = list(stored)
        target = tmp_path / f"copy{round_}"
        target.mkdir()
        copy(tmp_path / "live", target)
        if round_ == 2:
            ends.set()
            worker.join()
        gone = set(deleted)
        opened = SampleStore.open(target)
        listed, token = opened.list_page(ListQuery(page_size=1000))
        assert not token
        states = {record.sample_id: record for record in listed}
        for name, record in states.items():
            if record.state is State.COMMITTED:
                assert read_all(opened, samples[name].key) == (samples[name].data, samples[name].token_ids)
            else:
                assert record.error_code in ("DAMAGED", "INTERRUPTED")
        lost = [name for name in before if name not in states and name not in gone]
        assert lost == []
        assert [name for name in before if name not in gone and states[name].state is not State.COMMITTED] == []
        opened.close()
    store.close()
