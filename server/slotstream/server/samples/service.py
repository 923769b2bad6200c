"""The Samples service: reads, listings, deletions, checks, acks and leases. v1/samples.proto is its specification."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import Future
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from typing import Any, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import DecodeError, Message

from slotstream.server.access.bodies import BODY_S, Bodies
from slotstream.server.access.gate import Gate, Session
from slotstream.server.access.limits import READS, REQUESTS, VERIFICATIONS, WAITING_READS
from slotstream.server.config import ServerConfig
from slotstream.server.housekeeping import Housekeeping
from slotstream.server.metrics import Metrics
from slotstream.server.pools import Pools
from slotstream.server.samples import convert
from slotstream.server.samples.leases import LeaseBook
from slotstream.server.samples.reads import Opened, after, close_unwanted, covers, opened
from slotstream.server.status import abort
from slotstream.server.waiters import Waiters
from slotstream.store.records import SampleKey
from slotstream.store.sample.reading import SampleReader
from slotstream.store.samples import SampleStore
from slotstream.store.upkeep.retention import Reason
from slotstream.store.upkeep.verifying import Verdict
from slotstream.v1 import sample_pb2
from slotstream.v1 import samples_pb2 as pb
from slotstream.wire.errors import (
    BadParams,
    DeadlineExceeded,
    InternalFault,
    SampleNotFound,
    SlotStreamError,
    StillArriving,
    TooSlow,
)
from slotstream.wire.names import CONTROL_BYTES_MAX, DEFAULT_NAMESPACE, READ_WAIT_S_MAX, check_namespace

_log = logging.getLogger(__name__)
USAGE_PAGE = 1000
_Context = grpc.aio.ServicerContext[Any, Any]
_PAGE_BYTES_MAX = 8 << 20
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


class SamplesService:
    """Requests of trainers and people. Disk and catalogue are asked from threads, never on the event loop."""

    def __init__(
        self,
        config: ServerConfig,
        store: SampleStore,
        pools: Pools,
        metrics: Metrics,
        waiters: Waiters,
        gate: Gate,
        housekeeping: Housekeeping,
    ) -> None:
        self._housekeeping = housekeeping
        self._config = config
        self._store = store
        self._pools = pools
        self._metrics = metrics
        self._waiters = waiters
        self._gate = gate
        self._bodies = Bodies(CONTROL_BYTES_MAX, hang_up=gate.hang_up)
        self._read_shares = READS.shares(config)
        self._waiting_shares = WAITING_READS.shares(config)
        self._request_shares = REQUESTS.shares(config)
        self._verify_shares = VERIFICATIONS.shares(config)
        self._leases = LeaseBook(config)
        self._reads = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def handler(self, gate: Gate | None = None) -> grpc.GenericRpcHandler[Any, Any]:
        """The service. `gate`: who may call, where that is not everybody whom the server's own gate admits."""
        gate = gate or self._gate
        # Each is a stream of requests, of which there is one: gRPC would receive that of a unary call before anybody has looked
        # at the caller. No deserializers either: the length comes first. Rows are sent as raw bytes.
        methods = {
            "Read": _stream(self._read, gate, None),
            "Verify": _stream(self._verify, gate, pb.VerifyReply),
            "Restore": _stream(self._restore, gate, pb.RestoreReply),
            "Stat": _unary(self._stat, gate, sample_pb2.SampleInfo),
            "List": _unary(self._list, gate, pb.ListReply),
            "Delete": _unary(self._delete, gate, pb.DeleteReply),
            "Ack": _unary(self._ack, gate, pb.AckReply),
            "CountRead": _unary(self._count_read, gate, pb.CountReadReply),
            "Lease": _unary(self._lease, gate, pb.LeaseReply),
            "Usage": _unary(self._usage, gate, pb.UsageReply),
        }
        return grpc.method_handlers_generic_handler("slotstream.v1.Samples", methods)

    async def idle(self) -> None:
        """Returns once no read is running or waiting."""
        await self._idle.wait()

    @asynccontextmanager
    async def _answering(self, method: str, gate: Gate, context: _Context) -> AsyncIterator[tuple[Session, bytes]]:
        """Who is calling, and what they ask. Turns what goes wrong into a status, counted before the peer hears of it."""

        def count(code: str) -> None:
            self._metrics.requests.labels(method, code).inc()

        try:
            session = gate.admit(context)
            with (self._read_shares if method == "Read" else self._request_shares).one(session.peer):
                yield session, await self._bodies.read(context, session.caller, BODY_S)
            count("")
        except SlotStreamError as error:
            count(error.code)
            await abort(context, error)
        except asyncio.CancelledError:
            count("CANCELLED")
            raise
        except Exception:
            count(InternalFault.code)
            _log.exception("a fault in the server failed a %s", method)
            await abort(context, InternalFault("the server failed; its log says how"))

    async def _look_up(self, call: Callable[..., _T], *arguments: Any) -> _T:
        """What asks the catalogue alone."""
        return await asyncio.get_running_loop().run_in_executor(self._pools.lookups, call, *arguments)

    async def _check(self, call: Callable[..., _T], *arguments: Any) -> _T:
        """What waits for the disks of samples."""
        return await asyncio.get_running_loop().run_in_executor(self._pools.checks, call, *arguments)

    # Read.

    async def _read(self, gate: Gate, context: _Context) -> None:
        async with self._answering("Read", gate, context) as (session, raw), self._one_read():
            request = _parsed(pb.ReadRequest, raw)
            key = _key(session, "read", request)
            if not 0 <= request.wait_s <= READ_WAIT_S_MAX:
                raise BadParams(f"wait_s must be 0 to {READ_WAIT_S_MAX:.0f} seconds")
            self._waiters.check_open()
            try:
                reader, frames, header = await self._open(key, request)
            except (SampleNotFound, StillArriving):
                reader, frames, header = await self._open_later(session, key, request)
            step: Future[bytes | None] | None = None
            was_whole = False
            try:
                frame: bytes | None = header
                while frame is not None:
                    # One block ahead of the peer, so that disk and network overlap; a slow reader holds two blocks.
                    step = None if request.in_place else self._pools.reads.submit(next, frames, None)
                    await self._write(context, frame)
                    self._metrics.sent_bytes.inc(len(frame))
                    frame = None if step is None else await asyncio.wrap_future(step)
                was_whole = not request.in_place and covers(request, reader)
            finally:
                after(step, lambda: self._end_read(reader, was_whole))

    def _end_read(self, reader: SampleReader, was_whole: bool) -> None:
        """Closes the sample; now it may go, if its read was the last that its namespace's rule grants."""
        reader.close()
        namespace = reader.record.namespace
        if was_whole:
            counted = self._store.lifetimes.count_read(reader.record.key, reader.record.committed_unix_ns)
            counted.add_done_callback(lambda _: self._housekeeping.touch(namespace, at_once=True))
        else:
            self._housekeeping.touch(namespace, at_once=True)

    async def _write(self, context: _Context, message: Any) -> None:
        """Raises TooSlow when the reader takes nothing for too long: what it holds is a thread's time and an open file."""
        stall_s = self._config.read_stall_s
        try:
            async with asyncio.timeout(stall_s):
                await context.write(message)
        except TimeoutError as error:
            raise TooSlow(f"the reader took nothing for {stall_s:g} s") from error

    @asynccontextmanager
    async def _one_read(self) -> AsyncIterator[None]:
        self._reads += 1
        self._idle.clear()
        self._metrics.reads.set(self._reads)
        try:
            yield
        finally:
            self._reads -= 1
            self._metrics.reads.set(self._reads)
            if not self._reads:
                self._idle.set()

    @contextmanager
    def _one_wait(self, session: Session) -> Iterator[None]:
        with self._waiting_shares.one(session.peer):
            self._metrics.waiting_reads.inc()
            try:
                yield
            finally:
                self._metrics.waiting_reads.dec()

    async def _open(self, key: SampleKey, request: pb.ReadRequest) -> Opened:
        """A committed sample, its replies to come, and the first of them. Raises what the read is to be answered with."""
        opening = self._pools.reads.submit(opened, self._store, key, request)
        try:
            return await asyncio.wrap_future(opening)
        except asyncio.CancelledError:
            opening.add_done_callback(close_unwanted)
            raise

    async def _open_later(self, session: Session, key: SampleKey, request: pb.ReadRequest) -> Opened:
        """As `_open`, of a sample that is committed within `wait_s`. Raises DeadlineExceeded and ServerDraining, too."""
        loop = asyncio.get_running_loop()
        begun = loop.time()
        with self._waiters.watch(key) as changed:
            while True:
                changed.clear()
                self._waiters.check_open()
                try:
                    return await self._open(key, request)
                except StillArriving:
                    limit_s = request.wait_s
                    late: SlotStreamError = DeadlineExceeded(f"{key} is still arriving after {request.wait_s:g} seconds")
                except SampleNotFound:
                    limit_s = min(request.wait_s, self._config.appear_grace_s)
                    late = SampleNotFound(f"there is no sample {key}, and none appeared")
                try:
                    with self._one_wait(session):
                        async with asyncio.timeout_at(begun + limit_s):
                            await changed.wait()
                except TimeoutError as error:
                    raise late from error
                _key(session, "read", request)  # Again: the token may have been withdrawn while the read waited.

    # The short ones.

    async def _stat(self, gate: Gate, context: _Context) -> sample_pb2.SampleInfo:
        async with self._answering("Stat", gate, context) as (session, raw):
            return await self._look_up(self._stat_of, _key(session, "read", _parsed(pb.StatRequest, raw)))

    def _stat_of(self, key: SampleKey) -> sample_pb2.SampleInfo:
        record = self._store.stat(key)
        if record is None:
            raise SampleNotFound(f"there is no sample {key}")
        rule = self._housekeeping.policy.rule_for(key.namespace)
        return convert.info_of(record, self._store.lifetimes.standing(key), rule)

    async def _list(self, gate: Gate, context: _Context) -> pb.ListReply:
        async with self._answering("List", gate, context) as (session, raw):
            request = _parsed(pb.ListRequest, raw)
            return await self._look_up(self._list_page, request, _spaces(session, "read", request.namespace))

    def _list_page(self, request: pb.ListRequest, spaces: tuple[str, ...] | None) -> pb.ListReply:
        query = convert.query_of(request, spaces)
        while True:
            records, token = self._store.list_page(query)
            reply = pb.ListReply(samples=map(convert.info_of, records), next_page_token=token)
            # Somebody's samples with all the tags and metadata that they may have must not make a page that cannot be sent.
            if reply.ByteSize() <= _PAGE_BYTES_MAX or query.page_size == 1:
                return reply
            query = replace(query, page_size=max(1, query.page_size // 4))

    async def _delete(self, gate: Gate, context: _Context) -> pb.DeleteReply:
        async with self._answering("Delete", gate, context) as (session, raw):
            key = _key(session, "delete", _parsed(pb.DeleteRequest, raw))
            await self._check(self._store.delete, key)
            self._metrics.deleted_samples.labels(str(Reason.REQUEST)).inc()
            return pb.DeleteReply()

    async def _ack(self, gate: Gate, context: _Context) -> pb.AckReply:
        async with self._answering("Ack", gate, context) as (session, raw):
            request = _parsed(pb.AckRequest, raw)
            key = _key(session, "read", request)
            if self._housekeeping.policy.rule_for(key.namespace).delete_on_ack:
                session.principal().check("delete", key.namespace)
            await self._check(self._store.lifetimes.ack, key)
            self._housekeeping.touch(key.namespace, at_once=True)
            return pb.AckReply()

    async def _count_read(self, gate: Gate, context: _Context) -> pb.CountReadReply:
        async with self._answering("CountRead", gate, context) as (session, raw):
            request = _parsed(pb.CountReadRequest, raw)
            key = _key(session, "read", request)
            await asyncio.wrap_future(self._store.lifetimes.count_read(key, request.committed_unix_ns))
            self._housekeeping.touch(key.namespace, at_once=True)
            return pb.CountReadReply()

    async def _lease(self, gate: Gate, context: _Context) -> pb.LeaseReply:
        async with self._answering("Lease", gate, context) as (session, raw):
            request = _parsed(pb.LeaseRequest, raw)
            key = _key(session, "read", request)
            until = await self._lease_of(session, key, request)
            return pb.LeaseReply(leased_until_unix_ns=until)

    async def _lease_of(self, session: Session, key: SampleKey, request: pb.LeaseRequest) -> int:
        is_one = request.seconds > 0
        if is_one:
            self._leases.take(session.peer, key, request.holder, request.seconds)
        try:
            until = await self._check(self._store.lifetimes.lease, key, request.holder, request.seconds)
        except SlotStreamError:
            self._leases.give_back(session.peer, key, request.holder)
            raise
        if not is_one:
            self._leases.give_back(session.peer, key, request.holder)
        return until

    async def _usage(self, gate: Gate, context: _Context) -> pb.UsageReply:
        async with self._answering("Usage", gate, context) as (session, raw):
            request = _parsed(pb.UsageRequest, raw)
            return await self._check(self._usage_of, request, _spaces(session, "read", request.namespace))

    def _usage_of(self, request: pb.UsageRequest, spaces: tuple[str, ...] | None) -> pb.UsageReply:
        """Of the namespaces that the caller may read; what concerns everybody only for whoever may read all of them."""
        policy, lifetimes = self._housekeeping.policy, self._store.lifetimes
        if spaces is not None:
            return pb.UsageReply(namespaces=[convert.usage_of(lifetimes.usage(space), policy) for space in spaces])
        after = check_namespace(request.page_token) if request.page_token else ""
        page = lifetimes.usages(after, USAGE_PAGE)
        files, nbytes = lifetimes.quarantine_totals()
        return pb.UsageReply(
            namespaces=[convert.usage_of(usage, policy) for usage in page],
            next_page_token=page[-1].namespace if len(page) == USAGE_PAGE else "",
            free_bytes=self._store.free_bytes(),
            free_bytes_target=policy.free_bytes_target,
            quarantined_files=files,
            quarantined_bytes=nbytes,
            scrub=convert.scrub_of(self._housekeeping.scrub_progress, self._config.scrub_every_s),
            clock=lifetimes.watch.trouble,
            age_held=sorted(self._housekeeping.age_held),
        )

    async def _verify(self, gate: Gate, context: _Context) -> None:
        async with self._answering("Verify", gate, context) as (session, raw):
            request = _parsed(pb.VerifyRequest, raw)
            verdicts = self._verdicts(session, request)
            with self._verify_shares.one(session.peer):
                while (verdict := await self._check(next, verdicts, None)) is not None:
                    done = None
                    if request.quarantine:
                        done = await self._check(self._store.lifetimes.quarantine, verdict)
                    await self._write(context, convert.reply_of(verdict, quarantined=done is not None))

    async def _restore(self, gate: Gate, context: _Context) -> None:
        async with self._answering("Restore", gate, context) as (session, raw):
            request = _parsed(pb.RestoreRequest, raw)
            if request.sample_id:
                key = _key(session, "admin", request)
                done = self._store.restore(key.namespace, key.sample_id)
            else:
                spaces = _spaces(session, "admin", request.namespace)
                namespaces = (request.namespace,) if spaces is None else spaces
                done = itertools.chain.from_iterable(self._store.restore(namespace) for namespace in namespaces)
            with self._verify_shares.one(session.peer):
                while (one := await self._check(next, done, None)) is not None:
                    if not one.kept:
                        self._waiters.notify(one.key)
                    await self._write(context, convert.restored_of(one))

    def _verdicts(self, session: Session, request: pb.VerifyRequest) -> Iterator[Verdict]:
        """Of one sample for whoever may read it; of all for admins, whose token says of which namespaces."""
        if request.sample_id:
            # Taking a sample out of service is more than looking at it.
            key = _key(session, "admin" if request.quarantine else "read", request)
            return _once(lambda: self._store.verify(key))
        spaces = _spaces(session, "admin", request.namespace)
        namespaces = (request.namespace,) if spaces is None else spaces
        return itertools.chain.from_iterable(self._store.verify_all(namespace) for namespace in namespaces)


def _parsed(kind: type[_Message], raw: bytes) -> _Message:
    """Raises BadParams."""
    try:
        return kind.FromString(raw)
    except DecodeError as error:
        raise BadParams(f"the request is not a {kind.__name__}") from error


def _key(session: Session, right: str, request: _Named) -> SampleKey:
    """The sample that is asked for, if the caller has `right` there. Raises PermissionDenied before anything is looked up."""
    session.principal().check(right, request.namespace or DEFAULT_NAMESPACE)
    return convert.key_of(request.namespace, request.sample_id)


def _spaces(session: Session, right: str, namespace: str) -> tuple[str, ...] | None:
    """The namespaces that a request concerns: the one it names, else all in which the caller has `right` (None: every one)."""
    principal = session.principal()
    if not namespace:
        return principal.spaces(right)
    principal.check(right, namespace)
    return (check_namespace(namespace),)


def _once(verify: Callable[[], Verdict]) -> Iterator[Verdict]:
    yield verify()


def _unary(method: Callable[[Gate, _Context], Awaitable[Any]], gate: Gate, reply: type[Any]) -> grpc.RpcMethodHandler[Any, Any]:
    async def answer(_: object, context: _Context) -> Any:
        return await method(gate, context)

    behaviour: Any = answer
    return grpc.stream_unary_rpc_method_handler(behaviour, None, reply.SerializeToString)


def _stream(
    method: Callable[[Gate, _Context], Awaitable[None]], gate: Gate, reply: type[Any] | None
) -> grpc.RpcMethodHandler[Any, Any]:
    async def answer(_: object, context: _Context) -> None:
        await method(gate, context)

    behaviour: Any = answer
    return grpc.stream_stream_rpc_method_handler(behaviour, None, None if reply is None else reply.SerializeToString)
