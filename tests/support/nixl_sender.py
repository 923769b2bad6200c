"""A sender in a process of its own, which tests stop, kill and watch: samples over NIXL, one after another, until told to end.

    python nixl_sender.py ADDRESS NAMESPACE

Prints one line for each event: `up`, `down`, `fell-back`, `committed I`, `failed I CODE`, and `end` once its stdin ended and
every sample has its verdict. Sample I is `s-I`, with rows that `sample_of` gives.
"""

from __future__ import annotations

import mmap
import os
import queue
import sys
import threading
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from slotstream.transport.base import Acked, Committed, Failed, FellBack, LinkDown, LinkUp, RowChunk, SinkEvent
from slotstream.transport.grpc import GrpcSink
from slotstream.transport.nixl import NixlPlane
from slotstream.v1 import ingest_pb2
from slotstream.wire.hashing import xxh3
from slotstream.wire.names import PROTOCOL_VERSION
from support.synthetic import SyntheticSample

SLOT_BYTES = 1 << 20
SLOTS = 16
HIDDEN = 4096
ROWS = 8  # One chunk of a sample: 192 KiB.
CHUNKS = 2


def sample_of(index: int, namespace: str) -> SyntheticSample:
    return SyntheticSample(
        f"s-{index}", namespace=namespace, hidden_size=HIDDEN, num_tokens=ROWS * CHUNKS, seed=index % 2, tags={}, metadata={}
    )


class _Sending:
    def __init__(self, address: str, namespace: str) -> None:
        self._namespace = namespace
        self._rows = [sample_of(seed, namespace).rows() for seed in range(2)]
        self._events: queue.SimpleQueue[SinkEvent] = queue.SimpleQueue()
        self._staging = memoryview(mmap.mmap(-1, SLOTS * SLOT_BYTES))
        self._free = list(range(SLOTS))
        self._slots: dict[int, int] = {}
        self._open: set[int] = set()
        self._sent = 0
        hello = ingest_pb2.Hello(protocol=PROTOCOL_VERSION, engine_id="sender")
        self._sink = GrpcSink(address, hello, plane=NixlPlane(required=True))
        self._sink.use_staging(self._staging, SLOT_BYTES)
        self._sink.start(self._events.put)

    def run(self) -> None:
        ended = threading.Event()

        def end_with_stdin() -> None:
            sys.stdin.read()
            ended.set()

        threading.Thread(target=end_with_stdin, daemon=True).start()
        self._take(self._events.get())
        while not ended.is_set() or self._open:
            if not ended.is_set() and len(self._free) >= CHUNKS:
                self._send()
            else:
                self._take(self._events.get())
            while not self._events.empty():
                self._take(self._events.get())
        self._say("end")
        self._sink.close(5.0)

    def _send(self) -> None:
        self._sent += 1
        number, sample = self._sent, sample_of(self._sent, self._namespace)
        self._open.add(number)
        self._sink.open_sample(
            ingest_pb2.OpenSample(
                sample=number,
                namespace=sample.namespace,
                sample_id=sample.sample_id,
                model=sample.model,
                dtype=sample.dtype,
                layer_ids=sample.layer_ids,
                hidden_size=sample.hidden_size,
                rows_max=sample.num_tokens,
                rows_exact=True,
            )
        )
        part = ROWS * sample.row_bytes
        for index in range(CHUNKS):
            slot = self._free.pop()
            buffer = self._staging[slot * SLOT_BYTES :][:part]
            buffer[:] = self._rows[number % 2][index * part : (index + 1) * part]
            chunk = number * CHUNKS + index
            self._slots[chunk] = slot
            self._sink.submit(RowChunk(number, chunk, index * ROWS, ROWS, buffer, xxh3(buffer)))
        self._sink.commit(ingest_pb2.CommitSample(sample=number, row_count=sample.num_tokens, token_ids=sample.token_ids))

    def _take(self, event: SinkEvent) -> None:
        match event:
            case Acked():
                self._free += [self._slots.pop(chunk) for chunk in event.chunks]
            case Committed():
                self._open.discard(event.sample)
                self._say("committed", event.sample)
            case Failed():
                self._open.discard(event.sample)
                self._say("failed", event.sample, event.code)
            case FellBack():
                self._say("fell-back")
            case LinkUp():
                self._say("up")
            case LinkDown():
                self._open.clear()
                self._free += self._slots.values()
                self._slots.clear()
                self._say("down")
                self._sink.reset()

    def _say(self, *words: object) -> None:
        print(*words, flush=True)


if __name__ == "__main__":
    _Sending(*sys.argv[1:]).run()
    os._exit(0)  # NIXL's libraries crash in what they do at an exit where the system has libibverbs.
