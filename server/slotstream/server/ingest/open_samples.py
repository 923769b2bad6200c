"""The samples that one stream has open: what the peer says of them goes to their writers, what those say goes to the peer."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress

from slotstream.server.access.gate import Session
from slotstream.server.ingest.acks import Acks
from slotstream.server.ingest.announced import Announced
from slotstream.server.ingest.puller import Puller
from slotstream.server.ingest.replies import Replies
from slotstream.server.ingest.requests import commit_bytes, peers_failure, refused_record, spec_of
from slotstream.server.ingest.sample_writer import Abort, Chunk, Commit, Done, Ended, Open, Refuse, SampleWriter
from slotstream.server.ingest.shared import Shared
from slotstream.server.nixl.puller import NixlPuller
from slotstream.server.nixl.reader import PoolSlot, ReadAnswer, ReadRequest
from slotstream.server.overview.engines import Engine
from slotstream.store.records import Failure, SampleKey
from slotstream.store.sample.ranges import RangeSet
from slotstream.v1 import ingest_pb2 as pb
from slotstream.wire.columns import LateColumns
from slotstream.wire.errors import (
    BadParams,
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
from slotstream.wire.names import BATCH_MAX
from slotstream.wire.nixl import ANNOUNCEMENTS_MAX

_TURN_BYTES = 4 << 20  # Of announced chunks that arrived, before others have their turn on the event loop: it may write them.
_HELD_ITEMS_MAX = 4096  # Frames taken and not done with, and replies not sent, on one stream.
_REFUSED_MAX = 256  # Samples beyond the limit of open ones whose refusal is under way.
_USED_RANGES_MAX = 1 << 16


class OpenSamples:
    """Everything here runs on the event loop, but `_post` and `_answered` may not."""

    def __init__(
        self,
        shared: Shared,
        session: Session,
        replies: Replies,
        room: asyncio.Event,
        failed: Callable[[Exception], None],
    ) -> None:
        """`room` is set whenever something was freed: there may be room for more.

        `failed` is told of a fault that no caller of a method hears of: it came in a callback of the event loop.
        """
        self._shared = shared
        self._session = session
        self._replies = replies
        self._room = room
        self._failed = failed
        self._loop = asyncio.get_running_loop()
        self._writers: dict[int, SampleWriter] = {}
        self._used = RangeSet()
        self._held_bytes = 0
        self._held_items = 0
        self._acks = Acks(shared.config.window_bytes, self._collect, self._reply, failed)
        self._results: deque[Done] = deque()
        self._collecting = False
        # When each open sample will have taken too long. Each is one of the peer's share of open samples.
        self._due: dict[int, float] = {}
        self._announced = Announced()
        self._pulled: deque[ReadAnswer] = deque()
        self._puller: Puller = NixlPuller(shared.readers, self._answered)
        self._said_all = False
        self.engine: Engine | None = None  # Since its Hello.
        self._connected = True

    @property
    def window_bytes(self) -> int:
        """What the peer may have in flight."""
        return self._acks.window_bytes

    @property
    def is_full(self) -> bool:
        """Whether to leave further frames to flow control. The peer is promised window_bytes, and gets no more memory."""
        return (
            self._held_bytes >= self.window_bytes
            or self._shared.is_full
            or self._held_items + len(self._replies) >= _HELD_ITEMS_MAX
            or len(self._writers) >= self._shared.config.open_samples_max + _REFUSED_MAX
        )

    @property
    def wait_for_peer(self) -> bool:
        """Whether some are open, and it is the peer's turn: nothing that it said waits to be done."""
        return bool(self._writers) and not self._held_items

    @property
    def are_busy(self) -> bool:
        """Whether something that the peer said is not done yet."""
        return self._held_items > 0

    @property
    def are_answered(self) -> bool:
        """Whether none is open, and everything that there is to say was handed to the replies."""
        return not self._writers and not self._acks

    async def accept_announcements(self, hello: pb.Hello) -> bool:
        """Whether chunks may be announced on this stream. Raises ProtocolViolation for an offer that cannot be meant."""
        accepted = await self._puller.accept(hello)
        if accepted:
            self._acks.window_bytes = self._shared.config.nixl_window_bytes
        return accepted

    def fail_late(self) -> None:
        """Fail samples that take too long."""
        limit_s, now = self._shared.config.sample_s_max, self._loop.time()
        for number in [number for number, due in self._due.items() if due <= now]:
            self._due[number] = math.inf  # Said once; it stays among the open ones until its writer is done with it.
            self._hold(0)
            late = TooSlow(f"the sample was not committed within {limit_s:g} s")
            self._writers[number].abandon(Failure.of(late))

    def send_acks(self) -> None:
        """Say now which chunks were taken."""
        self._acks.send()

    def end_of_requests(self) -> None:
        """The peer says no more. What it committed is finished; what it did not will never be whole."""
        self._said_all = True
        for sample in self._announced.never_to_come():
            self._cut_short(self._writers[sample])
        for writer in self._writers.values():
            self._push(writer, Abort(Failure.of(Interrupted("the stream ended before the sample was committed"))))

    def disconnect(self) -> None:
        """The stream is over, and nobody is told anything any more: fail what is open."""
        self._connected = False
        for request in self._puller.close():
            self._let_go(request.nbytes)
            self._acks.let_go()
        self.abandon(Failure.of(Interrupted("the stream broke while the sample was arriving")))

    def abandon(self, failure: Failure) -> None:
        """Fail what is open, but for commits that have begun."""
        for writer in self._writers.values():
            self._hold(0)
            writer.abandon(failure)

    # What the peer says.

    def take(self, frame: bytes) -> bool:
        """What the peer says after its Hello; whether it is about samples.

        Raises ProtocolViolation, and Unauthenticated where its token was withdrawn.
        """
        self._collect()
        request, data = decode_request(frame)
        kind = request.WhichOneof("kind")
        if kind == "chunk":
            self._take_chunk(request.chunk, data, len(frame))
            return True
        requests = request.batch.requests if kind == "batch" else (request,)
        if not 1 <= len(requests) <= BATCH_MAX:
            raise ProtocolViolation(f"a batch cannot hold {len(requests)} requests")
        if len(data) or any(one.data for one in requests):
            raise ProtocolViolation("only a chunk may carry data")
        if sum(announce.length for one in requests for announce in one.announcements.chunks) > self.window_bytes:
            raise ProtocolViolation("more was announced at a time than may be in flight")
        for one in requests:
            self._take_control(one)
        return any(not one.HasField("report") for one in requests)

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
        elif kind == "report":
            if self.engine is not None:
                self._shared.engines.reported(self.engine, request.report)
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
                request = self._puller.check(announce)
                if self._writer(request.sample) is None:  # As below.
                    self._acks.add(request.chunk, request.nbytes)
                    continue
                self._announced.expect(request)
                self._hold(request.nbytes)
                self._acks.hold()
                requests.append(request)
        finally:
            if requests:  # Also those before one that is wrong: they are held.
                self._puller.pull(requests)

    def _answered(self, answer: ReadAnswer) -> None:
        """Called by the puller, from any thread."""
        self._pulled.append(answer)
        self._wake()

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
        if answer.slot is not None:
            self._puller.forget((answer.slot,))
        self._let_go(request.nbytes)
        self._acks.let_go()
        if writer is None:
            self._acks.add(request.chunk, request.nbytes)
        elif self._connected and not self._said_all:
            self._shared.metrics.nixl_fallbacks.inc()
            self._announced.ask_again(request)
            self._reply(pb.IngestReply(resend=pb.Resend(chunks=[request.chunk])))
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
        self._shared.metrics.chunks[transport].inc()
        self._shared.metrics.chunk_bytes.inc(nbytes)
        if self.engine is not None:
            self.engine.transport = transport

    def _take_chunk(self, header: pb.ChunkHeader, data: memoryview, nbytes: int) -> None:
        self._count_chunk("grpc", len(data))
        writer = self._writer(header.sample)
        if writer is None:  # It failed a moment ago and the peer has not heard yet.
            self._acks.add(header.chunk, nbytes)
            return
        self._hold(nbytes)
        self._acks.hold()
        writer.push(Chunk(header.chunk, header.first_row, header.rows, data, header.xxh3), nbytes)
        if self._announced.is_resent(header.sample, header.chunk):
            self._arrived(writer, header.chunk)

    def _take_commit(self, commit: pb.CommitSample) -> None:
        writer = self._writer(commit.sample)
        if writer is None:
            return
        try:
            nbytes = max(commit.ByteSize(), commit_bytes(commit))
            columns = LateColumns.from_wire(commit.columns)
        except (BadParams, TooLarge) as error:
            self._hold(0)
            writer.push(Abort(Failure.of(error)))
            return
        self._push(writer, Commit(commit.row_count, commit.token_ids, dict(commit.metadata), columns), nbytes)

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
        store, disk_threads = self._shared.store, self._shared.disk_threads
        writer = SampleWriter(store, disk_threads, number, key, self._post, line=self, peer=self._session.name)
        self._writers[number] = writer
        self._shared.opened()
        self._tell_open()
        self._hold(0)
        try:
            if denied is not None:
                raise denied
            self._check_room()
            spec = spec_of(request)
            self._shared.open_shares.take(self._session.peer)
            self._due[number] = self._loop.time() + self._shared.config.sample_s_max
            writer.push(Open(spec))
        except SlotStreamError as error:
            writer.push(Refuse(refused_record(key, request), Failure.of(error)))

    def _tell_open(self) -> None:
        if self.engine is not None:
            self.engine.open_samples = len(self._writers)

    def _check_room(self) -> None:
        if self._shared.draining:
            raise ServerDraining("the server is shutting down")
        limit = self._shared.config.open_samples_max
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
        self._shared.hold(nbytes)

    def _let_go(self, nbytes: int) -> None:
        """An item that was held, and its bytes, are done with."""
        self._held_bytes -= nbytes
        self._held_items -= 1
        self._shared.hold(-nbytes)

    # What the writers say.

    def _post(self, done: Done) -> None:
        """Called by the writers, from any thread. One wake-up of the loop collects all that came in meanwhile."""
        self._results.append(done)
        written = done.acked is not None and done.ended is None
        if not written:
            self._wake()

    def _wake(self) -> None:
        if not self._collecting:
            self._collecting = True
            with suppress(RuntimeError):  # The loop is closed: the process is ending, and there is nobody left to tell.
                self._loop.call_soon_threadsafe(self._woken)

    def _woken(self) -> None:
        try:
            self._collect()
        except Exception as error:
            self._failed(error)

    def _collect(self) -> None:
        self._collecting = False  # Before looking: what is posted from here on asks for another wake-up.
        taken = 0
        while self._pulled:
            if taken >= _TURN_BYTES:
                self._wake()
                break
            answer = self._pulled.popleft()
            taken += answer.request.nbytes
            self._take_answer(answer)
        freed: list[PoolSlot] = []
        while self._results:
            done = self._results.popleft()
            self._let_go(done.nbytes)
            if done.acked is not None:
                self._acks.let_go()
                self._acks.add(done.acked, done.nbytes)
            if done.slot is not None:
                freed.append(done.slot)
            if done.opened and done.writer.key is not None:
                self._shared.waiters.notify(done.writer.key)
            if done.ended is not None:
                self._end_sample(done.writer, done.ended)
        if freed:
            self._puller.forget(freed)
        self._room.set()

    def _reply(self, reply: pb.IngestReply) -> None:
        if self._connected:
            self._replies.add(reply)

    def _end_sample(self, writer: SampleWriter, ended: Ended) -> None:
        del self._writers[writer.number]
        self._tell_open()
        if self._due.pop(writer.number, None) is not None:
            self._shared.open_shares.give_back(self._session.peer)
        for _, nbytes in self._announced.forget(writer.number):
            self._let_go(nbytes)
        self._shared.ended(writer, ended, self.engine)
        self._acks.send()  # The verdict comes after the acks of the sample's chunks.
        failure = ended.failure
        if failure is not None and not ended.is_known:  # It may be stored: a Failed would be a lie, and a final one a loss.
            self._failed(Interrupted(failure.message))
            return
        if failure is None:
            self._reply(pb.IngestReply(committed=pb.Committed(sample=writer.number, duplicate=ended.duplicate)))
            return
        failed = pb.Failed(sample=writer.number, code=failure.code, message=failure.message, retryable=failure.retryable)
        self._reply(pb.IngestReply(failed=failed))
