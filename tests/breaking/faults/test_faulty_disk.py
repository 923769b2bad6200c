"""A real server on a disk that fails below Python and SQLite: nothing acknowledged is lost, nothing sound is condemned, and
nothing is refused for good that could be sent again.

CI runs PLANS; `make extended` runs every call with every error, on the samples' files and on the catalogue.
"""

from __future__ import annotations

import errno
import itertools
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from faults.faulty_disk import Call, FaultyDisk
from server.server_kit import COMMITTED, Peer, Reader, Sample, status
from support.server import ServerProcess, run_cli
from support.waiting import wait_until

from slotstream.connector.sending.verdicts import is_final
from slotstream.store.directory.looking import verify_directory
from slotstream.v1 import samples_pb2 as read_pb

FILES, ARRIVING, CATALOGUE = ".safetensors", ".partial", "catalog.sqlite"
COUNT = 8
# Of what the disk does to a read. DAMAGED and NOT_FOUND are not among them.
KNOWN_CODES = ("IO_ERROR", "STORE_FULL", "STORE_GONE")


@dataclass(frozen=True)
class Plan:
    calls: Call
    error: int = 0
    part: str = ""
    share: float = 1.0
    half: bool = False
    hang_s: float = 0.0

    def __str__(self) -> str:
        how = errno.errorcode[self.error] if self.error else "half" if self.half else "hangs"
        return f"{how} at {self.calls.name} of {self.part or 'all'}, {self.share:.0%}"


PLANS = [
    Plan(Call.READ, errno.EIO, FILES, 0.1),
    Plan(Call.READ, errno.ESTALE, FILES),
    Plan(Call.OPEN, errno.EIO, FILES, 0.3),
    Plan(Call.WRITE, errno.ENOSPC, ARRIVING, 0.2),
    Plan(Call.WRITE, errno.EROFS, ARRIVING),
    Plan(Call.ALLOCATE, errno.EDQUOT, ARRIVING, 0.5),
    Plan(Call.SYNC, errno.EIO, ARRIVING, 0.5),
    Plan(Call.RENAME, errno.EIO, ARRIVING, 0.5),
    Plan(Call.UNLINK, errno.EIO),
    Plan(Call.WRITE, errno.ENOSPC, CATALOGUE, 0.3),
    Plan(Call.WRITE, errno.EIO, CATALOGUE),
    Plan(Call.READ, errno.EIO, CATALOGUE, 0.3),
    Plan(Call.SYNC, errno.EIO, CATALOGUE),
    Plan(Call.READ | Call.WRITE, half=True),
    Plan(Call.SYNC, hang_s=0.1),
    Plan(Call.OPEN | Call.READ | Call.WRITE | Call.SYNC | Call.RENAME | Call.UNLINK, errno.EIO, "", 0.05),
]
EVERYTHING = [
    Plan(call, error, part, share)
    for call, error, part, share in itertools.product(
        Call,
        (errno.EIO, errno.ESTALE, errno.ENOSPC, errno.EDQUOT, errno.EROFS),
        ("", CATALOGUE),
        (0.2, 1.0),
    )
]


class Trial:
    """One server on a faulty disk, and what it acknowledged."""

    def __init__(self, directory: Path, stack: ExitStack) -> None:
        directory.mkdir(exist_ok=True)
        self.data_dir = directory / "data"
        self._stack = stack
        self.disk = FaultyDisk(directory / "plan", self.data_dir)
        self.stored: dict[str, Sample] = {}
        self.server = self._start(self.disk.environment)

    def _start(self, environment: dict[str, str]) -> ServerProcess:
        return self._stack.enter_context(ServerProcess(self.data_dir, "--transport", "grpc", environment=environment))

    def reader(self) -> Reader:
        return self._stack.enter_context(Reader(self.server.address))

    def send(self, names: list[str]) -> list[str]:
        """Sends these; which of them were committed. A stream that breaks is opened again."""
        committed = []
        for name in names:
            sample = Sample(name, seed=len(name) + sum(map(ord, name)))
            try:
                with Peer(self.server.address, timeout_s=30.0) as peer:
                    peer.say(sample.open(1), sample.chunk(1, 1, 0, 20), sample.chunk(1, 2, 20, 40), sample.commit(1))
                    reply = peer.hear_until("failed", "committed")
            except (grpc.RpcError, StopIteration):
                continue
            if reply.WhichOneof("kind") == "failed":
                assert not is_final(reply.failed.code), reply.failed
            else:
                self.stored[name] = sample
                committed.append(name)
        return committed

    def read_and_delete(self) -> None:
        """While the disk fails: what is read is right, or there is a code for why not; a deletion that is answered is done."""
        for name, sample in list(self.stored.items()):
            assert self._read(name) in (sample.data, *KNOWN_CODES)
        gone = next(iter(self.stored))
        sample = self.stored.pop(gone)
        try:
            self.reader().delete(read_pb.DeleteRequest(sample_id=gone))
            self.deleted = gone
        except grpc.RpcError:  # It is done, or it is not; from now on it stays so.
            self.disk.pause()
            found = self._read(gone)
            assert found in (sample.data, "NOT_FOUND")
            if found == sample.data:
                self.stored[gone] = sample

    def _read(self, name: str) -> bytes | str:
        """The rows of a sample, or the code that says why there are none."""
        try:
            rows: bytes = self.reader().read(name)[1]
            return rows
        except grpc.RpcError as error:
            return status(error)[1]

    deleted = ""

    def check(self) -> None:
        """The disk works again: everything acknowledged is there and sound, and the server takes samples as before."""
        reader = self.reader()
        for name, sample in self.stored.items():
            assert reader.read(name)[1] == sample.data, name
        verdicts = {v.sample_id: v.damage for v in reader.verify() if v.damage != "FOREIGN"}
        assert verdicts.keys() >= self.stored.keys()
        assert set(verdicts.values()) == {""}
        assert not (self.data_dir / ".quarantine").exists()
        if self.deleted:
            assert reader.refused(lambda: reader.stat(read_pb.StatRequest(sample_id=self.deleted)))[1] == "NOT_FOUND"

    def kill_and_restart(self) -> None:
        self.server.stop(signal.SIGKILL)
        self.server = self._start({})


@pytest.fixture
def trial(tmp_path: Path) -> Iterator[Trial]:
    with ExitStack() as stack:
        yield Trial(tmp_path, stack)


def _run(trial: Trial, plan: Plan) -> None:
    assert len(trial.send([f"before{n}" for n in range(COUNT)])) == COUNT
    trial.disk.arm(plan.calls, plan.error, share=plan.share, part=plan.part, half=plan.half, hang_s=plan.hang_s)
    names = [f"during{n}" for n in range(COUNT)]
    committed = trial.send(names)
    trial.read_and_delete()
    hits = trial.disk.disarm()
    if plan in PLANS:
        assert hits, "the plan met nothing"
    trial.check()
    # What was not committed is welcome now.
    again = [name for name in names if name not in committed]
    assert trial.send(again) == again
    trial.check()
    trial.kill_and_restart()
    trial.check()
    assert trial.reader().state("during0")[0] == COMMITTED
    assert len(trial.send(["after"])) == 1


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_what_was_acknowledged_survives_a_disk_that_fails(trial: Trial, plan: Plan) -> None:
    _run(trial, plan)


@pytest.mark.extended
@pytest.mark.parametrize("plan", EVERYTHING, ids=str)
def test_every_call_with_every_error(trial: Trial, plan: Plan) -> None:
    _run(trial, plan)


# Reads that fail are not damage: the scrubber, and the exit code of a check.


def _scrubbed(tmp_path: Path, passes: int, seconds: float) -> None:
    data_dir = tmp_path / "data"
    disk = FaultyDisk(tmp_path / "plan", data_dir)
    options = ("--metrics", "127.0.0.1:0", "--scrub-every-s", "0.01", "--scrub-bytes-per-s", "1e12", "--transport", "grpc")
    with ServerProcess(data_dir, *options, environment=disk.environment) as server:
        samples = [Sample(f"s{n}", seed=n) for n in range(30)]
        with Peer(server.address) as peer:
            for number, sample in enumerate(samples, 1):
                peer.put(sample, number)
        disk.arm(Call.READ, errno.EIO, share=0.1, part=FILES)
        until = time.monotonic() + seconds
        done = 0
        while done < passes or time.monotonic() < until:
            before = server.metric("slotstream_scrub_passes_total")
            wait_until(lambda before=before: server.metric("slotstream_scrub_passes_total") > before)  # type: ignore[misc]
            done += 1
        hits = disk.disarm()
        assert hits > passes
        assert server.metric("slotstream_quarantined_samples_total") == 0
        with Reader(server.address) as reader:
            assert {v.damage for v in reader.verify()} == {""}
            assert all(reader.read(sample.sample_id)[1] == sample.data for sample in samples)
    assert not (data_dir / ".quarantine").exists()


def test_a_tenth_of_all_reads_fails_and_nothing_is_quarantined(tmp_path: Path) -> None:
    _scrubbed(tmp_path, passes=5, seconds=0)


@pytest.mark.extended
def test_a_tenth_of_all_reads_fails_for_a_minute_and_nothing_is_quarantined(tmp_path: Path) -> None:
    _scrubbed(tmp_path, passes=5, seconds=60)


def test_a_check_that_cannot_read_says_so_by_its_exit_code(trial: Trial) -> None:
    trial.send(["a", "b"])
    trial.server.stop()
    trial.disk.arm(Call.READ, errno.EIO, part="/a.safetensors")
    done = run_cli("verify", "--data", str(trial.data_dir), environment=trial.disk.environment)
    assert done.returncode == 8, done.stderr
    assert done.stdout.startswith("IO_ERROR  default/a  ")
    assert done.stderr.endswith(": 1 could not be read\n")
    damaged: Any = next((trial.data_dir / "default").rglob("b.safetensors"))
    damaged.write_bytes(damaged.read_bytes()[:-1])
    done = run_cli("verify", "--data", str(trial.data_dir), environment=trial.disk.environment)
    assert done.returncode == 4, done.stderr  # Damage goes before what could not be read.
    assert {v.damage for v in verify_directory(trial.data_dir)} == {"", "TRUNCATED"}
