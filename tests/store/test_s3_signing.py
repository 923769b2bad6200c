"""URLs are signed as botocore signs them, byte for byte."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from datetime import datetime
from functools import cache
from typing import Any
from unittest.mock import patch
from urllib.parse import parse_qs, urlsplit

import botocore.session
import pytest
from botocore.config import Config

from slotstream.store.blobs.s3.signing import Signer

_AT = datetime.fromisoformat("2026-11-27T01:02:03+00:00")
_CRC = base64.b64encode(bytes(8)).decode()
_CASES: list[tuple[str, dict[str, Any], dict[str, str], dict[str, str]]] = [
    ("get_object", {}, {}, {}),
    ("put_object", {}, {"x-amz-checksum-crc64nvme": _CRC}, {"ChecksumCRC64NVME": _CRC}),
    ("put_object", {}, {"Content-MD5": _CRC}, {"ContentMD5": _CRC}),
    ("upload_part", {"UploadId": "a+b/c=", "PartNumber": 12}, {"x-amz-checksum-crc64nvme": _CRC}, {"ChecksumCRC64NVME": _CRC}),
]


@pytest.mark.parametrize("endpoint", [None, "http://127.0.0.1:8333", "https://store.example.org/deep"])
@pytest.mark.parametrize("token", [None, "a+token/="])
@pytest.mark.parametrize("bucket", ["bucket", "a.bucket"])
@pytest.mark.parametrize("key", ["n/ab/s1.0123.safetensors", "n/a b+c%2F&=?ü~.x"])
@pytest.mark.parametrize(("operation", "parameters", "headers", "named"), _CASES)
def test_as_botocore_does(
    endpoint: str | None,
    token: str | None,
    bucket: str,
    key: str,
    operation: str,
    parameters: Mapping[str, Any],
    headers: dict[str, str],
    named: dict[str, str],
) -> None:
    client, credentials = _client(endpoint, token)
    ours = Signer(client, credentials, bucket)
    with patch("slotstream.store.blobs.s3.signing.datetime") as clock:
        clock.now.return_value = _AT
        found = urlsplit(ours.url(operation, 60, key, headers, parameters))
    theirs = _theirs(client, operation, {"Bucket": bucket, "Key": key, **parameters, **named})
    assert (found.scheme, found.netloc, found.path) == (theirs.scheme, theirs.netloc, theirs.path)
    assert parse_qs(found.query) == parse_qs(theirs.query)


@cache
def _client(endpoint: str | None, token: str | None) -> tuple[Any, Any]:
    session = botocore.session.Session()
    session.set_credentials("AKID", "secret", token)
    config = Config(signature_version="s3v4", request_checksum_calculation="when_required")
    client = session.create_client("s3", region_name="eu-west-3", endpoint_url=endpoint, config=config)
    return client, session.get_credentials()


def _theirs(client: Any, operation: str, parameters: dict[str, Any]) -> Any:
    with (
        patch("botocore.auth.get_current_datetime", return_value=_AT),
        patch("botocore.crt.auth.get_current_datetime", return_value=_AT),
    ):
        return urlsplit(client.generate_presigned_url(operation, Params=parameters, ExpiresIn=60))
