"""What goes wrong, by the seed: one thing after the other, and now and then two at a time."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

from simulation.disk import PLENTY, Trouble
from simulation.scheduler import running
from simulation.threads import SimTime, ThreadPoolExecutor

if TYPE_CHECKING:
    from simulation.world import World

_HOUR_NS = 3600 * 10**9
_WRITES = ("create", "preallocate", "pwrite", "truncate", "make_dir")
_SYNCS = ("sync_data", "sync_dir")
_NAMES = ("rename", "unlink", "make_dir", "sync_dir")
_READS = ("open_read", "pread", "path_size", "walk")
_ERRORS = {
    _WRITES: (errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EMFILE),
    _SYNCS: (errno.EIO, errno.ENOSPC),
    _NAMES: (errno.EIO, errno.ENOSPC, errno.EROFS),
    _READS: (errno.EIO, errno.ESTALE, errno.EMFILE),
    (*_WRITES, *_SYNCS, *_NAMES, *_READS, "catalogue"): (errno.EIO, errno.ENOSPC),
    ("catalogue",): (errno.EIO,),
}
KINDS = ("kill", "power", "restart", "disk", "full", "leap", "slow", "cut", "away")


class Nemesis:
    """Strikes so many times, and sees that a server runs again after each end of one."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._rng = running().rng
        # Each seed has its favourites, so that some meet the same thing again and again.
        self._weights = [self._rng.choice((0, 1, 1, 4)) for _ in KINDS]
        self._weights[self._rng.randrange(len(KINDS))] = 4

    def run(self, strikes: int) -> None:
        for _ in range(strikes):
            running().pause(self._rng.random())
            kind = self._rng.choices(KINDS, self._weights)[0]
            self._world.model.counts[f"nemesis {kind}"] += 1
            getattr(self, kind)()

    # The process.

    def kill(self) -> None:
        self._wait_for_a_step()
        self._world.kill()
        self._start_again()

    def power(self) -> None:
        self._wait_for_a_step()
        self._world.cut_power()
        self._start_again()

    def restart(self) -> None:
        with self._world.trouble("restart"):
            self._world.stop(self._rng.choice((0.0, 0.5, 10.0)))
            self._world.start()

    def _wait_for_a_step(self) -> None:
        """Half of the time, until the disk is about to be asked for something, so that ends come between two steps."""
        if self._rng.random() < 0.7:
            scheduler = running()
            self._world.files.wake_before(self._rng.randrange(60), scheduler.current)
            scheduler.block(1.0)

    def _start_again(self) -> None:
        """The server. Its start may be interrupted, too."""
        with self._world.trouble("down"):
            running().pause(self._rng.choice((0.0, 0.1, 1.0)))
            if self._rng.random() < 0.25:
                self._world.begin_start()
                self._world.files.wake_before(self._rng.randrange(40), running().current)
                running().block(0.5)
                (self._world.kill if self._rng.random() < 0.5 else self._world.cut_power)()
            self._world.start()

    # The disk and the rest.

    def disk(self) -> None:
        operations = self._rng.choice(tuple(_ERRORS))
        some = self._rng.sample(operations, self._rng.randint(1, len(operations)))
        with self._world.trouble("disk"):
            trouble = Trouble(frozenset(some), _ERRORS[operations], self._rng.choice((10, 40, 100)))
            running().note(f"trouble: {trouble}")
            self._world.files.trouble = trouble
            running().pause(self._rng.random() * 2)
            dies = self._rng.random() < 0.5
            if dies:
                self._wait_for_a_step()
                (self._world.kill if self._rng.random() < 0.5 else self._world.cut_power)()
            self._world.files.trouble = None
            if dies:
                self._start_again()
        if not dies and self._rng.random() < 0.3:  # Is what could not be synced made up for?
            running().pause(self._rng.random())
            self.power()

    def full(self) -> None:
        with self._world.trouble("full"):
            self._world.files.free = self._rng.choice((3 << 20, 3 << 19, 1 << 19))
            running().pause(self._rng.random() * 2)
            self._world.files.free = PLENTY

    def away(self) -> None:
        with self._world.trouble("away"):
            self._world.files.away = True
            running().pause(self._rng.random() * 2)
            self._world.files.away = False

    def leap(self) -> None:
        self._world.model.leases_in_doubt(running().now)
        SimTime.leapt_ns += self._rng.choice((-30, -2, -1, 1, 2, 30)) * _HOUR_NS // self._rng.choice((1, 60, 3600))

    def slow(self) -> None:
        self._world.files.slow = self._rng.choice((5.0, 50.0))
        ThreadPoolExecutor.slow_s = self._rng.choice((0.0, 0.1, 1.0))
        running().pause(self._rng.random() * 3)
        self._world.files.slow, ThreadPoolExecutor.slow_s = 1.0, 0.0

    def cut(self) -> None:
        with self._world.trouble("cut"):
            for call in list(self._world.server.calls):
                if self._rng.random() < 0.6:
                    call.cut("UNAVAILABLE")
