"""What the directory says of its catalogue, beside it in `catalog.sqlite.seal`: so that another catalogue in its place is seen.

Each start gives the catalogue the next generation and writes it here too: one that is put back from an earlier day has an
earlier generation. A clean stop adds the hash of the whole file: the next start then knows that no bit of it changed, and looks
at nothing else. The note checks itself; one that is missing or damaged says nothing, and the start looks at everything.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import xxhash

from slotstream.wire.hashing import to_hex, xxh3

SUFFIX = ".seal"
_MARK = "slotstream-catalogue"
_BYTES_MAX = 512  # One sector: written in place, it is there or it is not.
_PIECE_BYTES = 1 << 20
_UNSEALED = "-"


@dataclass(frozen=True, slots=True)
class Seal:
    """`file_xxh3`: of the file as a clean stop left it; "" while a server runs, and after it died."""

    generation: int
    schema: int
    file_xxh3: str = ""

    def write(self, path: Path) -> None:
        """Durably, for the catalogue at `path`. Raises OSError."""
        text = f"{_MARK} {self.generation} {self.schema} {self.file_xxh3 or _UNSEALED}"
        raw = f"{text} {to_hex(xxh3(text.encode()))}\n".encode()
        note = path.with_name(path.name + SUFFIX)
        existed = note.exists()
        fd = os.open(note, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o640)
        try:
            os.pwrite(fd, raw.ljust(_BYTES_MAX), 0)  # In place: a disk that has no room has room for this.
            os.fdatasync(fd)
        finally:
            os.close(fd)
        if not existed:
            directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(directory)
            finally:
                os.close(directory)

    def matches(self, path: Path) -> bool:
        """Whether the catalogue at `path` is, byte for byte, the one that a clean stop left. Raises OSError."""
        log = path.with_name(path.name + "-wal")
        if not self.file_xxh3 or (log.exists() and log.stat().st_size):
            return False
        return path.exists() and hash_of(path) == self.file_xxh3


def read(path: Path) -> Seal | None:
    """What was said last of the catalogue at `path`; None where nothing, or nothing that can be trusted. Raises OSError."""
    try:
        fd = os.open(path.with_name(path.name + SUFFIX), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        raw = os.read(fd, _BYTES_MAX)
    finally:
        os.close(fd)
    try:
        text, _, digest = raw.decode("ascii").strip().rpartition(" ")
        mark, generation, schema, file_xxh3 = text.split(" ")
        if mark != _MARK or digest != to_hex(xxh3(text.encode())):
            return None
        return Seal(int(generation), int(schema), "" if file_xxh3 == _UNSEALED else file_xxh3)
    except ValueError:
        return None


def hash_of(path: Path) -> str:
    """xxh3-64 of a whole file. Raises OSError."""
    digest = xxhash.xxh3_64()
    with path.open("rb", buffering=0) as file:
        while piece := file.read(_PIECE_BYTES):
            digest.update(piece)
    return digest.hexdigest()
