"""One object on its way into a bucket: one PUT where it fits a part, else parts that are put together at the end."""

from __future__ import annotations

import threading
from collections.abc import Callable

from slotstream.store.blobs.base import Read, Stored
from slotstream.store.blobs.s3.requests import Refused, Requests
from slotstream.wire.errors import IoError

PART_BYTES_MIN = 8 << 20
PARTS_MAX = 10_000
_ROUND_TO = 1 << 20


def part_bytes_for(bytes_max: int) -> int:
    """How large the parts of an object are: eight MiB, more where ten thousand of them would not hold it."""
    least = -(-bytes_max // PARTS_MAX)
    return max(PART_BYTES_MIN, -(-least // _ROUND_TO) * _ROUND_TO)


class S3Put:
    """A `Put`."""

    def __init__(
        self,
        requests: Requests,
        key: str,
        bytes_max: int,
        read: Read,
        may: Callable[[], None],
        look: Callable[[], Stored | None],
        remove: Callable[[], None],
    ) -> None:
        """`key`: in the bucket. `look`: what is there under it; `remove`: it, and what was sent of it."""
        self.part_bytes = part_bytes_for(bytes_max)
        self._requests, self._key, self._read, self._may = requests, key, read, may
        self._look, self._remove = look, remove
        self._lock = threading.Lock()  # Guards what is below.
        self._upload = ""
        self._sent: dict[int, tuple[str, int]] = {}  # Part -> its ETag, and how long it is.
        self._is_touched = False  # Something may be there.

    def send(self, number: int) -> None:
        self._send(number, self.part_bytes)

    def forget(self, at: int) -> None:
        with self._lock:
            self._sent = {n: sent for n, sent in self._sent.items() if n * self.part_bytes + sent[1] <= at}

    def finish(self, nbytes: int) -> None:
        if nbytes <= self.part_bytes and not self._upload:
            self._is_touched = True
            self._requests.send_body("put_object", self._read(0, nbytes), self._may, self._key)
            return
        count = -(-nbytes // self.part_bytes)
        for number in reversed(range(count)):  # The first part has the header: while it lacks, nothing looks whole.
            length = min(self.part_bytes, nbytes - number * self.part_bytes)
            if self._sent.get(number, ("", 0))[1] != length:
                self._send(number, length)
        self._complete(count, nbytes)

    def abort(self) -> None:
        if self._is_touched:
            self._remove()

    def _send(self, number: int, length: int) -> None:
        upload = self._begun()
        body = self._read(number * self.part_bytes, length)
        etag = self._requests.send_body("upload_part", body, self._may, self._key, UploadId=upload, PartNumber=number + 1)
        with self._lock:
            self._sent[number] = (etag, length)

    def _begun(self) -> str:
        with self._lock:
            if not self._upload:
                self._may()  # An upload, too, would be removed by nobody.
                self._is_touched = True
                more = {"ChecksumAlgorithm": "CRC64NVME"} if self._requests.has_crc else {}
                self._upload = self._requests.call("create_multipart_upload", Key=self._key, **more)["UploadId"]
            return self._upload

    def _complete(self, count: int, nbytes: int) -> None:
        parts = [{"PartNumber": number + 1, "ETag": self._sent[number][0]} for number in range(count)]
        try:
            self._requests.call(
                "complete_multipart_upload", Key=self._key, UploadId=self._upload, MultipartUpload={"Parts": parts}
            )
        except Refused as error:
            # Asked twice, since the first answer was lost: the upload is over, and the object tells how it ended.
            if not error.is_absent:
                raise
        stored = self._look()
        if stored is None:
            raise IoError("the object store dropped an upload that was not finished")
        if stored.nbytes != nbytes:  # A part that lacks is no error to it.
            raise IoError(f"the object store made an object of {stored.nbytes} bytes out of parts of {nbytes}")
