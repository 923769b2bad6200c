"""The calls of `slotstream.v1.Samples`, their deadlines, and which server answers them."""

from __future__ import annotations

import copy
import dataclasses
import os
import threading
import time
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeVar

import grpc

from slotstream.client.call_errors import error_of, no_answer, unavailable
from slotstream.client.servers import Server, Servers, Walk, inherited
from slotstream.common.memory import keep_freed_blocks
from slotstream.v1 import sample_pb2, samples_pb2
from slotstream.wire.access import Access
from slotstream.wire.address import check_addresses
from slotstream.wire.errors import DeadlineExceeded, Interrupted

_AGAIN_S = 0.1

T = TypeVar("T")


class Rpc:
    """The calls to one server, or to any of several that hold the same samples, for any thread.

    A call whose server is away, or shuts down, goes to each other one, and then to one that is back, before it fails. Calls
    that only ask may always do so. Those that act may have acted before the first server went away. So may go on, as a second
    time changes nothing more:

    - Delete: the sample is gone, or the second server says NOT_FOUND of it. With `created_unix_ns` no other one is deleted.
    - Ack and Lease: they set what they had set. An ack whose sample was deleted by it is answered with NOT_FOUND.
    - Restore, Retention (`accept`), Verify (`quarantine`), before their first reply: they do what is left to do.

    CountRead may not: a read that counts twice would delete a sample one read too early. Such a read does not count.
    A stream that has begun does not move: its reader asks again, from its next row on.
    """

    def __init__(self, address: str | Sequence[str], *, timeout_s: float, access: Access | None = None) -> None:
        """`address`: one, or several as a list or with commas between. `timeout_s` bounds each call that answers once.

        Raises ConfigError for a malformed address, or files of `access` that do not fit.
        """
        self.addresses = check_addresses(address)
        self.access = self._checked(access or Access())
        self._timeout_s = timeout_s
        keep_freed_blocks()
        self._servers = Servers(self.addresses, self.access)

    def _checked(self, access: Access) -> Access:
        for address in self.addresses:
            access.check(address)
        return access

    @property
    def address(self) -> str:
        """The address; of several all of them, with commas between."""
        return ",".join(self.addresses)

    @property
    def others(self) -> int:
        """How many servers there are beside the one that is asked now."""
        return len(self.addresses) - 1

    def with_token(self, token: str | None) -> Rpc:
        """The same connections for calls with another token, or with none; closed with this one. Raises ConfigError."""
        other = copy.copy(self)
        other.access = self._checked(dataclasses.replace(self.access, token=token, token_file=None))
        return other

    def wait_until_connected(self, timeout_s: float) -> None:
        """Raises ServerUnavailable when no server took the connection, and answered on it, within `timeout_s`."""
        if not self.others:
            if self._servers.current().probe(timeout_s, wait_for_ready=True) is not None:
                raise unavailable(self.address, self.access, f"waited {timeout_s:g} s")
            return
        ends = time.monotonic() + timeout_s
        while True:
            failed: list[tuple[str, grpc.RpcError]] = []
            server: Server | None = self._servers.current()
            while server is not None:
                left_s = max(0.0, ends - time.monotonic()) / (len(self.addresses) - len(failed))
                error = server.probe(max(_AGAIN_S, left_s), wait_for_ready=False)
                if error is None:
                    return
                failed.append((server.address, error))
                server = self._servers.after(server, [address for address, _ in failed])
            if time.monotonic() >= ends:
                raise no_answer(failed, self.access)
            self.pause(_AGAIN_S)

    def stat(self, request: samples_pb2.StatRequest) -> sample_pb2.SampleInfo:
        info: sample_pb2.SampleInfo = self._call("Stat", request)
        return info

    def list(self, request: samples_pb2.ListRequest) -> samples_pb2.ListReply:
        reply: samples_pb2.ListReply = self._call("List", request)
        return reply

    def delete(self, request: samples_pb2.DeleteRequest) -> None:
        self._call("Delete", request)

    def ack(self, request: samples_pb2.AckRequest) -> None:
        self._call("Ack", request)

    def count_read(self, request: samples_pb2.CountReadRequest) -> None:
        self._call("CountRead", request, may_move=False)

    def lease(self, request: samples_pb2.LeaseRequest) -> samples_pb2.LeaseReply:
        reply: samples_pb2.LeaseReply = self._call("Lease", request)
        return reply

    def usage(self, request: samples_pb2.UsageRequest) -> samples_pb2.UsageReply:
        reply: samples_pb2.UsageReply = self._call("Usage", request)
        return reply

    def status(self) -> samples_pb2.StatusReply:
        """Raises NotServed where the server is too old for it."""
        reply: samples_pb2.StatusReply = self._call("Status", samples_pb2.StatusRequest())
        return reply

    def read(self, request: samples_pb2.ReadRequest) -> WatchedStream[bytes]:
        return self._stream(lambda server, metadata: server.read(request, metadata=metadata))

    def read_many(self, request: samples_pb2.ReadManyRequest) -> WatchedStream[bytes]:
        """Its first `receive` raises NotServed where the server is too old for it."""
        return self._stream(lambda server, metadata: server.read_many(request, metadata=metadata))

    def verify(self, request: samples_pb2.VerifyRequest) -> WatchedStream[samples_pb2.VerifyReply]:
        return self._stream(lambda server, metadata: server.stub.Verify(request, metadata=metadata))

    def restore(self, request: samples_pb2.RestoreRequest) -> WatchedStream[samples_pb2.RestoreReply]:
        return self._stream(lambda server, metadata: server.stub.Restore(request, metadata=metadata))

    def retention(self, request: samples_pb2.RetentionRequest) -> WatchedStream[samples_pb2.RetentionReply]:
        return self._stream(lambda server, metadata: server.stub.Retention(request, metadata=metadata))

    def pause(self, seconds: float) -> None:
        """Sleeps for so long. Raises ValueError as soon as the client is closed."""
        self._servers.pause(seconds)
        self._servers.check_open()

    def close(self) -> None:
        """Ends calls still under way, and what other threads wait for. May be called twice."""
        self._servers.close()

    def _call(self, name: str, request: Any, *, may_move: bool = True) -> Any:
        walk = Walk(self._servers, self.access, may_move=may_move)
        while True:
            call = getattr(walk.server.stub, name)
            try:
                return call(request, timeout=self._timeout_s, metadata=self.access.call_metadata())
            except grpc.RpcError as error:
                walk.go_on(error)

    def _stream(self, start: Callable[[Server, Any], Any]) -> WatchedStream[Any]:
        walk = Walk(self._servers, self.access)

        def begin() -> Any:
            return start(walk.server, self.access.call_metadata())

        stream: WatchedStream[Any] = WatchedStream(begin(), walk.server.address, self.access, walk, begin)
        self._servers.watch(stream)
        return stream


class _Replies:
    """Takes replies off a call in a thread of its own, one each time it is asked: one ahead of the consumer.

    gRPC's `next` has no limit, and now and then it did not return after a server was killed, although the call had ended
    (grpcio 1.85). Apart from the stream, so that a stream nobody holds any more can go away.
    """

    def __init__(self, call: Any) -> None:
        self.call = call
        self.asked: SimpleQueue[bool] = SimpleQueue()  # False: that was all.
        self.came: SimpleQueue[Any] = SimpleQueue()  # A reply, None after the last, or the error that ended the call.
        self.have_ended = False  # None has come.

    def run(self) -> None:
        while self.asked.get():
            reply = self._next()
            self.have_ended = reply is None
            self.came.put(reply)

    def _next(self) -> Any:
        try:
            return next(self.call, None)
        except Exception as error:
            return error


class WatchedStream(Generic[T]):
    """The replies of one call, each with a limit on how long it may take to come.

    A deadline on the whole call would fail long transfers that do progress, and gRPC has no other. Only time spent inside
    `receive` counts: the consumer may take as long as it likes between two replies.
    """

    def __init__(
        self,
        call: Any,
        address: str,
        access: Access | None = None,
        walk: Walk | None = None,
        begin: Callable[[], Any] | None = None,
    ) -> None:
        """`walk`, `begin`: until a reply has come, the call may be made again, by `begin`, to another server."""
        self._address, self._access = address, access or Access()
        self._walk, self._begin = walk, begin
        self._has_come = False
        self._pid = os.getpid()
        self._replies = self._taken_off(call)

    @staticmethod
    def _taken_off(call: Any) -> _Replies:
        replies = _Replies(call)
        replies.asked.put(True)
        threading.Thread(target=replies.run, name="slotstream-replies", daemon=True).start()
        return replies

    @property
    def has_ended(self) -> bool:
        """Whether the server has ended the call well: the replies that are still to be received are here."""
        return self._replies.have_ended

    def receive(self, limit_s: float) -> T | None:
        """The next reply; None after the last. Raises what the server answered, or DeadlineExceeded after `limit_s`."""
        if self._pid != os.getpid():
            raise Interrupted(f"this call to {self._address} is of the process that this one was forked from: make it again")
        while True:
            try:
                reply: T | Exception | None = self._replies.came.get(timeout=limit_s)
            except Empty:
                self.close()
                if self._walk is not None:
                    self._walk.was_silent()
                raise DeadlineExceeded(f"the server at {self._address} sent nothing for {limit_s:g} s") from None
            if not isinstance(reply, grpc.RpcError):
                break
            self.close()
            self._move(reply)
        if isinstance(reply, Exception):
            self.close()
            raise reply
        self._has_come = True
        self._replies.asked.put(reply is not None)
        return reply

    def _move(self, error: grpc.RpcError) -> None:
        """To another server. Raises what `error` means where that cannot be."""
        if self._walk is None or self._begin is None:
            raise error_of(error, self._address, self._access) from error
        if self._has_come:
            raise self._walk.broke(error) from error
        self._walk.go_on(error)
        self._address = self._walk.server.address
        self._replies = self._taken_off(self._begin())

    def end(self) -> None:
        """Ends the call, and what another thread waits for in `receive`."""
        self._replies.came.put(Interrupted("the client was closed meanwhile"))
        self.close()

    def close(self) -> None:
        """Ends the call; the server stops sending. May be called twice."""
        if self._pid == os.getpid():
            self._replies.asked.put(False)
            self._replies.call.cancel()
        else:
            inherited.append(self._replies)

    def __del__(self) -> None:
        self.close()
