"""Catalogues that earlier versions left: opened, brought forward in place, and nothing is lost."""

from __future__ import annotations

import logging
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from store.store_kit import Sample, read_all
from support.sqlite_of import sqlite_of

from slotstream.store.catalogue.queries import ListQuery
from slotstream.store.catalogue.sqlite import retention_sql, row_sums, schema, sql
from slotstream.store.directory.looking import verify_directory
from slotstream.store.records import Failure
from slotstream.store.samples import SampleStore

SAMPLES = [Sample(f"s{n}", seed=n, namespace=f"n{n % 2}", tags={"k": str(n)}) for n in range(5)]
_COLUMNS = {1: row_sums.COLUMNS, 2: row_sums.SUMMED}
_SCHEMA = {1: sql.SCHEMA, 2: sql.SCHEMA + retention_sql.UPGRADE}


def _left_by(version: int, directory: Path) -> None:
    """A directory as that version left it."""
    store = SampleStore.open(directory)
    for sample in SAMPLES:
        sample.put(store)
    Sample("bad").send(store).abort(Failure("ABORTED", "no"))
    store.lifetimes.ack(SAMPLES[0].key)
    store.lifetimes.lease(SAMPLES[1].key, "me", 3600)
    for _ in range(3):
        record = store.stat(SAMPLES[2].key)
        assert record is not None
        store.lifetimes.count_reads([(record.key, record.committed_unix_ns)]).result()
    store.close()
    path = directory / "catalog.sqlite"
    with closing(sqlite3.connect(path)) as db:
        rows = db.execute(f"SELECT id, {_COLUMNS[version]} FROM samples").fetchall()
        tags = db.execute("SELECT * FROM tags").fetchall()
        leases = db.execute(f"SELECT {row_sums.LEASE} FROM leases").fetchall()
        meta = db.execute("SELECT * FROM meta WHERE key <> 'generation'").fetchall()
    path.unlink()
    path.with_name(path.name + ".seal").unlink()
    with closing(sqlite3.connect(path)) as db:
        db.executescript(_SCHEMA[version])
        db.executemany(f"INSERT INTO samples (id, {_COLUMNS[version]}) VALUES ({', '.join('?' * len(rows[0]))})", rows)
        db.executemany("INSERT INTO tags VALUES (?, ?, ?, ?)", tags)
        db.executemany("INSERT INTO meta VALUES (?, ?)", [*meta, ("clean_shutdown", "1"), ("scrub", "where it was")])
        if version > 1:
            db.executemany("INSERT INTO leases VALUES (?, ?, ?, ?)", leases)
        db.execute(f"PRAGMA user_version = {version}")
        db.commit()


def _said(store: SampleStore) -> object:
    everything = store.list_page(ListQuery())[0]
    return everything, list(store.lifetimes.every_usage()), store.totals(), store.list_page(ListQuery(tags={"k": "3"}))[0]


@pytest.mark.parametrize("version", [1, 2])
def test_a_catalogue_of_an_earlier_version_is_brought_forward_without_loss(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, version: int
) -> None:
    _left_by(version, tmp_path / "data")
    # A person may look at it first, without a server: that changes nothing.
    assert sorted(v.sample_id for v in verify_directory(tmp_path / "data")) == [s.sample_id for s in SAMPLES]
    with caplog.at_level(logging.INFO):
        store = SampleStore.open(tmp_path / "data")
    assert f"from schema {version} to {schema.VERSION}" in caplog.text
    assert "corrupt" not in caplog.text
    assert "adopted 0" in caplog.text
    for sample in SAMPLES:
        assert read_all(store, sample.key) == (sample.data, sample.token_ids)
    bad = store.stat(Sample("bad").key)
    assert bad is not None
    assert bad.error_code == "ABORTED"
    assert [r.sample_id for r in store.list_page(ListQuery(tags={"k": "3"}))[0]] == ["s3"]
    if version > 1:
        assert store.lifetimes.standing(SAMPLES[0].key).acked_unix_ns
        assert store.lifetimes.standing(SAMPLES[1].key).leased_until_unix_ns
        assert store.lifetimes.standing(SAMPLES[2].key).reads == 3
    assert store.lifetimes.remembered("scrub") == "where it was"
    before = _said(store)
    store.close()
    store = SampleStore.open(tmp_path / "data")
    assert sqlite_of(store).was_shut_down_cleanly
    assert _said(store) == before
    store.close()
    assert not list((tmp_path / "data").glob("*corrupt*"))


@pytest.mark.parametrize("version", [1, 2])
def test_what_rotted_in_an_earlier_version_comes_from_the_files(tmp_path: Path, version: int) -> None:
    """Its rows have no checksums, so only what cannot be a row of ours is seen."""
    _left_by(version, tmp_path)
    with closing(sqlite3.connect(tmp_path / "catalog.sqlite")) as db:
        db.execute("UPDATE samples SET sample_id = CAST(X'f3' AS TEXT) WHERE sample_id = 's1'")
        db.execute("UPDATE samples SET tags = '[' WHERE sample_id = 's2'")
        db.commit()
    store = SampleStore.open(tmp_path)
    for sample in SAMPLES:
        assert read_all(store, sample.key) == (sample.data, sample.token_ids)
    assert store.stat(Sample("bad").key) is not None
    store.close()


def test_the_layout_is_the_same_whichever_version_it_began_with(tmp_path: Path) -> None:
    for version in (1, 2):
        _left_by(version, tmp_path / str(version))
        SampleStore.open(tmp_path / str(version)).close()
        with closing(sqlite3.connect(tmp_path / str(version) / "catalog.sqlite")) as db:
            assert schema.layout(db) == schema.expected_layout()
