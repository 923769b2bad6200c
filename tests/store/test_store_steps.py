"""Killed before and after each step, in writing: every step of a commit, a deletion, a sweep, a quarantine and so on.

A step is an operation on the disk, or `row`: something asked of the catalogue's writer. The lists below are the order of
the steps; the test holds the code to them, and then kills the store at each.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from store.store_kit import Crash, FaultyFiles, Sample, crash, read_all
from support.sqlite_of import sqlite_of

from slotstream.store.catalogue.queries import ListQuery
from slotstream.store.records import State
from slotstream.store.samples import SampleStore
from slotstream.store.upkeep.retention import Policy, Rule
from slotstream.store.upkeep.sweeping import Sweeper

KEPT, SAMPLE = Sample("kept", seed=5), Sample()
STEPS_SEEN = ("make_dir", "create", "preallocate", "pwrite", "truncate", "sync_data", "sync_dir", "rename", "unlink", "row")


class Stepped(FaultyFiles):
    """Counts steps, the catalogue's among them, and crashes before or after the n-th."""

    def __init__(self) -> None:
        super().__init__()
        self.kill: tuple[int, str] | None = None
        self.steps: list[str] = []

    def step(self, name: str, do: Callable[[], Any]) -> Any:
        if self.crashed:
            raise Crash
        self.steps.append(name)
        number = len(self.steps) - 1
        if self.kill == (number, "before"):
            self.crashed = True
            raise Crash
        result = do()
        if self.kill == (number, "after"):
            self.crashed = True
            raise Crash
        return result


def _stepped(name: str) -> Callable[..., Any]:
    original = getattr(FaultyFiles, name)

    def method(self: Stepped, *arguments: Any) -> Any:
        return self.step(name, lambda: original(self, *arguments))

    return method


for _name in STEPS_SEEN[:-1]:
    setattr(Stepped, _name, _stepped(_name))


def _open(directory: Path) -> tuple[SampleStore, Stepped]:
    files = Stepped()
    store = SampleStore.open(directory, files=files)
    submit = sqlite_of(store).submit

    def submitted(operation: Any, **how: bool) -> Future[Any]:
        def do() -> Future[Any]:
            future = submit(operation, **how)
            future.exception()  # Done before the next step, so that a kill falls where the list says.
            return future

        future: Future[Any] = files.step("row", do)
        return future

    sqlite_of(store).submit = submitted  # type: ignore[method-assign]
    files.steps.clear()
    return store, files


def _put(store: SampleStore) -> None:
    SAMPLE.put(store)


def _delete(store: SampleStore) -> None:
    store.delete(SAMPLE.key)


def _sweep(store: SampleStore) -> None:
    Sweeper(store.lifetimes, Policy(default=Rule(delete_on_ack=True)), store.free_bytes).sweep()


def _quarantine(store: SampleStore) -> None:
    verdict = store.verify(SAMPLE.key)
    assert verdict.damage == "HASH_MISMATCH"
    store.lifetimes.quarantine(verdict)


def _restore(store: SampleStore) -> None:
    assert [one.kept for one in store.restore()] == [""]


def _ack(store: SampleStore) -> None:
    store.lifetimes.ack(SAMPLE.key)


def _lease(store: SampleStore) -> None:
    store.lifetimes.lease(SAMPLE.key, "me", 60)


# Action -> its steps. The outcomes: what a reader sees after the next start, by the first step that was done.
ACTIONS: dict[str, tuple[Callable[[SampleStore], None], str]] = {
    "ingest": (
        _put,
        "make_dir sync_dir make_dir sync_dir create preallocate row pwrite pwrite pwrite pwrite "
        "pwrite truncate pwrite sync_data rename sync_dir row",
    ),
    "delete": (_delete, "row unlink sync_dir row"),
    "sweep": (_sweep, "row unlink sync_dir row"),
    "quarantine": (_quarantine, "make_dir sync_dir make_dir sync_dir rename sync_dir sync_dir row"),
    "restore": (_restore, "make_dir sync_dir make_dir sync_dir rename sync_dir sync_dir row"),
    "ack": (_ack, "row"),
    "lease": (_lease, "row"),
}
CASES = [
    pytest.param(action, number, when, id=f"{action}: killed {when} {number + 1}, {name}")
    for action, (_, steps) in ACTIONS.items()
    for number, name in enumerate(steps.split())
    for when in ("before", "after")
]


def _prepared(directory: Path, action: str) -> tuple[SampleStore, Stepped]:
    store = SampleStore.open(directory)
    KEPT.put(store)
    if action != "ingest":
        SAMPLE.put(store)
    if action == "sweep":
        store.lifetimes.ack(SAMPLE.key)
    if action == "restore":
        verdict = replace(store.verify(SAMPLE.key), damage="HASH_MISMATCH", message="a bad cable")
        assert store.lifetimes.quarantine(verdict)
    if action == "quarantine":
        raw = bytearray(SAMPLE.path(store).read_bytes())
        raw[-1] ^= 1
        SAMPLE.path(store).write_bytes(raw)
    crash(store)
    if action == "ingest" and SAMPLE.key.directory(directory).exists():  # So that every directory has still to be made.
        SAMPLE.key.directory(directory).rmdir()
    return _open(directory)


@pytest.mark.parametrize("action", ACTIONS)
def test_the_steps_are_these(tmp_path: Path, action: str) -> None:
    do, steps = ACTIONS[action]
    store, files = _prepared(tmp_path, action)
    do(store)
    assert " ".join(files.steps) == steps
    store.close()


def _expected(action: str, number: int, when: str) -> tuple[State, str] | None:
    names = ACTIONS[action][1].split()
    done = names[: number + (when == "after")]
    if action == "ingest":
        if "rename" in done:
            return State.COMMITTED, ""
        return (State.FAILED, "INTERRUPTED") if "create" in done else None
    if action in ("delete", "sweep"):
        return None if "row" in done else (State.COMMITTED, "")
    if action == "restore":
        return (State.COMMITTED, "") if "rename" in done else (State.FAILED, "DAMAGED")
    if action == "quarantine":
        return (State.FAILED, "DAMAGED") if "rename" in done else (State.COMMITTED, "")
    return State.COMMITTED, ""


@pytest.mark.parametrize(("action", "number", "when"), CASES)
def test_killed_at_a_step(tmp_path: Path, action: str, number: int, when: str) -> None:
    store, files = _prepared(tmp_path, action)
    files.kill = (number, when)
    with contextlib.suppress(Crash):
        ACTIONS[action][0](store)
    assert files.crashed
    crash(store)
    for _ in range(2):
        store = SampleStore.open(tmp_path)
        record = store.stat(SAMPLE.key)
        found = None if record is None else (record.state, record.error_code)
        assert found == _expected(action, number, when)
        assert read_all(store, KEPT.key) == (KEPT.data, KEPT.token_ids)
        if found == (State.COMMITTED, "") and action != "quarantine":
            assert read_all(store, SAMPLE.key) == (SAMPLE.data, SAMPLE.token_ids)
        assert not list(tmp_path.rglob("*.partial"))
        listed = {r.sample_id for r in store.list_page(ListQuery(state=State.COMMITTED))[0]}
        assert listed == {"kept"} | ({"s"} if found == (State.COMMITTED, "") else set())
        crash(store)
    store = SampleStore.open(tmp_path)
    if found != (State.COMMITTED, ""):
        assert SAMPLE.put(store) is False  # Whatever happened, the id is free again.
    store.close()
