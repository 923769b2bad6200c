"""The Samples service: reads, listings, deletions and checks. v1/samples.proto is its specification."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import Future
from contextlib import asynccontextmanager, contextmanager
from typing import Any, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import DecodeError, Message

from slotstream.server import convert
from slotstream.server.arrivals import Arrivals
from slotstream.server.config import ServerConfig
from slotstream.server.lane import Pools
from slotstream.server.metrics import Metrics
from slotstream.server.status import abort
from slotstream.store.reading import RowBlock, SampleReader
from slotstream.store.records import SampleKey, State
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
    TooLarge,
)
from slotstream.wire.frames import encode_rows
from slotstream.wire.names import CONTROL_BYTES_MAX, check_namespace

_log = logging.getLogger(__name__)
WAIT_S_MAX = 3600.0
_WAITING_SHARE = 0.75  # Of reads_max: whoever waits for samples that never come must not keep others from those that are there.
_Context = grpc.aio.ServicerContext[Any, Any]
_T = TypeVar("_T")
_M = TypeVar("_M", bound=Message)


class SamplesService:
    """Requests of trainers and people. Disk and catalogue are asked from threads, never on the event loop."""

    def __init__(self, config: ServerConfig, store: SampleStore, pools: Pools, metrics: Metrics, arrivals: Arrivals) -> None:
        self._config = config
        self._store = store
        self._pools = pools
        self._metrics = metrics
        self._arrivals = arrivals
        self._reads = 0
        self._waiting = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def handler(self) -> grpc.GenericRpcHandler[Any, Any]:
        read: Any = self._read
        verify: Any = self._verify
        methods = {
            # Requests come as raw bytes: what gRPC itself fails to parse gets no stable code. Rows are sent as raw bytes.
            "Read": grpc.unary_stream_rpc_method_handler(read),
            "Verify": grpc.unary_stream_rpc_method_handler(verify, None, pb.VerifyReply.SerializeToString),
            "Stat": _unary(self._stat, sample_pb2.SampleInfo),
            "List": _unary(self._list, pb.ListReply),
            "Delete": _unary(self._delete, pb.DeleteReply),
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

    async def _read(self, raw: bytes, context: _Context) -> None:
        async with self._answering("Read", context), self._one_read():
            request = _parse(pb.ReadRequest, raw)
            key = convert.key_of(request.namespace, request.sample_id)
            if not 0 <= request.wait_s <= WAIT_S_MAX:
                raise BadParams(f"wait_s must be 0 to {WAIT_S_MAX:.0f} seconds")
            reader = await self._open(key, request.wait_s)
            step: Future[bytes | None] | None = None
            try:
                frames = _frames(reader, request)
                step = self._pools.reads.submit(next, frames, None)
                while (frame := await asyncio.wrap_future(step)) is not None:
                    # One block ahead of the peer, so that disk and network overlap; a slow reader holds two blocks.
                    step = self._pools.reads.submit(next, frames, None)
                    await context.write(frame)
                    self._metrics.sent_bytes.inc(len(frame))
            finally:
                _after(step, reader.close)

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

    @contextmanager
    def _one_wait(self) -> Iterator[None]:
        if self._waiting >= max(1, int(self._config.reads_max * _WAITING_SHARE)):
            raise ServerUnavailable(f"{self._waiting} reads are waiting for samples, as many as this server allows")
        self._waiting += 1
        self._metrics.waiting_reads.set(self._waiting)
        try:
            yield
        finally:
            self._waiting -= 1
            self._metrics.waiting_reads.set(self._waiting)

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
                    with self._one_wait():
                        async with asyncio.timeout_at(begun + limit_s):
                            await changed.wait()
                except TimeoutError as error:
                    if record is None:
                        raise SampleNotFound(f"there is no sample {key}, and none appeared") from error
                    raise DeadlineExceeded(f"{key} is still arriving after {wait_s:g} seconds") from error

    # The short ones.

    async def _stat(self, raw: bytes, context: _Context) -> sample_pb2.SampleInfo:
        async with self._answering("Stat", context):
            request = _parse(pb.StatRequest, raw)
            key = convert.key_of(request.namespace, request.sample_id)
            record = await self._in_thread(self._store.stat, key)
            if record is None:
                raise SampleNotFound(f"there is no sample {key}")
            return convert.info_of(record)

    async def _list(self, raw: bytes, context: _Context) -> pb.ListReply:
        async with self._answering("List", context):
            return await self._in_thread(self._list_page, _parse(pb.ListRequest, raw))

    def _list_page(self, request: pb.ListRequest) -> pb.ListReply:
        records, token = self._store.list_page(convert.query_of(request))
        return pb.ListReply(samples=map(convert.info_of, records), next_page_token=token)

    async def _delete(self, raw: bytes, context: _Context) -> pb.DeleteReply:
        async with self._answering("Delete", context):
            request = _parse(pb.DeleteRequest, raw)
            key = convert.key_of(request.namespace, request.sample_id)
            await self._in_thread(self._store.delete, key)
            return pb.DeleteReply()

    async def _verify(self, raw: bytes, context: _Context) -> None:
        async with self._answering("Verify", context):
            verdicts = self._verdicts(_parse(pb.VerifyRequest, raw))
            while (verdict := await self._in_thread(next, verdicts, None)) is not None:
                await context.write(convert.reply_of(verdict))

    def _verdicts(self, request: pb.VerifyRequest) -> Iterator[Verdict]:
        if request.sample_id:
            return _once(lambda: self._store.verify(convert.key_of(request.namespace, request.sample_id)))
        return self._store.verify_all(check_namespace(request.namespace) if request.namespace else "")


def _once(verify: Callable[[], Verdict]) -> Iterator[Verdict]:
    yield verify()


def _unary(method: Callable[[bytes, _Context], Awaitable[Any]], reply: type[Any]) -> grpc.RpcMethodHandler[Any, Any]:
    behaviour: Any = method
    return grpc.unary_unary_rpc_method_handler(behaviour, None, reply.SerializeToString)


def _parse(kind: type[_M], raw: bytes) -> _M:
    """Raises BadParams, and TooLarge for what no request needs, before a parser makes objects of it."""
    if len(raw) > CONTROL_BYTES_MAX:
        raise TooLarge(f"a request of {len(raw)} bytes is longer than the {CONTROL_BYTES_MAX} allowed")
    request = kind()
    try:
        request.ParseFromString(raw)
    except DecodeError as error:
        raise BadParams(f"the request is not a {kind.__name__}") from error
    return request


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
