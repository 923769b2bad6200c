"""How a request gets to the bucket: small ones through botocore, bodies through urllib3 to signed URLs.

botocore reads and hashes a body several times; a signed URL leaves it alone. What the store has to check of a body is a header
that is signed with the URL. No URL is ever shown: its signature is as good as a password for some minutes.
"""

from __future__ import annotations

import base64
import hashlib
import logging
import os
import random
import time
from collections.abc import Callable, Mapping
from typing import Any
from xml.etree import ElementTree

import botocore.session
import urllib3
from awscrt import checksums  # type: ignore[import-untyped]
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError

from slotstream.store.blobs.s3.address import Address
from slotstream.store.blobs.s3.signing import Signer
from slotstream.wire.errors import ConfigError, IoError, StoreFull
from slotstream.wire.hashing import Buffer

for _name in ("botocore", "urllib3"):  # What they say of each request has its URL in it; and connections beyond some are fine.
    logging.getLogger(_name).setLevel(logging.ERROR)
READ_URL_S = 600  # How long a signed URL is good.
_BODY_URL_S = 60  # A body that somebody hangs on to must not arrive long after.
_CONNECT_S = 5
_ANSWER_S = 60
_CONNECTIONS = 32
_ERROR_BYTES_MAX = 1 << 16
_PAUSES_S = (0.1, 0.5, 2.0)  # Before a request is sent again; a little more or less each time.
_PASSING = frozenset({408, 429, 500, 502, 503, 504})
_NO_ROOM = frozenset({"QuotaExceeded", "InsufficientStorage", "InsufficientCapacity", "XMinioStorageFull", "507"})
_NONE: Mapping[str, str] = {}
_ABSENT = frozenset({"NoSuchKey", "NoSuchUpload", "NotFound", "404"})


class Refused(IoError):
    """The store answered, and not as it should. `code`: the error's name, or its number where it has none."""

    def __init__(self, message: str, code: str, status: int) -> None:
        super().__init__(message)
        self.error = code
        self.http_status = status

    @property
    def is_absent(self) -> bool:
        """Whether it says that there is no such object or upload; the bucket is there."""
        return self.error in _ABSENT


class Body:
    """What an answer brings, taken as it comes: what nobody took yet waits at the store, and takes no memory here."""

    def __init__(
        self, answer: urllib3.BaseHTTPResponse, nbytes: int, total: int, failure: Callable[[Exception], IoError]
    ) -> None:
        """`nbytes` are left to come, of an object of `total`."""
        self.nbytes, self.total = nbytes, total
        self._answer, self._failure = answer, failure

    def read(self, nbytes: int) -> bytes:
        """The next so many, which must be there. Raises IoError, and no more can be read then."""
        try:
            data = self._answer.read(nbytes, decode_content=False) if nbytes else b""
            if len(data) < nbytes:
                raise urllib3.exceptions.ProtocolError("the answer ended early")
        except (urllib3.exceptions.HTTPError, OSError) as error:
            self.close()
            raise self._failure(error) from None
        self.nbytes -= nbytes
        return data

    def close(self) -> None:
        """The connection can be used again only where all was read."""
        if self.nbytes:
            self.nbytes = 0
            _drop(self._answer)


class Requests:
    """To one bucket. Thread safe. Raises Refused, IoError and StoreFull."""

    def __init__(self, address: Address) -> None:
        """Raises ConfigError."""
        session = botocore.session.get_session()
        try:
            region = session.get_config_variable("region") or "us-east-1"
            config = Config(
                signature_version="s3v4",  # Else URLs are signed the old way.
                connect_timeout=_CONNECT_S,
                read_timeout=_ANSWER_S,
                max_pool_connections=_CONNECTIONS,
                retries={"mode": "standard", "max_attempts": 1 + len(_PAUSES_S)},
                request_checksum_calculation="when_required",
                response_checksum_validation="when_required",
            )
            self._client: Any = session.create_client("s3", region_name=region, config=config)
            credentials = session.get_credentials()
            if credentials is None:
                raise ConfigError(f"there are no credentials for {address}: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY")
            self._signer = Signer(self._client, credentials, address.bucket)
        except (BotoCoreError, ValueError) as error:
            raise ConfigError(f"the object store {address} cannot be used: {' '.join(str(error).split())}") from None
        self._bucket = address.bucket
        self._address = str(address)
        self._pool = urllib3.PoolManager(
            num_pools=4,
            maxsize=_CONNECTIONS,
            retries=False,
            timeout=urllib3.Timeout(connect=_CONNECT_S, read=_ANSWER_S),
            ca_certs=os.environ.get("AWS_CA_BUNDLE"),
        )
        self.has_crc = True  # Whether the store checks CRC-64/NVME; MD5 costs three times as much.

    def close(self) -> None:
        self._pool.clear()
        self._client.close()

    def call(self, operation: str, **parameters: Any) -> dict[str, Any]:
        """A request without a body of ours, as botocore knows it; sent again where that may help."""
        try:
            answer: dict[str, Any] = getattr(self._client, operation)(Bucket=self._bucket, **parameters)
            return answer
        except ClientError as error:
            told: Mapping[str, Any] = error.response
            status = int(told.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
            raise self._refused(status, str(told.get("Error", {}).get("Code", status))) from None
        except BotoCoreError as error:
            raise self._unanswered(error) from None

    def signed(
        self, operation: str, seconds: int, key: str, headers: Mapping[str, str] = _NONE, **parameters: str | int
    ) -> str:
        """A URL for one kind of request with `headers`, good for so long."""
        try:
            return self._signer.url(operation, seconds, key, headers, parameters)
        except (BotoCoreError, NoCredentialsError) as error:
            raise self._unanswered(error) from None

    def send_body(self, operation: str, body: Buffer, may: Callable[[], None], key: str, **parameters: str | int) -> str:
        """PUT a body that the store checks; its ETag. `may`: raises where that is not wanted any more."""
        return self.send_with(operation, body, self._digest(body), may, key, **parameters)

    def send_with(
        self,
        operation: str,
        body: Buffer,
        headers: Mapping[str, str],
        may: Callable[[], None],
        key: str,
        **parameters: str | int,
    ) -> str:
        """PUT a body with headers, which are signed too; its ETag."""
        for pause_s in (*_PAUSES_S, None):
            url = self.signed(operation, _BODY_URL_S, key, headers, **parameters)
            may()  # After the signature: whoever is stopped here and goes on later has one that is good no more.
            answer = self._try("PUT", url, headers, body, last=pause_s is None)
            if answer is not None and answer.status == 200 and not _is_error(answer.data):
                return str(answer.headers.get("ETag", ""))
            if answer is not None and answer.status not in _PASSING and answer.status != 200:
                break
            if pause_s is not None:
                _pause(pause_s)
        assert answer is not None, "the last try raises"
        raise self._refused(answer.status, _code(answer.data, answer.status))

    def get(self, url: str, at: int, nbytes: int) -> bytes:
        """So many bytes from `at` of what a signed URL names, fewer at its end. `nbytes`: 1 at least."""
        for pause_s in (*_PAUSES_S, None):
            body = self.open(url, at, nbytes)
            try:
                return body.read(body.nbytes)
            except IoError:
                if pause_s is None:
                    raise
                _pause(pause_s)
        raise AssertionError("the last try returns or raises")

    def open(self, url: str, at: int, nbytes: int) -> Body:
        """So many bytes from `at` of what a signed URL names, fewer at its end, as they come. `nbytes`: 1 at least."""
        for pause_s in (*_PAUSES_S, None):
            answer = self._try(
                "GET", url, {"Range": f"bytes={at}-{at + nbytes - 1}"}, None, last=pause_s is None, is_read=False
            )
            if answer is not None and answer.status == 206:
                total = _total(answer.headers.get("Content-Range", ""))
                if total > at:
                    return Body(answer, min(nbytes, total - at), total, self._unanswered)
                _drop(answer)
            elif answer is not None and answer.status == 200:  # All of it.
                total = int(answer.headers.get("Content-Length", 0))
                if total > at:
                    body = Body(answer, min(at + nbytes, total), total, self._unanswered)
                    body.read(at)
                    return body
                _drop(answer)
            elif answer is not None and (answer.status not in _PASSING or pause_s is None):
                raise self._refused(answer.status, _code(_said(answer), answer.status))
            elif answer is not None:
                _drop(answer)
            if pause_s is not None:
                _pause(pause_s)
        raise IoError(f"the object store {self._address} does not say how large an object is")

    def wrong_digest(self, body: Buffer) -> dict[str, str]:
        """As what a body is sent with, of other bytes: the store has to refuse it."""
        return self._digest(bytes(body) + b"!")

    def _digest(self, body: Buffer) -> dict[str, str]:
        """The header with a body's checksum."""
        if self.has_crc:
            raw = checksums.crc64nvme(body).to_bytes(8, "big")
            return {"x-amz-checksum-crc64nvme": base64.b64encode(raw).decode()}
        return {"Content-MD5": base64.b64encode(hashlib.md5(body, usedforsecurity=False).digest()).decode()}

    def _try(
        self,
        method: str,
        url: str,
        headers: Mapping[str, str],
        body: Buffer | None,
        *,
        last: bool,
        is_read: bool = True,
    ) -> urllib3.BaseHTTPResponse | None:
        """The answer, with all its bytes if `is_read`; None where there is none: IoError if it is the last try."""
        try:
            return self._pool.request(
                method,
                url,
                headers=headers,
                body=body,  # type: ignore[arg-type]  # http.client takes any buffer.
                redirect=False,
                preload_content=is_read,
                decode_content=False,
            )
        except urllib3.exceptions.HTTPError as error:
            if last:
                raise self._unanswered(error) from None
            return None

    def _refused(self, status: int, code: str) -> IoError | StoreFull:
        if code in _NO_ROOM or status == 507:
            return StoreFull(f"the object store {self._address} has no room: {code}")
        return Refused(f"the object store {self._address} answered {status} {code}", code, status)

    def _unanswered(self, error: Exception) -> IoError:
        """Its own words may have the URL in them."""
        cause: BaseException | None = error
        while cause is not None and not (isinstance(cause, OSError) and cause.strerror):
            cause = cause.__cause__ or cause.__context__
        why = cause.strerror if isinstance(cause, OSError) else type(error).__name__
        return IoError(f"the object store {self._address} does not answer: {why}")


def _pause(seconds: float) -> None:
    time.sleep(seconds * random.uniform(0.5, 1.5))


def _is_error(body: bytes) -> bool:
    """Whether an answer of 200 says that it failed all the same."""
    return b"<Error>" in body


def _said(answer: urllib3.BaseHTTPResponse) -> bytes:
    """The body of an answer that is an error."""
    try:
        return answer.read(_ERROR_BYTES_MAX, decode_content=False)
    except (urllib3.exceptions.HTTPError, OSError):
        return b""
    finally:
        _drop(answer)


def _drop(answer: urllib3.BaseHTTPResponse) -> None:
    """What it has left is not read: its connection is closed."""
    answer.close()
    answer.release_conn()


def _total(content_range: str) -> int:
    """How many bytes an object has, by the answer to a range of it; 0 where that does not say."""
    total = content_range.rpartition("/")[2]
    return int(total) if total.isascii() and total.isdigit() else 0


def _code(body: bytes, status: int) -> str:
    try:
        return ElementTree.fromstring(body).findtext("Code") or str(status)
    except ElementTree.ParseError:
        return str(status)
