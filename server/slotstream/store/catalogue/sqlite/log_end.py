"""Did SQLite take all of the log that it found? It reads up to the first frame whose checksum fails, and says nothing.

One flipped bit there takes back all that was written later. So does a kill in the middle of a write, where nothing is lost:
nobody had been told of it yet. The formats: https://www.sqlite.org/walformat.html.
"""

from __future__ import annotations

import sys
from pathlib import Path

_HEADER_BYTES = 32
_FRAME_BYTES = 24  # Before each page.
_SALTS_AT = 16  # In the log's header; in a frame's they are at 8.


def frames_written(path: Path) -> int:
    """How many frames the log of the catalogue at `path` has. Before the catalogue is opened."""
    try:
        raw = path.with_name(path.name + "-wal").read_bytes()
    except FileNotFoundError:
        return 0
    frame_bytes = _FRAME_BYTES + _page_bytes(path, raw)
    salts = [raw[at + 8 : at + 16] for at in range(_HEADER_BYTES, len(raw) - frame_bytes + 1, frame_bytes)]
    if not salts:
        return 0
    # Frames of earlier rounds, behind those of this one, have other salts. The first is always of this one.
    present = {salts[0], raw[_SALTS_AT : _SALTS_AT + 8]}
    return max(number for number, salt in enumerate(salts, 1) if salt in present)


def frames_taken(path: Path) -> int:
    """Those that SQLite took. After the first query."""
    try:
        with path.with_name(path.name + "-shm").open("rb") as file:
            return int.from_bytes(file.read(20)[16:], sys.byteorder)
    except FileNotFoundError:
        return 0


def _page_bytes(path: Path, log: bytes) -> int:
    """By the catalogue's own header; a database that is all in its log has it there."""
    with path.open("rb") as file:
        told = int.from_bytes(file.read(18)[16:], "big") or int.from_bytes(log[8:12], "big")
    return {1: 65536}.get(told, told) if told.bit_count() == 1 else 4096
