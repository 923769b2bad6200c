"""Many samples in one call: a small one costs its rows, and not a call of its own."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future
from contextlib import closing
from dataclasses import dataclass

from slotstream.server.access.gate import Session
from slotstream.server.parts import ServerParts
from slotstream.server.samples.calls import Calls, Context, key_for, parsed
from slotstream.server.samples.reads import Reply, after, counts_when_sent, opened
from slotstream.store.records import SampleKey, SampleRecord
from slotstream.store.samples import Held, SampleStore
from slotstream.v1 import samples_pb2 as pb
from slotstream.wire.errors import BadParams, SampleFailed, SlotStreamError
from slotstream.wire.frames import encode_replies
from slotstream.wire.names import READS_IN_CALL_MAX

# Replies that one thread makes before the event loop has its turn: a turn, or a message, costs as much as some rows.
_GROUP_BYTES = 2 << 20
_GROUP_REPLIES = 64
_FIRST_REPLIES = 8  # Of the first group, and twice as many of each one after it: the reader waits for the first.
_AHEAD = 8  # Samples that the catalogue is asked for at a time.
_FRESH_S = 1.0  # For so long its answers are good, where the reader takes his time.
_Ended = list[tuple[SampleRecord, bool]]  # Samples that were read, each with whether that is a read that counts.


@dataclass(slots=True)
class _Group:
    """Replies to be written, and the samples whose last reply is among them."""

    messages: list[bytes]
    then: str  # The namespace that the next group is of: threads are shared out by it.
    ended: _Ended


class _Filling:
    """The group that is being made. `batches`: all of its replies are one message, else each is its own."""

    def __init__(self, batches: bool) -> None:
        self._batches = batches
        self._replies: list[Reply] = []
        self._nbytes = 0
        self._most = _FIRST_REPLIES
        self.ended: _Ended = []

    def add(self, reply: Reply, then: str) -> Iterator[_Group]:
        """One more; before it, what there is, where that has no room for it. One too large for any group has one of its own."""
        nbytes = sum(map(len, reply))
        if self._replies and (len(self._replies) >= self._most or self._nbytes + nbytes > _GROUP_BYTES):
            yield from self.take(then)
        self._replies.append(reply)
        self._nbytes += nbytes

    def take(self, then: str) -> Iterator[_Group]:
        """What there is, if there is something; it is empty after."""
        if self._replies:
            replies, ended = self._replies, self.ended
            self._replies, self._nbytes, self.ended = [], 0, []
            self._most = min(2 * self._most, _GROUP_REPLIES)
            messages = [encode_replies(replies)] if self._batches else [b"".join(reply) for reply in replies]
            yield _Group(messages, then, ended)


class ManyReads:
    """The call ReadMany. Belongs to the event loop."""

    def __init__(self, parts: ServerParts[SampleStore], calls: Calls, ended: Callable[[_Ended], None]) -> None:
        """`ended`: told of samples once their last reply is written."""
        self._store, self._disk_threads, self._metrics, self._waiters = (
            parts.store,
            parts.disk_threads,
            parts.metrics,
            parts.waiters,
        )
        self._calls = calls
        self._ended = ended

    async def answer(self, session: Session, raw: bytes, context: Context) -> None:
        """Raises PermissionDenied before anything is looked up, BadParams and ServerDraining."""
        request = parsed(pb.ReadManyRequest, raw)
        reads = request.reads
        keys = [key_for(session, "read", read) for read in reads]
        if len(reads) > READS_IN_CALL_MAX:
            raise BadParams(f"{len(reads)} reads in one call are more than {READS_IN_CALL_MAX}")
        if any(read.wait_s for read in reads):
            raise BadParams("a call for many samples waits for none: leave wait_s out")
        self._waiters.check_open()
        groups = _groups(self._store, keys, request)
        lines = self._disk_threads.read_lines
        step: Future[_Group | None] = lines.submit(keys[0].namespace if keys else "", next, groups, None)
        try:
            while (group := await asyncio.wrap_future(step)) is not None:
                self._waiters.check_open()  # A server that is to stop waits for reads: more of them is the next one's work.
                # One group ahead of the peer; a slow reader holds two.
                step = lines.submit(group.then, next, groups, None)
                for message in group.messages:
                    await self._calls.write(context, message)
                    self._metrics.sent_bytes.inc(len(message))
                self._ended(group.ended)
        finally:
            after(step, groups.close)


class _Ahead:
    """The samples of a call, one after the other, looked for some at a time: rows that are read between two questions cost the
    processor what it has cached for them, and in a cluster each question is a way to the database and back.
    """

    def __init__(self, store: SampleStore, keys: Sequence[SampleKey]) -> None:
        self._store = store
        self._keys = keys
        self._next: list[Held] = []  # The first one last.
        self._asked_at = 0.0

    def __iter__(self) -> Iterator[Held]:
        for number in range(len(self._keys)):
            if time.monotonic() - self._asked_at > _FRESH_S:
                self.close()
            if not self._next:
                self._asked_at = time.monotonic()
                self._next = self._store.hold(self._keys[number : number + _AHEAD])[::-1]
            yield self._next.pop()

    def close(self) -> None:
        """Retention need not leave those alone that were not taken."""
        while self._next:
            self._next.pop().hold.end()


def _groups(store: SampleStore, keys: Sequence[SampleKey], request: pb.ReadManyRequest) -> Generator[_Group, None, None]:
    """The replies to all reads, made as they are asked for. One sample is open at a time, and closed with the generator."""
    group = _Filling(request.batches)
    with closing(_Ahead(store, keys)) as ahead:
        for number, (held, read) in enumerate(zip(ahead, request.reads, strict=True)):
            space = held.key.namespace
            try:
                reader, replies, header = opened(store, held, read, takes_files=request.files)
            except SlotStreamError as error:
                yield from group.add(_error_reply(number, error), space)
            else:
                with reader:
                    yield from group.add(header, space)
                    try:
                        for reply in replies:
                            yield from group.add(reply, space)
                        group.ended.append((reader.record, counts_when_sent(read, reader)))
                    except SlotStreamError as error:
                        yield from group.add(_error_reply(number, error), space)
                        group.ended.append((reader.record, False))
            then = keys[number + 1].namespace if number + 1 < len(keys) else ""
            if then != space:
                yield from group.take(then)


def _error_reply(number: int, error: SlotStreamError) -> Reply:
    reason = error.reason if isinstance(error, SampleFailed) else ""
    answer = pb.ReadError(read=number, code=error.code, message=str(error), reason=reason)
    return (pb.ReadReply(error=answer).SerializeToString(),)
