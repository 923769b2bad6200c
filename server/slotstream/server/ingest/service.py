"""The Ingest service: streams of raw frames in, acks and verdicts out. v1/ingest.proto is its specification.

The event loop reads frames and keeps the books; writers do the disk work. What a peer does wrong with one sample fails that
sample; what breaks the protocol ends its stream; neither touches any other stream.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import grpc.aio

from slotstream.server.access.gate import Gate, Shares
from slotstream.server.arrivals import Arrivals
from slotstream.server.config import ServerConfig
from slotstream.server.ingest.sample_writer import Ended, SampleWriter, UploadStore
from slotstream.server.ingest.stream import Context, Stream
from slotstream.server.metrics import Metrics, code_label
from slotstream.server.nixl.readers import NixlReaders
from slotstream.server.pools import Pools
from slotstream.server.status import abort
from slotstream.v1 import ingest_pb2 as pb
from slotstream.wire.errors import HashMismatch, ProtocolViolation, ServerDraining, SlotStreamError
from slotstream.wire.logtext import log_text
from slotstream.wire.throttle import Throttle

_log = logging.getLogger(__name__)


class IngestService:
    """All ingest streams of a server."""

    def __init__(
        self,
        config: ServerConfig,
        store: UploadStore,
        pools: Pools,
        metrics: Metrics,
        arrivals: Arrivals,
        gate: Gate,
        committed: Callable[[str], None],
        readers: NixlReaders | None = None,
    ) -> None:
        """`committed` is told the namespace of every sample stored. `readers`: None where chunks come in frames only."""
        self.config = config
        self._committed = committed
        self.readers = readers
        self.store = store
        self.pools = pools
        self.metrics = metrics
        self.arrivals = arrivals
        self.draining = False
        self.open_shares = Shares("open samples", sys.maxsize, config.peer_open_samples_max)  # The store limits all of them.
        self._gate = gate
        self._refusals = Throttle(every_s=60.0)
        self._stream_shares = Shares("ingest streams", config.streams_max, config.peer_streams_max)
        self._streams: set[Stream] = set()  # A stream stays until its last sample ended, connected or not.
        self._open = 0
        self._held_bytes = 0  # On all streams.
        self._idle = asyncio.Event()
        self._idle.set()
        metrics.held_bytes.set_function(lambda: self._held_bytes)

    def handler(self) -> grpc.GenericRpcHandler[bytes, bytes]:
        stream: Any = self._stream
        methods = {"Stream": grpc.stream_stream_rpc_method_handler(stream)}  # No serializers: raw bytes both ways.
        return grpc.method_handlers_generic_handler("slotstream.v1.Ingest", methods)

    async def _stream(self, requests: AsyncIterator[bytes], context: Context) -> None:
        try:
            session = self._gate.admit(context)
            with self._stream_shares.one(session.name):
                await self._serve(Stream(self, context, session))
        except ServerDraining as error:
            await abort(context, error)
        except SlotStreamError as error:
            if isinstance(error, ProtocolViolation):
                self.metrics.violations.inc()
            else:
                self.metrics.refused_streams.labels(error.code).inc()
            if (unsaid := self._refusals.admit(error.code)) is not None:
                more = f" ({unsaid} more with this code were not logged)" if unsaid else ""
                _log.warning("ending the stream of %s: %s%s", context.peer(), log_text(error.code, str(error)), more)
            await abort(context, error)

    async def _serve(self, stream: Stream) -> None:
        self._streams.add(stream)
        self.metrics.streams.inc()
        try:
            await stream.run()
        finally:
            self.metrics.streams.dec()
            self.forget(stream)

    @property
    def is_full(self) -> bool:
        """Whether all streams together hold as many bytes as they may: then none reads on."""
        return self._held_bytes >= self.config.ingest_bytes_max

    def hold(self, nbytes: int) -> None:
        """Frames were taken, or let go of (less than 0): then those who waited for it read on."""
        was_full = self.is_full
        self._held_bytes += nbytes
        if was_full and not self.is_full:
            for stream in self._streams:
                stream.wake()

    def opened(self) -> None:
        self._open += 1
        self._idle.clear()
        self.metrics.open_samples.set(self._open)

    def ended(self, writer: SampleWriter, ended: Ended) -> None:
        """Books the end of a sample and wakes who waits for it."""
        self._open -= 1
        self.metrics.open_samples.set(self._open)
        if not self._open:
            self._idle.set()
        if ended.failure is None:
            self.metrics.samples.labels("duplicate" if ended.duplicate else "committed", "").inc()
            self.metrics.open_to_durable.observe(ended.open_s)
            self.metrics.commit_to_durable.observe(ended.commit_s)
            if writer.key is not None:
                self._committed(writer.key.namespace)
            _log.debug("sample %s committed", writer.key)
        else:
            self.metrics.samples.labels("failed", code_label(ended.failure.code)).inc()
            if ended.failure.code == HashMismatch.code:
                self.metrics.hash_mismatches.inc()
            _log.info("sample %s failed: %s", writer.key, log_text(ended.failure.code, ended.failure.message))
        if writer.key is not None:
            self.arrivals.notify(writer.key)

    def forget(self, stream: Stream) -> None:
        if stream.is_over():
            self._streams.discard(stream)

    def drain(self) -> None:
        """Open no more samples, and tell every peer so."""
        self.draining = True
        for stream in self._streams:
            stream.reply(pb.IngestReply(draining=pb.Draining()))

    async def idle(self) -> None:
        """Returns once no sample is open."""
        await self._idle.wait()

    def end_streams(self) -> None:
        """Fail what is still open and end every stream with SERVER_DRAINING."""
        self.draining = True
        for stream in tuple(self._streams):
            stream.end()
