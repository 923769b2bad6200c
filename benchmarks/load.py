"""What one run of the transport benchmark moves, and the processes that send it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from random import Random
from time import perf_counter
from typing import Any, Protocol

from children import Child, questions

from slotstream.common.memory import map_memory

LAYERS, HIDDEN = 4, 4096
ROW_BYTES = LAYERS * HIDDEN * 2
SOURCE_BYTES = 64 << 20  # What each sender sends from, again and again: more than its share of a cache.
SAMPLE_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class Load:
    """`streams` senders at a time, each of which sends `samples` of `sample_chunks` chunks."""

    chunk_bytes: int
    streams: int
    samples: int
    sample_chunks: int

    @classmethod
    def of(cls, chunk_bytes: int, streams: int, total_bytes: int) -> Load:
        """About `total_bytes` in samples of 16 MiB, or of one chunk where that is more; at least one a stream."""
        sample_chunks = max(1, SAMPLE_BYTES // chunk_bytes)
        samples = max(1, total_bytes // (streams * sample_chunks * chunk_bytes))
        return cls(chunk_bytes, streams, samples, sample_chunks)

    @property
    def sample_bytes(self) -> int:
        return self.sample_chunks * self.chunk_bytes

    @property
    def chunks(self) -> int:
        """Chunks of each stream."""
        return self.samples * self.sample_chunks

    @property
    def total_bytes(self) -> int:
        return self.streams * self.samples * self.sample_bytes


class Stream(Protocol):
    """One sender, in a process of its own."""

    def prepare(self, load: Load) -> None:
        """Connect, and have the chunks ready."""

    def run(self) -> list[float]:
        """Send one load. Seconds of each chunk until it was taken; nothing where nobody says when that was."""

    def alone(self, chunks: int) -> list[float]:
        """The same seconds of chunks that are sent one at a time."""

    def clear(self) -> None:
        """Check and remove what the last run left."""

    def release(self) -> None:
        """Disconnect."""


def source(nbytes: int = SOURCE_BYTES) -> memoryview:
    """What to send chunks from, in memory like the connector's staging; the same bytes in every process."""
    return fill(memoryview(map_memory(nbytes)))


def fill(memory: memoryview) -> memoryview:
    """The same memory, with those bytes."""
    block = Random(0).randbytes(1 << 20)
    for at in range(0, len(memory), len(block)):
        memory[at : at + len(block)] = block
    return memory


def slots(memory: memoryview, chunk_bytes: int) -> list[memoryview]:
    """The chunks that fit into `memory`, one behind the other."""
    return [memory[at : at + chunk_bytes] for at in range(0, len(memory) - chunk_bytes + 1, chunk_bytes)]


def serve_stream(connection: Connection, make: Callable[..., object], *arguments: Any) -> None:
    """Main function of a sender: answers (method, arguments...) with when that began and ended, and what it returned."""
    stream = make(*arguments)
    connection.send("ready")
    for what, *details in questions(connection):
        began = perf_counter()
        answer = getattr(stream, what)(*details)
        connection.send((began, perf_counter(), answer))


class Senders:
    """As many sender processes as a load wants, started when first wanted."""

    def __init__(self, name: str, make: Callable[..., object], *arguments: Any, environment: Mapping[str, str]) -> None:
        self._name = name
        self._arguments = (make, *arguments)
        self._environment = environment
        self._children: list[Child] = []
        self._used = 0

    def prepare(self, load: Load) -> None:
        self.start(load.streams)
        self.all("prepare", load)

    def start(self, count: int) -> None:
        """Ask so many of them from here on."""
        while len(self._children) < count:
            name = f"{self._name} sender {len(self._children)}"
            # Untuned: vLLM is usually started without the server's malloc settings.
            child = Child(name, serve_stream, *self._arguments, tuned=False, environment=self._environment)
            self._children.append(child)
            child.answer()
        self._used = count

    @property
    def pids(self) -> list[int]:
        return [child.pid for child in self._children[: self._used]]

    def all(self, *question: Any) -> tuple[float, list[Any]]:
        """Ask all that are used at once: seconds from the first's beginning to the last's end, and the answers."""
        used = self._children[: self._used]
        for child in used:
            child.tell(*question)
        answers = [child.answer() for child in used]
        return max(end for _, end, _ in answers) - min(begin for begin, _, _ in answers), [answer for *_, answer in answers]

    def one(self, *question: Any) -> Any:
        """Ask the first."""
        return self._children[0].ask(*question)[2]

    def close(self) -> None:
        for child in self._children:
            child.close()
