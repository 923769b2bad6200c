"""What the kernel alone copies on this host: out of one process and out of several, and into pages that are new to a file.

NIXL's readers on the sender's own host copy its staging with `process_vm_readv`, and the server writes what they read. So this
bounds what the streams of one sender can reach there.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path

from children import Child, questions
from machine import progress

_CHUNK_BYTES = 2 << 20  # The connector's default.
_SOURCE_BYTES = 512 << 20  # As much staging as a connector has by default, at least.
_BUFFER_BYTES = 64 << 20  # That a reader copies into, again and again.


class _Piece(ctypes.Structure):
    _fields_ = (("address", ctypes.c_void_p), ("nbytes", ctypes.c_size_t))


@dataclass
class Copies:
    """So many processes that copy at a time, out of so many others (0: out of their own memory); GB/s of all, by round."""

    copiers: int
    sources: int
    into_files: bool
    gb_per_s: list[float] = field(default_factory=list)

    @property
    def name(self) -> str:
        what = f"{self.copiers} of {self.sources}" if self.sources else f"{self.copiers} of their own"
        return f"{what}, {'into new pages' if self.into_files else 'into old pages'}"


def _own(connection: Connection) -> None:
    """A process whose memory others copy."""
    memory = mmap.mmap(-1, _SOURCE_BYTES)  # Shared, as staging is.
    memory.write(os.urandom(_CHUNK_BYTES) * (_SOURCE_BYTES // _CHUNK_BYTES))
    for _ in questions(connection):
        connection.send((os.getpid(), ctypes.addressof(ctypes.c_char.from_buffer(memory))))


def _copy(connection: Connection, work: str) -> None:
    """A process that copies so many bytes, and says when it began and ended."""
    call = ctypes.CDLL(None, use_errno=True).process_vm_readv
    call.argtypes = (ctypes.c_int, *(ctypes.POINTER(_Piece), ctypes.c_ulong) * 2, ctypes.c_ulong)
    call.restype = ctypes.c_ssize_t
    memory = mmap.mmap(-1, _BUFFER_BYTES)
    memory.write(b"\1" * _BUFFER_BYTES)
    here, view = ctypes.addressof(ctypes.c_char.from_buffer(memory)), memoryview(memory)
    for pid, address, first, nbytes, into_file in questions(connection):
        with tempfile.TemporaryFile(dir=work) as file:
            began = time.monotonic()
            for at in range(0, nbytes, _CHUNK_BYTES):
                place = at % _BUFFER_BYTES
                if pid:
                    there = address + (first + at) % _SOURCE_BYTES
                    ours, theirs = _Piece(here + place, _CHUNK_BYTES), _Piece(there, _CHUNK_BYTES)
                    if call(pid, ours, 1, theirs, 1, 0) != _CHUNK_BYTES:
                        raise OSError(ctypes.get_errno(), "process_vm_readv")
                if into_file:
                    os.pwrite(file.fileno(), view[place : place + _CHUNK_BYTES], at)
            ended = time.monotonic()
        connection.send((began, ended))


def _cases(most: int) -> Iterator[Copies]:
    for into_files in (False, True):
        yield Copies(1, 1, into_files)
        yield Copies(most, 1, into_files)
        yield Copies(most, most, into_files)
    yield Copies(1, 0, True)
    yield Copies(most, 0, True)


def measure_copies(most: int, mib: int, rounds: int, work: Path) -> list[Copies]:
    """`most`: processes at a time. `mib`: copied in a run, by all together; each file takes its part of that. The cases take
    turns. Raises ChildFailed, also where a process may not read another's memory.
    """
    cases = list(_cases(most))
    each = max(1, mib // most // (_CHUNK_BYTES >> 20)) * _CHUNK_BYTES
    with ExitStack() as stack:
        sources = [stack.enter_context(Child(f"source {n}", _own, tuned=False)) for n in range(most)]
        copiers = [stack.enter_context(Child(f"copier {n}", _copy, str(work), tuned=False)) for n in range(most)]
        places = [source.ask() for source in sources]
        for number in range(rounds):
            progress(f"copies, round {number + 1}/{rounds}\n")
            for case in cases:
                used = copiers[: case.copiers]
                for at, copier in enumerate(used):
                    pid, address = places[at % case.sources] if case.sources else (0, 0)
                    copier.tell(pid, address, at * _SOURCE_BYTES // most, each, case.into_files)
                times = [copier.answer() for copier in used]
                took = max(ended for _, ended in times) - min(began for began, _ in times)
                case.gb_per_s.append(each * len(used) / 1e9 / took)
    return cases


def report_copies(cases: list[Copies]) -> str:
    """The table: medians."""
    lines = ["by the kernel alone, processes that copy out of so many others:"]
    for case in cases:
        speeds = case.gb_per_s
        lines.append(f"{case.name:34}{statistics.median(speeds):>8.2f} ({min(speeds):.2f} to {max(speeds):.2f}) GB/s")
    return "\n".join(lines)
