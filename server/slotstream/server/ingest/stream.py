"""One peer's ingest stream: its call from Hello to the end, and the limits of time that it is held to."""

from __future__ import annotations

import asyncio
import logging

import grpc.aio

from slotstream.server.access.bodies import EOF
from slotstream.server.access.gate import Session, host_of
from slotstream.server.ingest.open_samples import OpenSamples
from slotstream.server.ingest.replies import Replies
from slotstream.server.ingest.shared import Shared
from slotstream.server.version import server_version
from slotstream.store.records import Failure
from slotstream.v1 import ingest_pb2 as pb
from slotstream.wire.columns import taken_columns
from slotstream.wire.errors import ProtocolViolation, ServerDraining, TooSlow
from slotstream.wire.frames import decode_request
from slotstream.wire.names import CHUNK_BYTES_MAX, PROTOCOL_VERSION

_log = logging.getLogger(__name__)
_WATCHES_A_LIMIT = 8  # Looks at the clock within the shortest of a stream's limits of time.
_REASSURE_S = 5.0  # Less than the least that anybody sensibly waits for an answer.
Context = grpc.aio.ServicerContext[bytes, bytes]


class Stream:
    """One peer. Belongs to the event loop."""

    def __init__(self, shared: Shared, context: Context, session: Session) -> None:
        self._name = session.name
        host = host_of(context.peer())
        self._address = "unix" if host is None else host[0]
        self._peer = f"{session.name} at {context.peer()}"
        self._caller = session.caller
        self._shared = shared
        self._context = context
        self._loop = asyncio.get_running_loop()
        self._heard_at = self._loop.time()
        self._room = asyncio.Event()  # Set whenever something was let go of, or sent.
        self._ending = asyncio.Event()
        self._replies = Replies(context.write, self._room.set)
        self._fault: asyncio.Future[None] = self._loop.create_future()  # Of ours: the stream cannot go on.
        self._samples = OpenSamples(shared, session, self._replies, self._room, self._failed)

    async def run(self) -> None:
        """Serve the peer until it is done, gone, or wrong.

        Raises ProtocolViolation, ServerDraining, TooSlow, and Unauthenticated where its token was withdrawn meanwhile. Any
        other exception is a fault of the server's own.
        """
        receiver = asyncio.create_task(self._receive())
        sender = asyncio.create_task(self._replies.send())
        ending = asyncio.create_task(self._ending.wait())
        watch = asyncio.create_task(self._watch())
        reassure = asyncio.create_task(self._reassure())
        try:
            with self._shared.waking(self._room):
                await asyncio.wait((receiver, sender, ending, watch, self._fault), return_when=asyncio.FIRST_COMPLETED)
            for done in (watch, receiver, sender, self._fault):
                if done.done():
                    done.result()
            if receiver.done():
                self._samples.end_of_requests()
            if ending.done():
                receiver.cancel()  # Nothing more is taken: a busy peer must not keep its stream from ending.
            await self._flushed(sender)
            for done in (sender, self._fault):
                if done.done():
                    done.result()
            if ending.done():
                raise ServerDraining("the server is shutting down")
        finally:
            for task in (receiver, sender, ending, watch, reassure):
                task.cancel()
            self._samples.disconnect()
            if self._samples.engine is not None:
                self._shared.engines.ended(self._samples.engine)
            await asyncio.gather(receiver, sender, ending, watch, return_exceptions=True)

    def say_draining(self) -> None:
        """The server will open no more samples. A peer that is still to be welcomed hears it after that."""
        if self._samples.engine is not None:  # As of its welcome.
            self._replies.add(pb.IngestReply(draining=pb.Draining()))

    def end(self) -> None:
        """Fail what is open, and end the stream."""
        self._samples.abandon(Failure.of(ServerDraining("the server shut down before the sample was finished")))
        self._ending.set()

    def _failed(self, fault: Exception) -> None:
        if not self._fault.done():
            self._fault.set_exception(fault)

    async def _flushed(self, sender: asyncio.Task[None]) -> None:
        """Returns once every sample ended and every reply was sent, or that cannot be: the peer is gone, or a fault came."""
        while (self._replies or not self._samples.are_answered) and not (sender.done() or self._fault.done()):
            self._samples.send_acks()
            self._room.clear()
            room = asyncio.create_task(self._room.wait())
            try:
                await asyncio.wait((room, sender, self._fault), return_when=asyncio.FIRST_COMPLETED)
            finally:  # Also where the call is cancelled: nobody else would end it.
                room.cancel()

    async def _receive(self) -> None:
        hello = await self._shared.bodies.next(self._context, self._caller, self._shared.config.hello_s)
        if hello is EOF:
            return
        await self._greet(hello)
        while True:
            while self._samples.is_full:
                self._room.clear()
                await self._room.wait()
            frame = await self._context.read()
            if frame is EOF:
                return
            if self._samples.take(frame):
                self._heard_at = self._loop.time()

    async def _greet(self, frame: bytes) -> None:
        request, _ = decode_request(frame)
        if request.WhichOneof("kind") != "hello":
            raise ProtocolViolation("the first request of a stream must be Hello")
        hello = request.hello
        if hello.protocol != PROTOCOL_VERSION:
            raise ProtocolViolation(f"this server speaks protocol {PROTOCOL_VERSION}, not {hello.protocol}")
        _log.info("stream of %s: engine %.64r, rank %d", self._peer, hello.engine_id, hello.worker_rank)
        nixl = await self._samples.accept_announcements(hello)
        self._samples.engine = self._shared.engines.connect(hello, self._name, self._address, nixl=nixl)
        welcome = pb.Welcome(
            protocol=PROTOCOL_VERSION,
            server_version=server_version(),
            window_bytes=self._samples.window_bytes,
            chunk_bytes_max=CHUNK_BYTES_MAX,
            nixl=nixl,
            batches=True,
            columns=taken_columns(),
            reports=True,
            processes=self._shared.config.workers,
            process=self._shared.process,
        )
        self._replies.batches = hello.batches
        self._replies.add(pb.IngestReply(welcome=welcome))
        if self._shared.draining:
            self.say_draining()

    async def _watch(self) -> None:
        """Fails samples that take too long. Raises TooSlow when the peer says nothing while it has samples open."""
        config = self._shared.config
        while True:
            await asyncio.sleep(min(config.stream_idle_s, config.sample_s_max) / _WATCHES_A_LIMIT)
            self._samples.fail_late()
            now = self._loop.time()
            if not self._samples.wait_for_peer:
                self._heard_at = now
            elif now - self._heard_at >= config.stream_idle_s:
                raise TooSlow(f"the stream has open samples and said nothing for {config.stream_idle_s:g} s")

    async def _reassure(self) -> None:
        """A commit into an object store may take longer than a peer waits for an answer: acks of nothing say so."""
        while self._shared.config.store is not None:
            await asyncio.sleep(_REASSURE_S)
            if self._samples.are_busy and not self._replies:
                self._replies.add(pb.IngestReply(ack=pb.Ack()))
