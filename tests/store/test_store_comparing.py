"""A start after a kill compares names, directory by directory, and does the same as one that looks at every file and row."""

from __future__ import annotations

import logging
import random
import shutil
import sqlite3
from collections import Counter
from pathlib import Path

import pytest
from store.store_kit import Sample, crash, tree
from support.sqlite_of import sqlite_of

from slotstream.common import progress
from slotstream.store.catalogue.queries import ListQuery
from slotstream.store.catalogue.sqlite import row_sums, sql
from slotstream.store.catalogue.sqlite.row_sums import MalformedRow
from slotstream.store.directory.comparing import NameSums
from slotstream.store.disk.files import Files
from slotstream.store.records import State
from slotstream.store.samples import SampleStore

SAMPLES = 40


class CountedFiles(Files):
    """Counts the looks at single files."""

    def __init__(self) -> None:
        self.looks: Counter[str] = Counter()

    def path_size(self, path: Path) -> int | None:
        self.looks["path_size"] += 1
        return super().path_size(path)

    def open_read(self, path: Path) -> int:
        self.looks["open_read"] += 1
        return super().open_read(path)


def _killed(directory: Path, count: int = SAMPLES) -> list[Sample]:
    """A directory whose server was killed; its samples."""
    store = SampleStore.open(directory)
    samples = [Sample(f"s{number}", seed=number, namespace=f"n{number % 2}") for number in range(count)]
    for sample in samples:
        sample.put(store)
    crash(store)
    return samples


def _lose_row(directory: Path, sample: Sample) -> None:
    db = sqlite3.connect(directory / "catalog.sqlite")
    db.execute("DELETE FROM samples WHERE namespace = ? AND sample_id = ?", (sample.namespace, sample.sample_id))
    db.commit()
    db.close()


def _same_place(samples: list[Sample]) -> tuple[Sample, Sample]:
    seen: dict[tuple[str, str], Sample] = {}
    for sample in samples:
        other = seen.setdefault((sample.namespace, sample.key.shard), sample)
        if other is not sample:
            return other, sample
    raise AssertionError("take more samples")


def test_after_a_kill_no_file_that_has_its_row_is_looked_at_by_itself(tmp_path: Path) -> None:
    _killed(tmp_path)
    files = CountedFiles()
    store = SampleStore.open(tmp_path, files=files)
    assert not sqlite_of(store).was_shut_down_cleanly
    assert files.looks["path_size"] + files.looks["open_read"] == 0
    assert store.totals()[State.COMMITTED][0] == SAMPLES
    store.close()


def test_only_the_directory_that_differs_is_looked_at(tmp_path: Path) -> None:
    samples = _killed(tmp_path)
    lost = samples[3]
    _lose_row(tmp_path, lost)
    files = CountedFiles()
    store = SampleStore.open(tmp_path, files=files)
    assert store.totals()[State.COMMITTED][0] == SAMPLES
    beside = sum((s.namespace, s.key.shard) == (lost.namespace, lost.key.shard) for s in samples)
    assert files.looks["open_read"] == 1
    assert files.looks["path_size"] == beside
    store.close()


def test_a_file_that_is_gone_and_another_that_has_no_row_do_not_make_up_for_each_other(tmp_path: Path) -> None:
    samples = _killed(tmp_path, 400)
    gone, without_row = _same_place(samples)
    gone.key.path(tmp_path).unlink()
    _lose_row(tmp_path, without_row)
    store = SampleStore.open(tmp_path)
    damaged, adopted = store.stat(gone.key), store.stat(without_row.key)
    assert damaged is not None
    assert adopted is not None
    assert (damaged.state, damaged.error_code) == (State.FAILED, "DAMAGED")
    assert adopted.state is State.COMMITTED
    store.close()


@pytest.mark.parametrize("seed", range(12))
def test_it_does_the_same_as_a_look_at_everything(tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(seed)
    directory = tmp_path / "killed"
    samples = _killed(directory, 60)
    for _ in range(rng.randrange(0, 6)):
        _change(directory, rng.choice(samples), rng)
    copy = tmp_path / "copy"
    shutil.copytree(directory, copy)
    found = _opened(directory)
    everything = NameSums.places
    monkeypatch.setattr(NameSums, "places", lambda self, *, differing: everything(self, differing=False))
    assert found == _opened(copy)


def _change(directory: Path, sample: Sample, rng: random.Random) -> None:
    """What a power cut or a person may do to a directory."""
    path = sample.key.path(directory)
    what = rng.choice(
        ["row lost", "file lost", "file moved", "a copy", "not a sample", "a link", "a directory", "a shard lost"]
    )
    if what == "row lost":
        _lose_row(directory, sample)
    elif what == "file lost":
        path.unlink(missing_ok=True)
    elif what == "file moved" and path.is_file():
        path.rename(path.with_name("moved.safetensors"))
    elif what == "a copy" and path.is_file():
        other = Sample("copied").key.path(directory)
        other.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, other)
    elif what == "not a sample" and path.parent.is_dir():
        path.with_name(rng.choice(["notes.txt", "x.safetensors", "\udcff.safetensors"])).write_bytes(b"mine")
    elif what == "a link" and path.is_file() and not path.is_symlink():
        target = path.rename(directory.parent / f"away-{sample.sample_id}")
        path.symlink_to(target)
    elif what == "a directory":
        path.unlink(missing_ok=True)
        path.mkdir(parents=True, exist_ok=True)
    elif what == "a shard lost":
        shutil.rmtree(path.parent, ignore_errors=True)


def _opened(directory: Path) -> tuple[object, object]:
    """What a start makes of a directory: its files, and what the catalogue says."""
    store = SampleStore.open(directory)
    listed = store.list_page(ListQuery(page_size=1000))[0]
    crash(store)
    return tree(directory), sorted((r.namespace, r.sample_id, r.state, r.error_code, r.header_xxh3) for r in listed)


def test_a_file_of_any_name_takes_one_line_of_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    samples = _killed(tmp_path)
    for name in ("\udcff.safetensors", "two\nlines.safetensors"):
        samples[0].key.path(tmp_path).with_name(name).write_bytes(b"mine")
    _opened(tmp_path)
    said = [record.getMessage() for record in caplog.records if "is left alone" in record.getMessage()]
    assert len(said) == 2
    for line in said:
        assert line.isprintable()
        line.encode()


def test_a_rebuild_tells_the_log_how_far_it_is(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    _killed(tmp_path, 5)
    (tmp_path / "catalog.sqlite").write_bytes(b"garbage" * 1000)
    monkeypatch.setattr(progress, "EVERY_S", 0.0)
    with caplog.at_level(logging.INFO):
        SampleStore.open(tmp_path).close()
    assert "3 of 5 files are compared with the catalogue" in caplog.text


def test_rows_that_are_out_of_order_end_a_walk_over_names() -> None:
    class Damaged:
        def execute(self, *_: object) -> Damaged:
            return self

        def fetchall(self) -> list[tuple[object, ...]]:
            return [(7, "n", "s", "committed")]

    with pytest.raises(MalformedRow):
        sql.names(Damaged(), 7, 256, check=False)  # type: ignore[arg-type]


def test_the_database_spells_a_row_as_its_checksum_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    odd = "".join(map(chr, range(1, 128))) + "\x85\u2028\N{SNAIL}é</"
    store = SampleStore.open(tmp_path)
    Sample(model=odd, tags={"k": odd[31:126]}, metadata={"m": odd}).put(store)
    monkeypatch.setattr(row_sums, "checked", lambda row: pytest.fail("it was looked at again"))
    assert [page[1:] for page in sqlite_of(store).ask(lambda db: sql.names(db, 0, 9, check=True))] == [
        ("default", "s", "committed")
    ]
    store.close()


@pytest.mark.parametrize("changed", ["X'6d'", "'n'", "1", "''", "CAST(X'ff' AS TEXT)"])
def test_a_row_that_is_not_what_was_written_does_not_pass(tmp_path: Path, changed: str) -> None:
    store = SampleStore.open(tmp_path)
    Sample().put(store)
    store.close()
    db = sqlite3.connect(tmp_path / "catalog.sqlite")
    db.execute(f"UPDATE samples SET model = {changed}")
    with pytest.raises((MalformedRow, sqlite3.OperationalError)):
        sql.names(db, 0, 9, check=True)
    db.close()
