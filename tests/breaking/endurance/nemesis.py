"""What the histories are written under: killed processes, a clock that leaps, a disk that fills, and bits that flip.

What each may do to a sample stands in `register.py`. Kills, leaps and full disks may do nothing; a flip may do something to its
own sample only. A leap forward, and a flip in the catalogue, may end leases.
"""

from __future__ import annotations

import errno
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from faults.faulty_disk import Call, FaultyDisk
from faults.shifted_clock import DAY_NS, ShiftedClock
from faults.shim import together
from register import Operation
from world import World

from slotstream.client import connect
from slotstream.store.records import SampleKey

NAMESPACE = "default"
CLIENT = -1  # Of what the nemesis itself notes.
# With this rule a leap that is believed deletes everything, and the server does so within a second.
RULES = "[default]\nage_s_max = 604800\n"
# Each leap goes further than the last: what was stored during the last one is old again, and most of a namespace.
_LEAP_NS = 30 * DAY_NS
_MOMENT_S = 1.5


class Below:
    """What lies between the server and its disk and clock."""

    disk: FaultyDisk
    clock: ShiftedClock

    def __call__(self, work: Path, data_dir: Path) -> dict[str, str]:
        self.disk, self.clock = FaultyDisk(work / "plan", data_dir), ShiftedClock(work / "clock")
        return together(self.disk.environment, self.clock.environment)


class Strikes:
    """Every strike of a nemesis in a random order, again and again. `wrong`: what it saw that may not be.

    `lease_ends`: moments at which leases may have ended.
    """

    def __init__(self, rng: random.Random) -> None:
        self.wrong: list[str] = []
        self.done: Counter[str] = Counter()
        self.lease_ends: list[tuple[float, float]] = []
        self._rng = rng
        self._deck = self._deal()

    def strikes(self) -> Sequence[Callable[[], None]]:
        raise NotImplementedError

    def strike(self) -> None:
        next(self._deck)()

    def _deal(self) -> Iterator[Callable[[], None]]:
        strikes = self.strikes()
        while True:
            yield from self._rng.sample(strikes, len(strikes))
            self.done["rounds"] += 1

    def _moment(self) -> None:
        time.sleep(self._rng.random() * _MOMENT_S)


class Nemesis(Strikes):
    """Strikes one server, its disk and its clock."""

    def __init__(
        self,
        world: World,
        below: Below,
        rng: random.Random,
        ids: Callable[[], list[str]],
        note: Callable[[str, Operation], None],
    ) -> None:
        """`ids`: which are in use; `note` is told what became of them here."""
        super().__init__(rng)
        self._world = world
        self._below = below
        self._ids = ids
        self._note = note
        self._leaps = 0

    def strikes(self) -> Sequence[Callable[[], None]]:
        return (
            self.kill_primary,
            self.kill_worker,
            self.kill_worker,
            self.clock_ahead,
            self.clock_behind,
            self.fill_for_samples,
            self.fill,
            self.flip_a_sample,
            self.flip_a_sample,
            self.flip_the_catalogue,
        )

    def _restart(self, *options: str, meanwhile: Callable[[], None] = lambda: None) -> None:
        self._world.server.end(signal.SIGKILL)
        meanwhile()
        always = self._world.server_options
        self._world.server_options = [*always, *options]
        self._world.server.start()
        self._world.server_options = always
        self._world.wait_for_server()

    def kill_primary(self) -> None:
        self.done["primary killed"] += 1
        self._restart()

    def kill_worker(self) -> None:
        if pids := self._world.server_workers():
            self.done["worker killed"] += 1
            os.kill(pids[0], signal.SIGKILL)

    # The clock.

    def clock_ahead(self) -> None:
        """For a moment, which the server may begin in; and then, in half of the cases, somebody says that it is right again."""
        self._leaps += 1
        self.done["clock shifted ahead"] += 1
        self._shift(self._leaps * _LEAP_NS)
        if self._rng.random() < 0.5:
            self._moment()
        else:
            self._restart()
            if not self._doubt():
                self.wrong.append(f"the server began {self._leaps * 30} days ahead, and did not doubt its clock")
        time.sleep(1.0)  # A sweep comes each second.
        self._shift(0)
        if self._rng.random() < 0.5:
            self._accept()

    def clock_behind(self) -> None:
        self.done["clock shifted behind"] += 1
        self._shift(-2 * DAY_NS)
        if self._rng.random() < 0.5:
            self._restart()
        self._moment()
        self._shift(0)
        if self._rng.random() < 0.5:
            self._accept()

    def _accept(self) -> None:
        self.done["clock accepted"] += 1
        self._restart("--accept-clock")
        if doubt := self._doubt():
            self.wrong.append(f"the clock was accepted, and the server says: {doubt}")

    def _shift(self, ns: int) -> None:
        began = time.monotonic()
        self._below.clock.shift(ns)
        self.lease_ends.append((began, time.monotonic()))

    def _doubt(self) -> str | None:
        with connect(self._world.address, connect_timeout_s=60, call_timeout_s=60) as client:
            return client.usage().clock

    # The disk is full.

    def fill_for_samples(self) -> None:
        """Nothing more goes into samples; what the catalogue lives in is left, so that deletions go on."""
        self._fill("disk full for samples", ".partial")

    def fill(self) -> None:
        self._fill("disk full", "")

    def _fill(self, name: str, part: str) -> None:
        self._below.disk.arm(Call.WRITE | Call.ALLOCATE, errno.ENOSPC, part=part)
        self._moment()
        self.done[f"{name}: writes refused"] += self._below.disk.disarm()
        self.done[name] += 1

    # Bits flip.

    def flip_a_sample(self) -> None:
        for sample_id in self._rng.sample(ids := self._ids(), len(ids)):
            path = SampleKey(NAMESPACE, sample_id).path(self._world.data_dir)
            called_at = time.monotonic()
            try:
                hit = _flip(path, self._rng)
            except OSError:  # It is not stored.
                continue
            self.done["sample's bit flipped"] += 1
            answer = "flipped" if hit else "perhaps"
            self._note(sample_id, Operation(CLIENT, "flip", answer, called_at, time.monotonic()))
            return

    def flip_the_catalogue(self) -> None:
        """While the server is down: what flips under a running one shows at the next start at the latest."""
        self.done["catalogue's bit flipped"] += 1
        began = time.monotonic()
        self._restart(meanwhile=self._flip_the_catalogue)
        self.lease_ends.append((began, time.monotonic()))

    def _flip_the_catalogue(self) -> None:
        files = [path for path in self._world.data_dir.glob("catalog.sqlite*") if _is_catalogue(path)]
        _flip(self._rng.choice(files), self._rng)


def _is_catalogue(path: Path) -> bool:
    return path.name in ("catalog.sqlite", "catalog.sqlite-wal", "catalog.sqlite.seal") and path.stat().st_size > 0


def _flip(path: Path, rng: random.Random) -> bool:
    """Flip a bit of a file. False where another file, or none, is at its place by then. Raises OSError."""
    with path.open("r+b", buffering=0) as file:
        status = os.fstat(file.fileno())
        at = rng.randrange(status.st_size)
        (byte,) = os.pread(file.fileno(), 1, at)
        os.pwrite(file.fileno(), bytes((byte ^ 1 << rng.randrange(8),)), at)
        try:
            return path.stat().st_ino == status.st_ino
        except FileNotFoundError:
            return False
