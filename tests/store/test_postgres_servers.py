"""Several servers over one catalogue in PostgreSQL: what one decides holds for all, one of them leads, all hear the news."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import replace

import psycopg
import pytest
from store.catalogues import arriving, committed
from support.postgres import catalogue_url
from support.waiting import wait_until

from slotstream.store.catalogue.postgres import notices, questions
from slotstream.store.catalogue.postgres.catalogue import PostgresCatalogue
from slotstream.store.catalogue.queries import Queue
from slotstream.store.records import SampleKey, SampleRecord, State
from slotstream.wire.errors import SampleNotFound, StoreFull

pytestmark = pytest.mark.postgres


@pytest.fixture
def url() -> str:
    return catalogue_url()


def _one(url: str, query: str) -> int:
    with psycopg.connect(url, autocommit=True) as db:
        row = db.execute(query).fetchone()
        assert row is not None
        return int(row[0])


def test_two_servers_write_to_one_catalogue(url: str) -> None:
    """Of one id one of them begins; a lease and a deletion exclude each other; the totals are those of the rows."""
    servers = PostgresCatalogue(url), PostgresCatalogue(url)
    with ThreadPoolExecutor(4) as threads:
        for number in range(40):
            began = [server.begin(arriving(f"s{number}", created=place)) for place, server in enumerate(servers)]
            assert sorted(one.result() for one in began) == [False, True]
        # In opposite orders, many at a time.
        names = [f"s{number}" for number in range(40)]
        ends = [servers[0].commit(committed(name)) for name in names]
        ends += [servers[1].commit(committed(name)) for name in reversed(names)]
        for end in ends:
            end.result()
        assert servers[0].totals() == servers[1].totals()
        assert servers[0].totals()[State.COMMITTED] == (40, 4000)
        for name in names:
            deleted = threads.submit(servers[0].mark_deleting, committed(name))
            leased = threads.submit(_leases, servers[1], committed(name).key)
            assert (deleted.result() == 0) is not leased.result()
    stored = _one(url, "SELECT count(*) FROM slotstream.samples WHERE state = 'committed'")
    assert servers[1].totals()[State.COMMITTED] == (stored, 100 * stored)
    for server in servers:
        server.close()


def _leases(catalogue: PostgresCatalogue, key: SampleKey) -> bool:
    try:
        return catalogue.lease(key, "me", 60, 100, 100) > 0
    except SampleNotFound:
        return False


def test_leases_have_one_limit_for_all_servers(url: str) -> None:
    servers = [PostgresCatalogue(url) for _ in range(3)]
    for number in range(30):
        servers[0].commit(committed(f"s{number}")).result()
    given = []

    def take(number: int) -> None:
        with suppress(StoreFull):
            given.append(servers[number % 3].lease(SampleKey("n", f"s{number}"), "me", 60, 10, 10))

    with ThreadPoolExecutor(6) as threads:
        list(threads.map(take, range(30)))
    assert len(given) == 10
    for server in servers:
        server.close()


# Who leads.


@pytest.fixture
def servers(url: str) -> Iterator[tuple[PostgresCatalogue, PostgresCatalogue]]:
    opened = PostgresCatalogue(url), PostgresCatalogue(url)
    yield opened
    for one in opened:
        one.close()


def test_one_of_two_leads_and_the_other_after_it(url: str, servers: tuple[PostgresCatalogue, PostgresCatalogue]) -> None:
    first, second = servers
    term = first.lead()
    assert (term, second.lead(), first.lead()) == (1, 0, 1)
    first.close()
    wait_until(lambda: second.lead() > 0)  # The database ends a session a moment after it was closed.
    assert second.lead() == term + 1
    third = PostgresCatalogue(url)
    assert third.lead() == 0
    third.close()


def test_who_lost_its_session_leads_no_more(url: str, servers: tuple[PostgresCatalogue, PostgresCatalogue]) -> None:
    """Also before it knows."""
    first, second = servers
    first.commit(committed()).result()
    term = first.lead()
    _one(url, "SELECT count(pg_terminate_backend(pid)) FROM pg_locks WHERE locktype = 'advisory'")
    wait_until(lambda: second.lead() > 0)
    chosen = first.candidates(Queue.OLDEST, "n", (-1, -1), 10)
    assert first.mark_unused(chosen, term) == []
    assert first.lead() == 0
    assert second.mark_unused(chosen, second.lead()) == chosen


def test_a_term_begins_after_the_last_statement_of_the_one_before(
    url: str, servers: tuple[PostgresCatalogue, PostgresCatalogue]
) -> None:
    first, second = servers
    first.commit(committed()).result()
    term, chosen = first.lead(), first.candidates(Queue.OLDEST, "n", (-1, -1), 10)
    with psycopg.connect(url) as other, ThreadPoolExecutor(2) as threads:
        other.execute("SELECT 1 FROM slotstream.samples FOR UPDATE")
        marking = threads.submit(first.mark_unused, chosen, term)
        wait_until(lambda: _one(url, "SELECT count(*) FROM pg_locks WHERE NOT granted") == 1)
        _one(url, "SELECT count(pg_terminate_backend(pid)) FROM pg_locks WHERE locktype = 'advisory'")
        leading = threads.submit(lambda: wait_until(lambda: second.lead() > 0))
        wait_until(lambda: _one(url, "SELECT count(*) FROM pg_locks WHERE NOT granted") == 2)
        assert not leading.done()
        other.commit()
        assert marking.result() == chosen
        leading.result()
    assert second.lead() == term + 1


# News.


class News:
    def __init__(self, catalogue: PostgresCatalogue) -> None:
        self._heard: queue.SimpleQueue[SampleKey | None] = queue.SimpleQueue()
        catalogue.watch(self._heard.put)
        self.until(None)

    def next(self) -> SampleKey | None:
        return self._heard.get(timeout=30)

    def until(self, key: SampleKey | None) -> None:
        while self.next() != key:
            pass


def test_what_one_server_commits_the_other_hears(servers: tuple[PostgresCatalogue, PostgresCatalogue]) -> None:
    news = News(servers[1])
    for number in range(300):
        last = servers[0].commit(committed(f"s{number}"))
    last.result()
    missing: set[SampleKey | None] = {SampleKey("n", f"s{number}") for number in range(300)}
    while missing:
        missing.discard(news.next())


def test_who_listens_again_is_told_that_anything_may_have_happened(
    url: str, servers: tuple[PostgresCatalogue, PostgresCatalogue]
) -> None:
    news = News(servers[1])
    ended = "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE query LIKE 'LISTEN%' AND state = 'idle'"
    wait_until(lambda: _one(url, ended) == 1)
    servers[0].commit(committed("a")).result()
    news.until(None)
    servers[0].commit(committed("b")).result()
    news.until(SampleKey("n", "b"))


def test_more_news_than_is_kept_is_that_anything_happened(
    url: str, servers: tuple[PostgresCatalogue, PostgresCatalogue], monkeypatch: pytest.MonkeyPatch
) -> None:
    news = News(servers[1])
    monkeypatch.setattr(notices, "_TOLD_MAX", 3)
    with psycopg.connect(url) as other:  # What is asked meanwhile is one transaction.
        other.execute("SELECT 1 FROM slotstream.leader FOR UPDATE")
        waiting = servers[0]._submit(lambda work: None, term=1)
        wait_until(lambda: _one(url, "SELECT count(*) FROM pg_locks WHERE NOT granted") == 1)
        many = [servers[0].commit(committed(f"s{number}")) for number in range(5)]
    waiting.result()
    for one in many:
        one.result()
    news.until(None)


class _Explained:
    """A connection that says how each statement is done, and does it."""

    def __init__(self, db: psycopg.Connection) -> None:
        self._db = db
        self.plan = ""

    def execute(self, query: str, values: object) -> object:
        self.plan = "\n".join(str(line) for (line,) in self._db.execute(f"EXPLAIN {query}", values))  # type: ignore[call-overload]
        return self._db.execute(query, values)  # type: ignore[call-overload]


@pytest.mark.parametrize("namespaces", [1, 3])
def test_many_rows_are_found_by_their_names_without_a_walk_of_the_table(url: str, namespaces: int) -> None:
    records = [replace(committed(f"s{number}"), namespace=f"n{number % namespaces}") for number in range(600)]

    def question(db: psycopg.Connection) -> tuple[list[SampleRecord | None], str]:
        explained = _Explained(db)
        return questions.get_many(explained, [record.key for record in records[:8]]), explained.plan  # type: ignore[arg-type]

    with closing(PostgresCatalogue(url)) as catalogue:
        for written in [catalogue.commit(record) for record in records]:
            written.result()
        with psycopg.connect(url, autocommit=True) as db:
            db.execute("ANALYZE slotstream.samples")
        found, plan = catalogue._ask(question)
    assert found == records[:8]
    assert "Index Scan using samples_namespace_sample_id_key" in plan, plan
    assert "Seq Scan" not in plan
