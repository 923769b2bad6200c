"""The Ingest service: streams of raw frames in, acks and verdicts out. v1/ingest.proto is its specification.

The event loop reads frames and counts what is open and held; writers do the disk work. What a peer does wrong with one sample
fails that sample; what breaks the protocol ends its stream; neither touches any other stream.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import grpc.aio

from slotstream.common.logtext import log_text
from slotstream.common.throttle import Throttle
from slotstream.server.access.limits import INGEST_STREAMS
from slotstream.server.ingest.sample_writer import IngestStore
from slotstream.server.ingest.shared import Shared
from slotstream.server.ingest.stream import Context, Stream
from slotstream.server.logs import failure_fields
from slotstream.server.nixl.readers import NixlReaders
from slotstream.server.parts import ServerParts
from slotstream.server.status import abort
from slotstream.wire.errors import InternalFault, ProtocolViolation, ServerDraining, SlotStreamError

_log = logging.getLogger(__name__)


class IngestService:
    """All ingest streams of a server."""

    def __init__(
        self,
        parts: ServerParts[IngestStore],
        committed: Callable[[str], None],
        readers: NixlReaders | None = None,
    ) -> None:
        """`committed` is told the namespace of every sample stored. `readers`: None where chunks come in frames only."""
        self._metrics = parts.metrics
        self._gate = parts.gate
        self._shared = Shared(parts, committed, readers)
        self._endings = Throttle(every_s=60.0)  # What is logged of streams that are ended, by code, or class of a fault.
        self._stream_shares = INGEST_STREAMS.shares(parts.config)
        self._streams: dict[Stream, None] = {}  # In the order in which they came.

    def handler(self) -> grpc.GenericRpcHandler[bytes, bytes]:
        stream: Any = self._stream
        methods = {"Stream": grpc.stream_stream_rpc_method_handler(stream)}  # No serializers: raw bytes both ways.
        return grpc.method_handlers_generic_handler("slotstream.v1.Ingest", methods)

    async def _stream(self, requests: AsyncIterator[bytes], context: Context) -> None:
        try:
            session = self._gate.admit(context)
            self._shared.bodies.admit(context, session.caller)  # Before anything is made for it.
            with self._stream_shares.one(session.peer):
                await self._serve(Stream(self._shared, context, session))
        except ServerDraining as error:
            await abort(context, error)
        except SlotStreamError as error:
            if isinstance(error, ProtocolViolation):
                self._metrics.violations.inc()
            else:
                self._metrics.refused_streams.labels(error.code).inc()
            if (more := self._endings.more(error.code)) is not None:
                fields = failure_fields("stream_ended", error.code, peer=context.peer())
                said = log_text(error.code, str(error))
                _log.warning("ending the stream of %s: %s%s", context.peer(), said, more, extra=fields)
            await abort(context, error)
        except Exception as error:
            fault = InternalFault("the server failed; its log says how")
            self._metrics.refused_streams.labels(fault.code).inc()
            if (more := self._endings.more(type(error).__name__)) is not None:
                fields = failure_fields("fault", fault.code, peer=context.peer())
                _log.exception("a fault in the server ended the stream of %s%s", context.peer(), more, extra=fields)
            await abort(context, fault)

    async def _serve(self, stream: Stream) -> None:
        self._streams[stream] = None
        self._metrics.streams.inc()
        try:
            await stream.run()
        finally:
            self._metrics.streams.dec()
            del self._streams[stream]

    def drain(self) -> None:
        """Open no more samples, and tell every peer so."""
        self._shared.draining = True
        for stream in self._streams:
            stream.say_draining()

    async def idle(self) -> None:
        """Returns once no sample is open."""
        await self._shared.idle()

    def end_streams(self) -> None:
        """Fail what is still open and end every stream with SERVER_DRAINING."""
        self._shared.draining = True
        for stream in tuple(self._streams):
            stream.end()
