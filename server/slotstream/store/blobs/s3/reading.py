"""One object of a bucket being read, range by range. The first request brings its first half MiB: all of a small sample."""

from __future__ import annotations

import time

from slotstream.store.blobs.s3.requests import READ_URL_S, Requests

_FIRST_BYTES = 1 << 19


class S3Blob:
    """An `OpenBlob`. Thread safe."""

    def __init__(self, requests: Requests, key: str) -> None:
        """`key`: in the bucket. Raises Refused, also where there is no such object."""
        self._requests, self._key = requests, key
        self._url, self._good_until = "", 0.0
        self._first, self.nbytes = requests.get(self._signed(), 0, _FIRST_BYTES)

    def read(self, at: int, nbytes: int) -> bytes:
        nbytes = min(nbytes, self.nbytes - at)
        if nbytes <= 0:
            return b""
        if at + nbytes <= len(self._first):
            return self._first[at : at + nbytes]
        data, _ = self._requests.get(self._signed(), at, nbytes)
        return data

    def _signed(self) -> str:
        """One URL is good for many reads."""
        if time.monotonic() >= self._good_until:
            self._good_until = time.monotonic() + READ_URL_S / 2
            self._url = self._requests.signed("get_object", READ_URL_S, Key=self._key)
        return self._url
