"""Rules seen before they act: the table is what is then deleted; rules that changed wait, and empty no namespace unasked."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from store.store_kit import Sample, tree
from support.sqlite_of import sqlite_of

from slotstream.store.directory.forecasting import preview_directory
from slotstream.store.disk.files import Files
from slotstream.store.records import Failure, SampleKey
from slotstream.store.samples import SampleStore
from slotstream.store.upkeep import new_rules
from slotstream.store.upkeep.new_rules import NewRules, digest_of
from slotstream.store.upkeep.preview import Forecast
from slotstream.store.upkeep.retention import UNLIMITED, Policy, Reason, Rule
from slotstream.store.upkeep.sweeping import Sweeper
from slotstream.wire.errors import ConfigError

S = 10**9
BEGIN = 1_700_000_000 * S
NOTHING = Policy(default=Rule(failed_age_s_max=UNLIMITED))  # Not even failed samples are forgotten.


class _Disk(Files):
    """Some space beside the files that are there."""

    total = 1 << 30

    def free_bytes(self, path: Path) -> int:
        return self.total - sum(tree(path).values())


@dataclass
class World:
    """A store under a clock that the test sets, with samples a second apart in three namespaces."""

    directory: Path
    now: int = BEGIN
    elapsed: int = 0

    def __post_init__(self) -> None:
        self.files = _Disk()
        self.open()

    def open(self) -> None:
        self.store = SampleStore.open(
            self.directory, free_bytes_min=0, files=self.files, wall=lambda: self.now, elapsed=lambda: self.elapsed
        )

    def sleep(self, seconds: float) -> None:
        self.now += round(seconds * S)
        self.elapsed += round(seconds * S)

    def fill(self) -> None:
        for number in range(24):
            namespace = ("a", "b", "c")[number % 3]
            self.sleep(1)
            Sample(f"s{number}", rows=5 + number, namespace=namespace).put(self.store)
        for number in range(4):
            self.sleep(1)
            Sample(f"f{number}", namespace="a").send(self.store).abort(Failure("ABORTED", "no"))
        for number in (1, 4, 10):
            self.read(SampleKey("b", f"s{number}"), times=number)
        for number in (0, 6, 12, 15):
            self.store.lifetimes.ack(SampleKey("a", f"s{number}"))
        self.store.lifetimes.lease(SampleKey("a", "s6"), "me", 3600)
        self.store.lifetimes.lease(SampleKey("c", "s2"), "me", 3600)

    def read(self, key: SampleKey, times: int) -> None:
        record = self.store.stat(key)
        assert record is not None
        for _ in range(times):
            self.store.lifetimes.count_reads([(key, record.committed_unix_ns)]).result()

    def rules(self, policy: Policy, grace_s: float = 60) -> NewRules:
        return NewRules(self.store.lifetimes, policy, self.store.free_bytes, grace_s)

    def restart(self) -> None:
        self.store.close()
        self.open()

    def left(self) -> int:
        return sum(usage.samples for usage in self.store.lifetimes.every_usage())


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path / "data")
    made.fill()
    yield made
    made.store.close()


def _policies(size: int) -> dict[str, Policy]:
    every = {
        "age_s_max": Rule(age_s_max=12),
        "bytes_max": Rule(bytes_max=3 * size),
        "samples_max": Rule(samples_max=5),
        "delete_after_reads": Rule(delete_after_reads=4),
        "delete_on_ack": Rule(delete_on_ack=True),
        "failed_age_s_max": Rule(failed_age_s_max=2),
        "all": Rule(age_s_max=20, samples_max=6, bytes_max=5 * size, delete_on_ack=True, failed_age_s_max=0),
    }
    policies = {name: Policy(default=rule) for name, rule in every.items()}
    one = Rule(delete_on_ack=True, samples_max=6, delete_when_full=True)
    other = Rule(delete_read_when_full=True)
    policies["delete_when_full"] = Policy(namespaces={"a": one, "b": other, "c": one}, free_bytes_target=1000)
    policies["no rule"] = Policy()
    return policies


@pytest.mark.parametrize("name", _policies(1))
@pytest.mark.parametrize("where", ["store", "directory"])
def test_what_is_foreseen_is_what_is_then_deleted(world: World, name: str, where: str) -> None:
    size = sum(usage.bytes for usage in world.store.lifetimes.every_usage()) // 24
    policy = _policies(size)[name]
    world.files.total = sum(tree(world.directory).values()) + 1000 - 14 * size
    before = tree(world.directory)
    with world.store.reader(SampleKey("a", "s12")) as reader:  # In use: it stays, and so do leased ones.
        if where == "directory":
            # A directory does not say who reads there.
            found = _directory_preview(world, policy)
            reader.close()
        else:
            found = world.rules(policy).foreseen().forecasts
        assert tree(world.directory) == before
        sweeper = Sweeper(world.store.lifetimes, policy, world.store.free_bytes)
        swept = sweeper.sweep()
        made = sweeper.make_room()
    samples, nbytes = swept.samples_of + made.samples_of, swept.bytes_of + made.bytes_of
    reasons = {
        "age_s_max": Reason.AGE,
        "bytes_max": Reason.BYTES,
        "samples_max": Reason.SAMPLES,
        "delete_after_reads": Reason.READS,
        "delete_on_ack": Reason.ACK,
        "failed_age_s_max": Reason.FAILED_AGE,
        "delete_when_full": Reason.FREE_SPACE,
        "delete_read_when_full": Reason.FREE_SPACE,
    }
    assert {(one.namespace, reasons[one.key]): one.samples for one in found} == dict(samples)
    assert {(one.namespace, reasons[one.key]): one.bytes for one in found if one.bytes} == dict(+nbytes)
    assert {one.key for one in found} >= ({name} if name in reasons else set())
    assert bool(found) == (name != "no rule")


def _directory_preview(world: World, policy: Policy) -> tuple[Forecast, ...]:
    files = Files.free_bytes
    try:
        Files.free_bytes = lambda self, path: world.store.free_bytes()  # type: ignore[method-assign]
        return preview_directory(world.directory, policy, lambda: world.now).forecasts
    finally:
        Files.free_bytes = files  # type: ignore[method-assign]


def test_a_directory_without_a_catalogue_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no catalogue"):
        preview_directory(tmp_path / "none", Policy())
    (tmp_path / "catalog.sqlite").write_bytes(b"nonsense" * 1000)
    with pytest.raises(ConfigError, match="cannot be read"):
        preview_directory(tmp_path, Policy())


def test_rules_that_changed_wait_and_then_act(world: World, caplog: pytest.LogCaptureFixture) -> None:
    world.rules(Policy()).look()
    policy = Policy(namespaces={"a": Rule(samples_max=6)})
    rules = world.rules(policy)
    assert not rules.look()
    assert (rules.in_force, rules.wait_s) == (NOTHING, 60)
    assert "in a by samples_max: 2 samples, of 8" in caplog.text
    world.sleep(59)
    assert not rules.look()
    assert rules.wait_s == 1
    world.sleep(1)
    assert rules.look()
    assert (rules.in_force, rules.held, rules.wait_s) == (policy, frozenset(), 0)
    world.restart()
    again = world.rules(policy)  # The same rules, after a restart: nothing to wait for.
    again.look()
    assert again.in_force == policy
    changed = world.rules(Policy(namespaces={"a": Rule(samples_max=5)}))
    changed.look()
    assert changed.in_force == NOTHING


def test_where_more_than_half_would_go_nothing_does_until_it_is_accepted(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    world.rules(Policy()).look()
    policy = Policy(namespaces={"a": Rule(samples_max=3, failed_age_s_max=1), "b": Rule(samples_max=4)})
    rules = world.rules(policy, grace_s=0)
    assert rules.look()
    assert rules.held == {"a"}  # 5 of 8; in b it is 4 of 8.
    assert "nothing is deleted there until" in caplog.text
    sweeper = Sweeper(world.store.lifetimes, rules.in_force, world.store.free_bytes)
    assert dict(sweeper.sweep().samples_of) == {("b", Reason.SAMPLES): 4}
    world.restart()
    again = world.rules(policy, grace_s=0)  # A restart accepts nothing.
    again.look()
    assert again.held == {"a"}
    assert again.accept(["b"]) == frozenset()
    assert again.accept(["a", "b"]) == {"a"}
    assert again.in_force == policy
    world.restart()
    accepted = world.rules(policy, grace_s=0)
    accepted.look()
    assert (accepted.held, accepted.in_force) == (frozenset(), policy)


@pytest.mark.parametrize("seconds", [-3, 2, 30])
def test_a_short_age_deletes_nothing_unasked_however_young_the_samples_are(world: World, seconds: int) -> None:
    """Those that are not too old yet would all be in a moment."""
    world.rules(Policy()).look()
    world.sleep(max(0, seconds))
    rules = world.rules(Policy(default=Rule(age_s_max=5)), grace_s=0)
    rules.look()
    assert rules.held == {"a", "b", "c"}
    world.sleep(1000)
    assert Sweeper(world.store.lifetimes, rules.in_force, world.store.free_bytes).sweep().samples == {}
    assert world.left() == 24
    assert rules.accept() == {"a", "b", "c"}
    Sweeper(world.store.lifetimes, rules.in_force, world.store.free_bytes).sweep()
    assert world.left() == 2  # Both are leased.


def test_accepted_while_they_wait_they_act_at_once(world: World) -> None:
    policy = Policy(default=Rule(samples_max=1))
    rules = world.rules(policy)
    rules.look()
    assert rules.accept(["a"]) == frozenset()  # One namespace's admin does not shorten the others' time.
    assert rules.in_force == NOTHING
    world.sleep(60)
    rules.look()
    assert rules.held == {"b", "c"}
    other = world.rules(Policy(default=Rule(samples_max=2)))
    other.look()
    assert other.accept() == frozenset()
    assert other.in_force == other.policy


@pytest.mark.parametrize(
    "policy", [Policy(), Policy(default=Rule(samples_max=100)), Policy(namespaces={"z": Rule(samples_max=0)})], ids=str
)
def test_rules_that_would_delete_nothing_do_not_wait(world: World, policy: Policy) -> None:
    rules = world.rules(policy)
    rules.look()
    assert rules.in_force == policy


def test_a_new_store_does_not_wait(tmp_path: Path) -> None:
    world = World(tmp_path)
    policy = Policy(default=Rule(age_s_max=1))
    world.rules(policy).look()
    world.fill()
    world.restart()
    rules = world.rules(policy)
    rules.look()
    assert rules.in_force == policy
    world.store.close()


def test_what_the_catalogue_did_not_take_is_remembered_once_it_does(world: World) -> None:
    """A disk that fails for a moment, just then, makes no rules new at the next start."""
    policy = Policy(default=Rule(samples_max=1))
    rules = world.rules(policy)
    with _remembering_nothing(world.store):
        rules.look()
        rules.accept()
    assert rules.in_force == policy
    assert world.store.lifetimes.remembered(new_rules._META) is None
    assert not rules.look()
    world.restart()
    again = world.rules(policy)
    again.look()
    assert (again.wait_s, again.in_force) == (0, policy)


@contextmanager
def _remembering_nothing(store: SampleStore) -> Iterator[None]:
    refuse = "CREATE TEMP TRIGGER refuse BEFORE INSERT ON main.meta BEGIN SELECT RAISE(FAIL, 'no'); END"
    sqlite_of(store).submit(lambda db: db.execute(refuse).fetchone()).result()
    yield
    sqlite_of(store).submit(lambda db: db.execute("DROP TRIGGER refuse").fetchone()).result()


def test_a_clock_in_doubt_accepts_no_rules(world: World) -> None:
    """It holds back what they would delete by age, and that may end: it is counted all the same."""
    world.rules(Policy()).look()
    world.now += 20 * 86400 * S
    rules = world.rules(Policy(default=Rule(age_s_max=86400)), grace_s=0)
    world.store.lifetimes.watch.look()
    assert rules.foreseen().age_held == {"a", "b", "c"}
    rules.look()
    assert rules.held == {"a", "b", "c"}


@pytest.mark.parametrize("remembered", ["", "nonsense", '["x"]', '["x", 5]', "7"])
def test_what_was_remembered_wrongly_is_a_change(world: World, remembered: str) -> None:
    world.store.lifetimes.remember(new_rules._META, remembered)
    rules = world.rules(Policy(default=Rule(samples_max=1)))
    rules.look()
    assert rules.wait_s == 60


def test_the_digest_is_of_what_the_rules_say(tmp_path: Path) -> None:
    def digest(text: str) -> str:
        return digest_of(Policy.from_text(text, "x"))

    base = digest("[default]\nage_s_max = 60\n[namespaces.a]\nbytes_max = 5")
    assert digest("# other words\nnamespaces = {a = {bytes_max = 5.0}}\n[default]\nage_s_max = 60.0") == base
    others: list[Callable[[], str]] = [
        lambda: digest("[default]\nage_s_max = 61\n[namespaces.a]\nbytes_max = 5"),
        lambda: digest("[default]\nage_s_max = 60\n[namespaces.b]\nbytes_max = 5"),
        lambda: digest("[default]\nage_s_max = 60\n[namespaces.a]\nbytes_max = 5\nage_s_max = inf"),
        lambda: digest(""),
    ]
    assert len({base, *(other() for other in others)}) == 5
