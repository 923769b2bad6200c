"""A raw sender: one Ingest stream driven by hand, so that tests of what is stored need no connector and no vLLM."""

from __future__ import annotations

import queue
from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import Any, Self

import grpc

from slotstream.v1 import ingest_pb2, sample_pb2
from slotstream.wire.frames import encode_chunk
from slotstream.wire.hashing import xxh3
from slotstream.wire.names import MESSAGE_BYTES_MAX, PROTOCOL_VERSION
from support.synthetic import SyntheticSample

_METHOD = "/slotstream.v1.Ingest/Stream"


class IngestClient:
    """Sends what it is told, in order, and hands out replies as they come. Its stream ends with the `with` block."""

    def __init__(
        self,
        address: str,
        *,
        engine_id: str = "test-engine",
        timeout_s: float = 60.0,
        metadata: tuple[tuple[str, str], ...] = (),
    ) -> None:
        self._channel = grpc.insecure_channel(
            address,
            options=(("grpc.max_send_message_length", MESSAGE_BYTES_MAX), ("grpc.use_local_subchannel_pool", 1)),
        )
        self._outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        call = self._channel.stream_stream(
            _METHOD, request_serializer=None, response_deserializer=ingest_pb2.IngestReply.FromString
        )
        self._replies: Any = call(iter(self._outbox.get, None), timeout=timeout_s, wait_for_ready=True, metadata=metadata)
        self._numbers = 0
        self.send(ingest_pb2.IngestRequest(hello=ingest_pb2.Hello(protocol=PROTOCOL_VERSION, engine_id=engine_id)))
        self.welcome = self.next_reply("welcome").welcome

    def send(self, request: ingest_pb2.IngestRequest) -> None:
        self._outbox.put(request.SerializeToString())

    def send_raw(self, frame: bytes) -> None:
        """Any bytes, as a request."""
        self._outbox.put(frame)

    def next_reply(self, kind: str) -> ingest_pb2.IngestReply:
        """The next reply, which must be of this kind."""
        reply: ingest_pb2.IngestReply = next(self._replies)
        assert reply.WhichOneof("kind") == kind, f"expected {kind}, got {reply}"
        return reply

    def _next_that_says(self, kind: str) -> ingest_pb2.IngestReply:
        """As `next_reply`, without acks of nothing: a commit takes long, or took."""
        while True:
            reply: ingest_pb2.IngestReply = next(self._replies)
            if reply.WhichOneof("kind") != "ack" or reply.ack.chunks:
                assert reply.WhichOneof("kind") == kind, f"expected {kind}, got {reply}"
                return reply

    def open(self, sample: SyntheticSample, columns: Iterable[str] = ()) -> int:
        """Announces the sample; its number on this stream. Not answered, so not waited for."""
        self._numbers += 1
        self.send(
            ingest_pb2.IngestRequest(
                open=ingest_pb2.OpenSample(
                    sample=self._numbers,
                    namespace=sample.namespace,
                    sample_id=sample.sample_id,
                    model=sample.model,
                    dtype=sample.dtype,
                    layer_ids=sample.layer_ids,
                    hidden_size=sample.hidden_size,
                    rows_max=sample.num_tokens,
                    rows_exact=True,
                    tags=sample.tags,
                    metadata=sample.metadata,
                    columns=columns,
                )
            )
        )
        return self._numbers

    def send_rows(self, number: int, sample: SyntheticSample, start: int = 0, stop: int | None = None) -> None:
        """One chunk with rows [start, stop), and waits for its ack: the sample is then known to the server."""
        data = sample.rows(start, stop)
        self._numbers += 1
        header = ingest_pb2.ChunkHeader(
            sample=number,
            chunk=self._numbers,
            first_row=start,
            rows=len(data) // sample.row_bytes,
            xxh3=xxh3(data),
        )
        self._outbox.put(encode_chunk(header, data))
        assert self._next_that_says("ack").ack.chunks == [self._numbers]

    def commit(self, number: int, sample: SyntheticSample, columns: Mapping[str, bytes] | None = None) -> ingest_pb2.Committed:
        """Commits and waits until the sample is durable."""
        commit = ingest_pb2.CommitSample(
            sample=number,
            row_count=sample.num_tokens,
            token_ids=sample.token_ids,
            columns=[sample_pb2.ColumnData(name=name, data=data) for name, data in (columns or {}).items()],
        )
        self.send(ingest_pb2.IngestRequest(commit=commit))
        committed = self._next_that_says("committed").committed
        assert committed.sample == number
        return committed

    def abort(self, number: int, code: str = "ABORTED", message: str = "the request was aborted") -> ingest_pb2.Failed:
        """Gives the sample up and waits until it counts as failed."""
        self.send(ingest_pb2.IngestRequest(abort=ingest_pb2.AbortSample(sample=number, code=code, message=message)))
        return self.next_reply("failed").failed

    def store(self, *samples: SyntheticSample, rows_per_chunk: int = 16) -> None:
        """Sends whole samples, one after the other; on return they are committed."""
        for sample in samples:
            number = self.open(sample)
            for start in range(0, sample.num_tokens, rows_per_chunk):
                self.send_rows(number, sample, start, min(start + rows_per_chunk, sample.num_tokens))
            self.commit(number, sample)

    def fail(self, sample: SyntheticSample, code: str = "SLOT_MISMATCH", message: str = "the slots do not match") -> None:
        """Sends one row of a sample and then aborts it; on return it is failed."""
        number = self.open(sample)
        self.send_rows(number, sample, 0, 1)
        self.abort(number, code, message)

    def close(self) -> None:
        """Ends the stream; the server fails what is still open on it."""
        self._outbox.put(None)
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
