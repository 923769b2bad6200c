"""One object of a bucket being read.

A request costs as much processor as a MiB of its answer. So what is read whole is asked for in few: a small object is one, and
comes into memory, as long as all reads together have not too much there. Of a large one the rows are taken from the socket when
they are wanted; what nobody took yet waits at the store. Where the header alone is wanted, half a MiB is asked for.
"""

from __future__ import annotations

import threading
import time

from slotstream.store.blobs.s3.requests import READ_URL_S, Body, Requests
from slotstream.wire.errors import IoError
from slotstream.wire.hashing import Buffer

_FIRST_BYTES = 1 << 19  # Of an object of which no more may be wanted: it has the header.
_SMALL_BYTES = 8 << 20
_ASKED_BYTES = 64 << 20  # By one request, of an object that is read in order.


class Room:
    """Memory that reads share. Thread safe."""

    def __init__(self, nbytes: int) -> None:
        self._free = nbytes
        self._lock = threading.Lock()  # Guards it.

    def take(self, nbytes: int) -> bool:
        with self._lock:
            if nbytes > self._free:
                return False
            self._free -= nbytes
            return True

    def give_back(self, nbytes: int) -> None:
        with self._lock:
            self._free += nbytes


class S3Blob:
    """An `OpenBlob`. Thread safe; one thread at a time reads in order, and others beside it by requests of their own."""

    def __init__(self, requests: Requests, key: str, room: Room, *, all_of_it: bool) -> None:
        """`key`: in the bucket. Raises Refused, also where there is no such object."""
        self._requests, self._key, self._room = requests, key, room
        self._url, self._good_until = "", 0.0
        self._turn = threading.Lock()  # Guards what is below, but `_first`.
        self._coming: Body | None = requests.open(self._signed(), 0, _ASKED_BYTES if all_of_it else _FIRST_BYTES)
        self.nbytes = self._coming.total
        is_small = all_of_it and _FIRST_BYTES < self.nbytes <= _SMALL_BYTES
        self._taken = self.nbytes if is_small and room.take(self.nbytes) else 0
        try:
            self._first = self._coming.read(self._taken or min(_FIRST_BYTES, self._coming.nbytes))
        except IoError:  # It was cut short: asked for again, as it is not while the store is away.
            self._coming = None
            try:
                self._first = requests.get(self._signed(), 0, self._taken or min(_FIRST_BYTES, self.nbytes))
            except BaseException:
                self.close()
                raise
        self._next = len(self._first)  # Where what is coming begins, and what is read in order goes on.
        self._beside = -1  # Where the last read ended that was not in order: a second one there begins a new order.

    def read(self, at: int, nbytes: int) -> bytes:
        nbytes = min(nbytes, self.nbytes - at)
        if nbytes <= 0:
            return b""
        if at + nbytes <= len(self._first):
            return self._first[at : at + nbytes]
        known = self._first[at:]
        at, nbytes = at + len(known), nbytes - len(known)
        if not self._turn.acquire(blocking=False):
            return known + self._alone(at, nbytes)
        try:
            data = self._in_order(at, nbytes)
        finally:
            self._turn.release()
        return known + data if known else data

    def view(self, at: int, nbytes: int) -> Buffer:
        if nbytes > 0 and at + nbytes <= len(self._first):
            return memoryview(self._first)[at : at + nbytes]
        return self.read(at, nbytes)

    def close(self) -> None:
        with self._turn:
            coming, self._coming = self._coming, None
            taken, self._taken = self._taken, 0
        if coming is not None:
            coming.close()
        self._room.give_back(taken)

    def _in_order(self, at: int, nbytes: int) -> bytes:
        """Out of what is coming, which is asked for once a read goes on where the last one ended."""
        if at not in (self._next, self._beside):
            self._beside = at + nbytes
            return self._alone(at, nbytes)
        if at != self._next and self._coming is not None:
            self._coming.close()
            self._coming = None
        pieces = []
        self._next = at + nbytes
        while nbytes:
            if self._coming is None or not self._coming.nbytes:
                self._coming = self._requests.open(self._signed(), at, max(nbytes, _ASKED_BYTES))
            wanted = min(nbytes, self._coming.nbytes)
            try:
                pieces.append(self._coming.read(wanted))
            except IoError:  # A connection that waited for long may be gone.
                self._coming = None
                pieces.append(self._alone(at, wanted))
            at, nbytes = at + wanted, nbytes - wanted
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _alone(self, at: int, nbytes: int) -> bytes:
        return self._requests.get(self._signed(), at, nbytes)

    def _signed(self) -> str:
        """One URL is good for many reads."""
        if time.monotonic() >= self._good_until:
            self._url = self._requests.signed("get_object", READ_URL_S, self._key)
            self._good_until = time.monotonic() + READ_URL_S / 2
        return self._url
