"""A few rounds of `make kills`, a short soak, and that their book-keeping finds what is wrong."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from accounts import lies, settle
from histories import run_histories
from kills import run_rounds
from ledger import HIDDEN, LAYER_IDS, NAMESPACE, ROW_BYTES, Ledger, Promise, Try, promises, row_data, token_ids
from pair import Pair
from register import Operation, cut_short, deleted_under_a_lease, explain
from soak import run_soak
from support.ingest_client import IngestClient
from support.server import ServerProcess
from support.synthetic import SyntheticSample


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("rounds", "spool"),
    [
        pytest.param(4, True, id="with a spool"),
        pytest.param(2, False, id="without"),
        pytest.param(12, True, id="with a spool, longer", marks=pytest.mark.extended),
        pytest.param(12, False, id="without, longer", marks=pytest.mark.extended),
    ],
)
def test_a_few_kill_rounds(rounds: int, spool: bool) -> None:
    found = run_rounds(rounds, seed=1, spool=spool)
    assert not found.wrong, found
    assert found.cases["committed, server has committed"] > 0


@pytest.mark.timeout(600)
@pytest.mark.parametrize("rounds", [2, pytest.param(12, marks=pytest.mark.extended)])
def test_a_few_kill_rounds_with_workers(rounds: int) -> None:
    found = run_rounds(rounds, seed=5, workers=2, streams=1)
    assert not found.wrong, found
    assert found.cases["rounds: SIGKILL of a worker"] > 0
    assert found.cases["rounds: SIGKILL of the server"] > 0
    assert found.cases["committed, server has committed"] > 0


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("rounds", "spool"),
    [
        pytest.param(4, True, id="with a spool"),
        pytest.param(24, True, id="with a spool, longer", marks=pytest.mark.extended),
        pytest.param(24, False, id="without, longer", marks=pytest.mark.extended),
    ],
)
def test_a_few_kill_rounds_with_four_streams(rounds: int, spool: bool) -> None:
    """Each of the server's processes has one of each sender's; those over gRPC have a process on their side too."""
    found = run_rounds(rounds, seed=180, spool=spool, workers=4, streams=4)
    assert not found.wrong, found
    assert found.cases["committed, server has committed"] > 0
    assert found.cases["rounds: SIGKILL of a stream's process"] > 0


@pytest.mark.postgres
@pytest.mark.objects
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("rounds", "spool"),
    [
        pytest.param(7, True, id="with a spool"),
        pytest.param(60, True, id="with a spool, longer", marks=pytest.mark.extended),
        pytest.param(40, False, id="without, longer", marks=pytest.mark.extended),
    ],
)
def test_a_few_kill_rounds_of_two_servers_with_a_bucket(rounds: int, spool: bool) -> None:
    with Pair() as pair:
        found = run_rounds(rounds, seed=7, spool=spool, pair=pair)
    assert not found.wrong, found
    assert found.cases["committed, server has committed"] > 0
    for struck in ("of the object store", "of the database", "of the server", "of the sender"):
        assert any(case.startswith("rounds: ") and case.endswith(struck) for case in found.cases), struck


def test_what_the_server_may_not_say() -> None:
    """A failure of what it stored, and one that is final of what could be sent again."""

    def wrong(*said: str, committed: bool = True) -> list[str]:
        return list(lies([Try(at, one) for at, one in enumerate(said)], "s", committed=committed))

    assert wrong("", "duplicate") == wrong("STORE_FULL", "committed") == wrong("STORE_FULL", "", "duplicate") == []
    assert wrong("STORE_FULL", committed=False) == []
    assert "stored by a try" in wrong("INTERRUPTED", "duplicate")[0]
    assert "committed twice" in wrong("committed", "committed")[0]
    assert "it is stored" in wrong("INTERRUPTED", "STORE_FULL")[0]
    assert "which is final" in wrong("INTERNAL", committed=False)[0]
    assert list(lies([Try(0, "SLOT_MISMATCH", gave_up="SLOT_MISMATCH")], "s", committed=False)) == []


@pytest.mark.timeout(600)
def test_a_short_history() -> None:
    run = run_histories(8.0, seed=1, streams=4)
    assert not run.wrong, run.wrong[0]
    assert run.done["put committed"] > 0
    assert run.done["sent again over another stream"] > 0
    for strike in ("primary killed", "clock shifted ahead", "clock shifted behind", "disk full", "catalogue's bit flipped"):
        assert run.done[strike] > 0, strike
    assert run.done["disk full: writes refused"] > 0


def _told(*operations: tuple[str, str, str, float, float]) -> list[Operation]:
    return [Operation(0, kind, answer, called, returned, value) for kind, answer, value, called, returned in operations]


@pytest.mark.parametrize(
    ("history", "can_be"),
    [
        pytest.param(_told(("put", "committed", "a", 0, 1), ("read", "is", "a", 2, 3)), True, id="read after put"),
        pytest.param(_told(("put", "committed", "a", 0, 1), ("read", "is", "", 2, 3)), False, id="a committed sample is lost"),
        pytest.param(_told(("put", "committed", "a", 0, 4), ("read", "is", "", 2, 3)), True, id="read while it is put"),
        pytest.param(_told(("put", "failed", "a", 0, 1), ("read", "is", "a", 2, 3)), False, id="it failed, and is there"),
        pytest.param(_told(("put", "unknown", "a", 0, 1), ("read", "is", "a", 9, 10)), True, id="nobody knew, and it is there"),
        pytest.param(
            _told(("put", "unknown", "a", 0, 1), ("read", "is", "a", 2, 3), ("read", "is", "", 4, 5)),
            False,
            id="and then not",
        ),
        pytest.param(
            _told(("put", "failed", "a", 0, 1), ("put", "duplicate", "a", 2, 3)), False, id="it failed, and was stored"
        ),
        pytest.param(_told(("put", "committed", "a", 0, 3), ("put", "committed", "b", 1, 2)), False, id="two contents at once"),
        pytest.param(_told(("put", "committed", "a", 0, 3), ("put", "exists", "b", 1, 2)), True, id="one of them is refused"),
        pytest.param(
            _told(("put", "committed", "a", 0, 1), ("delete", "deleted", "", 2, 3), ("read", "is", "a", 4, 5)),
            False,
            id="a deleted sample is back",
        ),
        pytest.param(_told(("put", "committed", "a", 0, 1), ("delete", "nothing", "", 2, 3)), False, id="it is not found"),
        pytest.param(
            _told(("put", "full", "a", 0, 1), ("read", "is", "", 2, 3), ("put", "committed", "a", 4, 5)),
            True,
            id="no room, then some",
        ),
        pytest.param(_told(("put", "full", "a", 0, 1), ("read", "is", "a", 2, 3)), False, id="no room, and it is there"),
        pytest.param(
            _told(("put", "committed", "a", 0, 1), ("read", "damaged", "", 2, 3)), False, id="damaged, and no bit flipped"
        ),
        *(
            pytest.param(
                _told(("put", "committed", "a", 0, 1), ("flip", "flipped", "", 2, 3), *after), can_be, id=f"rotten: {name}"
            )
            for name, can_be, after in (
                ("refused, then put aside", True, [("read", "damaged", "", 4, 5), ("read", "is", "", 6, 7)]),
                ("replaced by what is sent again", True, [("put", "committed", "a", 4, 5), ("read", "is", "a", 6, 7)]),
                ("replaced by another one", True, [("put", "committed", "b", 4, 5), ("read", "is", "b", 6, 7)]),
                ("in the way of another one", True, [("put", "exists", "b", 4, 5), ("read", "damaged", "", 6, 7)]),
                ("what is sent again fails", True, [("put", "full", "a", 4, 5), ("read", "is", "", 6, 7)]),
                ("deleted", True, [("delete", "deleted", "", 4, 5), ("put", "committed", "b", 6, 7)]),
                ("served", False, [("read", "is", "a", 4, 5)]),
                ("said to be stored", False, [("put", "duplicate", "a", 4, 5)]),
                ("put aside, and served", False, [("read", "is", "", 4, 5), ("read", "is", "a", 6, 7)]),
                ("replaced, and refused", False, [("put", "committed", "a", 4, 5), ("read", "damaged", "", 6, 7)]),
            )
        ),
        pytest.param(
            _told(("put", "committed", "a", 0, 1), ("flip", "perhaps", "", 2, 3), ("read", "is", "a", 4, 5)),
            True,
            id="perhaps rotten",
        ),
    ],
)
def test_which_histories_can_be(history: list[Operation], can_be: bool) -> None:
    assert explain(history) is can_be


def test_a_deletion_under_a_lease_is_found() -> None:
    deletion = _told(("delete", "deleted", "", 2, 3))
    assert deleted_under_a_lease(deletion, [(1, 4)])
    assert not deleted_under_a_lease(deletion, [(2.5, 4), (0, 1.5)])


def test_a_lease_that_may_have_ended_early_is_cut_short() -> None:
    """Leases of 2 s, asked for at 0 and at 5, and a clock that leapt at 1."""
    assert cut_short([(0.5, 2), (5.5, 7)], 2, [(1, 1.1)]) == [(0.5, 1), (5.5, 7)]
    assert cut_short([(1.5, 3)], 2, [(0.9, 1.1)]) == [(1.5, 0.9)]  # It leapt while the lease was being given: nothing holds.


@pytest.mark.extended
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("seed", "streams"), [(2, 1), (3, 1), (4, 4)])
def test_a_longer_history(seed: int, streams: int) -> None:
    run = run_histories(120.0, seed, streams)
    assert not run.wrong, run.wrong[0]


@pytest.mark.postgres
@pytest.mark.objects
@pytest.mark.extended
@pytest.mark.timeout(900)
def test_a_history_of_two_servers_with_a_bucket() -> None:
    with Pair() as pair:
        run = run_histories(120.0, seed=5, pair=pair)
    assert not run.wrong, run.wrong[0]
    assert run.done["put committed"] > 0
    for strike in ("server killed", "server stopped", "object's bit flipped"):
        assert run.done[strike] > 0, strike


@pytest.mark.extended
@pytest.mark.timeout(600)
@pytest.mark.parametrize("streams", [1, 4])
def test_a_short_soak(streams: int) -> None:
    soak = run_soak(30.0, seed=1, streams=streams)
    assert not soak.problems, soak.table()


@dataclass(frozen=True)
class _Sample(SyntheticSample):
    """A sample as the senders send it; `other`: with another one's rows."""

    namespace: str = NAMESPACE
    layer_ids: tuple[int, ...] = LAYER_IDS
    hidden_size: int = HIDDEN
    num_tokens: int = 10
    other: bool = False

    @property
    def token_ids(self) -> list[int]:
        return token_ids(self.sample_id, self.num_tokens)

    def rows(self, start: int = 0, stop: int | None = None, layers: tuple[int, ...] | None = None) -> bytes:
        data = row_data("other" if self.other else self.sample_id, self.num_tokens)
        return data[start * ROW_BYTES : (self.num_tokens if stop is None else stop) * ROW_BYTES]


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server with a right sample, a wrong one, a failed one, and one that is still arriving."""
    with ServerProcess(tmp_path_factory.mktemp("accounts")) as server, IngestClient(server.address) as peer:
        peer.store(_Sample("right"), _Sample("wrong", other=True))
        peer.fail(_Sample("failed"))
        peer.send_rows(peer.open(_Sample("arriving")), _Sample("arriving"), 0, 5)
        yield server.address


_SOUND = (Promise("right", 10, "committed"), Promise("failed", 10, "failed", "SLOT_MISMATCH"))
# The arriving and the wrong sample are there for the cases that are about them.
_EXPECTED = {"arriving": "it is still arriving", "wrong": "its rows or token ids are not those that were sent"}


@pytest.mark.parametrize(
    ("promise", "spool", "verdict"),
    [
        pytest.param(Promise("gone", 10, "committed"), False, "it is not there", id="a committed sample is lost"),
        pytest.param(Promise("gone", 10, "failed", "INTERRUPTED"), False, "", id="a failure while the server was away"),
        pytest.param(
            Promise("gone", 10, "failed", "INTERRUPTED"), True, "never heard of its failure", id="with a spool, it is told"
        ),
        pytest.param(Promise("gone", 10, sender_end="killed"), True, "", id="killed before it could say a word"),
        pytest.param(Promise("gone", 10, sender_end="closed"), False, "", id="told to end while the server was away"),
        pytest.param(
            Promise("gone", 10, sender_end="closed"), True, "never heard of its failure", id="with a spool, its heir tells"
        ),
        pytest.param(Promise("gone", 10), False, "nothing was ever heard", id="no outcome, and its sender lived"),
        pytest.param(Promise("failed", 10, "committed"), False, "says that it failed", id="committed here, failed there"),
        pytest.param(Promise("failed", 10, sender_end="killed"), True, "", id="its sender was killed, and the server says so"),
        pytest.param(Promise("right", 10, "failed", "INTERRUPTED"), True, "", id="the answer was lost"),
        pytest.param(Promise("right", 11, "committed"), False, "are not those that were sent", id="a row is missing"),
    ],
)
def test_what_is_not_accounted_for(address: str, promise: Promise, spool: bool, verdict: str) -> None:
    others = [p for p in _SOUND if p.sample_id != promise.sample_id]
    others += [Promise("arriving", 10, sender_end="killed"), Promise("wrong", 10, "committed")]
    found = settle(address, [*others, promise], spool=spool)
    by_sample = {line.partition(" ")[0]: line for line in found.wrong}
    assert by_sample.keys() == {*_EXPECTED, *({promise.sample_id} if verdict else ())}
    for sample_id, said in _EXPECTED.items():
        assert said in by_sample[sample_id]
    assert verdict in by_sample.get(promise.sample_id, "")


def test_a_sample_that_nobody_promised(address: str) -> None:
    found = settle(address, _SOUND, spool=False)
    assert sorted(found.wrong) == ["arriving: nobody promised it", "wrong: nobody promised it"]


@pytest.mark.parametrize("script", ["kills", "histories", "soak"])
def test_each_starts_from_the_command_line(script: str) -> None:
    """As `make` starts it, in a process that has no more paths than a script has."""
    path = Path(__file__).with_name(f"{script}.py")
    ran = subprocess.run([sys.executable, path, "--help"], capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 0, ran.stderr


def test_a_ledger_tells_killed_senders_from_those_that_ended(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    ledger = Ledger(path)
    for sample_id, end in (("a", ""), ("b", "closed"), ("c", "")):
        ledger.write("started")
        ledger.write("promised", id=sample_id, rows=1)
        ledger.write("promised", id=sample_id + "2", rows=2)
        ledger.write("ended", id=sample_id + "2", outcome="failed", code="ABORTED")
        if end:
            ledger.write(end)
    found = {promise.sample_id: (promise.outcome, promise.sender_end) for promise in promises(path)}
    assert {sample_id: found[sample_id] for sample_id in "abc"} == {
        "a": ("", "killed"),
        "b": ("", "closed"),
        "c": ("", "killed"),
    }
    assert found["a2"] == ("failed", "killed")
