"""What a fuzz target is, and how one input becomes the decisions of a structured one. Imports nothing of slotstream."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TypeVar

CORPUS = Path(__file__).parent / "corpus"
_T = TypeVar("_T")


@dataclass(frozen=True)
class Target:
    """One parser. `check(data)` raises on anything that must not happen: an exception nobody documented, a broken promise.

    `share` is its part of a run over all targets: cheap parsers get many inputs, those that reach a disk fewer.
    `seeds` give a corpus its beginning: inputs that a mutation should start from.
    """

    name: str
    check: Callable[[bytes], None]
    share: int
    bytes_max: int
    seeds: Callable[[], Iterable[bytes]] = field(default=lambda: ())

    @property
    def corpus_dir(self) -> Path:
        return CORPUS / self.name

    @cached_property
    def corpus(self) -> list[bytes]:
        """Every input in the repository, shortest first."""
        return sorted((path.read_bytes() for path in self.corpus_dir.glob("*")), key=lambda data: (len(data), data))


SCRATCH = "SLOTSTREAM_FUZZ_SCRATCH"  # The environment's word on where directories go.


def scratch_base() -> str | None:
    """Where to make directories: in memory, where there is such a place."""
    return os.environ.get(SCRATCH) or ("/dev/shm" if os.access("/dev/shm", os.W_OK) else None)


class Source:
    """Reads decisions off an input. After its end every decision is the first choice, so short inputs mean something."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    @property
    def left(self) -> int:
        return len(self._data) - self._at

    def take(self, count: int) -> bytes:
        """The next `count` bytes; fewer at the end."""
        part = self._data[self._at : self._at + count]
        self._at += len(part)
        return part

    def rest(self) -> bytes:
        return self.take(self.left)

    def below(self, limit: int) -> int:
        """A number from 0 to limit - 1."""
        width = max(1, ((limit - 1).bit_length() + 7) // 8)
        return int.from_bytes(self.take(width), "little") % limit

    def pick(self, choices: Sequence[_T]) -> _T:
        return choices[self.below(len(choices))]

    def text(self, count: int) -> str:
        """Up to `count` characters, any byte a code point."""
        return self.take(self.below(count + 1)).decode("latin-1")


def damaged(data: bytes, source: Source) -> bytes:
    """`data` with the bytes overwritten, cut off or added that `source` says: as a disk, or somebody on it, would."""
    out = bytearray(data)
    while source.left:
        action = source.below(8)
        at = source.below(1 << 24) % (len(out) + 1)
        if action == 0:
            del out[at:]
        elif action == 1:
            out += bytes(source.below(1 << 13))
        elif action == 2:
            del out[at : at + source.below(256)]
        elif action == 3:
            out[at : at + 64] = bytes(len(out[at : at + 64]))
        else:
            patch = source.take(source.below(16) + 1)
            out[at : at + len(patch)] = patch
    return bytes(out)


def mutated(data: bytes, rng: random.Random, bytes_max: int) -> bytes:
    """`data` with a few random changes: what the engine without coverage has for a mutator."""
    out = bytearray(data)
    for _ in range(rng.randint(1, 6)):
        at = rng.randrange(len(out) + 1)
        match rng.randrange(5):
            case 0:
                out[at:at] = rng.randbytes(rng.randint(1, 8))
            case 1:
                del out[at : at + rng.randint(1, 8)]
            case 2 if out:
                out[at % len(out)] ^= 1 << rng.randrange(8)
            case 3:
                out[at : at + 4] = rng.choice((b"\0\0\0\0", b"\xff\xff\xff\xff", b"\x80\0\0\0", b"\x7f\xff\xff\xff"))
            case _:
                other = rng.randrange(len(out) + 1)
                out[at:at] = out[other : other + rng.randint(1, 32)]
    return bytes(out[:bytes_max])


def sentence(error: Exception) -> None:
    """What an error says can be printed, put into a protobuf message and into a JSON answer."""
    said = str(error)
    assert said
    assert "\n" not in said
    said.encode()
    assert len(said) < 20_000


@dataclass(frozen=True)
class Footprint:
    """What a process holds."""

    resident_bytes: int
    descriptors: int
    threads: int

    @classmethod
    def now(cls) -> Footprint:
        resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        return cls(resident, len(list(Path("/proc/self/fd").iterdir())), threading.active_count())
