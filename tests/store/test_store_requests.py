"""Samples are found by the id that vLLM answered their request with, along the index of the ids."""

from __future__ import annotations

import sqlite3
from dataclasses import replace

import pytest
from store.store_kit import Sample
from support.sqlite_of import sqlite_of

from slotstream.store.catalogue.queries import ListQuery
from slotstream.store.catalogue.sqlite import sql
from slotstream.store.records import State
from slotstream.store.samples import SampleStore

IDS = [
    "cmpl-a-0-01234567",
    "cmpl-a-1-01234567",
    "1_cmpl-a-0-01234567",
    "127_cmpl-a-0-01234567",
    "cmpl-ab-0-01234567",
    "chatcmpl-a-01234567",
    "0_chatcmpl-b-01234567",
    "1_chatcmpl-b-01234567",
    "mine",
    "mine-too",
    "a-b-0-01234567",
    "cmpl-a",  # In another namespace.
]


@pytest.fixture
def filled(store: SampleStore) -> SampleStore:
    for at, name in enumerate(IDS[:-1]):
        Sample(name, namespace="n", tags={"even": str(at % 2 == 0), "all": "yes"}).put(store)
    Sample("cmpl-a", namespace="other").put(store)
    Sample("cmpl-a-0-76543210", namespace="other").put(store)
    return store


def _found(store: SampleStore, request_id: str, **filters: object) -> list[str]:
    query = ListQuery(request_id=request_id, **{"namespaces": ("n",), **filters})  # type: ignore[arg-type]
    names: list[str] = []
    while True:
        records, token = store.list_page(query)
        names += [record.sample_id for record in records]
        if not token:
            return names
        query = replace(query, page_token=token)


@pytest.mark.parametrize(
    ("request_id", "found"),
    [
        ("cmpl-a", [3, 2, 1, 0]),
        ("cmpl-a-0", [3, 2, 0]),
        ("cmpl-a-0-01234567", [0]),
        ("chatcmpl-a", [5]),
        ("chatcmpl-b", [7, 6]),
        ("mine", [8]),  # An exact id wins.
        ("a b", [10]),  # The connector writes other characters so.
        ("cmpl-", []),
        ("cmpl", []),  # What stands before a dash need not be a request.
        ("...", []),
        ("nothing", []),
    ],
)
def test_a_requests_samples(filled: SampleStore, request_id: str, found: list[int]) -> None:
    assert _found(filled, request_id) == [IDS[at] for at in found]
    assert _found(filled, request_id, page_size=1) == [IDS[at] for at in found]


def test_a_chosen_id_that_begins_alike_is_another_samples(store: SampleStore) -> None:
    Sample("run-1-eval", namespace="n").put(store)
    Sample("run-1-2", namespace="n", metadata={"request_id": "cmpl-x-0-01234567"}).put(store)
    Sample("run-1-3", namespace="n", metadata={"request_id": "run-1-3"}).put(store)
    assert _found(store, "run-1") == ["run-1-3"]


def test_in_every_namespace_and_with_other_filters(filled: SampleStore) -> None:
    assert _found(filled, "cmpl-a", namespaces=None) == ["cmpl-a"]
    assert len(_found(filled, "cmpl-a-0", namespaces=None)) == 4
    assert _found(filled, "cmpl-a-0", namespaces=("n", "other"))[0] == "cmpl-a-0-76543210"
    assert _found(filled, "cmpl-a", tags={"even": "True"}) == [IDS[2], IDS[0]]
    assert _found(filled, "cmpl-a", tags={"even": "False", "all": "yes"}) == [IDS[3], IDS[1]]
    assert _found(filled, "cmpl-a", state=State.FAILED) == []
    assert _found(filled, "cmpl-a", model="none") == []


@pytest.mark.files_only
def test_a_look_up_walks_the_index_of_the_ids_at_any_size(filled: SampleStore) -> None:
    plans: list[str] = []

    def look(db: sqlite3.Connection) -> None:
        asked: list[str] = []
        db.set_trace_callback(asked.append)
        sql.list_page(db, ListQuery(namespaces=("n",), request_id="cmpl-a"))
        db.set_trace_callback(None)
        for statement in asked:
            if statement.startswith(("SELECT", "WITH")):
                plans.extend(row[3] for row in db.execute("EXPLAIN QUERY PLAN " + statement))

    sqlite_of(filled).ask(look)
    about = [plan for plan in plans if " s " in f"{plan} "]
    assert about
    assert not [plan for plan in about if plan.startswith("SCAN s")]
