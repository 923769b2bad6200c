"""The Samples service: reads, listings, deletions, checks, acks and leases. v1/samples.proto is its specification."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import Future
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import grpc
import grpc.aio

from slotstream.server import convert
from slotstream.server.arrivals import Arrivals
from slotstream.server.config import ServerConfig
from slotstream.server.housekeeping import Housekeeping
from slotstream.server.lane import Pools
from slotstream.server.metrics import Metrics
from slotstream.server.status import abort
from slotstream.store.reading import RowBlock, SampleReader
from slotstream.store.records import SampleKey, State
from slotstream.store.retention import Reason
from slotstream.store.samples import SampleStore
from slotstream.store.verifying import Verdict
from slotstream.v1 import sample_pb2
from slotstream.v1 import samples_pb2 as pb
from slotstream.wire.errors import (
    BadParams,
    DeadlineExceeded,
    InternalFault,
    SampleNotFound,
    ServerUnavailable,
    SlotStreamError,
)
from slotstream.wire.frames import encode_rows
from slotstream.wire.names import check_namespace

_log = logging.getLogger(__name__)
WAIT_S_MAX = 3600.0
USAGE_PAGE = 1000
_Context = grpc.aio.ServicerContext[Any, Any]
_T = TypeVar("_T")


class SamplesService:
    """Requests of trainers and people. Disk and catalogue are asked from threads, never on the event loop."""

    def __init__(
        self,
        config: ServerConfig,
        store: SampleStore,
        pools: Pools,
        metrics: Metrics,
        arrivals: Arrivals,
        keeping: Housekeeping,
    ) -> None:
        self._keeping = keeping
        self._config = config
        self._store = store
        self._pools = pools
        self._metrics = metrics
        self._arrivals = arrivals
        self._reads = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def handler(self) -> grpc.GenericRpcHandler[Any, Any]:
        read: Any = self._read
        verify: Any = self._verify
        methods = {
            # No response serializer: rows are sent as raw bytes.
            "Read": grpc.unary_stream_rpc_method_handler(read, pb.ReadRequest.FromString),
            "Verify": grpc.unary_stream_rpc_method_handler(
                verify, pb.VerifyRequest.FromString, pb.VerifyReply.SerializeToString
            ),
            "Stat": _unary(self._stat, pb.StatRequest, sample_pb2.SampleInfo),
            "List": _unary(self._list, pb.ListRequest, pb.ListReply),
            "Delete": _unary(self._delete, pb.DeleteRequest, pb.DeleteReply),
            "Ack": _unary(self._ack, pb.AckRequest, pb.AckReply),
            "Lease": _unary(self._lease, pb.LeaseRequest, pb.LeaseReply),
            "Usage": _unary(self._usage, pb.UsageRequest, pb.UsageReply),
        }
        return grpc.method_handlers_generic_handler("slotstream.v1.Samples", methods)

    async def idle(self) -> None:
        """Returns once no read is running or waiting."""
        await self._idle.wait()

    @asynccontextmanager
    async def _answering(self, method: str, context: _Context) -> AsyncIterator[None]:
        """Turns what goes wrong into a status, and counts the outcome before the peer hears of it."""

        def count(code: str) -> None:
            self._metrics.requests.labels(method, code).inc()

        try:
            yield
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

    async def _in_thread(self, call: Callable[..., _T], *arguments: Any) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._pools.reads, call, *arguments)

    # Read.

    async def _read(self, request: pb.ReadRequest, context: _Context) -> None:
        async with self._answering("Read", context), self._one_read():
            key = convert.key_of(request.namespace, request.sample_id)
            if not 0 <= request.wait_s <= WAIT_S_MAX:
                raise BadParams(f"wait_s must be 0 to {WAIT_S_MAX:.0f} seconds")
            reader = await self._open(key, request.wait_s)
            step: Future[bytes | None] | None = None
            was_whole = False
            try:
                frames = _frames(reader, request)
                step = self._pools.reads.submit(next, frames, None)
                while (frame := await asyncio.wrap_future(step)) is not None:
                    # One block ahead of the peer, so that disk and network overlap; a slow reader holds two blocks.
                    step = self._pools.reads.submit(next, frames, None)
                    await context.write(frame)
                    self._metrics.sent_bytes.inc(len(frame))
                was_whole = _covers(request, reader)
            finally:
                _after(step, lambda: self._end_read(reader, was_whole))

    def _end_read(self, reader: SampleReader, was_whole: bool) -> None:
        """Closes the sample; now it may go, if its read was the last that its namespace's rule grants."""
        reader.close()
        namespace = reader.record.namespace
        if was_whole:
            counted = self._store.keeping.count_read(reader.record)
            counted.add_done_callback(lambda _: self._keeping.touch(namespace, at_once=True))
        else:
            self._keeping.touch(namespace, at_once=True)

    @asynccontextmanager
    async def _one_read(self) -> AsyncIterator[None]:
        if self._reads >= self._config.reads_max:
            raise ServerUnavailable(f"{self._reads} reads are running or waiting, as many as this server allows")
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

    async def _open(self, key: SampleKey, wait_s: float) -> SampleReader:
        """The reader of a sample, once it is committed. Raises what the read is to be answered with."""
        await self._await_end(key, wait_s)
        opening = self._pools.reads.submit(self._store.reader, key)
        try:
            return await asyncio.wrap_future(opening)
        except asyncio.CancelledError:
            opening.add_done_callback(_close_unwanted)
            raise

    async def _await_end(self, key: SampleKey, wait_s: float) -> None:
        """Returns once the sample is committed or failed. Raises SampleNotFound, DeadlineExceeded and ServerDraining."""
        loop = asyncio.get_running_loop()
        begun = loop.time()
        with self._arrivals.watch(key) as changed:
            while True:
                changed.clear()
                self._arrivals.check_open()
                record = await self._in_thread(self._store.stat, key)
                if record is not None and record.state is not State.ARRIVING:
                    return
                limit_s = wait_s if record is not None else min(wait_s, self._config.appear_grace_s)
                try:
                    with self._metrics.waiting_reads.track_inprogress():
                        async with asyncio.timeout_at(begun + limit_s):
                            await changed.wait()
                except TimeoutError as error:
                    if record is None:
                        raise SampleNotFound(f"there is no sample {key}, and none appeared") from error
                    raise DeadlineExceeded(f"{key} is still arriving after {wait_s:g} seconds") from error

    # The short ones.

    async def _stat(self, request: pb.StatRequest, context: _Context) -> sample_pb2.SampleInfo:
        async with self._answering("Stat", context):
            key = convert.key_of(request.namespace, request.sample_id)
            return await self._in_thread(self._stat_of, key)

    def _stat_of(self, key: SampleKey) -> sample_pb2.SampleInfo:
        record = self._store.stat(key)
        if record is None:
            raise SampleNotFound(f"there is no sample {key}")
        rule = self._keeping.policy.rule_for(key.namespace)
        return convert.info_of(record, self._store.keeping.standing(key), rule)

    async def _list(self, request: pb.ListRequest, context: _Context) -> pb.ListReply:
        async with self._answering("List", context):
            return await self._in_thread(self._list_page, request)

    def _list_page(self, request: pb.ListRequest) -> pb.ListReply:
        records, token = self._store.list_page(convert.query_of(request))
        return pb.ListReply(samples=map(convert.info_of, records), next_page_token=token)

    async def _delete(self, request: pb.DeleteRequest, context: _Context) -> pb.DeleteReply:
        async with self._answering("Delete", context):
            key = convert.key_of(request.namespace, request.sample_id)
            await self._in_thread(self._store.delete, key)
            self._metrics.deleted_samples.labels(str(Reason.REQUEST)).inc()
            return pb.DeleteReply()

    async def _ack(self, request: pb.AckRequest, context: _Context) -> pb.AckReply:
        async with self._answering("Ack", context):
            key = convert.key_of(request.namespace, request.sample_id)
            await self._in_thread(self._store.keeping.ack, key)
            self._keeping.touch(key.namespace, at_once=True)
            return pb.AckReply()

    async def _lease(self, request: pb.LeaseRequest, context: _Context) -> pb.LeaseReply:
        async with self._answering("Lease", context):
            key = convert.key_of(request.namespace, request.sample_id)
            until = await self._in_thread(self._store.keeping.lease, key, request.holder, request.seconds)
            return pb.LeaseReply(leased_until_unix_ns=until)

    async def _usage(self, request: pb.UsageRequest, context: _Context) -> pb.UsageReply:
        async with self._answering("Usage", context):
            return await self._in_thread(self._usage_of, request)

    def _usage_of(self, request: pb.UsageRequest) -> pb.UsageReply:
        policy, keeping = self._keeping.policy, self._store.keeping
        if request.namespace:
            usage = keeping.usage(check_namespace(request.namespace))
            return pb.UsageReply(namespaces=[convert.usage_of(usage, policy)])
        after = check_namespace(request.page_token) if request.page_token else ""
        page = keeping.usages(after, USAGE_PAGE)
        files, nbytes = keeping.quarantine_census()
        return pb.UsageReply(
            namespaces=[convert.usage_of(usage, policy) for usage in page],
            next_page_token=page[-1].namespace if len(page) == USAGE_PAGE else "",
            free_bytes=self._store.free_bytes(),
            free_bytes_target=policy.free_bytes_target,
            quarantined_files=files,
            quarantined_bytes=nbytes,
            scrub=convert.scrub_of(self._keeping.scrub_progress, self._config.scrub_every_s),
        )

    async def _verify(self, request: pb.VerifyRequest, context: _Context) -> None:
        async with self._answering("Verify", context):
            verdicts = self._verdicts(request)
            while (verdict := await self._in_thread(next, verdicts, None)) is not None:
                done = None
                if request.quarantine:
                    done = await self._in_thread(self._store.keeping.quarantine, verdict)
                await context.write(convert.reply_of(verdict, quarantined=done is not None))

    def _verdicts(self, request: pb.VerifyRequest) -> Iterator[Verdict]:
        if request.sample_id:
            return _once(lambda: self._store.verify(convert.key_of(request.namespace, request.sample_id)))
        return self._store.verify_all(check_namespace(request.namespace) if request.namespace else "")


def _covers(request: pb.ReadRequest, reader: SampleReader) -> bool:
    """Whether every row was asked for, of whichever layers: such a read counts for delete_after_reads."""
    rows = reader.file.header.num_tokens
    return request.start == 0 and (not request.HasField("stop") or request.stop == rows)


def _once(verify: Callable[[], Verdict]) -> Iterator[Verdict]:
    yield verify()


def _unary(
    method: Callable[[Any, _Context], Awaitable[Any]], request: type[Any], reply: type[Any]
) -> grpc.RpcMethodHandler[Any, Any]:
    behaviour: Any = method
    return grpc.unary_unary_rpc_method_handler(behaviour, request.FromString, reply.SerializeToString)


def _frames(reader: SampleReader, request: pb.ReadRequest) -> Iterator[bytes]:
    """The replies of a read, made one at a time as they are asked for. Raises BadTokenRange, BadLayers and Damaged."""
    start, stop = reader.check_range(request.start, request.stop if request.HasField("stop") else None)
    layer_ids = tuple(request.layer_ids) or reader.file.layer_ids
    positions = reader.positions(layer_ids)
    header = pb.ReadHeader(
        info=convert.info_of(reader.record),
        layer_ids=layer_ids,
        start=start,
        stop=stop,
        token_ids=reader.token_ids(start, stop),
    )
    yield pb.ReadReply(header=header).SerializeToString()
    for block in reader.blocks(start, stop, positions):
        yield _rows_frame(block)


def _rows_frame(block: RowBlock) -> bytes:
    return encode_rows(pb.RowsHeader(first_row=block.first_row, rows=block.rows), block.data)


def _after(step: Future[Any] | None, then: Callable[[], None]) -> None:
    """Call `then` once no thread is in `step`: a file closed under a read could be another file by then."""
    if step is None:
        then()
    else:
        step.add_done_callback(lambda _: then())


def _close_unwanted(opening: Future[SampleReader]) -> None:
    if not opening.cancelled() and opening.exception() is None:
        opening.result().close()
