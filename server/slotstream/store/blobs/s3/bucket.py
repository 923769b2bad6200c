"""A bucket's objects below a prefix."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from botocore.exceptions import BotoCoreError
from urllib3.exceptions import HTTPError

from slotstream.store.blobs.base import Put, Read, Small, Stored
from slotstream.store.blobs.s3.address import Address
from slotstream.store.blobs.s3.checking import check
from slotstream.store.blobs.s3.put import S3Put
from slotstream.store.blobs.s3.reading import Room, S3Blob
from slotstream.store.blobs.s3.requests import Refused, Requests
from slotstream.wire.errors import IoError

_ROOM_BYTES = 128 << 20  # For small objects that are read whole; larger ones, and more of them, do without.


class S3Blobs:
    """A `Blobs`. Thread safe. Raises IoError and StoreFull unless it says more."""

    def __init__(self, url: str) -> None:
        """Sends nothing. Raises ConfigError."""
        self.address = Address.parsed(url)
        self._prefix = self.address.prefix
        self._requests = Requests(self.address)
        self._room = Room(_ROOM_BYTES)

    def __str__(self) -> str:
        return str(self.address)

    def close(self) -> None:
        self._requests.close()

    def put(self, key: str, bytes_max: int, read: Read, may: Callable[[], None] = lambda: None) -> Put:
        look, remove = partial(self.checksum, key), partial(self.abort, key)
        return S3Put(self._requests, self._prefix + key, bytes_max, read, may, look, remove)

    def open(self, key: str, *, all_of_it: bool = False) -> S3Blob | None:
        try:
            return S3Blob(self._requests, self._prefix + key, self._room, all_of_it=all_of_it)
        except Refused as error:
            if error.error == "NoSuchKey":  # And not that the bucket is gone: its objects are not, as far as anybody knows.
                return None
            raise

    def delete(self, key: str) -> None:
        self._requests.call("delete_object", Key=self._prefix + key)

    def abort(self, key: str) -> None:
        for upload in self._uploads(key):
            try:
                self._requests.call("abort_multipart_upload", Key=self._prefix + key, UploadId=upload)
            except Refused as error:
                if not error.is_absent:
                    raise
        # It says yes also where the upload was put together meanwhile, so the object is looked for after it.
        if self.checksum(key) is not None:
            self.delete(key)

    def _uploads(self, key: str) -> list[str]:
        """Those to one key that go on; a page of them, which is more than anybody begins."""
        found = self._requests.call("list_multipart_uploads", Prefix=self._prefix + key)
        return [one["UploadId"] for one in found.get("Uploads", ()) if one["Key"] == self._prefix + key]

    def get_small(self, key: str) -> Small | None:
        try:
            found = self._requests.call("get_object", Key=self._prefix + key)
            return Small(found["Body"].read(), found["ETag"])
        except Refused as error:
            if error.error == "NoSuchKey":
                return None
            raise
        except (BotoCoreError, HTTPError) as error:
            raise IoError(f"the object store {self.address} does not answer: {type(error).__name__}") from None

    def swap(self, key: str, data: bytes, instead_of: str) -> bool:
        there = {"IfMatch": instead_of} if instead_of else {"IfNoneMatch": "*"}
        try:
            self._requests.call("put_object", Key=self._prefix + key, Body=data, **there)
        except Refused as error:
            # 412; of two at once S3 also refuses one with 409; and one that is not there at all with 404.
            if error.http_status in (409, 412) or error.error == "NoSuchKey":
                # Asked twice, since the first answer was lost: it may be ours.
                found = self.get_small(key)
                return found is not None and found.data == data
            raise
        return True

    def list(self, prefix: str = "") -> Iterator[Stored]:
        token: dict[str, str] = {}
        while True:
            page = self._requests.call("list_objects_v2", Prefix=self._prefix + prefix, **token)
            for one in page.get("Contents", ()):
                yield Stored(one["Key"].removeprefix(self._prefix), one["Size"])
            if not page.get("IsTruncated"):
                return
            token = {"ContinuationToken": page["NextContinuationToken"]}

    def checksum(self, key: str) -> Stored | None:
        try:
            found = self._requests.call("head_object", Key=self._prefix + key, ChecksumMode="ENABLED")
        except Refused as error:
            if error.is_absent:
                return None
            raise
        crc = found.get("ChecksumCRC64NVME", "")
        return Stored(key, found["ContentLength"], f"crc64nvme:{crc}" if crc else "")

    def check(self) -> None:
        check(self, self._requests, str(self.address), self._prefix)
