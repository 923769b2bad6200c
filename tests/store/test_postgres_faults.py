"""The catalogue in PostgreSQL when its server or the way to it fails: what was acknowledged is there, and counts once."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import psycopg
import pytest
from store.catalogues import arriving, committed
from support.postgres import Cluster, catalogue_url, cluster
from support.postgres_proxy import Proxy
from support.waiting import wait_until

from slotstream.store.catalogue.postgres import database
from slotstream.store.catalogue.postgres.catalogue import PostgresCatalogue
from slotstream.store.catalogue.postgres.migrating import migrate
from slotstream.store.catalogue.queries import ListQuery, Queue, Standing
from slotstream.store.records import SampleKey, State
from slotstream.wire.errors import InternalFault, Interrupted, IoError, VerdictUnknown

pytestmark = pytest.mark.postgres

# A COMMIT that takes a while, so that something can happen meanwhile.
_SLOW_COMMIT = """
CREATE FUNCTION slotstream.linger() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN PERFORM pg_sleep(1); RETURN NULL; END $$;
CREATE CONSTRAINT TRIGGER linger AFTER INSERT OR UPDATE ON slotstream.samples DEFERRABLE INITIALLY DEFERRED
    FOR EACH ROW EXECUTE FUNCTION slotstream.linger();
"""


@pytest.fixture
def url() -> str:
    return catalogue_url()


@pytest.fixture
def catalogue(url: str) -> Iterator[PostgresCatalogue]:
    opened = PostgresCatalogue(url)
    yield opened
    opened.close()


@pytest.fixture
def proxy() -> Iterator[Proxy]:
    opened = Proxy(cluster().folder)
    yield opened
    opened.close()


@pytest.fixture
def behind(url: str, proxy: Proxy) -> Iterator[PostgresCatalogue]:
    """The catalogue, over a way that can be cut."""
    opened = PostgresCatalogue(cluster().url(url.rpartition("/")[2], proxy.folder))
    yield opened
    opened.close()


def _sql(url: str, *statements: str) -> None:
    with psycopg.connect(url, autocommit=True) as db:
        for statement in statements:
            db.execute(statement)


def _one(url: str, query: str) -> int:
    with psycopg.connect(url, autocommit=True) as db:
        row = db.execute(query).fetchone()
        assert row is not None
        return int(row[0])


# The server goes away.


def test_nothing_acknowledged_is_lost_when_the_server_is_killed_under_writes() -> None:
    """And nobody hears of it but by IO_ERROR."""
    own = Cluster()
    try:
        url = own.database()
        migrate(url)
        catalogue = PostgresCatalogue(url)
        acknowledged: dict[int, set[str]] = {number: set() for number in range(4)}
        errors: list[BaseException] = []
        over = threading.Event()

        def write(writer: int) -> None:
            number = 0
            while not over.is_set():
                number += 1
                name = f"w{writer}-{number}"
                try:
                    catalogue.begin(arriving(name)).result()
                    catalogue.commit(committed(name)).result()
                    acknowledged[writer].add(name)
                    catalogue.get(SampleKey("n", name))
                    catalogue.list_page(ListQuery(page_size=5))
                except IoError:
                    time.sleep(0.01)
                except BaseException as error:
                    errors.append(error)

        with ThreadPoolExecutor(4) as threads:
            writing = [threads.submit(write, writer) for writer in acknowledged]
            for _ in range(3):
                before = {writer: len(names) for writer, names in acknowledged.items()}
                wait_until(lambda before=before: all(len(acknowledged[w]) > n + 5 for w, n in before.items()))  # type: ignore[misc]
                own.kill()
                own.start()
            over.set()
            for one in writing:
                one.result()
        assert errors == []
        names = set().union(*acknowledged.values())
        for name in names:
            assert catalogue.get(SampleKey("n", name)) == committed(name)
        assert catalogue.totals()[State.COMMITTED][0] >= len(names)
        assert catalogue.totals()[State.COMMITTED][0] == _one(
            url, "SELECT count(*) FROM slotstream.samples WHERE state = 'committed'"
        )
        catalogue.close()
    finally:
        own.stop()


def test_a_server_that_is_away_is_an_io_error_for_all_that_is_asked(behind: PostgresCatalogue, proxy: Proxy) -> None:
    behind.commit(committed()).result()
    proxy.refuses = True
    proxy.cut_all()
    key = committed().key
    calls: list[Callable[[], object]] = [
        lambda: behind.begin(arriving("b")).result(),
        lambda: behind.commit(committed("c")).result(),
        lambda: behind.fail(arriving("b"), "ABORTED", "no").result(),
        lambda: behind.get(key),
        lambda: behind.get_settled(key),
        lambda: behind.list_page(ListQuery()),
        lambda: behind.mark_deleting(committed()),
        lambda: behind.lease(key, "me", 60, 10, 10),
        lambda: behind.set_meta("a", "b"),
        behind.totals,
        behind.now,
    ]
    for call in calls:
        with pytest.raises(IoError):
            call()
    proxy.refuses = False
    assert behind.get(key) == committed()
    behind.commit(committed("c")).result()


def test_connections_that_were_lost_while_nobody_used_them_do_not_show(behind: PostgresCatalogue, proxy: Proxy) -> None:
    behind.commit(committed()).result()
    assert behind.get(committed().key) == committed()
    proxy.cut_all()
    behind.commit(committed("b")).result()
    assert behind.get(committed().key) == committed()


def test_no_wait_for_a_server_that_is_stopped_is_without_an_end(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its machine answers, so the connections stay."""
    for limit in ("_WRITE_S", "_READ_S", "_VERDICT_S"):
        monkeypatch.setattr(database, limit, 0.5)
    monkeypatch.setattr(database, "_FRESH_S", 0.1)
    catalogue = PostgresCatalogue(url)
    catalogue.commit(committed()).result()
    assert catalogue.get(committed().key) == committed()
    name = url.rpartition("/")[2]
    with psycopg.connect(cluster().url("postgres"), autocommit=True) as db:
        found = db.execute("SELECT pid FROM pg_stat_activity WHERE datname = %s", (name,)).fetchall()
    assert len(found) == 2, "one that writes, and one that reads"
    for (pid,) in found:
        os.kill(pid, signal.SIGSTOP)
    try:
        with pytest.raises(IoError):
            catalogue.get(committed().key)
        with pytest.raises(IoError):
            catalogue.begin(arriving("b")).result()
    finally:
        for (pid,) in found:
            os.kill(pid, signal.SIGCONT)
    assert catalogue.begin(arriving("b")).result() is True
    assert catalogue.get(committed().key) == committed()
    catalogue.close()


# A COMMIT whose answer does not come.


def test_a_commit_that_counts_a_second_after_its_connection_was_lost_is_told(
    url: str, behind: PostgresCatalogue, proxy: Proxy
) -> None:
    """A look finds nothing at first; the same done again waits for the first."""
    _sql(url, _SLOW_COMMIT)
    proxy.cut_at_commit = 1
    writing = behind.commit(committed())
    assert proxy.commits_cut.acquire(timeout=30)
    assert behind.get(committed().key) is None
    writing.result()
    assert behind.get(committed().key) == committed()
    assert behind.totals()[State.COMMITTED] == (1, 100)


def test_what_was_committed_is_not_done_twice(behind: PostgresCatalogue, proxy: Proxy) -> None:
    behind.commit(committed()).result()
    proxy.cut_at_commit = 1
    behind.count_reads([(committed().key, committed().committed_unix_ns)]).result()
    assert proxy.cut_at_commit == 0
    assert behind.standing(committed().key) == Standing(reads=1)
    proxy.cut_at_commit = 1
    assert behind.begin(arriving("b")).result() is True, "it is this call that found nothing"
    proxy.cut_at_commit = 1
    assert behind.forget(arriving("b").key).result() is True
    assert behind.get(arriving("b").key) is None


def test_a_session_that_is_ended_at_its_commit_is_done_again(url: str, catalogue: PostgresCatalogue) -> None:
    _sql(url, _SLOW_COMMIT)
    writing = catalogue.commit(committed())
    ended = "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE query = 'COMMIT' AND state = 'active'"
    wait_until(lambda: _one(url, ended) == 1)
    writing.result()
    assert catalogue.get(committed().key) == committed()
    assert catalogue.totals()[State.COMMITTED] == (1, 100)


def test_nobody_is_told_what_nobody_knows(
    behind: PostgresCatalogue, proxy: Proxy, catalogue: PostgresCatalogue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A commit that cannot be decided in time has no verdict; all else may be asked again."""
    monkeypatch.setattr(database, "_VERDICT_S", 0.5)
    behind.commit(committed()).result()
    proxy.cut_at_commit, proxy.refuses_after_cut = 1, True
    with pytest.raises(VerdictUnknown):
        behind.commit(committed("b")).result()
    wait_until(lambda: catalogue.get(committed("b").key) is not None)
    proxy.refuses = False
    proxy.cut_at_commit = 1
    with pytest.raises(IoError):
        behind.ack(committed().key)
    proxy.refuses = proxy.refuses_after_cut = False
    behind.commit(committed("b")).result()
    assert catalogue.get(committed("b").key) == committed("b")


# Transactions that meet.


def test_of_two_transactions_that_wait_for_each_other_ours_is_done_again(url: str) -> None:
    _sql(url, f"ALTER DATABASE {url.rpartition('/')[2]} SET deadlock_timeout = '2s'")
    catalogue = PostgresCatalogue(url)
    names = ("a", "b")
    for name in names:
        catalogue.commit(committed(name)).result()
    with psycopg.connect(url) as other:
        other.execute("SET deadlock_timeout = '60s'")  # Ours finds it, and is the one that is undone.
        other.execute("SET search_path = slotstream")
        other.execute("SELECT 1 FROM samples WHERE sample_id = 'b' FOR UPDATE")
        reading = catalogue.count_reads([(committed(name).key, 15) for name in names])
        wait_until(lambda: _one(url, "SELECT count(*) FROM pg_locks WHERE NOT granted") == 1)
        other.execute("SELECT 1 FROM samples WHERE sample_id = 'a' FOR UPDATE")
    reading.result()
    assert [catalogue.standing(committed(name).key).reads for name in names] == [1, 1]
    # Told once the sessions are idle.
    wait_until(lambda: _one(url, "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()") == 1)
    catalogue.close()


def test_a_row_that_somebody_holds_on_to_fails_its_own_operation_alone(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database, "_MEETINGS_S", 0.1)
    monkeypatch.setattr("slotstream.store.catalogue.postgres.connecting._OF_THE_SESSION", _with_short_locks())
    catalogue = PostgresCatalogue(url)
    catalogue.commit(committed("held")).result()
    with psycopg.connect(url) as other:
        other.execute("SELECT 1 FROM slotstream.samples WHERE sample_id = 'held' FOR UPDATE")
        held, free = catalogue.begin(arriving("held")), catalogue.commit(committed("free"))
        with pytest.raises(IoError):
            held.result()
        free.result()
    assert catalogue.begin(arriving("held")).result() is False
    catalogue.close()


def _with_short_locks() -> dict[str, str]:
    from slotstream.store.catalogue.postgres import connecting

    return {**connecting._OF_THE_SESSION, "lock_timeout": "100"}


# What the tables hold.


def test_a_row_with_a_flipped_bit_is_doubted_alone(url: str, catalogue: PostgresCatalogue) -> None:
    catalogue.commit(committed("a")).result()
    catalogue.commit(committed("b")).result()
    seen = catalogue.candidates(Queue.OLDEST, "n", (0, -1), 10)
    _sql(url, "UPDATE slotstream.samples SET num_tokens = num_tokens + 1 WHERE sample_id = 'a'")
    for get in (catalogue.get, catalogue.get_settled):
        with pytest.raises(IoError, match="n/a does not match its checksum"):
            get(committed("a").key)
    together = [catalogue.fail(arriving("a"), "ABORTED", "no"), catalogue.fail(arriving("c"), "ABORTED", "no")]
    with pytest.raises(IoError):
        together[0].result()
    assert together[1].result() is True
    with pytest.raises(IoError):
        catalogue.mark_unused(seen[::-1])
    assert catalogue.get(committed("b").key) == committed("b"), "it was marked first, and is not any more"
    catalogue.adopt(committed("a")).result()
    assert catalogue.get(committed("a").key) == committed("a"), "its object said what it is"


def test_totals_stay_right_when_they_are_folded(
    url: str, catalogue: PostgresCatalogue, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(20):
        catalogue.begin(arriving(f"s{number}", namespace=f"n{number % 2}")).result()
        catalogue.commit(committed(f"s{number}", namespace=f"n{number % 2}")).result()
    catalogue.mark_deleting(committed("s0", namespace="n0"))
    catalogue.drop_deleting([SampleKey("n0", "s0")])
    before = catalogue.totals(), catalogue.usages("", 10)
    assert before[0][State.COMMITTED] == (19, 1900)
    many = _one(url, "SELECT count(*) FROM slotstream.deltas")
    monkeypatch.setattr(database, "_FOLD_EVERY", 1)
    catalogue.set_meta("a", "b")
    wait_until(lambda: _one(url, "SELECT count(*) FROM slotstream.deltas") == 2)
    assert many > 20
    assert (catalogue.totals(), catalogue.usages("", 10)) == before


def test_a_fault_of_our_own_leaves_the_thread_at_work(catalogue: PostgresCatalogue) -> None:
    def wrong(work: database.Work) -> None:
        work.db.execute("SELECT nothing FROM nowhere AT ALL")

    with pytest.raises(InternalFault):
        catalogue._submit(wrong).result()
    with pytest.raises(ZeroDivisionError):
        catalogue._submit(lambda work: 1 // 0).result()
    catalogue.commit(committed()).result()
    assert catalogue.get(committed().key) == committed()


def test_a_closed_catalogue_takes_nothing(url: str) -> None:
    catalogue = PostgresCatalogue(url)
    catalogue.begin(arriving())
    catalogue.close()
    catalogue.close()
    with pytest.raises(Interrupted):
        catalogue.commit(committed()).result()
    with pytest.raises(Interrupted):
        catalogue.get(committed().key)
    again = PostgresCatalogue(url)
    assert again.get(arriving().key) is not None
    assert _one(url, "SELECT count(*) FROM slotstream.writers") == 0, "who ended well leaves no row"
    again.close()
