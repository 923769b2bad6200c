"""Whether a bucket and the credentials can do what is asked of them: all of it is tried once, with objects of a few bytes."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from slotstream.store.blobs.base import CHECK_PREFIX, Blobs
from slotstream.store.blobs.s3.requests import Refused, Requests
from slotstream.wire.errors import ConfigError, IoError

_BODY = b"slotstream was here, and checks what this bucket can do\n"

_SWAPPED = "-swap"
_SWAP = "put an object only in place of one that is named (If-Match, If-None-Match)"


def check(blobs: Blobs, requests: Requests, address: str, prefix: str) -> None:
    """`prefix`: of the keys of `blobs` in the bucket.

    Raises ConfigError, naming the right or the feature that is missing, and IoError where nothing answers.
    """
    key = CHECK_PREFIX + secrets.token_hex(8)
    try:
        _check(blobs, requests, address, prefix, key)
    except BaseException:
        with suppress(IoError):
            blobs.abort(key)
            blobs.delete(key + _SWAPPED)
        raise


def _check(blobs: Blobs, requests: Requests, address: str, prefix: str, key: str) -> None:
    @contextmanager
    def needs(right: str, feature: str) -> Iterator[None]:
        """What is done in here needs a right, and is a feature that a store may lack."""
        try:
            yield
        except Refused as error:
            if error.error == "NoSuchBucket":
                raise ConfigError(f"there is no bucket at {address}") from None
            if error.error in ("InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken", "InvalidToken"):
                raise ConfigError(f"the credentials are not those of {address}: {error.error}") from None
            if error.http_status == 403:
                raise ConfigError(f"the credentials lack the right {right} at {address}") from None
            raise ConfigError(f"{address} cannot {feature}: it answered {error.http_status} {error.error}") from None

    def must(holds: bool, feature: str) -> None:
        if not holds:
            raise ConfigError(f"{address} cannot {feature}")

    def puts(body: bytes) -> Callable[[int, int], bytes]:
        return lambda at, nbytes: body[at : at + nbytes]

    with needs("s3:PutObject", "store an object"):
        _choose_checksum(blobs, requests, key)
    must(
        _refuses_wrong_bytes(requests, prefix + key),
        "refuse a body that does not match its checksum (CRC64NVME or Content-MD5)",
    )
    with needs("s3:GetObject", "say how large an object is"):
        found = blobs.checksum(key)
        must(found is not None and found.nbytes == len(_BODY), "say how large an object is")
    with needs("s3:GetObject", "give a range of an object"):
        opened = blobs.open(key)
        must(opened is not None and opened.read(4, 6) == _BODY[4:10], "give a range of an object")
        assert opened is not None, "it was just looked at"
        opened.close()
    with needs("s3:ListBucket", "list objects"):
        must([one.key for one in blobs.list(key)] == [key], "list an object that was just stored")
    with needs("s3:ListBucket", "say that an object is not there"):
        must(blobs.checksum(key + "-none") is None, "say that an object is not there")
    with needs("s3:PutObject", _SWAP):
        must(_swaps(blobs, key + _SWAPPED), _SWAP)
    with needs("s3:DeleteObject", "delete an object"):
        blobs.delete(key)
        blobs.delete(key + _SWAPPED)
        must(blobs.checksum(key) is None, "delete an object")
    with needs("s3:PutObject", "take an object in parts"):
        put = blobs.put(key, 1 << 30, puts(_BODY.ljust(1 << 24)))
        put.send(0)
    with needs("s3:ListBucketMultipartUploads and s3:AbortMultipartUpload", "abort an upload"):
        blobs.abort(key)
    with needs("s3:PutObject", "put parts together"):
        put = blobs.put(key, 1 << 30, puts(_BODY.ljust(1 << 24)))
        put.send(0)
        put.finish(put.part_bytes + 7)
    with needs("s3:DeleteObject", "delete an object"):
        blobs.delete(key)


def _swaps(blobs: Blobs, key: str) -> bool:
    if not blobs.swap(key, b"1", "") or blobs.swap(key, b"2", ""):
        return False
    first = blobs.get_small(key)
    if first is None or first.data != b"1" or not blobs.swap(key, b"3", first.tag) or blobs.swap(key, b"4", first.tag):
        return False
    last = blobs.get_small(key)
    return last is not None and last.data == b"3"


def _choose_checksum(blobs: Blobs, requests: Requests, key: str) -> None:
    """CRC-64/NVME where the store knows it, else MD5. The object is there after this."""

    def put() -> None:
        blobs.put(key, len(_BODY), lambda at, nbytes: _BODY[at : at + nbytes]).finish(len(_BODY))

    requests.has_crc = True
    with suppress(Refused):
        put()
        stored = blobs.checksum(key)
        if stored is not None and stored.checksum:
            return
    requests.has_crc = False
    put()


def _refuses_wrong_bytes(requests: Requests, key: str) -> bool:
    try:
        requests.send_with("put_object", _BODY, requests.wrong_digest(_BODY), lambda: None, key)
    except Refused as error:
        return 400 <= error.http_status < 500
    return False
