"""An Ingest service that says only what a test tells it to: for what a sound server never does."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections import deque
from collections.abc import Iterator
from concurrent import futures
from typing import Any

import grpc
from transport.recorder import WAIT_S

from slotstream.v1 import ingest_pb2
from slotstream.wire.frames import decode_request
from slotstream.wire.names import MESSAGE_BYTES_MAX

THREADS = "fake-ingest"


class Peer:
    """The server's side of one stream. A thread reads requests as they come; `next` hands them out."""

    def __init__(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> None:
        self._requests = requests
        self._inbox: queue.SimpleQueue[ingest_pb2.IngestRequest | None] = queue.SimpleQueue()
        self._outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._seen: list[ingest_pb2.IngestRequest] = []
        self._announced: deque[ingest_pb2.Announce] = deque()
        self.ended = threading.Event()  # The other side is gone.
        if not context.add_callback(self.end):
            self.end()
        threading.Thread(target=self._read, name=THREADS, daemon=True).start()

    def _read(self) -> None:
        with contextlib.suppress(Exception):  # gRPC raises a bare Exception when the peer breaks the stream.
            for frame in self._requests:
                request, data = decode_request(frame)
                request.data = bytes(data)
                self._inbox.put(request)
        self.ended.set()
        self._inbox.put(None)

    def replies(self) -> Iterator[bytes]:
        return iter(self._outbox.get, None)

    def next(self, kind: str) -> Any:
        """The next request, which must be of this kind: its message, or for a chunk the whole request."""
        request = self.next_of(kind)
        return request if kind == "chunk" else getattr(request, kind)

    def next_of(self, *kinds: str) -> ingest_pb2.IngestRequest:
        """The next request, which must be of one of these kinds."""
        request = self._inbox.get(timeout=WAIT_S)
        assert request is not None, f"the stream ended where {kinds} was expected, after {self._seen}"
        self._seen.append(request)
        assert request.WhichOneof("kind") in kinds, f"expected {kinds}, got {request}"
        return request

    def next_announced(self) -> ingest_pb2.Announce:
        """The next chunk that is announced, alone or with others."""
        if not self._announced:
            self._announced.extend(self.next("announcements").chunks)
        return self._announced.popleft()

    def rest(self) -> list[ingest_pb2.IngestRequest]:
        """What else came, once the stream has ended."""
        return list(iter(lambda: self._inbox.get(timeout=WAIT_S), None))

    def say(self, **kind: Any) -> None:
        """Send one reply, such as `ack=Ack(chunks=[1])`."""
        self._outbox.put(ingest_pb2.IngestReply(**kind).SerializeToString())

    def say_bytes(self, reply: bytes) -> None:
        self._outbox.put(reply)

    def welcome(self, window_bytes: int = 1 << 20, *, batches: bool = False) -> ingest_pb2.Hello:
        """Take the Hello and answer it."""
        hello: ingest_pb2.Hello = self.next("hello")
        self.say(welcome=ingest_pb2.Welcome(protocol=1, server_version="fake", window_bytes=window_bytes, batches=batches))
        return hello

    def ack(self, chunk: int) -> None:
        self.say(ack=ingest_pb2.Ack(chunks=[chunk]))

    def end(self) -> None:
        """End the stream, with an OK status."""
        self._outbox.put(None)


class FakeIngest(grpc.GenericRpcHandler):  # type: ignore[type-arg]
    """Listens at `address` until the `with` block ends."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._peers: queue.SimpleQueue[Peer] = queue.SimpleQueue()
        pool = futures.ThreadPoolExecutor(4, thread_name_prefix=THREADS)
        self._server = grpc.server(pool, handlers=[self], options=(("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),))
        if not self._server.add_insecure_port(address):
            raise OSError(f"cannot listen on {address}")
        self._server.start()

    def accept(self) -> Peer:
        """The next stream."""
        return self._peers.get(timeout=WAIT_S)

    def service(self, handler_call_details: Any) -> Any:
        if handler_call_details.method != "/slotstream.v1.Ingest/Stream":
            return None
        return grpc.stream_stream_rpc_method_handler(self._stream)

    def _stream(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        peer = Peer(requests, context)
        self._peers.put(peer)
        return peer.replies()

    def stop(self) -> None:
        self._server.stop(grace=None).wait()

    def __enter__(self) -> FakeIngest:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()
