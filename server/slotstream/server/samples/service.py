"""The Samples service: reads, listings, deletions, acks and leases, and `admin`'s calls. v1/samples.proto specifies it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from typing import Any

import grpc

from slotstream.server.access.gate import Gate, Session
from slotstream.server.access.limits import WAITING_READS
from slotstream.server.housekeeping import Housekeeping
from slotstream.server.parts import ServerParts
from slotstream.server.samples import convert
from slotstream.server.samples.admin import AdminCalls
from slotstream.server.samples.calls import Calls, Context, key_for, parsed, spaces_for, stream, unary
from slotstream.server.samples.leases import LeaseBook
from slotstream.server.samples.many import ManyReads
from slotstream.server.samples.reads import Opened, Unopened, after, close_unwanted, counts_when_sent, opened
from slotstream.server.samples.status import About, StatusCall
from slotstream.store.records import SampleKey, SampleRecord
from slotstream.store.sample.reading import SampleReader
from slotstream.store.samples import SampleStore
from slotstream.store.upkeep.retention import Reason
from slotstream.v1 import sample_pb2
from slotstream.v1 import samples_pb2 as pb
from slotstream.wire.errors import (
    BadParams,
    DeadlineExceeded,
    SampleFailed,
    SampleNotFound,
    SlotStreamError,
    StillArriving,
)
from slotstream.wire.names import READ_WAIT_S_MAX, READS_IN_CALL_MAX

_PAGE_BYTES_MAX = 8 << 20


class SamplesService:
    """Requests of trainers and people. Disk and catalogue are asked from threads, never on the event loop."""

    def __init__(self, parts: ServerParts[SampleStore], housekeeping: Housekeeping, about: About | None = None) -> None:
        self._housekeeping = housekeeping
        self._config, self._store, self._disk_threads = parts.config, parts.store, parts.disk_threads
        self._metrics, self._waiters, self._gate = parts.metrics, parts.waiters, parts.gate
        self._calls = Calls(parts)
        self._many = ManyReads(parts, self._calls, self._end_reads)
        self._admin = AdminCalls(parts, self._calls, housekeeping)
        self._status = StatusCall(parts, self._calls, housekeeping, about)
        self._waiting_shares = WAITING_READS.shares(parts.config)
        self._leases = LeaseBook(parts.config)
        self._reads = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def handler(self, gate: Gate | None = None) -> grpc.GenericRpcHandler[Any, Any]:
        """The service. `gate`: who may call, where that is not everybody whom the server's own gate admits."""
        gate = gate or self._gate
        methods = {
            "Read": stream(self._read, gate, None),  # Rows are sent as raw bytes.
            "ReadMany": stream(self._read_many, gate, None),
            "Stat": unary(self._stat, gate, sample_pb2.SampleInfo),
            "List": unary(self._list, gate, pb.ListReply),
            "Delete": unary(self._delete, gate, pb.DeleteReply),
            "Ack": unary(self._ack, gate, pb.AckReply),
            "CountRead": unary(self._count_read, gate, pb.CountReadReply),
            "Lease": unary(self._lease, gate, pb.LeaseReply),
            "Status": unary(self._status.answer, gate, pb.StatusReply),
            **self._admin.handlers(gate),
        }
        return grpc.method_handlers_generic_handler("slotstream.v1.Samples", methods)

    async def idle(self) -> None:
        """Returns once no read is running or waiting."""
        await self._idle.wait()

    # Read.

    async def _read(self, gate: Gate, context: Context) -> None:
        async with self._calls.answering("Read", gate, context) as (session, raw), self._one_read():
            request = parsed(pb.ReadRequest, raw)
            key = key_for(session, "read", request)
            if not 0 <= request.wait_s <= READ_WAIT_S_MAX:
                raise BadParams(f"wait_s must be 0 to {READ_WAIT_S_MAX:.0f} seconds")
            self._waiters.check_open()
            try:
                reader, replies, header = await self._open(key, request)
            except SlotStreamError as error:
                if not error.may_come:
                    raise
                reader, replies, header = await self._open_later(session, key, request)
            frames = map(b"".join, replies)
            step: Future[bytes | None] | None = None
            counts = False
            try:
                frame: bytes | None = b"".join(header)
                while frame is not None:
                    # One block ahead of the peer, so that disk and network overlap; a slow reader holds two blocks.
                    step = None if request.in_place else self._disk_threads.read_lines.submit(key.namespace, next, frames, None)
                    await self._calls.write(context, frame)
                    self._metrics.sent_bytes.inc(len(frame))
                    frame = None if step is None else await asyncio.wrap_future(step)
                counts = counts_when_sent(request, reader)
            finally:
                after(step, lambda: self._end_read(reader, counts))

    def _end_read(self, reader: SampleReader | Unopened, counts: bool) -> None:
        reader.close()
        self._end_reads([(reader.record, counts)])

    def _end_reads(self, reads: Sequence[tuple[SampleRecord, bool]]) -> None:
        """Of samples that nobody reads now, each with whether the read counts: they may go, if it was the last that their
        namespace's rule grants.
        """

        def touch(_: object = None) -> None:
            for namespace in {record.namespace for record, _ in reads}:
                self._housekeeping.touch(namespace, at_once=True)

        if counted := [(record.key, record.committed_unix_ns) for record, counts in reads if counts]:
            self._store.lifetimes.count_reads(counted).add_done_callback(touch)
        else:
            touch()

    async def _read_many(self, gate: Gate, context: Context) -> None:
        async with self._calls.answering("ReadMany", gate, context) as (session, raw), self._one_read():
            await self._many.answer(session, raw, context)

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
        """A committed sample, its replies to come, and the first of them. Raises what the read is answered with."""

        def open_one() -> Opened:
            return opened(self._store, self._store.hold([key])[0], request)

        opening = self._disk_threads.read_lines.submit(key.namespace, open_one)
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
                except SampleFailed as failed:
                    if not failed.may_come:
                        raise
                    limit_s, late = request.wait_s, failed
                try:
                    with self._one_wait(session):
                        async with asyncio.timeout_at(begun + limit_s):
                            await changed.wait()
                except TimeoutError as error:
                    raise late from error
                key_for(session, "read", request)  # Again: the token may have been withdrawn while the read waited.

    # The short ones.

    async def _stat(self, gate: Gate, context: Context) -> sample_pb2.SampleInfo:
        async with self._calls.answering("Stat", gate, context) as (session, raw):
            return await self._calls.look_up(self._stat_of, key_for(session, "read", parsed(pb.StatRequest, raw)))

    def _stat_of(self, key: SampleKey) -> sample_pb2.SampleInfo:
        record = self._store.stat(key)
        if record is None:
            raise SampleNotFound(f"there is no sample {key}")
        rule = self._housekeeping.policy.rule_for(key.namespace)
        return convert.info_of(record, self._store.lifetimes.standing(key), rule, self._store.refusals.of(key))

    async def _list(self, gate: Gate, context: Context) -> pb.ListReply:
        async with self._calls.answering("List", gate, context) as (session, raw):
            request = parsed(pb.ListRequest, raw)
            spaces = spaces_for(session, "read", request.namespace)
            as_of = await self._calls.check("", self._store.settled) if request.settle else 0
            reply = await self._calls.look_up(self._list_page, request, spaces)
            reply.as_of_unix_ns = as_of
            return reply

    def _list_page(self, request: pb.ListRequest, spaces: tuple[str, ...] | None) -> pb.ListReply:
        query = convert.query_of(request, spaces)
        while True:
            records, token = self._store.list_page(query)
            reply = pb.ListReply(
                samples=map(convert.info_of, records), next_page_token=token, of_request=bool(query.request_id)
            )
            # Somebody's samples with all the tags and metadata that they may have must not make a page that cannot be sent.
            if reply.ByteSize() <= _PAGE_BYTES_MAX or query.page_size == 1:
                return reply
            query = replace(query, page_size=max(1, query.page_size // 4))

    async def _delete(self, gate: Gate, context: Context) -> pb.DeleteReply:
        async with self._calls.answering("Delete", gate, context) as (session, raw):
            request = parsed(pb.DeleteRequest, raw)
            key = key_for(session, "delete", request)
            await self._calls.check(key.namespace, self._store.delete, key, request.created_unix_ns)
            self._metrics.deleted_samples.labels(str(Reason.REQUEST)).inc()
            return pb.DeleteReply()

    async def _ack(self, gate: Gate, context: Context) -> pb.AckReply:
        async with self._calls.answering("Ack", gate, context) as (session, raw):
            request = parsed(pb.AckRequest, raw)
            key = key_for(session, "read", request)
            if self._housekeeping.policy.rule_for(key.namespace).delete_on_ack:
                session.principal().check("delete", key.namespace)
            await self._calls.check(key.namespace, self._store.lifetimes.ack, key)
            self._housekeeping.touch(key.namespace, at_once=True)
            return pb.AckReply()

    async def _count_read(self, gate: Gate, context: Context) -> pb.CountReadReply:
        async with self._calls.answering("CountRead", gate, context) as (session, raw):
            request = parsed(pb.CountReadRequest, raw)
            if len(request.more) >= READS_IN_CALL_MAX:
                raise BadParams(f"one call counts at most {READS_IN_CALL_MAX} reads")
            counted = [(key_for(session, "read", one), one.committed_unix_ns) for one in (request, *request.more)]
            await asyncio.wrap_future(self._store.lifetimes.count_reads(counted))
            for namespace in {key.namespace for key, _ in counted}:
                self._housekeeping.touch(namespace, at_once=True)
            return pb.CountReadReply()

    async def _lease(self, gate: Gate, context: Context) -> pb.LeaseReply:
        async with self._calls.answering("Lease", gate, context) as (session, raw):
            request = parsed(pb.LeaseRequest, raw)
            ends_any = request.seconds == 0 and (not request.holder or "admin" in session.principal().rights)
            key = key_for(session, "admin" if ends_any else "read", request)
            until = await self._lease_of(session, key, request)
            return pb.LeaseReply(leased_until_unix_ns=until)

    async def _lease_of(self, session: Session, key: SampleKey, request: pb.LeaseRequest) -> int:
        lifetimes, holder = self._store.lifetimes, request.holder
        if request.seconds == 0:
            await self._calls.check(key.namespace, lifetimes.end_leases, key, holder or None)
            self._leases.end(key, holder)
            return 0
        most = self._leases.take(session.peer, key, holder, request.seconds)
        try:
            return await self._calls.check(key.namespace, lifetimes.lease, key, holder, request.seconds, *most)
        except SlotStreamError:
            self._leases.take_back(session.peer, key, holder)
            raise
