"""What all calls of the Samples service have: who is calling, what they ask, their share, threads, and a status at the end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import DecodeError, Message

from slotstream.common.throttle import Throttle
from slotstream.server.access.bodies import BODY_S, Bodies
from slotstream.server.access.gate import Gate, Session
from slotstream.server.access.limits import READS, REQUESTS
from slotstream.server.logs import failure_fields
from slotstream.server.parts import ServerParts
from slotstream.server.samples import convert
from slotstream.server.status import abort
from slotstream.store.records import SampleKey
from slotstream.store.samples import SampleStore
from slotstream.v1 import samples_pb2 as pb
from slotstream.wire.errors import BadParams, InternalFault, SlotStreamError, TooSlow
from slotstream.wire.names import CONTROL_BYTES_MAX, DEFAULT_NAMESPACE, check_namespace

_log = logging.getLogger(__name__)
Context = grpc.aio.ServicerContext[Any, Any]
_Unary = Callable[[Gate, Context], Awaitable[Any]]
_Stream = Callable[[Gate, Context], Awaitable[None]]
_T = TypeVar("_T")
_Message = TypeVar("_Message", bound=Message)
# Requests that name one sample.
_Named = (
    pb.ReadRequest
    | pb.StatRequest
    | pb.DeleteRequest
    | pb.VerifyRequest
    | pb.RestoreRequest
    | pb.AckRequest
    | pb.CountReadRequest
    | pb.LeaseRequest
)


class Calls:
    """Belongs to the event loop. Disk and catalogue are asked from threads, never on it."""

    def __init__(self, parts: ServerParts[SampleStore]) -> None:
        self._disk_threads = parts.disk_threads
        self._metrics = parts.metrics
        self._stall_s = parts.config.read_stall_s
        self._faults = Throttle(every_s=60.0)  # What is logged of them, by call and class.
        self.bodies = Bodies(CONTROL_BYTES_MAX, connections=parts.gate.connections)
        self.read_shares = READS.shares(parts.config)
        self.request_shares = REQUESTS.shares(parts.config)

    @asynccontextmanager
    async def answering(self, method: str, gate: Gate, context: Context) -> AsyncIterator[tuple[Session, bytes]]:
        """Who is calling, and what they ask. Turns what goes wrong into a status, counted before the peer hears of it."""

        def count(code: str) -> None:
            self._metrics.requests.labels(method, code).inc()

        try:
            session = gate.admit(context)
            with (self.read_shares if method in ("Read", "ReadMany") else self.request_shares).one(session.peer):
                yield session, await self.bodies.read(context, session.caller, BODY_S)
            count("")
        except SlotStreamError as error:
            count(error.code)
            await abort(context, error)
        except asyncio.CancelledError:
            count("CANCELLED")
            raise
        except Exception as error:
            count(InternalFault.code)
            if (more := self._faults.more(f"{method} {type(error).__name__}")) is not None:
                fields = failure_fields("fault", InternalFault.code, peer=context.peer())
                _log.exception("a fault in the server failed a %s%s", method, more, extra=fields)
            await abort(context, InternalFault("the server failed; its log says how"))

    async def look_up(self, call: Callable[..., _T], *arguments: Any) -> _T:
        """What asks the catalogue alone."""
        return await asyncio.get_running_loop().run_in_executor(self._disk_threads.lookups, call, *arguments)

    async def check(self, namespace: str, call: Callable[..., _T], *arguments: Any) -> _T:
        """What waits for the disks of samples, of one namespace; or of all ("")."""
        return await asyncio.wrap_future(self._disk_threads.check_lines.submit(namespace, call, *arguments))

    async def write(self, context: Context, message: Any) -> None:
        """Raises TooSlow when the reader takes nothing for too long: what it holds is a thread's time and an open file."""
        try:
            async with asyncio.timeout(self._stall_s):
                await context.write(message)
        except TimeoutError as error:
            raise TooSlow(f"the reader took nothing for {self._stall_s:g} s") from error


def parsed(kind: type[_Message], raw: bytes) -> _Message:
    """Raises BadParams."""
    try:
        return kind.FromString(raw)
    except DecodeError as error:
        raise BadParams(f"the request is not a {kind.__name__}") from error


def key_for(session: Session, right: str, request: _Named) -> SampleKey:
    """The sample that is asked for, if the caller has `right` there. Raises PermissionDenied before anything is looked up."""
    session.principal().check(right, request.namespace or DEFAULT_NAMESPACE)
    return convert.key_of(request.namespace, request.sample_id)


def spaces_for(session: Session, right: str, namespace: str) -> tuple[str, ...] | None:
    """The namespaces that a request concerns: the one it names, else all in which the caller has `right` (None: every one)."""
    principal = session.principal()
    if not namespace:
        return principal.spaces(right)
    principal.check(right, namespace)
    return (check_namespace(namespace),)


# Each call is a stream of requests, of which there is one: gRPC would receive that of a unary call before anybody has looked
# at the caller. No deserializers either: the length comes first.


def unary(method: _Unary, gate: Gate, reply: type[Any]) -> grpc.RpcMethodHandler[Any, Any]:
    """A call with one reply."""

    async def answer(_: object, context: Context) -> Any:
        return await method(gate, context)

    behaviour: Any = answer
    return grpc.stream_unary_rpc_method_handler(behaviour, None, reply.SerializeToString)


def stream(method: _Stream, gate: Gate, reply: type[Any] | None) -> grpc.RpcMethodHandler[Any, Any]:
    """A call that writes its replies; `reply` is None where it writes raw bytes."""

    async def answer(_: object, context: Context) -> None:
        await method(gate, context)

    behaviour: Any = answer
    return grpc.stream_stream_rpc_method_handler(behaviour, None, None if reply is None else reply.SerializeToString)
