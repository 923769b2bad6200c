"""What a server does for its attempts, and the leader for those of servers that are gone. Two threads.

One renews what arrives here, holds what is read here for long, and asks what time it is. The other sweeps, if this server
leads: it removes the objects of attempts that ended, and decides those that expired. Nothing else in the bucket is touched, and
nothing at all while the catalogue is older than the bucket.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

from slotstream.store.blobs.base import Blobs
from slotstream.store.catalogue.attempts import LIFE_S, Attempt, SharedCatalogue
from slotstream.store.cluster.generation import Generations
from slotstream.store.cluster.reading import BlobFiles, object_key
from slotstream.store.disk.clock import boot_ns
from slotstream.store.records import SampleRecord
from slotstream.store.sample.file import sample_file_at
from slotstream.store.shared_state import AttemptCounts
from slotstream.wire.errors import Damaged, Interrupted, SlotStreamError, StoreGone, UnsupportedFormat

_log = logging.getLogger(__name__)
BEAT_S = 15.0
_AWAY_BEAT_S = 1.0  # While an engine is away.
SWEEP_S = 5.0
_LONG_READ_S = 20.0
_PAGE = 100


class DatabaseTime:
    """The database's clock: asked now and then, and in between the time that passed here is added. Unix nanoseconds."""

    def __init__(self, ask: Callable[[], int], elapsed: Callable[[], int] = boot_ns) -> None:
        self._ask, self._elapsed = ask, elapsed
        self._anchor = (0, 0)
        self.look()

    def look(self) -> None:
        """Raises what asking the catalogue raises."""
        before = self._elapsed()
        now = self._ask()
        after = self._elapsed()
        self._anchor = (now, (before + after) // 2)

    def __call__(self) -> int:
        now, then = self._anchor
        return now + self._elapsed() - then


class Reads:
    """Which objects this server has open, and since when. Thread safe."""

    def __init__(self) -> None:
        self._open: Counter[str] = Counter()
        self._since: dict[str, float] = {}
        self._lock = threading.Lock()

    def begin(self, attempt: str) -> None:
        with self._lock:
            self._open[attempt] += 1
            self._since.setdefault(attempt, time.monotonic())

    def end(self, attempt: str) -> None:
        with self._lock:
            self._open[attempt] -= 1
            if not self._open[attempt]:
                del self._open[attempt], self._since[attempt]

    def long(self) -> list[str]:
        until = time.monotonic() - _LONG_READ_S
        with self._lock:
            return [attempt for attempt, since in self._since.items() if since <= until]


class Keeper:
    """Of one server, from `start` to `stop`."""

    def __init__(
        self,
        catalogue: SharedCatalogue,
        blobs: Blobs,
        objects: BlobFiles,
        clock: DatabaseTime,
        generations: Generations,
        open_attempts: Callable[[], Iterable[str]],
        scratch_bytes: Callable[[], int],
    ) -> None:
        self._catalogue, self._blobs, self._objects, self._clock = catalogue, blobs, objects, clock
        self._generations = generations
        self._open_attempts, self._measure = open_attempts, scratch_bytes
        self.attempts = AttemptCounts()  # As of the last beat, and so the next.
        self.scratch_bytes = 0
        self.reads = Reads()
        self.leads = False  # As of the last look; what is done as leader asks again.
        self.trouble = ""  # Which engine is away, in a sentence.
        self._good_until: dict[str, int] = {}  # Attempt -> until when it is surely open, by the clock that is never set.
        self._lock = threading.Lock()  # Guards it.
        self._over = threading.Event()
        self._threads = [
            threading.Thread(target=self._beat_forever, name="attempts", daemon=True),
            threading.Thread(target=self._sweep_forever, name="sweep", daemon=True),
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    def check(self) -> None:
        """Raises StoreGone while an engine is away."""
        if self.trouble:
            raise StoreGone(self.trouble)

    # Attempts of this server.

    def began(self, attempt: str) -> None:
        """The catalogue is about to know of it."""
        with self._lock:
            self._good_until[attempt] = boot_ns() + round(LIFE_S * 1e9)

    def over(self, attempt: str) -> None:
        with self._lock:
            self._good_until.pop(attempt, None)

    def check_open(self, attempt: str) -> None:
        """Raises Interrupted where it may have expired: the leader may have removed its object already."""
        with self._lock:
            good_until = self._good_until.get(attempt, 0)
        if boot_ns() >= good_until:
            raise Interrupted("the catalogue was away for so long that the sample's attempt may have expired")

    def beat(self) -> None:
        """Once. Raises what the engines raise."""
        at = boot_ns()
        self._clock.look()
        if names := list(self._open_attempts()):
            still = self._catalogue.renew(names).result()
            with self._lock:
                for name in names:
                    if name in self._good_until:
                        self._good_until[name] = at + round(LIFE_S * 1e9) if name in still else 0
        if long := self.reads.long():
            self._catalogue.hold_attempts(long).result()
        self.attempts, self.scratch_bytes = self._catalogue.count_attempts(), self._measure()
        self._generations.look()

    def _beat_forever(self) -> None:
        while not self._over.wait(_AWAY_BEAT_S if self.trouble else BEAT_S):
            try:
                self.beat()
                if self.trouble:
                    _log.warning("what was away is back")
                self.trouble = ""
            except SlotStreamError as error:
                if not self.trouble:
                    _log.error("%s; not serving until it is back", error)
                self.trouble = str(error)
            except Exception:
                _log.exception("a fault while attempts were renewed")

    # Attempts of any server.

    def _sweep_forever(self) -> None:
        told = ""
        while not self._over.is_set():
            try:
                term = self._catalogue.lead()
                if term and self._generations.is_due():
                    self._generations.raise_both(term)
                self.leads = term > 0 and not self._generations.is_behind
                if self.leads:
                    self.sweep()
                told = ""
            except SlotStreamError as error:
                self.leads = False
                if str(error) != told:
                    _log.warning("what was left in the bucket is swept later: %s", error)
                told = str(error)
            except Exception:
                _log.exception("a fault while attempts were swept")
            self._over.wait(SWEEP_S)

    def sweep(self) -> int:
        """As leader: all that are due. How many objects are gone. Raises what the engines raise, once all were tried."""
        gone = 0
        while not self._over.is_set():
            due = self._catalogue.ended_attempts(_PAGE)
            if not due or not self._generations.raise_both(self._catalogue.lead()):
                return gone
            done, failed = self._sweep_page(due)
            self._catalogue.forget_attempts(done).result()
            gone += len(done)
            for settled in [self._catalogue.fail_abandoned(attempt.key) for attempt in due]:
                settled.result()
            if failed is not None:
                raise failed  # They would come again at once.
            if len(due) < _PAGE:
                return gone
        return gone

    def _sweep_page(self, due: list[Attempt]) -> tuple[list[str], SlotStreamError | None]:
        """Whose objects are gone; and why others are not."""
        done, failed = [], None
        for attempt in due:
            try:
                if attempt.is_ended:
                    self._blobs.abort(object_key(attempt.key, attempt.name))
                    done.append(attempt.name)
                else:
                    self._decide(attempt)
            except SlotStreamError as error:
                failed = error
        return done, failed

    def _decide(self, attempt: Attempt) -> None:
        """Its server is gone. What it had sent whole is a sample, unless its id has one; anything else goes."""
        record = self._whole(attempt)
        try:
            if record is not None and self._catalogue.commit(record).result() is None:
                _log.warning("sample %s is committed: its server had sent all of it before it stopped", attempt.key)
                return
        except Interrupted:
            return  # Ended by its server, which is back.
        self._catalogue.end(attempt.name).result()

    def _whole(self, attempt: Attempt) -> SampleRecord | None:
        try:
            file = sample_file_at(self._objects, Path(object_key(attempt.key, attempt.name)))
            record = file.record()
        except (FileNotFoundError, Damaged, UnsupportedFormat):
            return None
        return replace(record, attempt=attempt.name) if file.key == attempt.key else None
