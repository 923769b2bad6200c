"""Many samples in one call: a small one costs its rows, and not a call of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from slotstream.server.access.gate import Session
from slotstream.server.parts import ServerParts
from slotstream.server.samples.calls import Calls, Context, key_for, parsed
from slotstream.server.samples.reads import after, counts_when_sent, opened
from slotstream.store.records import SampleKey, SampleRecord
from slotstream.store.samples import SampleStore
from slotstream.v1 import samples_pb2 as pb
from slotstream.wire.errors import BadParams, SampleFailed, SlotStreamError
from slotstream.wire.names import READS_IN_CALL_MAX

_GROUP_BYTES = 1 << 20  # Replies that one thread makes before the event loop has its turn: a turn costs as much as some rows.
_GROUP_REPLIES = 64


@dataclass(slots=True)
class _Group:
    """Replies to be written, and the samples whose last reply is among them."""

    frames: list[bytes] = field(default_factory=list)
    nbytes: int = 0
    then: str = ""  # The namespace that the next group is of: threads are shared out by it.
    ended: list[tuple[SampleRecord, bool]] = field(default_factory=list)  # And whether that is a read that counts.

    def add(self, frame: bytes) -> None:
        self.frames.append(frame)
        self.nbytes += len(frame)

    @property
    def is_full(self) -> bool:
        return self.nbytes >= _GROUP_BYTES or len(self.frames) >= _GROUP_REPLIES


class ManyReads:
    """The call ReadMany. Belongs to the event loop."""

    def __init__(self, parts: ServerParts[SampleStore], calls: Calls, ended: Callable[[SampleRecord, bool], None]) -> None:
        """`ended`: told of each sample once its last reply is written, and whether that is a read that counts."""
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
        reads = parsed(pb.ReadManyRequest, raw).reads
        keys = [key_for(session, "read", read) for read in reads]
        if len(reads) > READS_IN_CALL_MAX:
            raise BadParams(f"{len(reads)} reads in one call are more than {READS_IN_CALL_MAX}")
        if any(read.wait_s for read in reads):
            raise BadParams("a call for many samples waits for none: leave wait_s out")
        self._waiters.check_open()
        groups = _groups(self._store, keys, reads)
        lines = self._disk_threads.read_lines
        step: Future[_Group | None] = lines.submit(keys[0].namespace if keys else "", next, groups, None)
        try:
            while (group := await asyncio.wrap_future(step)) is not None:
                self._waiters.check_open()  # A server that is to stop waits for reads: more of them is the next one's work.
                # One group ahead of the peer; a slow reader holds two.
                step = lines.submit(group.then, next, groups, None)
                for frame in group.frames:
                    await self._calls.write(context, frame)
                    self._metrics.sent_bytes.inc(len(frame))
                for record, counts in group.ended:
                    self._ended(record, counts)
        finally:
            after(step, groups.close)


def _groups(store: SampleStore, keys: Sequence[SampleKey], reads: Sequence[pb.ReadRequest]) -> Generator[_Group, None, None]:
    """The replies to all reads, made as they are asked for. One sample is open at a time, and closed with the generator."""
    group = _Group()
    for number, (key, read) in enumerate(zip(keys, reads, strict=True)):
        group.then = key.namespace
        try:
            reader, frames, header = opened(store, key, read)
        except SlotStreamError as error:
            group.add(_error_frame(number, error))
        else:
            with reader:
                group.add(header)
                try:
                    for frame in frames:
                        if group.is_full:
                            yield group
                            group = _Group(then=key.namespace)
                        group.add(frame)
                    group.ended.append((reader.record, counts_when_sent(read, reader)))
                except SlotStreamError as error:
                    group.add(_error_frame(number, error))
                    group.ended.append((reader.record, False))
        group.then = keys[number + 1].namespace if number + 1 < len(keys) else ""
        if group.is_full or group.then != key.namespace:
            yield group
            group = _Group()
    if group.frames:
        yield group


def _error_frame(number: int, error: SlotStreamError) -> bytes:
    reason = error.reason if isinstance(error, SampleFailed) else ""
    answer = pb.ReadError(read=number, code=error.code, message=str(error), reason=reason)
    return pb.ReadReply(error=answer).SerializeToString()
