"""One peer's ingest stream: its frames in, acks and verdicts out, and the limits that it is held to."""

from __future__ import annotations

import asyncio
import logging
import math
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import grpc.aio

from slotstream.server.access.gate import Session
from slotstream.server.ingest.announced import Announced
from slotstream.server.ingest.replies import Replies
from slotstream.server.ingest.requests import commit_bytes, peers_failure, refused_record, spec_of
from slotstream.server.ingest.sample_writer import Abort, Chunk, Commit, Done, Ended, Open, Refuse, SampleWriter
from slotstream.server.nixl.reader import ReadAnswer, ReadRequest, Slot
from slotstream.server.version import server_version
from slotstream.store.records import Failure, SampleKey
from slotstream.store.sample.ranges import RangeSet
from slotstream.v1 import ingest_pb2 as pb
from slotstream.wire.errors import (
    Interrupted,
    PermissionDenied,
    ProtocolViolation,
    ServerDraining,
    SlotStreamError,
    StoreFull,
    TooLarge,
    TooSlow,
)
from slotstream.wire.frames import decode_request
from slotstream.wire.names import BATCH_MAX, CHUNK_BYTES_MAX, PROTOCOL_VERSION
from slotstream.wire.nixl import ANNOUNCEMENTS_MAX

if TYPE_CHECKING:
    from slotstream.server.ingest.service import IngestService

_log = logging.getLogger(__name__)
# A written chunk is noticed, and acked, with the next one that arrives or after _ACK_DELAY_S: waking the event loop, and a
# message, cost about as much as a chunk does. An ack does not wait for more once it is worth an _ACKS_SHARE of the window.
_ACK_DELAY_S = 0.004
_ACKS_SHARE = 8
_TURN_BYTES = 4 << 20  # Of announced chunks that arrived, before others have their turn on the event loop: it may write them.
_WATCHES_A_LIMIT = 8  # Looks at the clock within the shortest of a stream's limits of time.
_HELD_ITEMS_MAX = 4096  # Frames taken and not done with, and replies not sent, on one stream.
_REFUSED_MAX = 256  # Samples beyond the limit of open ones whose refusal is under way.
_USED_RANGES_MAX = 1 << 16
_EOF: Any = grpc.aio.EOF  # type: ignore[attr-defined]  # Missing in grpc-stubs.
Context = grpc.aio.ServicerContext[bytes, bytes]


class Stream:
    """One peer. Everything here runs on the event loop, but `_post` may not."""

    def __init__(self, service: IngestService, context: Context, session: Session) -> None:
        self.peer = f"{session.name} at {context.peer()}"
        self._session = session
        self._service = service
        self._context = context
        self._loop = asyncio.get_running_loop()
        self._writers: dict[int, SampleWriter] = {}
        self._used = RangeSet()
        self._window_bytes = service.config.window_bytes  # What the peer may have in flight.
        self._held_bytes = 0
        self._held_items = 0
        self._acks: list[int] = []  # Chunks taken and not acked yet.
        self._acks_bytes = 0
        self._chunks_held = 0
        self._look: asyncio.TimerHandle | None = None  # Set while chunks are held, or acks.
        self._room = asyncio.Event()  # Set whenever something was let go of.
        self._replies = Replies(context.write, self._room.set)
        self._ending = asyncio.Event()
        self._connected = True
        self._results: deque[Done] = deque()
        self._collecting = False
        self._heard_at = self._loop.time()
        # When each open sample will have taken too long. Each is one of the peer's share of open samples.
        self._due: dict[int, float] = {}
        self._announced = Announced(service.readers, self._wake)
        self._said_all = False

    # The call.

    async def run(self) -> None:
        """Serve the peer until it is done, gone, or wrong.

        Raises ProtocolViolation, ServerDraining, TooSlow, and Unauthenticated where its token was withdrawn meanwhile.
        """
        receiver = asyncio.create_task(self._receive())
        sender = asyncio.create_task(self._replies.send())
        ending = asyncio.create_task(self._ending.wait())
        watch = asyncio.create_task(self._watch())
        try:
            await asyncio.wait((receiver, sender, ending, watch), return_when=asyncio.FIRST_COMPLETED)
            if watch.done():
                watch.result()
            if receiver.done():
                receiver.result()
                # The peer says no more. What it committed is finished; what it did not will never be whole.
                self._said_all = True
                for sample in self._announced.never_to_come():
                    self._cut_short(self._writers[sample])
                for writer in self._writers.values():
                    self._push(writer, Abort(Failure.of(Interrupted("the stream ended before the sample was committed"))))
            if ending.done():
                receiver.cancel()  # Nothing more is taken: a busy peer must not keep its stream from ending.
            await self._flushed(sender)
            if ending.done():
                raise ServerDraining("the server is shutting down")
        finally:
            self._connected = False
            for request in self._announced.close():
                self._let_go(request.nbytes)
                self._chunks_held -= 1
            for task in (receiver, sender, ending, watch):
                task.cancel()
            self._abandon(Failure.of(Interrupted("the stream broke while the sample was arriving")))
            await asyncio.gather(receiver, sender, ending, watch, return_exceptions=True)

    async def _flushed(self, sender: asyncio.Task[None]) -> None:
        """Returns once every sample ended and every reply was sent, or the peer is gone."""
        while (self._writers or self._replies or self._acks) and not sender.done():
            self._send_acks()
            self._room.clear()
            room = asyncio.create_task(self._room.wait())
            await asyncio.wait((room, sender), return_when=asyncio.FIRST_COMPLETED)
            room.cancel()

    async def _receive(self) -> None:
        hello_s = self._service.config.hello_s
        try:
            async with asyncio.timeout(hello_s):
                hello = await self._context.read()
        except TimeoutError as error:
            raise TooSlow(f"the stream said no Hello within {hello_s:g} s") from error
        if hello is _EOF:
            return
        await self._greet(hello)
        while True:
            while self._is_full():
                self._room.clear()
                await self._room.wait()
            frame = await self._context.read()
            if frame is _EOF:
                return
            self._heard_at = self._loop.time()
            self._take(frame)

    async def _watch(self) -> None:
        """Fails samples that take too long. Raises TooSlow when the peer says nothing while it has samples open."""
        config = self._service.config
        while True:
            await asyncio.sleep(min(config.stream_idle_s, config.sample_s_max) / _WATCHES_A_LIMIT)
            now = self._loop.time()
            for number in [number for number, due in self._due.items() if due <= now]:
                self._due[number] = math.inf  # Said once; it stays among the open ones until its writer is done with it.
                self._hold(0)
                late = TooSlow(f"the sample was not committed within {config.sample_s_max:g} s")
                self._writers[number].abandon(Failure.of(late))
            if not self._writers or self._held_items:
                self._heard_at = now  # Nothing is open, or it is our own turn: the peer may wait.
            elif now - self._heard_at >= config.stream_idle_s:
                raise TooSlow(f"the stream has open samples and said nothing for {config.stream_idle_s:g} s")

    def _is_full(self) -> bool:
        """Whether to leave further frames to flow control. The peer is promised window_bytes, and gets no more memory."""
        config = self._service.config
        return (
            self._held_bytes >= self._window_bytes
            or self._service.is_full
            or self._held_items + len(self._replies) >= _HELD_ITEMS_MAX
            or len(self._writers) >= config.open_samples_max + _REFUSED_MAX
        )

    def reply(self, reply: pb.IngestReply) -> None:
        if self._connected:
            self._replies.add(reply)

    def wake(self) -> None:
        """There may be room again."""
        self._room.set()

    def end(self) -> None:
        self._abandon(Failure.of(ServerDraining("the server shut down before the sample was finished")))
        self._ending.set()

    def is_over(self) -> bool:
        return not self._connected and not self._writers

    def _abandon(self, failure: Failure) -> None:
        for writer in self._writers.values():
            self._hold(0)
            writer.abandon(failure)

    # What the peer says.

    async def _greet(self, frame: bytes) -> None:
        request, _ = decode_request(frame)
        if request.WhichOneof("kind") != "hello":
            raise ProtocolViolation("the first request of a stream must be Hello")
        hello = request.hello
        if hello.protocol != PROTOCOL_VERSION:
            raise ProtocolViolation(f"this server speaks protocol {PROTOCOL_VERSION}, not {hello.protocol}")
        _log.info("stream of %s: engine %.64r, rank %d", self.peer, hello.engine_id, hello.worker_rank)
        nixl = hello.HasField("nixl") and await self._announced.accept(hello.nixl)
        if nixl:
            self._window_bytes = self._service.config.nixl_window_bytes
        welcome = pb.Welcome(
            protocol=PROTOCOL_VERSION,
            server_version=server_version(),
            window_bytes=self._window_bytes,
            chunk_bytes_max=CHUNK_BYTES_MAX,
            nixl=nixl,
            batches=True,
        )
        self._replies.batches = hello.batches
        self.reply(pb.IngestReply(welcome=welcome))
        if self._service.draining:
            self.reply(pb.IngestReply(draining=pb.Draining()))

    def _take(self, frame: bytes) -> None:
        self._collect()
        request, data = decode_request(frame)
        kind = request.WhichOneof("kind")
        if kind == "chunk":
            self._take_chunk(request.chunk, data, len(frame))
            return
        requests = request.batch.requests if kind == "batch" else (request,)
        if not 1 <= len(requests) <= BATCH_MAX:
            raise ProtocolViolation(f"a batch cannot hold {len(requests)} requests")
        if len(data) or any(one.data for one in requests):
            raise ProtocolViolation("only a chunk may carry data")
        if sum(announce.length for one in requests for announce in one.announcements.chunks) > self._window_bytes:
            raise ProtocolViolation("more was announced at a time than may be in flight")
        for one in requests:
            self._take_control(one)

    def _take_control(self, request: pb.IngestRequest) -> None:
        """A request that may stand in a batch."""
        kind = request.WhichOneof("kind")
        if kind == "open":
            self._take_open(request.open)
        elif kind == "announcements":
            self._take_announcements(request.announcements.chunks)
        elif kind == "commit":
            self._take_commit(request.commit)
        elif kind == "abort":
            if writer := self._writer(request.abort.sample):
                self._push(writer, Abort(peers_failure(request.abort)))
        else:
            raise ProtocolViolation(f"a request of kind {kind} does not belong here")

    def _push(self, writer: SampleWriter, item: Commit | Abort, nbytes: int = 0) -> None:
        """Do `item` after every chunk sent or announced before it."""
        self._hold(nbytes)
        if not self._announced.park(writer.number, item, nbytes):
            writer.push(item, nbytes)

    def _take_announcements(self, announcements: Sequence[pb.Announce]) -> None:
        if not 1 <= len(announcements) <= ANNOUNCEMENTS_MAX:
            raise ProtocolViolation(f"{len(announcements)} chunks cannot be announced at a time")
        requests: list[ReadRequest] = []
        try:
            for announce in announcements:
                request = self._announced.take(announce)
                if self._writer(request.sample) is None:  # As below.
                    self._ack(request.chunk, request.nbytes)
                    continue
                self._hold(request.nbytes)
                self._chunks_held += 1
                self._announced.expect(request)
                requests.append(request)
        finally:
            if requests:  # Also those before one that is wrong: they are held.
                self._look_later()
                self._announced.start(requests)

    def _take_answer(self, answer: ReadAnswer) -> None:
        """What became of an announced chunk."""
        request = answer.request
        writer = self._writers.get(request.sample)
        if writer is not None and self._connected and answer.data is not None:
            self._count_chunk("nixl", request.nbytes)
            item = Chunk(request.chunk, request.first_row, request.rows, answer.data, request.digest, answer.slot, answer.found)
            writer.push(item, request.nbytes)
            self._arrived(writer, request.chunk)
            return
        self._announced.free(answer)
        self._let_go(request.nbytes)
        self._chunks_held -= 1
        if writer is None:
            self._ack(request.chunk, request.nbytes)
        elif self._connected and not self._said_all:
            self._service.metrics.nixl_fallbacks.inc()
            self._announced.ask_again(request)
            self.reply(pb.IngestReply(resend=pb.Resend(chunks=[request.chunk])))
        else:
            self._cut_short(writer)
            self._arrived(writer, request.chunk)

    def _cut_short(self, writer: SampleWriter) -> None:
        """Fail a sample whose announced rows could not be read, and are not going to be sent either."""
        self._hold(0)
        writer.push(Abort(Failure.of(Interrupted("the stream ended before the sample's rows were read"))))

    def _arrived(self, writer: SampleWriter, chunk: int) -> None:
        for item, nbytes in self._announced.arrived(writer.number, chunk):
            writer.push(item, nbytes)

    def _count_chunk(self, transport: str, nbytes: int) -> None:
        self._service.metrics.chunks[transport].inc()
        self._service.metrics.chunk_bytes.inc(nbytes)

    def _take_chunk(self, header: pb.ChunkHeader, data: memoryview, nbytes: int) -> None:
        self._count_chunk("grpc", len(data))
        writer = self._writer(header.sample)
        if writer is None:  # It failed a moment ago and the peer has not heard yet.
            self._ack(header.chunk, nbytes)
            return
        self._hold(nbytes)
        self._chunks_held += 1
        self._look_later()
        writer.push(Chunk(header.chunk, header.first_row, header.rows, data, header.xxh3), nbytes)
        if self._announced.is_resent(header.sample, header.chunk):
            self._arrived(writer, header.chunk)

    def _take_commit(self, commit: pb.CommitSample) -> None:
        writer = self._writer(commit.sample)
        if writer is None:
            return
        try:
            nbytes = max(commit.ByteSize(), commit_bytes(commit))
        except TooLarge as error:
            self._hold(0)
            writer.push(Abort(Failure.of(error)))
            return
        self._push(writer, Commit(commit.row_count, commit.token_ids, dict(commit.metadata)), nbytes)

    def _take_open(self, request: pb.OpenSample) -> None:
        number = request.sample
        if number in self._used:
            raise ProtocolViolation(f"sample number {number} was used before on this stream")
        self._used.add(number, number + 1)
        if len(self._used) > _USED_RANGES_MAX:
            self._used.forget_lowest()
        principal = self._session.principal()
        key: SampleKey | None = None
        denied: SlotStreamError | None = None
        try:
            principal.check("ingest", request.namespace)
            key = SampleKey.checked(request.namespace, request.sample_id)
        except PermissionDenied as error:
            # Without a key nothing of it gets into the catalogue, and nobody who waits for that id hears of it.
            denied = error
        except SlotStreamError:
            pass  # spec_of says the same.
        writer = self._writers[number] = SampleWriter(self._service.store, self._service.pools, number, key, self._post)
        self._service.opened()
        self._hold(0)
        try:
            if denied is not None:
                raise denied
            self._check_room()
            spec = spec_of(request)
            self._service.open_shares.take(self._session.name)
            self._due[number] = self._loop.time() + self._service.config.sample_s_max
            writer.push(Open(spec))
        except SlotStreamError as error:
            writer.push(Refuse(refused_record(key, request), Failure.of(error)))

    def _check_room(self) -> None:
        if self._service.draining:
            raise ServerDraining("the server is shutting down")
        limit = self._service.config.open_samples_max
        if len(self._writers) > limit:
            raise StoreFull(f"{limit} samples are open on this stream already, as many as this server allows")

    def _writer(self, number: int) -> SampleWriter | None:
        """The open sample `number`; None when it ended. Raises ProtocolViolation when it was never opened."""
        writer = self._writers.get(number)
        if writer is None and number not in self._used:
            raise ProtocolViolation(f"sample number {number} was never opened on this stream")
        return writer

    def _hold(self, nbytes: int) -> None:
        self._held_bytes += nbytes
        self._held_items += 1
        self._service.hold(nbytes)

    def _let_go(self, nbytes: int) -> None:
        """An item that was held, and its bytes, are done with."""
        self._held_bytes -= nbytes
        self._held_items -= 1
        self._service.hold(-nbytes)

    # What the writers say.

    def _post(self, done: Done) -> None:
        """Called by the writers, from any thread. One wake-up of the loop collects whatever came in meanwhile."""
        self._results.append(done)
        written = done.acked is not None and done.ended is None
        if not written:
            self._wake()

    def _wake(self) -> None:
        if not self._collecting:
            self._collecting = True
            with suppress(RuntimeError):  # The loop is closed: the process is ending, and there is nobody left to tell.
                self._loop.call_soon_threadsafe(self._collect)

    def _collect(self) -> None:
        self._collecting = False  # Before looking: what is posted from here on asks for another wake-up.
        taken = 0
        while self._announced.results:
            if taken >= _TURN_BYTES:
                self._wake()
                break
            answer = self._announced.results.popleft()
            taken += answer.request.nbytes
            self._take_answer(answer)
        freed: list[Slot] = []
        while self._results:
            done = self._results.popleft()
            self._let_go(done.nbytes)
            if done.acked is not None:
                self._chunks_held -= 1
                self._ack(done.acked, done.nbytes)
            if done.slot is not None:
                freed.append(done.slot)
            if done.opened and done.writer.key is not None:
                self._service.arrivals.notify(done.writer.key)
            if done.ended is not None:
                self._end_sample(done.writer, done.ended)
        if freed and self._service.readers is not None:
            self._service.readers.free(freed)
        self._room.set()
        if not self._connected:
            self._service.forget(self)

    def _ack(self, chunk: int, nbytes: int) -> None:
        self._acks.append(chunk)
        self._acks_bytes += nbytes
        if self._acks_bytes * _ACKS_SHARE >= self._window_bytes:
            self._send_acks()
        else:
            self._look_later()

    def _look_later(self) -> None:
        if self._look is None:
            self._look = self._loop.call_later(_ACK_DELAY_S, self._looked)

    def _looked(self) -> None:
        self._look = None
        self._collect()
        self._send_acks()
        if self._chunks_held:
            self._look_later()

    def _send_acks(self) -> None:
        if self._acks:
            ack, self._acks, self._acks_bytes = pb.Ack(chunks=self._acks), [], 0
            self.reply(pb.IngestReply(ack=ack))

    def _end_sample(self, writer: SampleWriter, ended: Ended) -> None:
        del self._writers[writer.number]
        if self._due.pop(writer.number, None) is not None:
            self._service.open_shares.give_back(self._session.name)
        for _, nbytes in self._announced.forget(writer.number):
            self._let_go(nbytes)
        self._send_acks()  # The verdict comes after the acks of the sample's chunks.
        self._service.ended(writer, ended)
        failure = ended.failure
        if failure is None:
            self.reply(pb.IngestReply(committed=pb.Committed(sample=writer.number, duplicate=ended.duplicate)))
            return
        failed = pb.Failed(sample=writer.number, code=failure.code, message=failure.message, retryable=failure.retryable)
        self.reply(pb.IngestReply(failed=failed))
