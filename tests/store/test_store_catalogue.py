"""The index: filters, pages, and that it stays an index at any size."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slotstream.store.catalogue.queries import ListQuery
from slotstream.store.catalogue.sqlite import sql as catalogue_sql
from slotstream.store.catalogue.sqlite.catalogue import SqliteCatalogue
from slotstream.store.records import SampleKey, SampleRecord, State
from slotstream.wire.errors import BadPage, BadParams, InternalFault, Interrupted, StoreFull

RECORDS = [
    SampleRecord(
        namespace=f"n{number % 3}",
        sample_id=f"s{number:03}",
        state=State.FAILED if number % 10 == 0 else State.COMMITTED,
        created_unix_ns=1_000 + number // 2,  # Pairs share a time: the id breaks the tie.
        model=f"m{number % 2}",
        dtype="BF16",
        layer_ids=(1, 2),
        hidden_size=8,
        num_tokens=number,
        file_bytes=number * 10,
        committed_unix_ns=2_000,
        error_code="X" if number % 10 == 0 else "",
        error_message="why" if number % 10 == 0 else "",
        tags={"parity": str(number % 2), "seven": str(number % 7)},
        metadata={"engine": "e"},
        header_xxh3=f"{number:016x}",
    )
    for number in range(60)
]


@pytest.fixture
def catalogue(tmp_path: Path) -> Iterator[SqliteCatalogue]:
    opened = SqliteCatalogue(tmp_path / "catalog.sqlite")
    for record in RECORDS:
        opened.put_committed(record)
    opened.submit(lambda db: None).result()
    yield opened
    opened.close()


def _pages(catalogue: SqliteCatalogue, query: ListQuery) -> list[SampleRecord]:
    found: list[SampleRecord] = []
    while True:
        page, token = catalogue.list_page(query)
        found += page
        assert len(page) == query.page_size or not token
        if not token:
            return found
        query = replace(query, page_token=token)


@pytest.mark.parametrize("page_size", [1, 7, 60, 1000])
@pytest.mark.parametrize(
    "filters",
    [
        {},
        {"namespace": "n1"},
        {"model": "m0"},
        {"namespace": "n2", "model": "m1"},
        {"state": State.FAILED},
        {"state": State.COMMITTED, "namespace": "n0"},
        {"state": State.ARRIVING},
        {"created_from_unix_ns": 1_010, "created_until_unix_ns": 1_020},
        {"tags": {"parity": "1"}},
        {"tags": {"parity": "1", "seven": "3"}, "namespace": "n0"},
        {"tags": {"seven": "3", "parity": "none"}},
        {"tags": {"seven": "0"}, "state": State.FAILED, "created_from_unix_ns": 1_001},
        {"namespace": "n' OR 1=1 --"},
    ],
    ids=str,
)
def test_pages_hold_what_the_filters_ask_for_newest_first(
    catalogue: SqliteCatalogue, filters: dict[str, Any], page_size: int
) -> None:
    def wanted(record: SampleRecord) -> bool:
        return bool(
            record.namespace == filters.get("namespace", record.namespace)
            and record.model == filters.get("model", record.model)
            and record.state == filters.get("state", record.state)
            and filters.get("created_from_unix_ns", 0) <= record.created_unix_ns
            and record.created_unix_ns < filters.get("created_until_unix_ns", 1 << 62)
            and filters.get("tags", {}).items() <= dict(record.tags).items()
        )

    assert _pages(catalogue, ListQuery(**filters, page_size=page_size)) == [r for r in reversed(RECORDS) if wanted(r)]


def test_rows_that_appear_meanwhile_do_not_shift_a_listing(catalogue: SqliteCatalogue) -> None:
    page, token = catalogue.list_page(ListQuery(page_size=10))
    catalogue.put_committed(replace(RECORDS[0], sample_id="newest", created_unix_ns=9_999)).result()
    rest, _ = catalogue.list_page(ListQuery(page_size=1000, page_token=token))
    assert page + rest == RECORDS[::-1]


@pytest.mark.parametrize("token", ["garbage", "!", "AAAA", "é", "A" * 28, "A" * 10_000])
def test_a_token_that_was_not_given_out_is_refused(catalogue: SqliteCatalogue, token: str) -> None:
    with pytest.raises(BadPage):
        catalogue.list_page(ListQuery(page_token=token))


def test_a_token_continues_its_own_listing_only(catalogue: SqliteCatalogue) -> None:
    _, token = catalogue.list_page(ListQuery(namespace="n0", page_size=1))
    assert catalogue.list_page(ListQuery(namespace="n0", page_size=5, page_token=token))[0]
    with pytest.raises(BadPage, match="other filters"):
        catalogue.list_page(ListQuery(namespace="n1", page_token=token))


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
    good = [catalogue.put_committed(replace(RECORDS[0], sample_id=f"g{n}")) for n in range(3)]
    bad = catalogue.submit(lambda db: db.execute("INSERT INTO samples (id) VALUES ('x')"))
    good += [catalogue.put_committed(replace(RECORDS[0], sample_id=f"h{n}")) for n in range(3)]
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
        catalogue.put_committed(replace(RECORDS[0], sample_id="long", metadata={"k": "x" * (1 << 20)})).result()
    catalogue.submit(lambda db: db.execute("PRAGMA max_page_count = 1000000").fetchone()).result()
    catalogue.put_committed(replace(RECORDS[0], sample_id="again")).result()


def test_a_closed_catalogue_says_so(tmp_path: Path) -> None:
    catalogue = SqliteCatalogue(tmp_path / "catalog.sqlite")
    catalogue.close()
    catalogue.close()
    with pytest.raises(Interrupted):
        catalogue.drop_deleting([SampleKey("n", "s")])
