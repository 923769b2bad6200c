"""Several servers over one catalogue in PostgreSQL: what one decides holds for all."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import psycopg
import pytest
from store.catalogues import arriving, committed
from support.postgres import catalogue_url

from slotstream.store.catalogue.postgres.catalogue import PostgresCatalogue
from slotstream.store.records import SampleKey, State
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
