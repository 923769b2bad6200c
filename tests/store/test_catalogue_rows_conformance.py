"""What every catalogue does with rows: pages, tokens, walks, and what it remembers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from store.catalogues import RECORDS, HandClock, arriving, committed

from slotstream.store.catalogue.base import Catalogue, scan
from slotstream.store.catalogue.queries import ListQuery
from slotstream.store.records import SampleRecord, State
from slotstream.wire.errors import BadPage


def _pages(catalogue: Catalogue, query: ListQuery) -> list[SampleRecord]:
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
    catalogue: Catalogue, filters: dict[str, Any], page_size: int
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


def test_rows_that_appear_meanwhile_do_not_shift_a_listing(catalogue: Catalogue) -> None:
    page, token = catalogue.list_page(ListQuery(page_size=10))
    catalogue.commit(replace(RECORDS[0], sample_id="newest", created_unix_ns=9_999)).result()
    rest, _ = catalogue.list_page(ListQuery(page_size=1000, page_token=token))
    assert page + rest == RECORDS[::-1]


@pytest.mark.parametrize("token", ["garbage", "!", "AAAA", "é", "A" * 28, "A" * 10_000])
def test_a_token_that_was_not_given_out_is_refused(catalogue: Catalogue, token: str) -> None:
    with pytest.raises(BadPage):
        catalogue.list_page(ListQuery(page_token=token))


def test_a_token_continues_its_own_listing_only(catalogue: Catalogue) -> None:
    _, token = catalogue.list_page(ListQuery(namespace="n0", page_size=1))
    assert catalogue.list_page(ListQuery(namespace="n0", page_size=5, page_token=token))[0]
    with pytest.raises(BadPage, match="other filters"):
        catalogue.list_page(ListQuery(namespace="n1", page_token=token))


def test_a_walk_sees_every_row_once(catalogue: Catalogue) -> None:
    assert list(scan(catalogue)) == RECORDS
    assert list(scan(catalogue, "n1")) == [record for record in RECORDS if record.namespace == "n1"]
    first = catalogue.scan_page(0, 5)
    assert [number for number, _ in first] == sorted({number for number, _ in first})
    rest = catalogue.scan_page(first[-1][0], 1000)
    assert [record for _, record in first + rest] == RECORDS


def test_a_sample_keeps_its_number(empty: Catalogue) -> None:
    for name in ("a", "b"):
        empty.begin(arriving(name)).result()
    before = {record.sample_id: number for number, record in empty.scan_page(0, 10)}
    empty.commit(committed("a")).result()
    assert {record.sample_id: number for number, record in empty.scan_page(0, 10)} == before


def test_what_is_unfinished(catalogue: Catalogue) -> None:
    catalogue.begin(arriving("underway")).result()
    assert catalogue.mark_deleting(RECORDS[1]) == 0
    assert {(r.sample_id, r.state) for r in catalogue.unfinished()} == {
        ("underway", State.ARRIVING),
        (RECORDS[1].sample_id, State.DELETING),
    }


def test_who_lists_sees_what_was_opened_before(empty: Catalogue) -> None:
    empty.begin(arriving())
    assert [record.state for record in empty.list_page(ListQuery())[0]] == [State.ARRIVING]


@pytest.mark.parametrize("text", ["\0", "\x1a", "\x1a0", "\0\x1a\0", "\x1a\x1a0\0", "a\0b", "é\U0001f600", "\\0", "'", "%s"])
def test_texts_keep_every_character(empty: Catalogue, text: str) -> None:
    stored = replace(committed(), model=text, tags={"k": text}, metadata={text: text})
    empty.commit(stored).result()
    assert empty.get(stored.key) == stored
    assert empty.list_page(ListQuery(model=text))[0] == [stored]
    assert empty.list_page(ListQuery(tags={"k": text}))[0] == [stored]
    empty.fail(arriving("f"), "ABORTED", text).result()
    failed = empty.get(arriving("f").key)
    assert failed is not None
    assert failed.error_message == text
    assert empty.lease(stored.key, text, 60, 100, 100) > 0
    empty.end_leases(stored.key, text)
    assert empty.standing(stored.key).leased_until_unix_ns == 0
    empty.set_meta("m", text)
    assert empty.get_meta("m") == text


# The rest.


def test_what_is_remembered_survives_a_restart(reopen: Callable[[], Catalogue]) -> None:
    opened = reopen()
    assert opened.get_meta("rules") is None
    opened.set_meta("rules", "one")
    opened.set_meta("rules", "two words, é and \n", durable=True)
    opened.commit(committed()).result()
    opened.close()
    again = reopen()
    assert again.get_meta("rules") == "two words, é and \n"
    assert again.get(committed().key) == committed()
    again.close()


def test_its_clock_is_that_of_its_leases(empty: Catalogue, clock: HandClock) -> None:
    assert empty.now() == clock.now
