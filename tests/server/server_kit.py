"""A server in a thread, and peers that speak to it in raw bytes, rightly or wrongly."""

from __future__ import annotations

import asyncio
import functools
import queue
import random
import threading
from collections.abc import Callable, Coroutine, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from slotstream.server.app import Server
from slotstream.server.config import ServerConfig
from slotstream.store.records import SampleKey
from slotstream.store.samples import SampleStore
from slotstream.v1 import ingest_pb2 as pb
from slotstream.v1 import sample_pb2
from slotstream.v1 import samples_pb2 as read_pb
from slotstream.wire.frames import decode_reply, encode_chunk
from slotstream.wire.hashing import xxh3

TIMEOUT_S = 60.0
Metadata = tuple[tuple[str, str], ...]
_T = TypeVar("_T")


class RunningServer:
    """A server on a port of its own, in a thread of this process. Options are those of ServerConfig."""

    def __init__(self, data_dir: Path, *, store: SampleStore | None = None, **options: Any) -> None:
        self.data_dir = data_dir
        # A process that reads over NIXL starts with each server that may: half a second of a core, for tests that want none.
        defaults: dict[str, Any] = {"listen": "127.0.0.1:0", "appear_grace_s": 60.0, "transport": "grpc"}
        self.config = ServerConfig(data_dir=data_dir, **defaults | options)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.server = self.call(self._make(store))
        self.call(self.server.start())
        self.address = self.server.address

    async def _make(self, store: SampleStore | None) -> Server:
        return Server(self.config, store=store)

    def call(self, coroutine: Coroutine[Any, Any, _T]) -> _T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(TIMEOUT_S)

    def start_drain(self) -> Any:
        return asyncio.run_coroutine_threadsafe(self.server.drain(), self._loop)

    def metric(self, name: str, **labels: str) -> float:
        value = self.server.metrics.registry.get_sample_value(f"slotstream_{name}", labels)
        return 0.0 if value is None else value

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.call(self.server.stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


@dataclass(frozen=True)
class Sample:
    """Rows of 2 layers x 64 BF16 values: 256 bytes."""

    sample_id: str = "s"
    rows: int = 40
    seed: int = 0
    namespace: str = "default"
    model: str = "m"
    tags: dict[str, str] = field(default_factory=dict)
    metadata: dict[str, str] = field(default_factory=dict)

    row_bytes = 256
    layer_ids = (4, 9)

    @property
    def key(self) -> SampleKey:
        return SampleKey(self.namespace, self.sample_id)

    @property
    def data(self) -> bytes:
        return random.Random(self.seed).randbytes(self.rows * self.row_bytes)

    @property
    def token_ids(self) -> list[int]:
        return [self.seed * 1000 + row for row in range(self.rows)]

    def part(self, start: int, stop: int) -> bytes:
        return self.data[start * self.row_bytes : stop * self.row_bytes]

    def open(self, number: int, **changes: Any) -> pb.IngestRequest:
        fields: dict[str, Any] = {
            "sample": number,
            "namespace": self.namespace,
            "sample_id": self.sample_id,
            "model": self.model,
            "dtype": "BF16",
            "layer_ids": self.layer_ids,
            "hidden_size": 64,
            "rows_max": self.rows,
            "rows_exact": True,
            "tags": self.tags,
            "metadata": self.metadata,
        }
        return pb.IngestRequest(open=pb.OpenSample(**(fields | changes)))

    def chunk(self, number: int, chunk: int, start: int, stop: int) -> bytes:
        data = self.part(start, stop)
        header = pb.ChunkHeader(sample=number, chunk=chunk, first_row=start, rows=stop - start, xxh3=xxh3(data))
        return encode_chunk(header, data)

    def commit(self, number: int, **changes: Any) -> pb.IngestRequest:
        fields: dict[str, Any] = {"sample": number, "row_count": self.rows, "token_ids": self.token_ids}
        return pb.IngestRequest(commit=pb.CommitSample(**(fields | changes)))


def hello(protocol: int = 1, *, batches: bool = False) -> pb.IngestRequest:
    return pb.IngestRequest(hello=pb.Hello(protocol=protocol, engine_id="test", worker_rank=3, batches=batches))


def batch(*requests: pb.IngestRequest) -> pb.IngestRequest:
    return pb.IngestRequest(batch=pb.RequestBatch(requests=requests))


class Peer:
    """One ingest stream. Says Hello at once unless told not to."""

    def __init__(self, address: str, *, greet: bool = True, metadata: Metadata = (), timeout_s: float = TIMEOUT_S * 2) -> None:
        options = (("grpc.use_local_subchannel_pool", 1), ("grpc.max_send_message_length", -1))
        self.channel = grpc.insecure_channel(address, options=options)
        self._outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        stream = self.channel.stream_stream("/slotstream.v1.Ingest/Stream", request_serializer=None, response_deserializer=None)
        self._call: Any = stream(iter(self._outbox.get, None), timeout=timeout_s, metadata=metadata)
        if greet:
            self.say(hello())
            self.welcome = self.hear().welcome

    def say(self, *requests: pb.IngestRequest | bytes) -> None:
        for request in requests:
            self._outbox.put(request if isinstance(request, bytes) else request.SerializeToString())

    def hear(self) -> pb.IngestReply:
        return pb.IngestReply.FromString(next(self._call))

    def hear_until(self, *kinds: str) -> pb.IngestReply:
        while (reply := self.hear()).WhichOneof("kind") not in kinds:
            pass
        return reply

    def acks(self, count: int) -> list[int]:
        """The next `count` chunks to be acked, sorted, in however many messages; other replies are passed over."""
        chunks: list[int] = []
        while len(chunks) < count:
            chunks += self.hear_until("ack").ack.chunks
        return sorted(chunks)

    def failed(self) -> pb.Failed:
        """The next verdict, which must be a failure."""
        reply = self.hear_until("failed", "committed")
        assert reply.WhichOneof("kind") == "failed", reply
        return reply.failed

    def committed(self) -> pb.Committed:
        reply = self.hear_until("failed", "committed")
        assert reply.WhichOneof("kind") == "committed", reply
        return reply.committed

    def put(self, sample: Sample, number: int, chunk_rows: int = 16) -> pb.Committed:
        """Sends a whole sample and waits until it is durable."""
        self.say(sample.open(number))
        for at, start in enumerate(range(0, sample.rows, chunk_rows)):
            self.say(sample.chunk(number, number * 1000 + at, start, min(start + chunk_rows, sample.rows)))
        self.say(sample.commit(number))
        return self.committed()

    def half_close(self) -> None:
        self._outbox.put(None)

    def ending(self) -> tuple[grpc.StatusCode, str]:
        """Status and slotstream code that the stream ends with; replies before that are dropped."""
        try:
            for _ in self._call:
                pass
        except grpc.RpcError as error:
            return status(error)
        return grpc.StatusCode.OK, ""

    def cancel(self) -> None:
        self._call.cancel()

    def close(self) -> None:
        self._outbox.put(None)
        self._call.cancel()
        self.channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def status(error: Any) -> tuple[grpc.StatusCode, str]:
    return error.code(), dict(error.trailing_metadata() or ()).get("slotstream-code", "")


class Reader:
    """The Samples service, in messages."""

    def __init__(self, address: str, *, metadata: Metadata = ()) -> None:
        options = (("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", -1))
        self.channel = grpc.insecure_channel(address, options=options)
        base = "/slotstream.v1.Samples/"

        def method(kind: Any, name: str, request: Any, reply: Any = None) -> Any:
            call = kind(base + name, request.SerializeToString, None if reply is None else reply.FromString)
            return functools.partial(call, metadata=metadata)

        unary, stream = self.channel.unary_unary, self.channel.unary_stream
        self._read = method(stream, "Read", read_pb.ReadRequest)
        self.read_many = method(stream, "ReadMany", read_pb.ReadManyRequest, read_pb.ReadReply)
        self._verify = method(stream, "Verify", read_pb.VerifyRequest, read_pb.VerifyReply)
        self._restore = method(stream, "Restore", read_pb.RestoreRequest, read_pb.RestoreReply)
        self.stat = method(unary, "Stat", read_pb.StatRequest, sample_pb2.SampleInfo)
        self.list = method(unary, "List", read_pb.ListRequest, read_pb.ListReply)
        self.delete = method(unary, "Delete", read_pb.DeleteRequest, read_pb.DeleteReply)
        self.ack = method(unary, "Ack", read_pb.AckRequest, read_pb.AckReply)
        self.count_read = method(unary, "CountRead", read_pb.CountReadRequest, read_pb.CountReadReply)
        self.lease = method(unary, "Lease", read_pb.LeaseRequest, read_pb.LeaseReply)
        self.retention = method(stream, "Retention", read_pb.RetentionRequest, read_pb.RetentionReply)
        self.usage = method(unary, "Usage", read_pb.UsageRequest, read_pb.UsageReply)
        self.status = method(unary, "Status", read_pb.StatusRequest, read_pb.StatusReply)

    def frames(self, **request: Any) -> Iterator[bytes]:
        call: Any = self._read(read_pb.ReadRequest(**request), timeout=TIMEOUT_S)
        return call  # type: ignore[no-any-return]

    def read(self, sample_id: str, **request: Any) -> tuple[read_pb.ReadHeader, bytes]:
        """The header and all rows, joined; asserts that they come in order and without gaps."""
        frames = self.frames(sample_id=sample_id, **request)
        first, data = decode_reply(next(frames))
        assert first.WhichOneof("kind") == "header"
        assert len(data) == 0
        row, parts = first.header.start, list[bytes]()
        for frame in frames:
            reply, data = decode_reply(frame)
            assert reply.rows.first_row == row
            row += reply.rows.rows
            parts.append(bytes(data))
        assert row == first.header.stop
        return first.header, b"".join(parts)

    def refused(self, call: Callable[[], Any]) -> tuple[str, str]:
        """Status name and slotstream code of a call that must fail."""
        try:
            result = call()
            if isinstance(result, Iterable) and not isinstance(result, bytes):
                list(result)
        except grpc.RpcError as error:
            code, stable = status(error)
            return code.name, stable
        raise AssertionError("it was not refused")

    def state(self, sample_id: str, namespace: str = "") -> tuple[int, str]:
        info = self.stat(read_pb.StatRequest(namespace=namespace, sample_id=sample_id), timeout=TIMEOUT_S)
        return info.state, info.error_code

    def others_refused(self, sample_id: str) -> dict[str, int]:
        """How many other samples failed under a committed one's id, by code."""
        return dict(self.stat(read_pb.StatRequest(sample_id=sample_id), timeout=TIMEOUT_S).refused)

    def verify(self, **request: Any) -> list[read_pb.VerifyReply]:
        return list(self._verify(read_pb.VerifyRequest(**request), timeout=TIMEOUT_S))

    def restore(self, **request: Any) -> list[read_pb.RestoreReply]:
        return list(self._restore(read_pb.RestoreRequest(**request), timeout=TIMEOUT_S))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.channel.close()


SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
ARRIVING, COMMITTED, FAILED = (
    sample_pb2.SAMPLE_STATE_ARRIVING,
    sample_pb2.SAMPLE_STATE_COMMITTED,
    sample_pb2.SAMPLE_STATE_FAILED,
)


def health(server: RunningServer, service: str = "") -> int:
    """What the health service says of `service`, asked on a connection of its own."""
    options = (("grpc.use_local_subchannel_pool", 1),)
    with grpc.insecure_channel(server.address, options=options) as channel:
        answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=service), timeout=30)
        return int(answer.status)
