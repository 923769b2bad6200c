"""What the server does without being asked: it applies retention, scrubs, and watches that its disk is still there.

Two threads. One ticks: each second it looks at the directory, at free space and at namespaces in which something happened,
every half minute at all of them. The other scrubs, which is mostly sleeping. Neither ever touches an arriving sample. Of
several servers that share a catalogue one applies the rules and scrubs.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from slotstream.server.config import ServerConfig
from slotstream.server.metrics import Metrics
from slotstream.server.pulse import Pulse
from slotstream.store.samples import SampleStore
from slotstream.store.upkeep.new_rules import NewRules
from slotstream.store.upkeep.scrubbing import Progress, Scrubber
from slotstream.store.upkeep.sweeping import Sweeper, Swept
from slotstream.wire.errors import SlotStreamError, StoreGone

_log = logging.getLogger(__name__)
_TICK_S = 1.0
_FULL_SWEEP_S = 30.0
_RETRY_S = 60.0  # After a pass of the scrubber that the store's trouble ended.


class Housekeeping:
    """Owns the threads, from `start` to `stop`."""

    def __init__(self, config: ServerConfig, store: SampleStore, metrics: Metrics, on_health: Callable[[bool], None]) -> None:
        """`on_health` is told, from a thread, whether the data directory is there, whenever that changed."""
        self.policy = config.retention
        self._scrub_every_s = config.scrub_every_s
        self._store = store
        self._metrics = metrics
        self._on_health = on_health
        self.rules = NewRules(store.lifetimes, config.retention, store.free_bytes, config.retention_grace_s)
        self._sweeper = Sweeper(store.lifetimes, self.rules.in_force, store.free_bytes)
        metrics.rules_held.set_function(lambda: len(self.rules.held))
        metrics.rules_wait.set_function(lambda: self.rules.wait_s)
        self._scrubber = Scrubber(store.lifetimes, config.scrub_bytes_per_s, metrics.scrubbed_bytes.inc)
        metrics.free_target.set(config.retention.free_bytes_target)
        metrics.scrub_every.set(config.scrub_every_s)
        if config.scrub_every_s:
            metrics.scrub_end.set_function(lambda: self._scrubber.progress.ended_unix_ns / 1e9)
        self._is_healthy = True
        self._trouble = ""
        self.age_held: frozenset[str] = frozenset()
        self._touched: set[str] = set()
        self._touched_lock = threading.Lock()
        self._full_sweep_at = 0.0
        self._wake = threading.Event()
        self._stopping = threading.Event()
        self._threads = [threading.Thread(target=self._tick, name="retention", daemon=True)]
        if self._scrub_every_s:
            self._threads.append(threading.Thread(target=self._scrub, name="scrub", daemon=True))
        self._ticking = Pulse("retention", self._threads[0])
        self.pulses = (self._ticking, *(Pulse(thread.name, thread, idle=True) for thread in self._threads[1:]))

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Ends both threads; blocks for what they are deleting or reading at the moment."""
        self._stopping.set()
        self._wake.set()
        self._scrubber.stop()
        for thread in self._threads:
            thread.join()

    def touch(self, namespace: str, *, at_once: bool = False) -> None:
        """Samples of the namespace were committed, read or acked: its rule may have something to do. Any thread."""
        if not self.policy.rule_for(namespace).limits():
            return
        with self._touched_lock:
            self._touched.add(namespace)
        if at_once:
            self._wake.set()

    def accept_rules(self, namespaces: tuple[str, ...] | None) -> frozenset[str]:
        """The rules may delete what they say in these namespaces, or in all (None). In which they were held."""
        released = self.rules.accept(namespaces)
        self._full_sweep_at = 0.0  # Rules that waited begin to act, too, and those are held nowhere.
        self._wake.set()
        return released

    @property
    def scrub_progress(self) -> Progress:
        return self._scrubber.progress

    def _tick(self) -> None:
        while not self._stopping.is_set():
            self._wake.clear()
            full = time.monotonic() >= self._full_sweep_at
            if full:
                self._full_sweep_at = time.monotonic() + _FULL_SWEEP_S  # First: somebody may want the next one meanwhile.
            with self._ticking.excused():
                done = self._look_at_directory() and self._sweep(full)
            if full and not done:
                self._full_sweep_at = 0.0
            self._wake.wait(_TICK_S)

    def _look_at_directory(self) -> bool:
        try:
            self._store.check_directory()
            healthy = True
        except StoreGone as error:
            healthy = False
            if self._is_healthy:
                _log.error("%s; not serving until it is back", error)
        if healthy != self._is_healthy:
            self._is_healthy = healthy
            self._on_health(healthy)
        return healthy

    def _sweep(self, full: bool) -> bool:
        """False when the store is in trouble, or there is more to do: then the next tick goes on."""
        with self._touched_lock:
            touched, self._touched = self._touched, set()
        try:
            if not self._store.leads:
                return True
            full = self.rules.look() or full  # Rules that begin to act have something to do everywhere.
            self._sweeper.policy = self.rules.in_force
            done = [self._sweeper.sweep(None if full else sorted(touched)), self._sweeper.make_room()]
        except SlotStreamError as error:
            self._say(f"retention stops for now: {error}")
            with self._touched_lock:
                self._touched |= touched
            return False
        except Exception:
            _log.exception("a fault in retention; it goes on with the next sweep")
            return True
        still_short = any(swept.still_short for swept in done)
        self._say("less than free_bytes_target is free, and nothing more may be deleted for that" if still_short else "")
        self._hold(None if full else touched, done[0].held)
        for swept in done:
            self._count(swept)
        if any(swept.unfinished for swept in done):
            with self._touched_lock:
                self._touched |= touched
            self._wake.set()
            return False
        return True

    def _hold(self, swept: set[str] | None, held: set[str]) -> None:
        """In which namespaces nothing is deleted by age now; of `swept`, or of all, that was just found out."""
        before = self.age_held
        self.age_held = frozenset(held if swept is None else (before - swept) | held)
        self._metrics.age_held.set(len(self.age_held))
        if new := sorted(self.age_held - before):
            why = self._store.lifetimes.watch.trouble
            _log.warning("%s; nothing is deleted by age in %s: if the clock is right, start with --accept-clock", why, new)

    def _say(self, trouble: str) -> None:
        """Logs what keeps retention from its work, once, not each second."""
        if trouble and trouble != self._trouble:
            _log.warning("%s", trouble)
        self._trouble = trouble

    def _count(self, swept: Swept) -> None:
        for reason, count in swept.samples.items():
            self._metrics.deleted_samples.labels(str(reason)).inc(count)
            self._metrics.deleted_bytes.labels(str(reason)).inc(swept.bytes[reason])
            _log.info("retention deleted %d samples, %d bytes: %s", count, swept.bytes[reason], reason)

    def _leads(self) -> bool:
        try:
            return self._store.leads
        except SlotStreamError:
            return False

    def _scrub_due_in_s(self) -> float:
        return self._scrubber.due_in_s(self._scrub_every_s) if self._leads() else _RETRY_S

    def _scrub(self) -> None:
        while not self._stopping.wait(self._scrub_due_in_s()):
            if not self._leads():
                continue
            try:
                finished = self._scrubber.run_pass()
            except Exception:
                _log.exception("a fault in the scrubber; it begins again later")
                finished = False
            if finished:
                self._metrics.scrub_passes.inc()
            elif self._stopping.wait(_RETRY_S):
                return
