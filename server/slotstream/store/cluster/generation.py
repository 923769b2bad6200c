"""Whether the catalogue is older than the bucket: an older dump was restored, or it is a new one.

A number stands in the catalogue and in one object. The leader raises both, first the catalogue's: every half minute, and before
it removes objects. So a catalogue whose number is less than the object's, or that has another name than the one there, does not
know of all that was committed. Its servers read, take samples and delete nothing, until `slotstream rebuild` has compared both.
"""

from __future__ import annotations

import json
import logging
import threading
import time

from slotstream.store.blobs.base import CHECK_PREFIX, Blobs
from slotstream.store.catalogue.attempts import Generation, SharedCatalogue
from slotstream.wire.errors import StoreGone

_log = logging.getLogger(__name__)
KEY = ".slotstream-generation"
EVERY_S = 30.0  # Less than an attempt lives: what a dump has as arriving is not decided before it shows that it is one.
BEHIND = (
    "the catalogue is older than the bucket, or another bucket's: nothing is deleted until slotstream rebuild has compared both"
)


def is_own(name: str) -> bool:
    """Whether an object is the generation, or of a server that is starting: of no sample, and of nobody else's."""
    return name == KEY or name.startswith(CHECK_PREFIX)


def encoded(generation: Generation) -> bytes:
    return json.dumps({"catalogue": generation.catalogue, "number": generation.number}).encode()


def decoded(data: bytes) -> Generation | None:
    """None where that says no generation."""
    try:
        said = json.loads(data)
        return Generation(str(said["catalogue"]), int(said["number"]))
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def is_older(mine: Generation, there: Generation | None) -> bool:
    """Whether the catalogue's is older than what the object says. None: it says none."""
    return there is None or there.catalogue != mine.catalogue or there.number > mine.number


class Generations:
    """Of one server. Thread safe. Raises what the engines raise."""

    def __init__(self, catalogue: SharedCatalogue, blobs: Blobs) -> None:
        self._catalogue, self._blobs = catalogue, blobs
        self._lock = threading.Lock()  # One look at a time: the last one's answer stays.
        self._raised_at = float("-inf")
        self.is_behind = False  # As of the last look.

    def check(self) -> None:
        """Raises StoreGone where nothing may be deleted."""
        if self.is_behind:
            raise StoreGone(BEHIND)

    def look(self) -> None:
        with self._lock:
            there = self._blobs.get_small(KEY)
            # The object is looked at first, and raised last.
            self._judge(there is not None and is_older(self._catalogue.generation(), decoded(there.data)))
            if there is None:
                self._catalogue.generation()  # Whether it answers.

    def is_due(self) -> bool:
        return time.monotonic() - self._raised_at >= EVERY_S

    def raise_both(self, term: int) -> bool:
        """As leader: the next generation begins, and objects may be removed in it. False where none may."""
        with self._lock:
            there = self._blobs.get_small(KEY)
            mine = self._catalogue.generation()
            self._judge(there is not None and is_older(mine, decoded(there.data)))
            if self.is_behind:
                return False
            following = Generation(mine.catalogue, mine.number + 1)
            if not term or not self._catalogue.set_generation(following.number, term):
                return False  # Another one leads.
            if not self._blobs.swap(KEY, encoded(following), "" if there is None else there.tag):
                return False
            self._raised_at = time.monotonic()
            return True

    def _judge(self, is_behind: bool) -> None:
        if is_behind and not self.is_behind:
            _log.error("%s", BEHIND)
        if self.is_behind and not is_behind:
            _log.warning("the catalogue was compared with the bucket: what is to be deleted is deleted again")
        self.is_behind = is_behind
