"""The Workers service, the primary's side of its workers: the uploads that they have open, what they count and are told."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, TypeVar

import grpc.aio

from slotstream.server.ingest.requests import spec_of
from slotstream.server.parts import ServerParts
from slotstream.server.processes.remote_store import failure_message, failure_of
from slotstream.store.records import Failure, SampleKey, SampleRecord, State
from slotstream.store.sample.file import Content
from slotstream.store.sample.remote import RemoteUpload
from slotstream.store.sample.upload import VerdictUnknown
from slotstream.store.samples import SampleStore
from slotstream.v1 import workers_pb2 as pb
from slotstream.v1 import workers_pb2_grpc
from slotstream.wire.errors import InternalFault, Interrupted, ServerDraining, SlotStreamError

_log = logging.getLogger(__name__)
_T = TypeVar("_T")
_Context = grpc.aio.ServicerContext[Any, Any]
_ENDED = "a process of the server ended while the sample was arriving"


class WorkersService(workers_pb2_grpc.WorkersServicer):
    """The Workers service. Belongs to one event loop; the store's work is done in the disk threads."""

    def __init__(self, parts: ServerParts[SampleStore], committed: Callable[[str], None]) -> None:
        """`committed` is told the namespace of every sample that was stored."""
        self._committed = committed
        self._store, self._disk_threads = parts.store, parts.disk_threads
        self._metrics, self._waiters, self._engines = parts.metrics, parts.waiters, parts.engines
        self._uploads: dict[int, tuple[int, RemoteUpload]] = {}  # number -> worker, upload
        self._numbers = itertools.count(1)
        self._orders: dict[int, asyncio.Queue[pb.WorkerOrder]] = {}  # of the workers that are there
        self._serving = True
        self._idle = asyncio.Event()
        self._idle.set()
        self._joining = asyncio.Condition()
        self._running: set[asyncio.Task[Any]] = set()  # The loop itself holds tasks only weakly.

    async def joined(self, count: int) -> None:
        """Returns once `count` workers are there."""
        async with self._joining:
            await self._joining.wait_for(lambda: len(self._orders) >= count)

    @property
    def count(self) -> int:
        """Workers that are there."""
        return len(self._orders)

    def order(self, kind: pb.WorkerOrder.Kind) -> None:
        """Tell every worker."""
        for orders in self._orders.values():
            orders.put_nowait(pb.WorkerOrder(kind=kind))

    def change(self, serving: bool) -> None:
        """The data directory is back, or away: what every worker's health service says from now on."""
        self._serving = serving
        self.order(pb.WorkerOrder.SERVING if serving else pb.WorkerOrder.NOT_SERVING)

    async def idle(self) -> None:
        """Returns once no worker has a sample open."""
        await self._idle.wait()

    async def Join(self, requests: AsyncIterator[pb.WorkerReport], context: _Context) -> AsyncIterator[pb.WorkerOrder]:
        first = await anext(requests)
        worker = first.worker
        orders = self._orders[worker] = asyncio.Queue()
        if not self._serving:
            orders.put_nowait(pb.WorkerOrder(kind=pb.WorkerOrder.NOT_SERVING))
        async with self._joining:
            self._joining.notify_all()

        async def listen() -> None:
            async for report in requests:
                self._metrics.merge(worker, [(m.name, dict(m.labels), m.value) for m in report.metrics])
                self._engines.merge(worker, report.engines)

        listening = asyncio.create_task(listen())
        order: asyncio.Task[pb.WorkerOrder] | None = None
        try:
            while True:
                order = asyncio.create_task(orders.get())
                await asyncio.wait((order, listening), return_when=asyncio.FIRST_COMPLETED)
                if not order.done():
                    return
                yield order.result()
        finally:
            for task in (listening, order):
                if task is not None:
                    task.cancel()
            del self._orders[worker]
            self._metrics.gone(worker)
            self._engines.forget(worker)
            await asyncio.shield(self._task(self._abandon(worker)))

    async def _abandon(self, worker: int) -> None:
        """Fail what a worker that is gone had open."""
        lost = [number for number, (owner, _) in self._uploads.items() if owner == worker]
        if lost:
            _log.error("worker %d ended with %d samples open: they are failed", worker, len(lost))
        for number in lost:
            await self._end(number, Failure.of(Interrupted(_ENDED)))

    # Calls, each a task of its own: one that is cancelled (its worker died, or waited for as long as it does) must not forget
    # what a thread is doing for it.

    async def Begin(self, request: pb.BeginUpload, context: _Context) -> pb.UploadBegun:
        begun = self._task(self._begin(request))
        try:
            return await asyncio.shield(begun)
        except asyncio.CancelledError:
            self._task(self._end_unheard(begun))
            raise

    async def Publish(self, request: pb.PublishUpload, context: _Context) -> pb.UploadEnded:
        return await asyncio.shield(self._task(self._publish(request)))

    async def Fail(self, request: pb.FailUpload, context: _Context) -> pb.UploadEnded:
        await asyncio.shield(self._task(self._end(request.upload, failure_of(request.failure))))
        return pb.UploadEnded()

    async def Refuse(self, request: pb.RefuseUpload, context: _Context) -> pb.UploadEnded:
        await asyncio.shield(self._task(self._refuse(request)))
        return pb.UploadEnded()

    def _task(self, work: Coroutine[Any, Any, _T]) -> asyncio.Task[_T]:
        task = asyncio.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return task

    async def finish(self) -> None:
        """Returns once everything that calls began is done. No call may be running any more."""
        while self._running:
            await asyncio.wait(tuple(self._running))

    async def _begin(self, request: pb.BeginUpload) -> pb.UploadBegun:
        try:
            if request.worker not in self._orders:
                raise ServerDraining("the server is shutting down")
            spec = spec_of(request.sample)
            upload = await self._in(self._disk_threads.chunks, self._store.open_remote, spec, request.peer)
        except SlotStreamError as error:
            return pb.UploadBegun(failure=failure_message(Failure.of(error)))
        number = next(self._numbers)
        self._uploads[number] = request.worker, upload
        self._idle.clear()
        self._waiters.notify(spec.key)
        if request.worker not in self._orders:  # It went meanwhile.
            await self._end(number, Failure.of(Interrupted(_ENDED)))
        return pb.UploadBegun(upload=number, partial=upload.partial.name, created_unix_ns=upload.created_unix_ns)

    async def _end_unheard(self, begun: asyncio.Task[pb.UploadBegun]) -> None:
        """The worker did not hear the sample's number: nobody else will ever end it."""
        await self._end((await begun).upload, Failure.of(Interrupted("the sample took too long to begin")))

    async def _publish(self, request: pb.PublishUpload) -> pb.UploadEnded:
        found = self._uploads.get(request.upload)
        if found is None:
            return pb.UploadEnded(failure=failure_message(Failure.of(Interrupted("the sample is not open any more"))))
        upload = found[1]
        sealed, content = _sealed(upload, request)
        self._store.lifetimes.clock.heard(sealed.committed_unix_ns)
        try:
            duplicate = await self._in(self._disk_threads.commits, upload.commit, sealed, content)
            self._committed(upload.spec.namespace)
            return pb.UploadEnded(duplicate=duplicate)
        except SlotStreamError as error:
            return pb.UploadEnded(failure=failure_message(Failure.of(error)))
        except VerdictUnknown:
            raise  # The worker's call fails, and it knows no more than this process does.
        except Exception:
            _log.exception("a fault in the server failed sample %s", upload.spec.key)
            return pb.UploadEnded(failure=failure_message(Failure.of(InternalFault("the server failed; its log says how"))))
        finally:
            self._forget(request.upload, upload.spec.key)

    async def _refuse(self, request: pb.RefuseUpload) -> None:
        record = SampleRecord(
            request.namespace, request.sample_id, State.ARRIVING, request.created_unix_ns, model=request.model
        )
        await self._in(self._disk_threads.chunks, self._store.record_failed, record, failure_of(request.failure), request.peer)
        self._waiters.notify(record.key)

    async def _end(self, number: int, failure: Failure) -> None:
        """Fail a sample that is open; one that is being committed ends with its commit."""
        found = self._uploads.get(number)
        if found is not None and await self._in(self._disk_threads.chunks, found[1].abort, failure):
            self._forget(number, found[1].spec.key)

    def _forget(self, number: int, key: SampleKey) -> None:
        self._uploads.pop(number, None)
        if not self._uploads:
            self._idle.set()
        self._waiters.notify(key)

    async def _in(self, pool: ThreadPoolExecutor, call: Callable[..., _T], *arguments: Any) -> _T:
        return await asyncio.get_running_loop().run_in_executor(pool, call, *arguments)


def _sealed(upload: RemoteUpload, request: pb.PublishUpload) -> tuple[SampleRecord, Content]:
    """What the worker's file holds: its catalogue row, and what makes it the same as another."""
    spec = upload.spec
    record = replace(
        SampleRecord.arriving(spec, request.created_unix_ns),
        state=State.COMMITTED,
        num_tokens=request.num_tokens,
        file_bytes=request.file_bytes,
        committed_unix_ns=request.committed_unix_ns,
        metadata=dict(request.metadata),
        header_xxh3=request.header_xxh3,
    )
    content = Content(
        row_format=spec.row_format,
        num_tokens=request.num_tokens,
        layer_ids=spec.layer_ids,
        hash_rows=request.hash_rows,
        hashes=tuple(request.hashes),
        column_xxh3=dict(request.late_xxh3),
    )
    return record, content
