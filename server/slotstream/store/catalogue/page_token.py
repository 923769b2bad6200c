"""Page tokens: where a listing goes on, sealed. Row ids count all samples, and a token's holder may be one who sees only some.

Sealed with a key of the catalogue's own, synthetic-IV style: a keyed BLAKE2b of the content is both its seal and what makes
the key stream, so that a token can be neither read nor changed.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import struct
from hashlib import blake2b

from slotstream.wire.errors import BadPage

KEY_BYTES = 32
_POSITION = struct.Struct(">BqqI")
_VERSION = 2
_SEAL_BYTES = 16


def is_key(text: str) -> bool:
    """Whether `text` spells a key."""
    try:
        return len(bytes.fromhex(text)) == KEY_BYTES
    except ValueError:
        return False


def seal(key: bytes, created_unix_ns: int, row_id: int, fingerprint: int) -> str:
    """The token of the page that follows this row in the listing with this fingerprint (32 bits)."""
    content = _POSITION.pack(_VERSION, created_unix_ns, row_id, fingerprint)
    mark = _mark(key, content)
    return base64.urlsafe_b64encode(mark + _masked(key, mark, content)).decode()


def unseal(key: bytes, token: str, fingerprint: int) -> tuple[int, int]:
    """(created_unix_ns, row id) of the last row of the page before. Raises BadPage."""
    try:
        raw = base64.b64decode(token, b"-_", validate=True)
    except (binascii.Error, ValueError) as error:
        raise BadPage("the page token is not one that this server gave out") from error
    mark = raw[:_SEAL_BYTES]
    content = _masked(key, mark, raw[_SEAL_BYTES:]) if len(raw) == _SEAL_BYTES + _POSITION.size else b""
    if not content or not hmac.compare_digest(mark, _mark(key, content)):
        raise BadPage("the page token is not one that this server gave out")
    _, created, row_id, of_listing = _POSITION.unpack(content)
    if of_listing != fingerprint:
        raise BadPage("the page token belongs to a listing with other filters")
    return created, row_id


def _mark(key: bytes, content: bytes) -> bytes:
    return blake2b(content, digest_size=_SEAL_BYTES, key=key, person=b"slotstream page").digest()


def _masked(key: bytes, mark: bytes, content: bytes) -> bytes:
    stream = blake2b(mark, digest_size=_POSITION.size, key=key, person=b"slotstream mask").digest()
    return bytes(a ^ b for a, b in zip(content, stream, strict=True))
