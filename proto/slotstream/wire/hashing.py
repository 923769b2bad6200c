"""The one hash of the wire and of the files: xxh3-64, seed 0. It finds damage, not forgery.

42 GB/s a core, without the GIL.
"""

from __future__ import annotations

import xxhash

HASH_HEX_CHARS = 16

Buffer = bytes | bytearray | memoryview


def xxh3(data: Buffer) -> int:
    """xxh3-64 of `data` as an unsigned 64-bit integer."""
    return xxhash.xxh3_64_intdigest(data)


def to_hex(digest: int) -> str:
    """16 lower-case hex characters, most significant first."""
    return f"{digest:016x}"
