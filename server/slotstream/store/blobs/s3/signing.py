"""Signed URLs for objects, as botocore's own (SigV4 in the query): it takes a millisecond for each, and this a thirtieth.

Where a bucket is, by which name of a host and which path, is botocore's to say: it signs one URL, and the others are like it.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote, urlsplit

_ALGORITHM = "AWS4-HMAC-SHA256"
_METHODS = {"get_object": "GET", "put_object": "PUT", "upload_part": "PUT"}
_QUERY = {"UploadId": "uploadId", "PartNumber": "partNumber"}


class Signer:
    """Of one bucket. Thread safe. Asks the credentials for each URL, so that those that are renewed are the new ones."""

    def __init__(self, client: Any, credentials: Any, bucket: str) -> None:
        """`client`, `credentials`: botocore's. Raises what botocore raises where it cannot say where the bucket is."""
        self._credentials = credentials
        self._region = client.meta.region_name
        like = urlsplit(client.generate_presigned_url("get_object", Params={"Bucket": bucket, "Key": "k"}))
        self._origin, self._host, self._path = f"{like.scheme}://{like.netloc}", like.netloc, like.path.removesuffix("k")
        self._key_of = ("", "", b"")  # Day and secret -> the key that signs.

    def url(
        self, operation: str, seconds: int, key: str, headers: Mapping[str, str], parameters: Mapping[str, str | int]
    ) -> str:
        """For one kind of request, with `headers`, good for so long. `parameters`: UploadId and PartNumber, of a part."""
        held = self._credentials.get_frozen_credentials()
        at = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
        scope = f"{at[:8]}/{self._region}/s3/aws4_request"
        signed = {"host": self._host, **{name.lower(): value for name, value in headers.items()}}
        names = ";".join(sorted(signed))
        query = {
            "X-Amz-Algorithm": _ALGORITHM,
            "X-Amz-Credential": f"{held.access_key}/{scope}",
            "X-Amz-Date": at,
            "X-Amz-Expires": str(seconds),
            "X-Amz-SignedHeaders": names,
            **{_QUERY[name]: str(value) for name, value in parameters.items()},
        }
        if held.token:
            query["X-Amz-Security-Token"] = held.token
        path = self._path + quote(key, safe="/-_.~")
        asked = "&".join(sorted(f"{quote(name, safe='-_.~')}={quote(value, safe='-_.~')}" for name, value in query.items()))
        lines = "".join(f"{name}:{signed[name].strip()}\n" for name in sorted(signed))
        request = f"{_METHODS[operation]}\n{path}\n{asked}\n{lines}\n{names}\nUNSIGNED-PAYLOAD"
        told = f"{_ALGORITHM}\n{at}\n{scope}\n{hashlib.sha256(request.encode()).hexdigest()}"
        signature = hmac.new(self._signing_key(at[:8], held.secret_key), told.encode(), hashlib.sha256).hexdigest()
        return f"{self._origin}{path}?{asked}&X-Amz-Signature={signature}"

    def _signing_key(self, day: str, secret: str) -> bytes:
        known = self._key_of
        if known[:2] != (day, secret):
            made = f"AWS4{secret}".encode()
            for part in (day, self._region, "s3", "aws4_request"):
                made = hmac.new(made, part.encode(), hashlib.sha256).digest()
            self._key_of = known = (day, secret, made)
        return known[2]
