"""A store of objects in memory: a model of `Blobs`, for what needs many of them, or one that can be looked into."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from functools import partial

from slotstream.store.blobs.base import Blobs, OpenBlob, Put, Read, Small, Stored
from slotstream.store.blobs.s3.put import part_bytes_for
from slotstream.wire.errors import IoError
from slotstream.wire.hashing import Buffer, xxh3


class Bucket:
    """What all that open it share: objects, and parts of uploads that are not put together."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.uploads: dict[tuple[str, int], dict[int, bytes]] = {}  # Key, and the upload's number -> its parts.
        self.numbers = itertools.count()
        self.lock = threading.Lock()  # Of each change. Nobody waits while it is held.


class MemoryBlobs(Blobs):
    """A `Blobs` over a bucket in memory. Each request goes through `_do`, which a model of a network may override."""

    def __init__(self, bucket: Bucket, part_bytes: Callable[[int], int] = part_bytes_for) -> None:
        """`part_bytes`: of an object of at most so many bytes."""
        self._bucket, self._part_bytes = bucket, part_bytes

    def __str__(self) -> str:
        return "a bucket in memory"

    def _do(self, request: Callable[[], None], what: str) -> None:
        """A request that changes something."""
        with self._bucket.lock:
            request()

    def _ask(self, what: str) -> None:
        """Before a request that changes nothing."""

    def put(self, key: str, bytes_max: int, read: Read, may: Callable[[], None] = lambda: None) -> Put:
        return _MemoryPut(self, key, self._part_bytes(bytes_max), read, may)

    def open(self, key: str, *, all_of_it: bool = False) -> OpenBlob | None:
        self._ask("open")
        data = self._bucket.objects.get(key)
        return None if data is None else _MemoryBlob(self, data)

    def get_small(self, key: str) -> Small | None:
        self._ask("get")
        data = self._bucket.objects.get(key)
        return None if data is None else Small(data, f"{xxh3(data):016x}")

    def swap(self, key: str, data: bytes, instead_of: str) -> bool:
        def request() -> None:
            there = self._bucket.objects.get(key)
            if ("" if there is None else f"{xxh3(there):016x}") == instead_of:
                self._bucket.objects[key] = data

        self._do(request, "swap")
        found = self.get_small(key)
        return found is not None and found.data == data

    def delete(self, key: str) -> None:
        self._do(partial(self._bucket.objects.pop, key, None), "delete")  # type: ignore[arg-type]

    def abort(self, key: str) -> None:
        self._do(partial(self._end_uploads, key), "abort")
        if self.checksum(key) is not None:
            self.delete(key)

    def _end_uploads(self, key: str) -> None:
        for upload in [upload for upload in self._bucket.uploads if upload[0] == key]:
            del self._bucket.uploads[upload]

    def list(self, prefix: str = "") -> Iterator[Stored]:
        self._ask("list")
        for key in sorted(self._bucket.objects):
            if key.startswith(prefix) and (data := self._bucket.objects.get(key)) is not None:
                yield Stored(key, len(data))

    def checksum(self, key: str) -> Stored | None:
        self._ask("checksum")
        data = self._bucket.objects.get(key)
        return None if data is None else Stored(key, len(data), f"xxh3:{xxh3(data):016x}")

    def check(self) -> None:
        self._ask("check")

    def close(self) -> None:
        pass


class _MemoryBlob(OpenBlob):
    def __init__(self, blobs: MemoryBlobs, data: bytes) -> None:
        self.nbytes = len(data)
        self._blobs, self._data = blobs, data

    def read(self, at: int, nbytes: int) -> bytes:
        self._blobs._ask("read")
        return self._data[at : at + nbytes]

    def view(self, at: int, nbytes: int) -> Buffer:
        return self.read(at, nbytes)

    def close(self) -> None:
        pass


class _MemoryPut(Put):
    def __init__(self, blobs: MemoryBlobs, key: str, part_bytes: int, read: Read, may: Callable[[], None]) -> None:
        self.part_bytes = part_bytes
        self._blobs, self._bucket, self._key = blobs, blobs._bucket, key
        self._read, self._may = read, may
        self._upload: tuple[str, int] | None = None
        self._lock = threading.Lock()  # Guards the two around it.
        self._sent: dict[int, int] = {}  # Part -> how long it is.
        self._is_touched = False

    def send(self, number: int) -> None:
        self._send(number, self.part_bytes)

    def _send(self, number: int, length: int) -> None:
        with self._lock:
            if self._upload is None:
                self._may()
                self._is_touched = True
                self._upload = (self._key, next(self._bucket.numbers))
                self._bucket.uploads[self._upload] = {}
            upload = self._upload
        data = bytes(self._read(number * self.part_bytes, length))
        self._may()

        def put_part() -> None:
            if (parts := self._bucket.uploads.get(upload)) is not None:
                parts[number] = data

        self._blobs._do(put_part, "part")
        with self._lock:
            self._sent[number] = length

    def forget(self, at: int) -> None:
        with self._lock:
            self._sent = {n: length for n, length in self._sent.items() if n * self.part_bytes + length <= at}

    def finish(self, nbytes: int) -> None:
        if nbytes <= self.part_bytes and self._upload is None:
            self._is_touched = True
            data = bytes(self._read(0, nbytes))
            self._may()
            self._blobs._do(partial(self._bucket.objects.__setitem__, self._key, data), "put")
            return
        count = -(-nbytes // self.part_bytes)
        for number in reversed(range(count)):
            length = min(self.part_bytes, nbytes - number * self.part_bytes)
            if self._sent.get(number) != length:
                self._send(number, length)
        assert self._upload is not None, "its parts were sent"
        self._blobs._do(partial(self._complete, self._upload, count), "complete")
        stored = self._blobs.checksum(self._key)
        if stored is None or stored.nbytes != nbytes:
            raise IoError(f"the object store made no object of {nbytes} bytes out of its parts")

    def _complete(self, upload: tuple[str, int], count: int) -> None:
        """As a store does it: of the parts that there are. Where the upload is over, nothing."""
        if (parts := self._bucket.uploads.pop(upload, None)) is not None:
            self._bucket.objects[self._key] = b"".join(parts[number] for number in range(count) if number in parts)

    def abort(self) -> None:
        if self._is_touched:
            self._blobs.abort(self._key)
