"""Retention: rules from a file, pure decisions, and sweeps that delete what may go and nothing else."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from store.store_kit import BROKEN, FaultyFiles, Sample, crash, read_all, stored, tree
from support.sqlite_of import sqlite_of
from support.waiting import WAIT_S, wait_until

from slotstream.store.catalogue.queries import Candidate, ListQuery, Queue, Usage
from slotstream.store.catalogue.sqlite import retention_sql
from slotstream.store.catalogue.sqlite.catalogue import SqliteCatalogue
from slotstream.store.disk.clock import Clock
from slotstream.store.disk.files import Files
from slotstream.store.records import Failure, SampleKey, State
from slotstream.store.samples import SampleStore
from slotstream.store.upkeep import sweeping
from slotstream.store.upkeep.preview import Imagined
from slotstream.store.upkeep.retention import Policy, Reason, Rule, forgotten, over_limit, to_free
from slotstream.store.upkeep.sweeping import Sweeper
from slotstream.wire.errors import BadParams, ConfigError, Leased, SampleNotFound, StoreFull
from slotstream.wire.names import LEASE_S_MAX

# Rules.


def _policy(tmp_path: Path, text: str, free_bytes_min: int = 0) -> Policy:
    path = tmp_path / "rules.toml"
    path.write_text(text)
    return Policy.from_toml(path, free_bytes_min=free_bytes_min)


def test_a_namespace_overrides_the_default_key_by_key(tmp_path: Path) -> None:
    policy = _policy(
        tmp_path,
        """
        free_bytes_target = 1000
        [default]
        age_s_max = 60
        delete_when_full = true
        [namespaces.train]
        age_s_max = inf
        delete_on_ack = true
        [namespaces."v1.2"]
        bytes_max = 5
        """,
    )
    assert policy.rule_for("anything") == Rule(age_s_max=60, delete_when_full=True)
    assert policy.rule_for("train") == Rule(delete_on_ack=True, delete_when_full=True)
    assert policy.rule_for("v1.2").limits() == {"bytes_max": 5, "age_s_max": 60, "delete_when_full": True}
    assert policy.free_bytes_target == 1000


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("nonsense", "is not TOML"),
        ("retention = 1", r"unknown keys \['retention'\]"),
        ("default = 1", "default must be a table"),
        ("[default]\nmax_age = 1", r"default: unknown keys \['max_age'\]"),
        ("[default]\nage_s_max = -1", "default: age_s_max"),
        ("[default]\nbytes_max = nan", "default: bytes_max"),
        ('[default]\nbytes_max = "1 GB"', "default: bytes_max"),
        ("[default]\nbytes_max = true", "default: bytes_max"),
        ("[default]\ndelete_after_reads = 0", "default: delete_after_reads"),
        ("[default]\ndelete_on_ack = 1", "default: delete_on_ack"),
        ('[namespaces."a/b"]', "namespaces: namespace 'a/b'"),
        ("[namespaces.a]\nb = 1", "namespaces.a: unknown keys"),
        ("[namespaces.a]\nsamples_max = -1", "namespaces.a: samples_max"),
        ("free_bytes_target = 1.5\n[default]\ndelete_when_full = true", "free_bytes_target must be a whole number"),
        ("[default]\ndelete_when_full = true", "needs a free_bytes_target above the 7 bytes"),
        ("free_bytes_target = 7\n[default]\ndelete_when_full = true", "needs a free_bytes_target above the 7 bytes"),
        ("free_bytes_target = 9", "does nothing unless"),
        ("bucket_bytes_max = 0.5", "bucket_bytes_max must be a whole number"),
        ("bucket_bytes_max = 9\n[default]\ndelete_when_full = true", "does nothing without a free_bytes_target"),
        (
            "bucket_bytes_max = 9\nfree_bytes_target = 9\n[default]\ndelete_when_full = true",
            "free_bytes_target, 9, must be below the 9 of bucket_bytes_max",
        ),
        ("bucket_bytes_max = 9\nfree_bytes_target = 1", "does nothing unless"),
        ("[default]\ndelete_read_when_full = 1", "default: delete_read_when_full must be true or false"),
        ("[default]\ndelete_read_when_full = true", "delete_read_when_full needs a free_bytes_target above the 7 bytes"),
    ],
)
def test_a_rule_that_cannot_work_is_named(tmp_path: Path, text: str, named: str) -> None:
    with pytest.raises(ConfigError, match=f"^--retention: .*{named}"):
        _policy(tmp_path, text, free_bytes_min=7)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^--retention: cannot read"):
        Policy.from_toml(tmp_path / "none.toml")


# Decisions.


def _candidates(*sizes: int) -> list[Candidate]:
    return [Candidate(SampleKey("n", f"s{at}"), at * 10**9, size, (at * 10**9, at)) for at, size in enumerate(sizes)]


@pytest.mark.parametrize(
    ("rule", "reasons"),
    [
        (Rule(), []),
        (Rule(samples_max=4), []),
        (Rule(samples_max=2), [Reason.SAMPLES] * 2),
        (Rule(samples_max=0), [Reason.SAMPLES] * 4),
        (Rule(bytes_max=100), []),
        (Rule(bytes_max=99), [Reason.BYTES]),
        (Rule(bytes_max=70), [Reason.BYTES] * 2),
        (Rule(age_s_max=7), [Reason.AGE] * 3),
        (Rule(age_s_max=8, bytes_max=60, samples_max=0), [Reason.AGE] * 2 + [Reason.BYTES] + [Reason.SAMPLES]),
    ],
    ids=str,
)
def test_the_oldest_go_until_every_limit_holds(rule: Rule, reasons: list[Reason]) -> None:
    page = _candidates(10, 20, 30, 40)
    due = over_limit(rule, Usage("n", 4, 100), page, now_unix_ns=9 * 10**9)
    assert [candidate for candidate, _ in due] == page[: len(reasons)]
    assert [reason for _, reason in due] == reasons


def test_room_is_made_with_as_few_as_suffice() -> None:
    page = _candidates(10, 20, 30)
    assert [to_free(nbytes, page) for nbytes in (0, 1, 10, 11, 1000)] == [[], page[:1], page[:1], page[:2], page]


def test_failed_samples_are_forgotten_by_age() -> None:
    page = _candidates(0, 0, 0)
    assert forgotten(Rule(), page, 10**12) == []
    assert forgotten(Rule(failed_age_s_max=1), page, 2 * 10**9) == page[:2]


# Sweeps.


def _put(store: SampleStore, *names: str, namespace: str = "default") -> int:
    """Stores small samples in this order; the size of one's file."""
    for name in names:
        Sample(name, namespace=namespace).put(store)
    record = store.stat(SampleKey(namespace, names[-1]))
    assert record is not None
    return record.file_bytes


def _left(store: SampleStore, namespace: str = "default") -> str:
    """The ids of the files in a namespace, sorted; and its rows say the same."""
    names = sorted(Path(path).name.removesuffix(".safetensors") for path in stored(store) if path.startswith(f"{namespace}/"))
    found = store.lifetimes.candidates(Queue.OLDEST, namespace, (-1, -1), 1000)
    assert sorted(candidate.key.sample_id for candidate in found) == names
    assert store.lifetimes.usage(namespace).samples == len(names)
    return "".join(names)


def _sweeper(store: SampleStore, **rule: float | bool) -> Sweeper:
    return Sweeper(store.lifetimes, Policy(namespaces={"default": Rule(**rule)}), store.free_bytes)  # type: ignore[arg-type]


@pytest.mark.parametrize("what", ["bytes_max", "samples_max"])
def test_past_a_quota_the_oldest_go(store: SampleStore, what: str) -> None:
    size = _put(store, "d", "c", "b", "a")
    _put(store, "x", namespace="other")
    done = _sweeper(store, **{what: 2 * size + 1 if what == "bytes_max" else 2}).sweep()
    assert _left(store) == "ab"
    assert _left(store, "other") == "x"
    reason = Reason(what.removesuffix("_max"))
    assert (done.samples, done.bytes) == ({reason: 2}, {reason: 2 * size})


def test_age_counts_from_the_commit(store: SampleStore, monkeypatch: pytest.MonkeyPatch) -> None:
    _put(store, "a")
    _put(store, "b")
    clock = store.lifetimes.clock
    b = store.stat(Sample("b").key)
    assert b is not None
    monkeypatch.setattr(clock, "_source", lambda: b.committed_unix_ns + 60 * 10**9 - 1)
    assert _sweeper(store, age_s_max=60).sweep().samples == {Reason.AGE: 1}
    assert _left(store) == "b"
    monkeypatch.setattr(clock, "_source", lambda: b.committed_unix_ns + 60 * 10**9)
    _sweeper(store, age_s_max=60).sweep()
    assert _left(store) == ""


def test_reads_and_acks(store: SampleStore) -> None:
    _put(store, "a", "b", "c")
    for name, times in (("a", 1), ("b", 2)):
        record = store.stat(Sample(name).key)
        assert record is not None
        for _ in range(times):
            store.lifetimes.count_reads([(record.key, record.committed_unix_ns)]).result()
    store.lifetimes.ack(Sample("c").key)
    store.lifetimes.ack(Sample("c").key)
    assert [store.lifetimes.standing(Sample(name).key).reads for name in "abc"] == [1, 2, 0]
    assert _sweeper(store).sweep().samples == {}
    assert _sweeper(store, delete_after_reads=2).sweep().samples == {Reason.READS: 1}
    assert _left(store) == "ac"
    assert _sweeper(store, delete_on_ack=True).sweep(["default"]).samples == {Reason.ACK: 1}
    assert _left(store) == "a"
    with pytest.raises(SampleNotFound):
        store.lifetimes.ack(Sample("c").key)
    # What counted for the old one says nothing about a new sample of the same id.
    _put(store, "b")
    assert store.lifetimes.standing(Sample("b").key).reads == 0


def test_failed_samples_are_kept_until_their_rule_forgets_them(store: SampleStore, monkeypatch: pytest.MonkeyPatch) -> None:
    Sample("a").send(store).abort(Failure("ABORTED", "no"))
    assert _sweeper(store, age_s_max=0).sweep().samples == {}
    record = store.stat(Sample("a").key)
    assert record is not None
    monkeypatch.setattr(store.lifetimes.clock, "_source", lambda: record.created_unix_ns + 10 * 10**9)
    assert _sweeper(store, failed_age_s_max=11).sweep().samples == {}
    assert _sweeper(store, failed_age_s_max=10).sweep().samples == {Reason.FAILED_AGE: 1}
    assert store.stat(Sample("a").key) is None
    assert list(store.lifetimes.every_usage()) == []


class _Disk(Files):
    """Some space beside the files that are there."""

    total = 1 << 30

    def free_bytes(self, path: Path) -> int:
        return self.total - sum(tree(path).values())


def test_when_space_runs_low_the_oldest_that_may_go_do(tmp_path: Path) -> None:
    files = _Disk()
    store = SampleStore.open(tmp_path, files=files, free_bytes_min=0)
    for name, namespace in (("a", "kept"), ("b", "x"), ("c", "y"), ("d", "x"), ("e", "y")):
        size = _put(store, name, namespace=namespace)
    rule = Rule(delete_when_full=True)
    policy = Policy(namespaces={"x": rule, "y": rule}, free_bytes_target=1000)
    sweeper = Sweeper(store.lifetimes, policy, store.free_bytes)
    files.total = 5 * size + 1000
    assert sweeper.make_room().samples == {}
    files.total -= 1
    assert sweeper.make_room().samples == {Reason.FREE_SPACE: 1}
    files.total -= 2 * size
    assert sweeper.make_room().samples == {Reason.FREE_SPACE: 2}
    assert [_left(store, space) for space in ("kept", "x", "y")] == ["a", "", "e"]
    files.total = 0
    last = sweeper.make_room()
    assert (last.samples, last.still_short) == ({Reason.FREE_SPACE: 1}, True)
    assert sweeper.make_room().samples == {}
    assert _left(store, "kept") == "a"
    store.close()


def test_of_a_bucket_room_is_what_it_may_hold_and_does_not(tmp_path: Path) -> None:
    """The disk is not where the samples are, so it does not matter what it says."""
    policy = _policy(
        tmp_path, "bucket_bytes_max = 1000\nfree_bytes_target = 5\n[default]\ndelete_when_full = true", free_bytes_min=7
    )
    assert (policy.bucket_bytes_max, policy.free_bytes_target) == (1000, 5)
    store = SampleStore.open(tmp_path / "data", free_bytes_min=0)
    for name in "abcde":
        size = _put(store, name, namespace="x")
    policy = replace(policy, bucket_bytes_max=5 * size + 100, free_bytes_target=100)
    assert Sweeper(store.lifetimes, policy, lambda: 0).make_room().samples == {}
    policy = replace(policy, bucket_bytes_max=4 * size)
    imagined = Imagined(store._catalogue, store.lifetimes.now())
    assert Sweeper(imagined, policy, lambda: 1 << 60).make_room().samples == {Reason.FREE_SPACE: 2}
    assert Sweeper(store.lifetimes, policy, lambda: 1 << 60).make_room().samples == {Reason.FREE_SPACE: 2}
    assert _left(store, "x") == "cde"
    store.close()


def test_when_space_runs_low_what_was_read_goes_and_what_was_not_stays(tmp_path: Path) -> None:
    files = _Disk()
    store = SampleStore.open(tmp_path, files=files, free_bytes_min=0)
    for name in ("a", "b", "c", "d", "e", "f"):
        size = _put(store, name, namespace="train")
    _put(store, "a", "b", namespace="other")
    both = Policy(
        namespaces={"train": Rule(delete_read_when_full=True), "other": Rule(delete_when_full=True)}, free_bytes_target=1000
    )
    read = Policy(default=Rule(delete_read_when_full=True), free_bytes_target=1000)
    key = {name: SampleKey("train", name) for name in "abcdef"}
    for name in "ef":  # In another order than that of their commits, which is the one that counts.
        store.lifetimes.ack(key[name])
    for name in "db":
        record = store.stat(key[name])
        assert record is not None
        store.lifetimes.count_reads([(key[name], record.committed_unix_ns)]).result()
    store.lifetimes.lease(key["d"], "me", 60)
    sweeper = Sweeper(store.lifetimes, read, store.free_bytes)
    files.total = 8 * size + 1000 - 1
    assert sweeper.make_room().samples == {Reason.FREE_SPACE: 1}
    assert _left(store, "train") == "acdef"
    files.total = 0
    with store.reader(key["e"]):
        last = sweeper.make_room()
        assert (last.samples, last.still_short) == ({Reason.FREE_SPACE: 1}, True)
        assert _left(store, "train") == "acde"  # Unread, unread, leased, being read.
    assert sweeper.make_room().samples == {Reason.FREE_SPACE: 1}
    assert [_left(store, space) for space in ("train", "other")] == ["acd", "ab"]
    # Beside a namespace whose unread samples may go as well: of all together the oldest first.
    last = Sweeper(store.lifetimes, both, store.free_bytes).make_room()
    assert (last.samples, last.still_short) == ({Reason.FREE_SPACE: 2}, True)
    assert [_left(store, space) for space in ("train", "other")] == ["acd", ""]
    store.close()


def test_a_sample_that_is_read_or_leased_is_never_deleted_by_a_rule(store: SampleStore) -> None:
    _put(store, "a", "b", "c", "d")
    for name in "abcd":
        store.lifetimes.ack(Sample(name).key)
    store.lifetimes.lease(Sample("b").key, "me", 60)
    sweeper = _sweeper(store, samples_max=0, age_s_max=0, bytes_max=0, delete_on_ack=True)
    with store.reader(Sample("a").key) as reader:
        sweeper.sweep()
        assert _left(store) == "ab"
        assert b"".join(bytes(p) for block in reader.blocks(0, 10) for p in block.data) == Sample("a").data
    store.lifetimes.lease(Sample("b").key, "me", 0)
    sweeper.sweep()
    assert _left(store) == ""


def test_what_is_in_use_counts_and_younger_ones_go_for_it(store: SampleStore) -> None:
    _put(store, "a", "b", "c", "d")
    store.lifetimes.lease(Sample("a").key, "me", 60)
    _sweeper(store, samples_max=2).sweep()
    assert _left(store) == "ad"


def test_leases(tmp_path: Path) -> None:
    store = SampleStore.open(tmp_path)
    _put(store, "a")
    key = Sample("a").key
    first = store.lifetimes.lease(key, "one", 60)
    second = store.lifetimes.lease(key, "two", 3600)
    assert store.lifetimes.standing(key).leased_until_unix_ns == second > first
    store.lifetimes.lease(key, "two", 0)
    assert store.lifetimes.standing(key).leased_until_unix_ns == first
    with pytest.raises(Leased):
        store.delete(key)
    crash(store)
    store = SampleStore.open(tmp_path)  # A lease outlives the server.
    with pytest.raises(Leased):
        store.delete(key)
    store.lifetimes.clock._source = lambda: first
    store.delete(key)
    assert tree(tmp_path) == {}
    with pytest.raises(SampleNotFound):
        store.lifetimes.lease(key, "one", 1)
    for holder, seconds in (("", 1), ("a/b", 1), ("one", -1), ("one", LEASE_S_MAX + 1), ("one", float("nan"))):
        with pytest.raises(BadParams):
            store.lifetimes.lease(key, holder, seconds)
    store.close()


@pytest.mark.files_only
def test_a_lease_that_is_granted_while_a_deletion_begins_holds(store: SampleStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """The deletion has looked at the sample, and the lease is written before anything is marked as being deleted."""
    Sample().put(store)
    submit = sqlite_of(store).submit

    def after_a_lease(*arguments: Any, **how: Any) -> Any:
        monkeypatch.undo()
        store.lifetimes.lease(Sample().key, "me", 60)
        return submit(*arguments, **how)

    monkeypatch.setattr(store._catalogue, "submit", after_a_lease)
    with pytest.raises(Leased):
        store.delete(Sample().key)
    assert read_all(store, Sample().key)[0] == Sample().data


@pytest.mark.files_only
def test_leases_have_a_limit_and_those_that_ended_do_not_count(store: SampleStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slotstream.store.upkeep.lifetimes.LEASES_MAX", 2)
    _put(store, "a")
    until = [store.lifetimes.lease(Sample("a").key, holder, 60) for holder in ("one", "two", "one")]
    with pytest.raises(StoreFull):
        store.lifetimes.lease(Sample("a").key, "three", 60)
    store.lifetimes.clock._source = lambda: max(until)
    store.lifetimes.lease(Sample("a").key, "three", 60)


@pytest.mark.files_only
@pytest.mark.parametrize("refused", ["unknown", "full"])
def test_a_lease_that_is_refused_leaves_what_shares_its_transaction_alone(
    store: SampleStore, monkeypatch: pytest.MonkeyPatch, refused: str
) -> None:
    """A transaction that fails is rolled back, and each of its operations begins again in one of its own."""
    monkeypatch.setattr("slotstream.store.upkeep.lifetimes.LEASES_MAX", 0 if refused == "full" else 10)
    _put(store, "a")
    busy, go_on = threading.Event(), threading.Event()
    runs: list[str] = []

    def block(db: sqlite3.Connection) -> None:
        busy.set()
        assert go_on.wait(WAIT_S)

    catalogue = sqlite_of(store)
    catalogue.submit(block)
    assert busy.wait(WAIT_S)  # What is asked from here on is in the next transaction.
    before = catalogue.submit(lambda db: runs.append("before"))
    with ThreadPoolExecutor(1) as pool:
        leasing = pool.submit(store.lifetimes.lease, Sample("a" if refused == "full" else "nobody").key, "me", 60)
        wait_until(lambda: len(catalogue._operations) == 2)
        after = catalogue.submit(lambda db: runs.append("after"))
        go_on.set()
        with pytest.raises(StoreFull if refused == "full" else SampleNotFound):
            leasing.result(WAIT_S)
    assert (before.result(WAIT_S), after.result(WAIT_S)) == (None, None)
    assert runs == ["before", "after"]


def test_a_sweep_stops_at_its_budget_and_goes_on(store: SampleStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweeping, "_PAGE", 2)
    monkeypatch.setattr(sweeping, "_BUDGET", 4)
    _put(store, *"abcdefg")
    sweeper = _sweeper(store, samples_max=1)
    for name in "abc":  # However many are in use in front, a sweep gets past them.
        store.lifetimes.lease(Sample(name).key, "me", 60)
    done = [sweeper.sweep() for _ in range(2)]
    assert [(sum(d.samples.values()), d.unfinished) for d in done] == [(4, True), (0, False)]
    assert _left(store) == "abc"


def test_a_deletion_that_the_disk_refused_is_hidden_and_tried_again(tmp_path: Path) -> None:
    files = FaultyFiles()
    store = SampleStore.open(tmp_path, files=files)
    _put(store, "a", "b")
    files.faults = {"unlink": (files.calls.count("unlink") + 1, BROKEN)}
    sweeper = _sweeper(store, samples_max=1)
    sweeper.sweep()
    assert store.stat(Sample("a").key) is None
    assert Sample("a").path(store).exists()
    sweeper.sweep()
    assert _left(store) == "b"
    store.close()


def test_a_sample_that_was_replaced_since_it_was_chosen_stays(store: SampleStore) -> None:
    _put(store, "a")
    chosen = store.lifetimes.candidates(Queue.OLDEST, "default", (-1, -1), 10)
    store.delete(Sample("a").key)
    replace(Sample("a"), seed=1).put(store)
    assert store.lifetimes.delete_unused(chosen) == []
    assert read_all(store, Sample("a").key)[0] == replace(Sample("a"), seed=1).data


# The index.


@pytest.mark.files_only
@pytest.mark.parametrize("queue", Queue, ids=lambda queue: queue.name)
def test_candidates_come_from_an_index_whatever_the_size(store: SampleStore, queue: Queue) -> None:
    """A page of candidates costs the same beside a million samples: no scan of the table, no sort."""
    db = sqlite3.connect(store.data_dir / "catalog.sqlite")
    statements: list[str] = []
    db.set_trace_callback(statements.append)
    retention_sql.candidates(db, queue, "default", (0, 0), 10)
    (statement,) = [one for one in statements if one.startswith("SELECT")]
    plan = [row[3] for row in db.execute(f"EXPLAIN QUERY PLAN {statement}")]
    assert len(plan) == 1
    assert plan[0].startswith(f"SEARCH samples USING INDEX {retention_sql.QUEUES[queue][0]} (namespace=?"), plan
    db.close()


def test_a_catalogue_of_the_first_version_is_brought_forward(tmp_path: Path) -> None:
    store = SampleStore.open(tmp_path)
    _put(store, "a", "b")
    _put(store, "c", namespace="other")
    Sample("bad").send(store).abort(Failure("ABORTED", "no"))
    usages = list(store.lifetimes.every_usage())
    store.close()
    _downgrade(tmp_path / "catalog.sqlite")
    store = SampleStore.open(tmp_path)
    assert list(store.lifetimes.every_usage()) == usages
    assert [u.samples for u in usages] == [2, 1]
    assert usages[0].failed == 1
    store.lifetimes.ack(Sample("a").key)
    _sweeper(store, delete_on_ack=True).sweep()
    assert _left(store) == "b"
    store.close()


def _downgrade(path: Path) -> None:
    """What the first version would have left there: the same rows in its own tables."""
    from slotstream.store.catalogue.sqlite.sql import _COLUMNS, SCHEMA

    db = sqlite3.connect(path)
    rows = db.execute(f"SELECT {_COLUMNS} FROM samples").fetchall()
    meta = db.execute("SELECT * FROM meta").fetchall()
    db.close()
    path.unlink()
    path.with_name(path.name + ".seal").unlink()
    db = sqlite3.connect(path)
    db.executescript(SCHEMA)
    db.executemany(f"INSERT INTO samples ({_COLUMNS}) VALUES ({', '.join('?' * len(rows[0]))})", rows)
    db.executemany("INSERT INTO meta VALUES (?, ?)", meta)
    db.execute("PRAGMA user_version = 1")
    db.commit()
    db.close()


# The clock.


def test_stamps_never_go_back_not_even_over_a_restart(tmp_path: Path) -> None:
    store = SampleStore.open(tmp_path)
    _put(store, "a")
    a = store.stat(Sample("a").key)
    assert a is not None
    for end in (SampleStore.close, crash):
        end(store)
        store = SampleStore.open(tmp_path)
        store.lifetimes.clock._source = lambda: 5  # Somebody set the clock back to 1970.
        name = f"after-{end.__name__}"
        _put(store, name)
        later = store.stat(Sample(name).key)
        assert later is not None
        assert later.committed_unix_ns > later.created_unix_ns > a.committed_unix_ns
        a = later
    # The oldest is still the one that came first, and nothing expired.
    _sweeper(store, samples_max=1).sweep()
    assert [c.key.sample_id for c in store.lifetimes.candidates(Queue.OLDEST, "default", (-1, -1), 9)] == ["after-crash"]
    assert _sweeper(store, age_s_max=3600).sweep().samples == {}
    store.close()


def test_a_clock_set_back_does_not_disturb_pages(store: SampleStore) -> None:
    _put(store, "a", "b", "c")
    page, token = store.list_page(ListQuery(page_size=2))
    store.lifetimes.clock._source = lambda: 5
    _put(store, "d")
    rest, _ = store.list_page(ListQuery(page_size=2, page_token=token))
    assert [r.sample_id for r in page + rest] == ["c", "b", "a"]
    assert [r.sample_id for r in store.list_page(ListQuery())[0]] == ["d", "c", "b", "a"]


def test_a_clock_is_strictly_increasing() -> None:
    times = iter([10, 10, 3, 12])
    clock = Clock(5, lambda: next(times))
    assert [clock.stamp() for _ in range(4)] == [10, 11, 12, 13]


def test_totals_by_namespace_follow_every_change(tmp_path: Path) -> None:
    catalogue = SqliteCatalogue(tmp_path / "c.sqlite")
    from store.catalogues import RECORDS

    for record in RECORDS:
        catalogue.commit(record)
        catalogue.put_damaged(record, "gone") if record.num_tokens % 7 == 3 else None
    catalogue.commit(replace(RECORDS[10], state=State.COMMITTED)).result()

    def counted(db: sqlite3.Connection) -> list[Usage]:
        rows = db.execute(
            "SELECT namespace, sum(state = 'committed'), sum(iif(state = 'committed', file_bytes, 0)), sum(state = 'failed') "
            "FROM samples GROUP BY namespace ORDER BY namespace"
        )
        return [Usage(*row) for row in rows]

    kept: Callable[[sqlite3.Connection], list[Usage]] = lambda db: retention_sql.usages(db, "", 10)  # noqa: E731
    assert catalogue.ask(kept) == catalogue.ask(counted)
    for record in RECORDS[::2]:
        assert catalogue.mark_deleting(record) == 0
    catalogue.drop_deleting([record.key for record in RECORDS[::4]])
    assert catalogue.ask(kept) == [u for u in catalogue.ask(counted) if u.samples or u.failed]
    catalogue.close()


@pytest.mark.files_only
def test_a_lease_that_comes_between_a_deletions_look_and_its_mark_holds(
    store: SampleStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    Sample("a").put(store)
    submit = sqlite_of(store).submit

    def later(operation: Callable[..., Any], **options: bool) -> Future[Any]:
        monkeypatch.undo()
        store.lifetimes.lease(Sample("a").key, "me", 60)
        return submit(operation, **options)

    monkeypatch.setattr(store._catalogue, "submit", later)
    with pytest.raises(Leased):
        store.delete(Sample("a").key)
    assert read_all(store, Sample("a").key)[0] == Sample("a").data


@pytest.mark.files_only
def test_a_sample_that_is_deleted_while_a_sweep_looks_is_no_damage(store: SampleStore, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in "abc":
        Sample(name).put(store)
    look = retention_sql._candidate

    def later(*arguments: Any) -> Candidate:
        monkeypatch.undo()
        store.delete(Sample("a").key)
        return look(*arguments)

    monkeypatch.setattr(retention_sql, "_candidate", later)
    _sweeper(store, samples_max=1).sweep()
    assert sqlite_of(store).rebuilds == 0
    assert [r.sample_id for r in store.list_page(ListQuery())[0]] == ["c"]
