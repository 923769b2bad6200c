"""Many reads, one stream: each is answered in its turn, a bad one too, and what breaks goes on with the next row."""

from __future__ import annotations

import copy
import functools
import itertools
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar, cast

from slotstream.client.call_errors import AWAY, NoServerLeft, NotServed
from slotstream.client.info import SampleInfo
from slotstream.client.local_file import WrongFileError
from slotstream.client.reading import RowReader
from slotstream.client.rpc import Rpc, WatchedStream
from slotstream.v1 import samples_pb2
from slotstream.wire.errors import (
    DeadlineExceeded,
    Interrupted,
    ProtocolViolation,
    SampleFailed,
    SampleNotFound,
    SlotStreamError,
    StillArriving,
    Unauthenticated,
    error_from_code,
)
from slotstream.wire.frames import Frame, decode_reply, split_replies

K = TypeVar("K")
R = TypeVar("R")
Read = samples_pb2.ReadRequest
_log = logging.getLogger(__name__)
_CALL_BYTES_MAX = 192 << 10  # Of a request; a server takes a little more.
_READS_IN_CALL = 256  # A server takes more; but what is asked for early may be deleted before its turn.
READS_FIRST = 16  # In the first call of who is known to want many. Each call has four times as many as the one before.
_AHEAD_FROM = 16  # Reads in a call behind which the next one is made early, once half are taken: who takes as many wants more.
_PAUSE_S, _PAUSE_S_MAX = 0.1, 2.0
_HEADER_TAG, _ERROR_TAG = 0x0A, 0x1A  # What a reply begins with: ReadReply.header, ReadReply.error.
# The connection's failures, and not a sample's: they end the stream, where trying again did not help.
_ENDING = (*AWAY, DeadlineExceeded, ProtocolViolation, Unauthenticated)


@dataclass(frozen=True, slots=True)
class Listed:
    """A read of all rows of a sample that a listing told of: where its file is at hand, no server is asked."""

    info: SampleInfo
    read: Read


class _Call:
    """One ReadMany call. Each reply is of the read whose turn it is, until a header or an error begins another."""

    def __init__(self, stream: WatchedStream[bytes], first: int) -> None:
        self._stream = stream
        self._ahead: list[Frame | None] = []  # Replies that came and were not taken, the next one last.
        self.first = first

    def take(self, limit_s: float) -> Frame | None:
        """The next reply; None where the call is over."""
        if not self._ahead:
            message = self._stream.receive(limit_s)
            self._ahead.extend([None] if message is None else reversed(split_replies(message)))
        return self._ahead.pop()

    def put_back(self, frame: Frame | None) -> None:
        self._ahead.append(frame)

    @property
    def has_ended(self) -> bool:
        """Whether the server is done with it: what is left of its replies is here."""
        return self._stream.has_ended

    def close(self) -> None:
        self._stream.close()


class _Turn:
    """The replies of one read of a call: for a RowReader, a stream like that of a call of its own."""

    def __init__(self, call: _Call, number: int) -> None:
        self._call = call
        self._number = number
        self._has_header = self.is_over = False

    def receive(self, limit_s: float) -> Frame | None:
        """As `WatchedStream.receive`."""
        if self.is_over:
            return None
        frame = self._call.take(limit_s)
        if frame is None and not self._has_header:
            raise Interrupted("the server ended the call before it had answered all reads")
        begins = frame[0] if frame else 0
        if begins == _ERROR_TAG:
            answer = decode_reply(frame or b"")[0].error
            if answer.read == self._number - self._call.first:
                self.is_over = True
                raise _error_of(answer)
        if frame is None or begins == _ERROR_TAG or (begins == _HEADER_TAG and self._has_header):
            self._call.put_back(frame)
            self.is_over = True
            return None
        self._has_header = True
        return frame

    def close(self) -> None:
        """The call goes on."""


def _error_of(answer: samples_pb2.ReadError) -> SlotStreamError:
    if answer.code == SampleFailed.code:
        return SampleFailed(answer.message, answer.reason)
    return error_from_code(answer.code, answer.message)


class ManyReads:
    """Reads of one client, many in a call. Not thread safe: one object a stream."""

    def __init__(
        self,
        rpc: Rpc,
        *,
        stall_limit_s: float,
        retry_s: float,
        wait_s: float,
        data_dir: Path | None,
        count: Callable[[SampleInfo, bool], None],
        first_reads: int = 1,
    ) -> None:
        """`count`: see `RowReader.count_with`. `first_reads`: how many the first call has, at most."""
        self._rpc = rpc
        self._stall_limit_s = stall_limit_s
        self._retry_s = retry_s
        self._wait_s = wait_s
        self._data_dir = data_dir
        self._count = count
        self._is_served = True  # By an older server, not: then each read is a call.
        # Reads of the next call: a caller that wants a few does not make the server read hundreds, some of them deleted soon.
        self._most = first_reads
        self._broken: Exception | None = None  # Why there are no more, where what was wanted before is asked for first.
        self._reads: list[Read] = []
        self._call: _Call | None = None
        self._early: _Call | None = None  # The next one, where it is made before the present one's replies are all taken.
        self._turn: _Turn | None = None
        self._ends = 0.0  # When trying again is over; 0 while all is well.
        self._pause_s = _PAUSE_S
        self._moves = 0  # To other servers, since all was well.

    def answers(
        self, wanted: Iterable[tuple[K, Read | Listed | SlotStreamError]], receive: Callable[[RowReader], R]
    ) -> Iterator[tuple[K, R | SlotStreamError]]:
        """What `receive` makes of each read, or why there is nothing, in the order asked; an error is its own answer.

        Raises what ends all reads: the server is away for longer than `retry_s`, or does not know the token.
        """
        rest, self._broken = iter(wanted), None
        ahead: Future[list[tuple[K, Read | Listed | SlotStreamError]]] | None = None
        try:
            while asked := self._next_call(rest) if ahead is None else ahead.result():
                self._reads = [read for _, read in asked if isinstance(read, Read)]
                self._call, self._early, ahead = self._early, None, None
                numbers = itertools.count()
                for taken, (key, read) in enumerate(asked, 1):
                    if isinstance(read, Listed):
                        answer = self._answer_listed(read, receive)
                    else:
                        answer = self._answer(next(numbers), receive) if isinstance(read, Read) else read
                    is_long = 2 * taken >= len(asked) >= _AHEAD_FROM
                    if ahead is None and is_long and self._call is not None and self._call.has_ended:
                        ahead = self._asked_ahead(rest)
                    yield key, answer
                self._end_call()
        finally:
            self._end_call()
            if self._early is not None:
                self._early.close()

    def _asked_ahead(
        self, rest: Iterator[tuple[K, Read | Listed | SlotStreamError]]
    ) -> Future[list[tuple[K, Read | Listed | SlotStreamError]]]:
        """Make the next call: the server reads on while the caller takes what is left of the present one, which has ended."""
        asked: Future[list[tuple[K, Read | Listed | SlotStreamError]]] = Future()
        try:
            entries = self._next_call(rest)
            if reads := [read for _, read in entries if isinstance(read, Read)]:
                self._early = self._call_of(reads, 0)
            asked.set_result(entries)
        except Exception as error:  # Raised once what was asked before is answered.
            asked.set_exception(error)
        return asked

    def _next_call(
        self, rest: Iterator[tuple[K, Read | Listed | SlotStreamError]]
    ) -> list[tuple[K, Read | Listed | SlotStreamError]]:
        asked, nbytes = [], 0
        for key, wanted in self._until_it_breaks(itertools.islice(rest, self._most)):
            read = wanted.read if isinstance(wanted, Listed) and not self._is_at_hand(wanted.info) else wanted
            asked.append((key, read))
            if isinstance(read, Read):
                read.in_place = read.all_in_place = self._data_dir is not None
                read.counting = samples_pb2.READ_COUNTING_CALLED
                nbytes += read.ByteSize() + 8
            if nbytes > _CALL_BYTES_MAX:
                break
        self._most = min(4 * self._most, _READS_IN_CALL)
        if self._broken is not None and not asked:
            raise self._broken
        return asked

    def _until_it_breaks(self, rest: Iterator[R]) -> Iterator[R]:
        """What comes before the caller's iterator, or the listing, raises; that is noted, and ends it."""
        if self._broken is not None:
            return
        try:
            yield from rest
        except Exception as error:
            self._broken = error

    @property
    def _takes_files(self) -> bool:
        """Whether small samples may come as their files. What is read in place has its file there."""
        return self._data_dir is None

    def _is_at_hand(self, info: SampleInfo) -> bool:
        return self._data_dir is not None and info.header_xxh3 is not None

    def _answer_listed(self, listed: Listed, receive: Callable[[RowReader], R]) -> R | SlotStreamError:
        """Out of the sample's file; in a call of its own from the server, where that is gone, another, or cannot be read."""
        assert self._data_dir is not None, "only then is it at hand"
        try:
            with RowReader.of_file(self._data_dir, listed.info, listed.read) as reader:
                reader.count_with(self._count)
                return receive(reader)
        except WrongFileError as error:
            _log.debug("rows come from the server, not out of %s: %s", self._data_dir, error)
        except SlotStreamError as error:
            if not error.retryable:
                return error
        return next(answer for _, answer in self._sent().answers([(None, listed.read)], receive))

    def _sent(self) -> ManyReads:
        """The same, without files."""
        sent = copy.copy(self)
        sent._data_dir, sent._call, sent._early, sent._turn = None, None, None, None
        return sent

    def _answer(self, number: int, receive: Callable[[RowReader], R]) -> R | SlotStreamError:
        try:
            reader = self._opened(number, None)
            reader.go_on_with(functools.partial(self._again, number))
            answer = receive(reader)
            self._pass_rest()
            return answer
        except SlotStreamError as error:
            if isinstance(error, _ENDING):
                raise
            return error
        finally:
            self._is_well()

    def _pass_rest(self) -> None:
        """What is left of a read that is answered, where `receive` wanted fewer rows: the next read's come after it.

        A connection that breaks here costs the answer nothing: the next read begins another call.
        """
        try:
            while self._turn is not None and not self._turn.is_over:
                self._turn.receive(self._stall_limit_s)
        except (*AWAY, DeadlineExceeded) as error:
            _log.debug("the next read begins another call: %s", error)
            self._end_call()

    def _is_well(self) -> None:
        self._ends, self._pause_s, self._moves = 0.0, _PAUSE_S, 0

    def _again(self, number: int, broken: RowReader, error: SlotStreamError) -> RowReader:
        """The rest of a read, of the same sample. Raises `error` where that cannot be."""
        if broken.next_row > broken.start:
            self._is_well()  # It went on for a while.
        self._wait(error)
        reader = self._opened(number, broken.next_row)
        if reader.info.committed_unix_ns != broken.info.committed_unix_ns:
            reader.close()
            self._end_call()
            raise SampleNotFound(f"sample {broken.info.sample_id!r} was replaced while it was read")
        return reader

    def _opened(self, number: int, start: int | None) -> RowReader:
        """Of one read; `start`: from that row on. Tries again until it is answered, or `retry_s` are over."""
        while True:
            try:
                return self._out_of_file(self._open(number, start), number, start)
            except NotServed as error:
                if not self._is_served:
                    raise
                self._is_served = False
                self._end_call()
                _log.info("the server reads one sample a call: %s", error)
            except SlotStreamError as error:
                if error.may_come:
                    if not self._wait_s:
                        raise
                    return self._waited_for(number)
                is_of_call = self._turn is not None and not self._turn.is_over
                if is_of_call and not error.retryable and not isinstance(error, _ENDING):
                    # One read spoils the call: perhaps not this one.
                    self._end_call()
                    return self._out_of_file(self._open_alone(number, start, 0.0), number, start)
                self._wait(error)

    def _waited_for(self, number: int) -> RowReader:
        """Of a sample that may be there soon."""
        try:
            return self._out_of_file(self._open_alone(number, None, self._wait_s), number, None)
        except DeadlineExceeded as error:
            raise StillArriving(str(error)) from error

    def _open(self, number: int, start: int | None) -> RowReader:
        if not self._is_served:
            return self._open_alone(number, start, 0.0)
        if self._call is None:
            self._call = self._call_of([self._from(number, start), *self._reads[number + 1 :]], number)
        self._turn = _Turn(self._call, number)
        read = self._reads[number] if start is None else self._from(number, start)
        return self._reader(cast(WatchedStream[bytes], self._turn), read, takes_file=self._takes_files)

    def _call_of(self, reads: list[Read], first: int) -> _Call:
        request = samples_pb2.ReadManyRequest(reads=reads, batches=True, files=self._takes_files)
        return _Call(self._rpc.read_many(request), first)

    def _open_alone(self, number: int, start: int | None, wait_s: float, *, in_place: bool | None = None) -> RowReader:
        self._turn = None
        read = self._from(number, start)
        read.wait_s = wait_s
        if in_place is not None:
            read.in_place = in_place
        return self._reader(self._rpc.read(read), read)

    def _reader(self, stream: WatchedStream[bytes], read: Read, *, takes_file: bool = False) -> RowReader:
        limits = {"header_limit_s": read.wait_s + self._stall_limit_s, "stall_limit_s": self._stall_limit_s}
        return RowReader(stream, read, **limits, takes_file=takes_file)

    def _from(self, number: int, start: int | None) -> Read:
        read = Read()
        read.CopyFrom(self._reads[number])
        if start is not None:
            read.start = start
        return read

    def _out_of_file(self, reader: RowReader, number: int, start: int | None) -> RowReader:
        """With the rows out of the sample's file, where that is at hand, or was sent."""
        try:
            if self._data_dir is not None:
                reader.take_from(self._data_dir)
            else:
                reader.take_sent_file()
        except WrongFileError as error:
            _log.debug("rows come from the server, not out of the sample's file: %s", error)
            reader = self._open_alone(number, start, 0.0, in_place=False)  # Of the call nothing is left for this read.
        reader.count_with(self._count)
        return reader

    def _wait(self, error: SlotStreamError) -> None:
        """Before the next try. Raises `error` where another would be of no use, or `retry_s` are over."""
        was_answered = self._turn is not None and self._turn.is_over
        if not error.retryable or isinstance(error, StillArriving):
            if not was_answered:
                self._end_call()
            raise error
        self._end_call()
        if isinstance(error, AWAY) and not isinstance(error, NoServerLeft) and self._moves < self._rpc.others:
            self._moves += 1  # Its server is away; the next call goes to another.
            return
        now = time.monotonic()
        self._ends = self._ends or now + self._retry_s
        if now >= self._ends:
            raise error
        self._rpc.pause(min(self._pause_s, self._ends - now))
        self._pause_s = min(2 * self._pause_s, _PAUSE_S_MAX)

    def _end_call(self) -> None:
        if self._call is not None:
            self._call.close()
        self._call = self._turn = None
