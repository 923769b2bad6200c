"""What a store of objects is asked to do.

An object is there whole or not at all. Keys are chosen so that none is ever used twice: only `swap` overwrites one.
Everything here is thread safe, and raises IoError where the store does not answer as it should, StoreFull where it has no room.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from slotstream.wire.hashing import Buffer

CHECK_PREFIX = ".slotstream-check/"  # Of what `check` puts, and removes again.
Read = Callable[[int, int], Buffer]  # (at, nbytes) -> bytes of what is put; called again where they have to be sent again.


@dataclass(frozen=True, slots=True)
class Stored:
    """An object that is there. `checksum`: what the store says of its bytes, and its name; "" where it says none."""

    key: str
    nbytes: int
    checksum: str = ""


@dataclass(frozen=True, slots=True)
class Small:
    """A small object, with all its bytes. `tag`: another one has another."""

    data: bytes
    tag: str


class Put(Protocol):
    """One object on its way, in parts of `part_bytes` that are sent in any order, from any thread, and may be sent again."""

    part_bytes: int

    def send(self, number: int) -> None:
        """Send part `number` (from 0) now, as `read` gives it. It has to be whole."""

    def forget(self, at: int) -> None:
        """What was sent of the bytes from `at` on is not what the object will have."""

    def finish(self, nbytes: int) -> None:
        """The object is there, with so many bytes, when this returns. Sends what was not sent, the first part last.

        After an error the object may be there or not: `abort` makes sure that it is not.
        """

    def abort(self) -> None:
        """Nothing is left of it, sent parts included. No call of this object may be under way. After `finish` too."""


class OpenBlob(Protocol):
    """An object being read. Close it: a connection and memory may be its own. No call of it may be under way then."""

    nbytes: int

    def read(self, at: int, nbytes: int) -> bytes:
        """`nbytes` from `at`; fewer only at the end of the object. Reads in order cost least."""

    def view(self, at: int, nbytes: int) -> Buffer:
        """As `read`; what lies in memory already is not copied."""

    def close(self) -> None: ...


class Blobs(Protocol):
    """Objects by key: names with `/` between them, below the place that this was opened at."""

    def put(self, key: str, bytes_max: int, read: Read, may: Callable[[], None] = lambda: None) -> Put:
        """Begin an object of at most so many bytes. Nothing is sent yet. `may` is called before an upload begins and
        before each body is sent, and raises where it must not be: what it allows arrives within a minute, or never.
        """

    def open(self, key: str, *, all_of_it: bool = False) -> OpenBlob | None:
        """None where there is no such object. `all_of_it`: all of it will be read, and in order: more is asked for at once."""

    def delete(self, key: str) -> None:
        """One that is not there is fine."""

    def abort(self, key: str) -> None:
        """Nothing is left of `key`: neither parts that anybody sent, nor an object. Who was sending has to have stopped."""

    def get_small(self, key: str) -> Small | None:
        """An object of a few bytes. None where there is none."""

    def swap(self, key: str, data: bytes, instead_of: str) -> bool:
        """Put an object of a few bytes in place of the one with this tag ("": of none). False where another is there.

        After an error it may be there or not. The one kind of object that is ever overwritten.
        """

    def list(self, prefix: str = "") -> Iterator[Stored]:
        """Objects whose keys begin so, in the order of their keys, without their checksums."""

    def checksum(self, key: str) -> Stored | None:
        """What the store says of an object, without its bytes. None where there is none."""

    def check(self) -> None:
        """Try all that is relied on. Raises ConfigError, which names the right or the feature that is missing."""

    def close(self) -> None: ...
