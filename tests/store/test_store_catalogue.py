"""The catalogue in SQLite, beyond what every catalogue does (test_catalogue_conformance.py): it stays an index at any size."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from store.catalogues import RECORDS

from slotstream.store.catalogue.queries import ListQuery
from slotstream.store.catalogue.sqlite import sql as catalogue_sql
from slotstream.store.catalogue.sqlite.catalogue import SqliteCatalogue
from slotstream.store.records import SampleKey, State
from slotstream.wire.errors import BadParams, InternalFault, Interrupted, StoreFull


@pytest.fixture
def catalogue(tmp_path: Path) -> Iterator[SqliteCatalogue]:
    opened = SqliteCatalogue(tmp_path / "catalog.sqlite")
    for record in RECORDS:
        opened.commit(record)
    opened.submit(lambda db: None).result()
    yield opened
    opened.close()


def test_a_listing_has_limits() -> None:
    for change in ({"page_size": 0}, {"page_size": 1001}, {"tags": {str(n): "x" for n in range(9)}}):
        with pytest.raises(BadParams):
            ListQuery(**change)


@pytest.mark.parametrize(
    "query",
    [
        ListQuery(),
        ListQuery(namespace="n1"),
        ListQuery(model="m1", created_from_unix_ns=5),
        ListQuery(namespace="n1", model="m1"),
        ListQuery(state=State.FAILED, namespace="n1"),
        ListQuery(state=State.COMMITTED),
        ListQuery(tags={"parity": "1"}),
        ListQuery(tags={"parity": "1", "seven": "2"}, namespace="n1"),
    ],
    ids=str,
)
def test_a_page_walks_an_index_in_order(catalogue: SqliteCatalogue, query: ListQuery) -> None:
    """Neither a scan of the table nor a sort: a page costs the same beside a million other samples."""
    db = sqlite3.connect(catalogue.path)
    for before in (None, (1_010, 5)):
        sql, values = catalogue_sql._list_sql(db, query, before)
        plan = [row[3] for row in db.execute(f"EXPLAIN QUERY PLAN {sql}", (*values, 10))]
        assert not any("TEMP B-TREE" in step for step in plan), plan
        assert all("USING" in step or "CORRELATED" in step for step in plan), plan
    db.close()


def test_people_can_read_the_table(catalogue: SqliteCatalogue) -> None:
    db = sqlite3.connect(catalogue.path)
    row = db.execute("SELECT namespace, state, num_tokens, tags FROM samples WHERE sample_id = 's003'").fetchone()
    assert row == ("n0", "committed", 3, '{"parity":"1","seven":"3"}')
    assert db.execute("SELECT samples, bytes FROM totals WHERE state = 'committed'").fetchone()[0] == 54
    db.close()


def test_one_operation_that_fails_takes_no_other_with_it(catalogue: SqliteCatalogue) -> None:
    gate = threading.Event()
    blocked = catalogue.submit(lambda db: gate.wait())
    good = [catalogue.commit(replace(RECORDS[0], sample_id=f"g{n}")) for n in range(3)]
    bad = catalogue.submit(lambda db: db.execute("INSERT INTO samples (id) VALUES ('x')"))
    good += [catalogue.commit(replace(RECORDS[0], sample_id=f"h{n}")) for n in range(3)]
    gate.set()
    blocked.result()
    for future in good:
        future.result()
    with pytest.raises(InternalFault):
        bad.result()
    assert catalogue.get(SampleKey("n0", "h2")) is not None


def test_a_full_disk_is_said_to_be_one(catalogue: SqliteCatalogue) -> None:
    (pages,) = catalogue.submit(lambda db: db.execute("PRAGMA page_count").fetchone()).result()
    catalogue.submit(lambda db: db.execute(f"PRAGMA max_page_count = {pages}").fetchone()).result()
    with pytest.raises(StoreFull):
        catalogue.commit(replace(RECORDS[0], sample_id="long", metadata={"k": "x" * (1 << 20)})).result()
    catalogue.submit(lambda db: db.execute("PRAGMA max_page_count = 1000000").fetchone()).result()
    catalogue.commit(replace(RECORDS[0], sample_id="again")).result()


def test_a_closed_catalogue_says_so(tmp_path: Path) -> None:
    catalogue = SqliteCatalogue(tmp_path / "catalog.sqlite")
    catalogue.close()
    catalogue.close()
    with pytest.raises(Interrupted):
        catalogue.drop_deleting([SampleKey("n", "s")])
