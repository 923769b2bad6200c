"""The control stream, and the gRPC data plane: rows as raw frames on the stream itself. Others plug in as a `DataPlane`.

Threads: one of ours reads replies and reconnects; gRPC's own consumes our request iterator, one frame at a time and only
as fast as the network takes them, so that nothing but staging holds rows that wait.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

import grpc

from slotstream.common.memory import keep_freed_blocks
from slotstream.transport.base import Acked, Committed, Failed, LinkDown, LinkUp, RowChunk, SinkEvent
from slotstream.transport.channel import open_channel
from slotstream.transport.logs import connector_logger
from slotstream.transport.spread import Spread
from slotstream.transport.targets import OpenOnStream, Target, Targets, as_targets
from slotstream.v1 import ingest_pb2
from slotstream.wire.access import Access
from slotstream.wire.errors import ServerDraining, SlotStreamError, Unauthenticated
from slotstream.wire.frames import encode_batch, encode_chunk, is_chunk
from slotstream.wire.names import BATCH_MAX, CONTROL_BYTES_MAX, WINDOW_BYTES

logger = connector_logger(__name__)

_METHOD = "/slotstream.v1.Ingest/Stream"
_RETRY_S = 0.25  # After the first failure; doubles up to _RETRY_S_MAX.
_RETRY_S_MAX = 2.0
_WAIT_S = 10.0  # At a time, for a server that takes this stream.
_BATCH_BYTES_MAX = CONTROL_BYTES_MAX // 2  # Of requests that share a message; a longer one has its own.
_Item = RowChunk | ingest_pb2.CommitSample | ingest_pb2.AbortSample


class DataPlane(Protocol):
    """How the bytes of chunks get to the server: all that differs between transports. Called from the stream's threads."""

    def use_staging(self, memory: memoryview, slot_bytes: int) -> None:
        """Before `start`, or never: see `SampleSink`."""

    def start(self, on_event: Callable[[SinkEvent], None]) -> None:
        """Before the first stream."""

    def hello(self, hello: ingest_pb2.Hello) -> ingest_pb2.Hello:
        """The Hello of a stream that begins, with what this plane offers."""

    def welcomed(self, welcome: ingest_pb2.Welcome) -> None:
        """The server's answer to it."""

    batch_max: int  # Chunks that `encode` takes at a time.

    def encode(self, chunks: Sequence[RowChunk]) -> Iterator[bytes]:
        """The requests that get chunks across; 1 to `batch_max` of them, taken while the stream lasts."""

    def acked(self, chunk: int) -> None:
        """The server has the chunk, however it got it."""

    def refused(self, chunks: Sequence[int]) -> None:
        """The server wants these chunks as frames after all; they are sent as such."""

    def ended(self) -> None:
        """The stream is over, and with it everything on its way."""

    def close(self, timeout_s: float) -> None:
        """Nothing more is asked for."""


class Frames:
    """Every chunk as a raw frame: the gRPC data plane."""

    batch_max = 1

    def use_staging(self, memory: memoryview, slot_bytes: int) -> None:
        return

    def start(self, on_event: Callable[[SinkEvent], None]) -> None:
        return

    def hello(self, hello: ingest_pb2.Hello) -> ingest_pb2.Hello:
        return hello

    def welcomed(self, welcome: ingest_pb2.Welcome) -> None:
        return

    def encode(self, chunks: Sequence[RowChunk]) -> Iterator[bytes]:
        for chunk in chunks:
            yield encode_chunk(chunk_header(chunk), chunk.buffer)

    def acked(self, chunk: int) -> None:
        return

    def refused(self, chunks: Sequence[int]) -> None:
        return

    def ended(self) -> None:
        return

    def close(self, timeout_s: float) -> None:
        return


def chunk_header(chunk: RowChunk) -> ingest_pb2.ChunkHeader:
    return ingest_pb2.ChunkHeader(
        sample=chunk.sample, chunk=chunk.chunk, first_row=chunk.first_row, rows=chunk.rows, xxh3=chunk.xxh3
    )


class GrpcSink:
    """A `SampleSink` over one bidirectional gRPC stream. See `SampleSink` for the meaning of each method.

    It tries for as long as it takes: a stream that never came up is no LinkDown, unless the server refused our token.
    Certificates and token are read again for each stream. Chunks go the way of `plane`, and as frames where the server asks
    for that. Of several servers the next one is tried after a LinkDown; one that shuts down is left once nothing is open.
    """

    def __init__(
        self,
        target: str | Targets,
        hello: ingest_pb2.Hello,
        *,
        access: Access | None = None,
        ack_timeout_s: float = 30.0,
        plane: DataPlane | None = None,
        spread: Spread | None = None,
        stream: int = 0,
    ) -> None:
        """`spread`: the streams of this sender; `stream`: which of them this one is."""
        self._spread, self._stream = spread or Spread(1), stream
        self._targets = as_targets(target)
        self._access = access or Access()
        self._hello = ingest_pb2.Hello(batches=True)
        self._hello.MergeFrom(hello)
        self._frames = Frames()
        self._plane = plane or self._frames
        self._ack_timeout_s = ack_timeout_s
        self._on_event: Callable[[SinkEvent], None] = lambda event: None
        self._changed = threading.Condition()
        self._opens: deque[ingest_pb2.OpenSample] = deque()
        self._items: deque[_Item] = deque()
        self._resends: deque[RowChunk] = deque()  # asked for again; their bytes are in flight already
        self._in_flight: dict[int, RowChunk] = {}  # sent and not acked
        self._in_flight_bytes = 0
        self._window_bytes = WINDOW_BYTES
        self._batches = False  # The server takes several requests in one message.
        self._takes_reports = False
        self._report: ingest_pb2.EngineReport | None = None  # Waits to be sent.
        self._open = OpenOnStream()
        self._awaited: set[int] = set()  # samples committed or aborted, not answered
        self._progress_at = 0.0  # monotonic; when something was last answered, or first waited for
        self._elsewhere = False  # This stream met a process that has its share of ours.
        self._down = False  # LinkDown was said; nothing moves until reset()
        self._was_up = False  # this stream was welcomed
        self._refused = False  # this stream ended because of its token
        self._closed = False
        self._call: Any = None
        self._thread = threading.Thread(target=self._run, name="slotstream-grpc", daemon=True)

    def use_staging(self, memory: memoryview, slot_bytes: int) -> None:
        self._plane.use_staging(memory, slot_bytes)

    def start(self, on_event: Callable[[SinkEvent], None]) -> None:
        self._on_event = on_event
        keep_freed_blocks()
        self._plane.start(on_event)
        self._thread.start()

    def open_sample(self, request: ingest_pb2.OpenSample) -> None:
        with self._changed:
            if taken := self._open.open(request.sample):
                self._note_waiting()
                self._opens.append(request)
                self._changed.notify_all()
        if not taken:
            self._refuse([request.sample])

    def submit(self, chunk: RowChunk) -> None:
        if not self._put(chunk):
            self._on_event(Acked((chunk.chunk,)))

    def commit(self, request: ingest_pb2.CommitSample) -> None:
        self._put(request)

    def abort(self, request: ingest_pb2.AbortSample) -> None:
        self._put(request)

    def report(self, report: ingest_pb2.EngineReport) -> None:
        with self._changed:
            if self._was_up and self._takes_reports:
                self._report = report
                self._changed.notify_all()

    def _put(self, item: _Item) -> bool:
        """False where its sample was refused here: the server is not told of it."""
        with self._changed:
            if not self._open.takes(item.sample):
                return False
            self._note_waiting()
            self._items.append(item)
            if len(self._items) == 1:  # Behind others it changes nothing: no thread is woken for it.
                self._changed.notify_all()
        return True

    def _refuse(self, samples: Sequence[int]) -> None:
        for sample in samples:
            self._on_event(Failed(sample, ServerDraining.code, "the server is shutting down, and another one is to be tried"))

    def _note_waiting(self) -> None:
        if not self._waiting():
            self._progress_at = time.monotonic()

    def _waiting(self) -> bool:
        """Whether anything is owed an answer: then silence counts as a fault."""
        return bool(self._opens or self._items or self._in_flight or self._awaited)

    def check_deadlines(self) -> None:
        with self._changed:
            silent_s = time.monotonic() - self._progress_at
            call = self._call
            if self._down or call is None or not self._waiting() or silent_s < self._ack_timeout_s:
                return
        logger.warning("no answer from %s for %.0f s: giving the stream up", self._targets.current, silent_s)
        call.cancel()

    def reset(self) -> None:
        with self._changed:
            self._opens.clear()
            self._items.clear()
            self._resends.clear()
            self._in_flight.clear()
            self._in_flight_bytes = 0
            self._awaited.clear()
            self._open.clear()
            self._report = None
            self._down = False
            self._changed.notify_all()

    def close(self, timeout_s: float) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            call = self._call
        self._spread.wake()
        if call is not None:
            call.cancel()
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        self._plane.close(timeout_s)

    # -- our thread: connect, read replies, reconnect

    def _run(self) -> None:
        while not self._closed:
            if not self._spread.may_connect(self._stream):
                self._spread.wait(self._stream, lambda: self._closed, _WAIT_S)
                continue
            message = self._one_stream(self._targets.next())
            self._spread.ended(self._stream)
            self._targets.ended(up=self._was_up or self._elsewhere)
            with self._changed:
                self._call = None
                if self._closed:
                    return
                self._down = self._was_up or self._refused
            if self._down:
                self._on_event(LinkDown(message, Unauthenticated.code if self._refused else ""))
            with self._changed:
                self._changed.wait_for(lambda: self._closed or not self._down)
            pause_s = self._targets.pause_s(_RETRY_S, _RETRY_S_MAX)
            with self._changed:
                self._changed.wait_for(lambda: self._closed, timeout=pause_s)

    def _one_stream(self, target: Target) -> str:
        """Run one stream to its end; returns why it ended."""
        self._was_up = self._refused = self._elsewhere = self._open.leaving = False
        try:
            metadata = self._access.call_metadata()
            channel = open_channel(target, self._access)
        except SlotStreamError as error:
            self._refused = isinstance(error, Unauthenticated)
            return str(error)
        try:
            stream = channel.stream_stream(
                _METHOD, request_serializer=None, response_deserializer=ingest_pb2.IngestReply.FromString
            )
            ended = threading.Event()
            call = stream(self._requests(ended), metadata=metadata)
            with self._changed:
                self._call = call
                if self._closed:  # Just now: close() saw no call that it could cancel.
                    self._call.cancel()
            try:
                for reply in call:
                    self._take(reply)
                return f"the server at {target} ended the stream"
            except grpc.RpcError as error:
                self._refused = error.code() is grpc.StatusCode.UNAUTHENTICATED
                if self._open.may_end:
                    return f"the server at {target} is shutting down, and nothing is open there"
                return f"{target}: {error.code().name}: {error.details()}"
            finally:
                ended.set()
                self._plane.ended()
                with self._changed:
                    self._changed.notify_all()
        finally:
            channel.close()

    def _take(self, reply: ingest_pb2.IngestReply) -> None:
        kind = reply.WhichOneof("kind")
        if kind == "batch":
            for one in reply.batch.replies:
                self._take(one)
            return
        with self._changed:
            if self._closed or (kind == "welcome" and self._was_up):  # The second on a stream means nothing.
                return
            self._progress_at = time.monotonic()
            refused: list[int] = []
            dropped: list[int] = []
            if kind == "welcome" and not self._spread.settles(self._stream, reply.welcome):
                self._elsewhere = bool(reply.welcome.processes)
                if self._call is not None:
                    self._call.cancel()
                return
            if kind == "welcome":
                self._was_up = True
                # The server keeps as much ready for each stream: together they are to ask no more of it than one.
                # One of an earlier version has this one alone.
                sharing = self._spread.streams if reply.welcome.processes else 1
                self._window_bytes = max(1, reply.welcome.window_bytes // sharing)
                self._batches = reply.welcome.batches
                self._takes_reports = reply.welcome.reports
                self._report = None
                self._plane.welcomed(reply.welcome)
                self._changed.notify_all()
            elif kind == "ack":
                for number in reply.ack.chunks:
                    if (chunk := self._in_flight.pop(number, None)) is not None:
                        self._in_flight_bytes -= chunk.buffer.nbytes
                        self._plane.acked(number)
                if self._items and self._fits(self._items[0]):
                    self._changed.notify_all()
            elif kind == "committed":
                self._over(reply.committed.sample)
            elif kind == "failed":
                self._over(reply.failed.sample)
            elif kind == "draining":
                refused, dropped = self._leave()
            elif kind == "resend":
                self._resends.extend(self._in_flight[n] for n in reply.resend.chunks if n in self._in_flight)
                self._plane.refused(reply.resend.chunks)
                self._changed.notify_all()
        if kind == "welcome":
            self._on_event(LinkUp(reply.welcome.server_version, frozenset(reply.welcome.columns), self._targets.current))
        elif kind == "ack":
            self._on_event(Acked(tuple(reply.ack.chunks)))
        elif kind == "committed":
            self._on_event(Committed(reply.committed.sample, reply.committed.duplicate))
        elif kind == "failed":
            self._on_event(Failed(reply.failed.sample, reply.failed.code, reply.failed.message))
        elif refused:
            self._refuse(refused)
            if dropped:
                self._on_event(Acked(tuple(dropped)))

    def _over(self, sample: int) -> None:
        """A sample has its verdict."""
        self._awaited.discard(sample)
        self._open.ended(sample)
        self._end_if_left()

    def _leave(self) -> tuple[list[int], list[int]]:
        """The server opens no more samples: where there is another, none is sent. Those refused so, and chunks of theirs."""
        if not self._targets.several:
            return [], []
        self._open.leaving = True
        refused = [request.sample for request in self._opens]
        self._opens.clear()
        for sample in refused:
            self._open.ended(sample)
        dropped = [item.chunk for item in self._items if isinstance(item, RowChunk) and item.sample in refused]
        self._items = deque(item for item in self._items if item.sample not in refused)
        self._end_if_left()
        return refused, dropped

    def _end_if_left(self) -> None:
        if self._open.may_end and self._call is not None:
            self._call.cancel()

    # -- gRPC's thread: the request iterator

    def _requests(self, ended: threading.Event) -> Iterator[bytes]:
        yield ingest_pb2.IngestRequest(hello=self._plane.hello(self._hello)).SerializeToString()
        while (parts := self._next(ended)) is not None:
            requests = itertools.chain.from_iterable(parts)
            yield from _in_batches(requests) if self._batches else requests

    def _next(self, ended: threading.Event) -> list[Iterable[bytes]] | None:
        """What to send next, in order, once it may be sent; None when the stream is over."""
        with self._changed:
            while not (ended.is_set() or self._closed):
                if self._was_up and (parts := self._sendable()):
                    return parts
                self._changed.wait()
            return None

    def _sendable(self) -> list[Iterable[bytes]]:
        """What may be sent now; it is encoded when it is sent, without the lock.

        Of chunks that go as frames from the start one: what is said meanwhile may have to go before the next.
        """
        parts: list[Iterable[bytes]] = []
        if self._report is not None:
            parts.append(map(_encode, (self._report,)))
            self._report = None
        while self._opens and len(parts) < BATCH_MAX:
            parts.append(map(_encode, (self._opens.popleft(),)))
        while self._resends:
            chunk = self._resends.popleft()
            if chunk.chunk in self._in_flight:  # Not acked meanwhile: its buffer is still ours.
                return [*parts, self._frames.encode((chunk,))]
        while len(parts) < BATCH_MAX and self._items:
            if chunks := self._chunks_that_fit():
                parts.append(self._plane.encode(chunks))
                if len(chunks) == self._plane.batch_max:
                    break
            elif isinstance(item := self._items[0], RowChunk):
                break
            else:
                self._awaited.add(item.sample)
                self._items.popleft()
                parts.append(map(_encode, (item,)))
        return parts

    def _chunks_that_fit(self) -> list[RowChunk]:
        """The next chunks, as many as may be sent at once; they are in flight from here on."""
        chunks: list[RowChunk] = []
        while self._items and len(chunks) < self._plane.batch_max and self._fits(item := self._items[0]):
            if not isinstance(item, RowChunk):
                break
            self._in_flight[item.chunk] = item
            self._in_flight_bytes += item.buffer.nbytes
            chunks.append(item)
            self._items.popleft()
        return chunks

    def _fits(self, item: _Item) -> bool:
        if not isinstance(item, RowChunk):
            return True
        return not self._in_flight or self._in_flight_bytes + item.buffer.nbytes <= self._window_bytes


def _encode(
    item: ingest_pb2.OpenSample | ingest_pb2.CommitSample | ingest_pb2.AbortSample | ingest_pb2.EngineReport,
) -> bytes:
    if isinstance(item, ingest_pb2.EngineReport):
        return ingest_pb2.IngestRequest(report=item).SerializeToString()
    if isinstance(item, ingest_pb2.OpenSample):
        return ingest_pb2.IngestRequest(open=item).SerializeToString()
    if isinstance(item, ingest_pb2.CommitSample):
        return ingest_pb2.IngestRequest(commit=item).SerializeToString()
    return ingest_pb2.IngestRequest(abort=item).SerializeToString()


def _in_batches(requests: Iterable[bytes]) -> Iterator[bytes]:
    """The same requests in order, those next to each other that are not chunks in one message."""
    batch: list[bytes] = []
    nbytes = 0
    for request in requests:
        alone = is_chunk(request)
        if batch and (alone or nbytes + len(request) > _BATCH_BYTES_MAX or len(batch) == BATCH_MAX):
            yield _message(batch)
            batch, nbytes = [], 0
        if alone:
            yield request
        else:
            batch.append(request)
            nbytes += len(request)
    if batch:
        yield _message(batch)


def _message(batch: list[bytes]) -> bytes:
    return batch[0] if len(batch) == 1 else encode_batch(batch)
