"""The cases of `slotstream.store.directory.recovery`, one parameter each."""

from __future__ import annotations

import json
import logging
import sqlite3
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from store.store_kit import Crash, FaultyFiles, Sample, crash, crash_in, read_all, tree
from support.sqlite_of import sqlite_of

from slotstream.store.catalogue.queries import ListQuery
from slotstream.store.catalogue.sqlite.row_sums import MalformedRow
from slotstream.store.catalogue.sqlite.sql import scan
from slotstream.store.records import SampleRecord, State
from slotstream.store.samples import SampleStore
from slotstream.store.upkeep.lifetimes import Lifetimes
from slotstream.wire.errors import ConfigError, IoError

SAMPLE = Sample(tags={"k": "v"}, metadata={"engine": "e"})
KEPT = Sample("kept", seed=5)
Damage = Callable[[Path], None]


def _crashed(action: Callable[[SampleStore], object], **faults: tuple[int, type[Crash]]) -> Damage:
    """A store that had KEPT, and crashed in `action`."""

    def damage(directory: Path) -> None:
        store = SampleStore.open(directory)
        KEPT.put(store)
        store.close()
        files = FaultyFiles()
        store = SampleStore.open(directory, files=files)
        files.calls.clear()
        files.faults = dict(faults)
        crash_in(store, lambda: action(store))

    return damage


def _put(store: SampleStore) -> None:
    SAMPLE.put(store)


def _put_and_crash(store: SampleStore) -> None:
    SAMPLE.put(store)
    raise Crash


def _put_delete_put(store: SampleStore) -> None:
    SAMPLE.put(store)
    store.delete(SAMPLE.key)
    _put_and_crash(store)


def _crash_before_row(store: SampleStore) -> None:
    def crashes(record: SampleRecord) -> None:
        store._files.crashed = True  # type: ignore[attr-defined]
        raise Crash

    store._catalogue.commit = crashes  # type: ignore[method-assign, assignment]
    SAMPLE.put(store)


def _crash_while_deleting(store: SampleStore) -> None:
    SAMPLE.put(store)
    store._files.faults = {"unlink": (0, Crash)}  # type: ignore[attr-defined]
    store.delete(SAMPLE.key)


def _crash_after_unlink(store: SampleStore) -> None:
    SAMPLE.put(store)
    store._files.faults = {"sync_dir": (store._files.calls.count("sync_dir") + 1, Crash)}  # type: ignore[attr-defined]
    store.delete(SAMPLE.key)


def _and_then(before: Damage, after: Callable[[Path], object]) -> Damage:
    def damage(directory: Path) -> None:
        before(directory)
        after(directory)

    return damage


def _sql(statement: str) -> Callable[[Path], None]:
    def change(directory: Path) -> None:
        db = sqlite3.connect(directory / "catalog.sqlite")
        db.execute(statement)
        db.commit()
        db.close()

    return change


def _lose_catalogue(directory: Path) -> None:
    for path in directory.glob("catalog.sqlite*"):
        path.unlink()


def _lose_partial(directory: Path) -> None:
    for path in directory.rglob("*.partial"):
        path.unlink()


def _path(directory: Path) -> Path:
    return SAMPLE.key.path(directory)


INTERRUPTED = (State.FAILED, "INTERRUPTED")
COMMITTED = (State.COMMITTED, "")

CASES = [
    pytest.param(_crashed(_put, pwrite=(2, Crash)), INTERRUPTED, id="some rows written"),
    pytest.param(_crashed(_put, sync_data=(1, Crash)), INTERRUPTED, id="all rows written, never synced"),
    pytest.param(_crashed(_put, rename=(1, Crash)), INTERRUPTED, id="synced, never renamed"),
    pytest.param(_crashed(_put, create=(1, Crash)), None, id="announced, nothing on disk"),
    pytest.param(
        _and_then(_crashed(_put, rename=(1, Crash)), _sql("DELETE FROM samples WHERE sample_id = 's'")),
        INTERRUPTED,
        id="partial left, arriving row lost",
    ),
    pytest.param(
        _and_then(_crashed(_put, rename=(1, Crash)), _lose_partial),
        INTERRUPTED,
        id="arriving row, partial gone",
    ),
    pytest.param(_crashed(_put, sync_dir=(3, Crash)), COMMITTED, id="renamed, directory not synced"),
    pytest.param(_crashed(_crash_before_row), COMMITTED, id="renamed, row still says arriving"),
    pytest.param(
        _and_then(_crashed(_put_and_crash), _sql("DELETE FROM samples WHERE sample_id = 's'")),
        COMMITTED,
        id="committed, row lost",
    ),
    pytest.param(
        _and_then(_crashed(_put_and_crash), _sql("UPDATE samples SET state = 'failed' WHERE sample_id = 's'")),
        COMMITTED,
        id="whole file, row says failed",
    ),
    pytest.param(_crashed(_put_and_crash), COMMITTED, id="committed, then crashed"),
    pytest.param(_and_then(_crashed(_put_and_crash), lambda d: _path(d).unlink()), (State.FAILED, "DAMAGED"), id="file gone"),
    pytest.param(
        _and_then(_crashed(_put_and_crash), lambda d: _path(d).write_bytes(b"short")), COMMITTED, id="file of another size"
    ),
    pytest.param(_crashed(_crash_while_deleting), None, id="marked as deleting, file there"),
    pytest.param(_crashed(_crash_after_unlink), None, id="marked as deleting, file gone"),
    pytest.param(
        _and_then(
            _crashed(_put_delete_put), _sql("UPDATE samples SET state = 'deleting', header_xxh3 = 'x' WHERE sample_id = 's'")
        ),
        COMMITTED,
        id="deleted, committed again, the new row lost",
    ),
    pytest.param(_and_then(_crashed(_put_and_crash), _lose_catalogue), COMMITTED, id="catalogue lost"),
    pytest.param(
        _and_then(_crashed(_put_and_crash), lambda d: (d / "catalog.sqlite").unlink()),
        COMMITTED,
        id="catalogue lost, its log left",
    ),
    pytest.param(
        _and_then(_crashed(_put_and_crash), lambda d: (d / "catalog.sqlite").write_bytes(b"garbage" * 5000)),
        COMMITTED,
        id="catalogue overwritten",
    ),
    pytest.param(
        _and_then(_crashed(_put_and_crash), lambda d: (d / "catalog.sqlite").write_bytes(b"")), COMMITTED, id="catalogue empty"
    ),
    *(
        pytest.param(
            _and_then(_crashed(_put_and_crash), _sql(f"UPDATE samples SET {change} WHERE sample_id = 's'")),
            COMMITTED,
            id=change,
        )
        for change in (
            "layer_ids = '[1e9]'",
            "layer_ids = '[-1]'",
            "layer_ids = '3'",
            "hidden_size = 4294967296",
            "num_tokens = 1.5",
            "tags = '[1]'",
            """tags = '{"a":1}'""",
            """metadata = '{"a":"\\ud800"}'""",
            f"metadata = '{'[' * 100_000}'",
            "namespace = '../..'",
            "sample_id = 'a/b'",
        )
    ),
    pytest.param(_and_then(_crashed(_put_and_crash), _sql("DROP TABLE meta")), COMMITTED, id="catalogue without a table"),
]


@pytest.mark.parametrize(("damage", "outcome"), CASES)
def test_recovery(tmp_path: Path, damage: Damage, outcome: tuple[State, str] | None) -> None:
    damage(tmp_path)
    for _ in range(2):  # Recovering twice changes nothing.
        store = SampleStore.open(tmp_path)
        record = store.stat(SAMPLE.key)
        assert (None if record is None else (record.state, record.error_code)) == outcome
        assert read_all(store, KEPT.key) == (KEPT.data, KEPT.token_ids)
        assert not list(tmp_path.rglob("*.partial"))
        crash(store)
    store = SampleStore.open(tmp_path)
    if outcome == COMMITTED and _path(tmp_path).stat().st_size > 100:
        assert read_all(store, SAMPLE.key) == (SAMPLE.data, SAMPLE.token_ids)
        assert SAMPLE.put(store) is True
    elif outcome != COMMITTED:
        assert SAMPLE.put(store) is False
    assert store.totals()[State.COMMITTED][0] == 2
    store.close()


def test_a_rebuilt_catalogue_says_what_the_lost_one_said(tmp_path: Path) -> None:
    store = SampleStore.open(tmp_path)
    samples = [replace(SAMPLE, sample_id=f"s{n}", namespace=f"n{n % 3}", seed=n) for n in range(20)]
    for sample in samples:
        sample.put(store)
    before = store.list_page(ListQuery(tags={"k": "v"}))
    store.close()
    _lose_catalogue(tmp_path)
    store = SampleStore.open(tmp_path)
    assert store.list_page(ListQuery(tags={"k": "v"})) == before
    assert len(before[0]) == 20
    store.close()


def test_a_corrupt_catalogue_is_kept_and_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    SampleStore.open(tmp_path).close()
    (tmp_path / "catalog.sqlite").write_bytes(b"garbage" * 1000)
    with caplog.at_level(logging.ERROR):
        SampleStore.open(tmp_path).close()
    assert "corrupt" in caplog.text
    (aside,) = tmp_path.glob("catalog.sqlite.corrupt-*")
    assert aside.read_bytes() == b"garbage" * 1000


def test_damage_inside_the_catalogue_is_found_after_a_crash(tmp_path: Path) -> None:
    store = SampleStore.open(tmp_path)
    for number in range(50):
        Sample(f"s{number}").put(store)
    sqlite_of(store).submit(lambda db: None).result()
    crash(store)
    raw = bytearray((tmp_path / "catalog.sqlite").read_bytes())
    for page in range(4096, len(raw), 4096):
        raw[page : page + 200] = b"\x07" * 200
    (tmp_path / "catalog.sqlite").write_bytes(raw)
    for log in tmp_path.glob("catalog.sqlite-*"):
        log.unlink()
    store = SampleStore.open(tmp_path)
    assert store.totals()[State.COMMITTED][0] == 50
    store.close()


@pytest.mark.parametrize(
    ("entry", "value"),
    [
        ("layer_ids", "[3,3]"),
        ("layer_ids", "[3,4294967296]"),
        ("layer_ids", "[-3,7]"),
        ("sample_id", "../s"),
        ("namespace", ""),
        ("tags", '{"":"v"}'),
        ("tags", '{"a":"\\ud800"}'),
        ("tags", '{"a":1}'),
    ],
)
def test_a_file_that_no_listing_could_show_is_not_adopted(tmp_path: Path, entry: str, value: str) -> None:
    store = SampleStore.open(tmp_path)
    SAMPLE.put(store)
    KEPT.put(store)
    path = SAMPLE.path(store)
    crash(store)
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    header["__metadata__"][entry] = value
    path.write_bytes(raw[:8] + json.dumps(header, separators=(",", ":")).encode().ljust(length) + raw[8 + length :])
    _lose_catalogue(tmp_path)
    store = SampleStore.open(tmp_path)
    assert [record.sample_id for record in store.list_page(ListQuery())[0]] == ["kept"]
    store.close()


def test_rows_that_are_out_of_order_end_a_walk() -> None:
    """In a damaged tree they would lead a walk over everything back to where it was, without end."""

    class Damaged:
        def execute(self, *_: object) -> list[tuple[object, ...]]:
            return [(7,)]

    with pytest.raises(MalformedRow):
        scan(Damaged(), 7, 256)  # type: ignore[arg-type]


def test_files_that_are_not_samples_are_left_alone(tmp_path: Path) -> None:
    store = SampleStore.open(tmp_path)
    SAMPLE.put(store)
    path = SAMPLE.path(store)
    crash(store)
    foreign = [
        path.parent / "other.safetensors",
        path.parent / "notes.partial",
        tmp_path / "notes.txt",
        tmp_path / "default" / "x.a1.partial",
    ]
    for other in foreign:
        other.write_bytes(path.read_bytes())
    Sample("junk").key.directory(tmp_path).mkdir(exist_ok=True)
    Sample("junk").key.path(tmp_path).write_bytes(b"junk")
    before = tree(tmp_path)
    store = SampleStore.open(tmp_path)
    assert tree(tmp_path) == before
    assert [record.sample_id for record in store.list_page(ListQuery())[0]] == ["s"]
    store.close()


def test_a_clean_restart_opens_no_sample_file_but_sweeps_partials(tmp_path: Path) -> None:
    store = SampleStore.open(tmp_path)
    SAMPLE.put(store)
    store.close()
    directory = SAMPLE.key.directory(tmp_path)
    (directory / "s.0123456789abcdef.partial").write_bytes(b"rows")
    files = FaultyFiles()
    store = SampleStore.open(tmp_path, files=files)
    assert "pread" not in files.calls
    assert not list(tmp_path.rglob("*.partial"))
    record = store.stat(SAMPLE.key)
    assert record is not None
    assert record.state is State.COMMITTED
    store.close()


def test_a_start_that_fails_at_its_last_question_gives_the_directory_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    SampleStore.open(tmp_path).close()

    def fails(lifetimes: Lifetimes, name: str) -> str | None:
        raise IoError(f"{name} cannot be read")

    with monkeypatch.context() as patch:
        patch.setattr(Lifetimes, "remembered", fails)
        with pytest.raises(ConfigError, match="clock cannot be read"):
            SampleStore.open(tmp_path)
    SampleStore.open(tmp_path).close()
