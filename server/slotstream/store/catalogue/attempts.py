"""What a catalogue is asked beside, where the bytes of samples are objects that several servers send and remove.

An attempt is one object on its way. It is open until its sample is committed, or until it is ended: one of both, once. An open
one expires, unless its server renews it. What was ended keeps a row until its object is gone, and so does what was deleted.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

from slotstream.store.catalogue.base import Catalogue
from slotstream.store.records import SampleKey, SampleRecord
from slotstream.store.shared_state import AttemptCounts

LIFE_S = 120.0  # Of an open attempt that nobody renews.
REMOVED_AFTER_S = 60.0  # How long the object of a deleted sample stays, for who is reading it.
# How long an expired attempt is left alone: what its server had signed and not sent is refused by then.
EXPIRED_S = 120.0
LATE_S = 600.0  # Due for so long: whoever leads should have done with it.


@dataclass(frozen=True, slots=True)
class Attempt:
    """Its object's key is made of `key` and `name`. `is_ended`: its object may go; else it expired."""

    key: SampleKey
    name: str
    is_ended: bool


@dataclass(frozen=True, slots=True)
class Generation:
    """How old a catalogue is: its number only grows, and another catalogue has another name."""

    catalogue: str
    number: int


class SharedCatalogue(Catalogue, Protocol):
    """A catalogue of samples whose records name an attempt.

    `begin` opens it. `commit` takes it, unless another sample is committed under the id: that is its answer then. It raises
    Interrupted where the attempt was ended. What deletes a sample, or puts another in its place, leaves its attempt as ended.
    """

    def end(self, attempt: str) -> Future[bool]:
        """The attempt is not going to be a sample. False where it was ended before, or is one."""

    def forget_attempts(self, attempts: Sequence[str]) -> Future[None]:
        """The objects of these, which were ended, are gone."""

    def renew(self, attempts: Sequence[str]) -> Future[set[str]]:
        """They go on for another LIFE_S. Which of them are open."""

    def ended_attempts(self, limit: int) -> list[Attempt]:
        """Up to `limit` that are due: ended, and nobody reads their object; or expired for EXPIRED_S. The longest due first."""

    def count_attempts(self) -> AttemptCounts:
        """Late are those that were due LATE_S ago, and whose object nobody reads."""

    def oldest_attempt(self) -> int:
        """When the oldest open one began, Unix nanoseconds; 0 where none is open."""

    def known_attempts(self, attempts: Sequence[str], keys: Sequence[SampleKey]) -> set[str]:
        """Which of these attempts, each at a sample, are of samples, open or ended."""

    def fail_abandoned(self, key: SampleKey) -> Future[bool]:
        """A sample that says arriving, and has no open attempt, failed (INTERRUPTED). Whether it did."""

    def hold_attempts(self, attempts: Sequence[str]) -> Future[None]:
        """Their objects are being read: they stay for another REMOVED_AFTER_S."""

    def take_failures(self, peer: str, wanted: int, most: int, per_s: float) -> int:
        """Up to `wanted` of the failed samples that a peer may leave here: `most`, and `per_s` more each second up to that."""

    def generation(self) -> Generation: ...

    def set_generation(self, number: int, term: int = 0) -> bool:
        """Its number is this from here on. False where it is as large already, or where another leads."""

    def open_attempts(self) -> dict[str, tuple[SampleKey, int]]:
        """Name -> its sample, and when it expires, Unix nanoseconds."""

    def take_over(self, record: SampleRecord, over: str | None) -> Future[bool]:
        """The sample that an object holds is committed, in place of the one of attempt `over`, or of none that is committed.

        False where something else is there by now. All that is known of the attempt is forgotten. No other object has to go.
        """

    def let_go(self, attempts: Sequence[str]) -> Future[None]:
        """Nothing is known of these any more, open ones or ended: nobody removes their objects."""

    def keep_standing(self, record: SampleRecord, reads: int, acked_unix_ns: int) -> Future[None]:
        """A committed sample, if it still has that header, was read so often elsewhere, and acked then (0: not)."""

    def drop_lost(self, record: SampleRecord) -> Future[bool]:
        """A committed sample is forgotten whose object is gone. False where its row is another one by now."""
