"""The calls of `slotstream.v1.Samples` over one channel, their deadlines, and what their failures mean here."""

from __future__ import annotations

import copy
import dataclasses
import os
import threading
import weakref
from collections.abc import Sequence
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeVar

import grpc

from slotstream.client.diagnosis import diagnose
from slotstream.common.channel import channel_options
from slotstream.common.memory import keep_freed_blocks
from slotstream.v1 import sample_pb2, samples_pb2, samples_pb2_grpc
from slotstream.wire.access import Access
from slotstream.wire.address import check_address
from slotstream.wire.errors import (
    CODE_KEY,
    REASON_KEY,
    BadParams,
    DeadlineExceeded,
    InternalFault,
    Interrupted,
    ProtocolViolation,
    SampleFailed,
    ServerUnavailable,
    SlotStreamError,
    TooLarge,
    error_from_code,
)
from slotstream.wire.names import MESSAGE_BYTES_MAX

_HEALTH_CHECK = "/grpc.health.v1.Health/Check"
_READ = "/slotstream.v1.Samples/Read"
_READ_MANY = "/slotstream.v1.Samples/ReadMany"
# A trainer should notice a restarted server at once.
_CHANNEL_OPTIONS = (*channel_options(MESSAGE_BYTES_MAX), ("grpc.max_reconnect_backoff_ms", 2000))
# Channels to one address else share a connection, also one that a forked process inherited and cannot use.
_FORKED_OPTIONS = (*_CHANNEL_OPTIONS, ("grpc.use_local_subchannel_pool", 1))

T = TypeVar("T")
# Of a process that was forked: what its parent has connected. Never closed here: it is the parent's.
_inherited: list[object] = []


class Rpc:
    """One channel to one server, for any thread. A process that was forked makes a new connection when it calls."""

    def __init__(self, address: str, *, timeout_s: float, access: Access | None = None) -> None:
        """`timeout_s` bounds each call that answers once. Raises ConfigError for a malformed address, or files of `access`
        that do not fit."""
        self.address = check_address(address)
        self.access = (access or Access()).check(self.address)
        self._timeout_s = timeout_s
        self._closed = threading.Event()
        self._lock = threading.Lock()  # Of the streams.
        self._streams: weakref.WeakSet[WatchedStream[Any]] = weakref.WeakSet()
        keep_freed_blocks()
        self._connect(_CHANNEL_OPTIONS)

    def _connect(self, options: Sequence[tuple[str, int]]) -> None:
        self._pid = os.getpid()
        files = self.access.tls_files()
        if files is None:
            self._channel = grpc.insecure_channel(self.address, options=options)
        else:
            self._channel = grpc.secure_channel(self.address, grpc.ssl_channel_credentials(*files), options=options)
        self._stub: Any = samples_pb2_grpc.SamplesStub(self._channel)  # type: ignore[no-untyped-call]
        # Its replies stay bytes, which the stub's would not: protobuf copies rows several times over (slotstream.wire.frames).
        self._read = self._channel.unary_stream(_READ, samples_pb2.ReadRequest.SerializeToString, None)
        self._read_many = self._channel.unary_stream(_READ_MANY, samples_pb2.ReadManyRequest.SerializeToString, None)

    def with_token(self, token: str | None) -> Rpc:
        """The same connection for calls with another token, or with none; it is closed with this one. Raises ConfigError."""
        other = copy.copy(self)
        other.access = dataclasses.replace(self.access, token=token, token_file=None).check(self.address)
        return other

    def wait_until_connected(self, timeout_s: float) -> None:
        """Raises ServerUnavailable when nothing took the connection, and answered on it, within `timeout_s`."""
        # Any answer will do, also that there is no such service. Not channel_ready_future: its thread delays close by 0.2 s.
        probe = self._channel.unary_unary(_HEALTH_CHECK, request_serializer=None, response_deserializer=None)
        try:
            probe(b"", timeout=timeout_s, wait_for_ready=True)
        except grpc.RpcError as error:
            if isinstance(error, grpc.Call) and error.code() in (
                grpc.StatusCode.DEADLINE_EXCEEDED,
                grpc.StatusCode.UNAVAILABLE,
            ):
                raise unavailable(self.address, self.access, f"waited {timeout_s:g} s") from error

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
        self._call("CountRead", request)

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
        self._check_open()
        return self._watched(self._read(request, metadata=self.access.call_metadata()))

    def read_many(self, request: samples_pb2.ReadManyRequest) -> WatchedStream[bytes]:
        """Its first `receive` raises NotServed where the server is too old for it."""
        self._check_open()
        return self._watched(self._read_many(request, metadata=self.access.call_metadata()))

    def verify(self, request: samples_pb2.VerifyRequest) -> WatchedStream[samples_pb2.VerifyReply]:
        self._check_open()
        return self._watched(self._stub.Verify(request, metadata=self.access.call_metadata()))

    def restore(self, request: samples_pb2.RestoreRequest) -> WatchedStream[samples_pb2.RestoreReply]:
        self._check_open()
        return self._watched(self._stub.Restore(request, metadata=self.access.call_metadata()))

    def _watched(self, call: Any) -> WatchedStream[Any]:
        stream: WatchedStream[Any] = WatchedStream(call, self.address, self.access)
        with self._lock:
            self._streams.add(stream)
        if self._closed.is_set():  # Meanwhile.
            stream.end()
        return stream

    def pause(self, seconds: float) -> None:
        """Sleeps for so long. Raises ValueError as soon as the client is closed."""
        self._closed.wait(seconds)
        self._check_open()

    def retention(self, request: samples_pb2.RetentionRequest) -> WatchedStream[samples_pb2.RetentionReply]:
        self._check_open()
        return self._watched(self._stub.Retention(request, metadata=self.access.call_metadata()))

    def close(self) -> None:
        """Ends calls still under way, and what other threads wait for. May be called twice."""
        self._closed.set()
        if self._pid != os.getpid():
            return  # What there is belongs to the parent.
        with self._lock:
            streams = list(self._streams)
        for stream in streams:
            stream.end()
        self._channel.close()

    def _call(self, name: str, request: Any) -> Any:
        self._check_open()  # Before the stub is looked at: it may be the parent's.
        try:
            return getattr(self._stub, name)(request, timeout=self._timeout_s, metadata=self.access.call_metadata())
        except grpc.RpcError as error:
            raise error_of(error, self.address, self.access) from error

    def _check_open(self) -> None:
        if self._closed.is_set():
            raise ValueError("this client is closed")
        if self._pid != os.getpid():  # gRPC may still write to the parent's connection, in the first call or two.
            _inherited.extend((self._channel, self._stub, self._read, self._read_many))
            self._lock, self._streams = threading.Lock(), weakref.WeakSet()
            self._connect(_FORKED_OPTIONS)


class NotServed(ProtocolViolation):
    """The server does not know the call: it is of an earlier version, or no slotstream server at all."""


class _Replies:
    """Takes replies off a call in a thread of its own, one each time it is asked: one ahead of the consumer.

    gRPC's `next` has no limit, and now and then it did not return after a server was killed, although the call had ended
    (grpcio 1.85). Apart from the stream, so that a stream nobody holds any more can go away.
    """

    def __init__(self, call: Any) -> None:
        self.call = call
        self.asked: SimpleQueue[bool] = SimpleQueue()  # False: that was all.
        self.came: SimpleQueue[Any] = SimpleQueue()  # A reply, None after the last, or the error that ended the call.

    def run(self) -> None:
        while self.asked.get():
            self.came.put(self._next())

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

    def __init__(self, call: Any, address: str, access: Access | None = None) -> None:
        self._address, self._access = address, access or Access()
        self._pid = os.getpid()
        self._replies = _Replies(call)
        self._replies.asked.put(True)
        threading.Thread(target=self._replies.run, name="slotstream-replies", daemon=True).start()

    def receive(self, limit_s: float) -> T | None:
        """The next reply; None after the last. Raises what the server answered, or DeadlineExceeded after `limit_s`."""
        if self._pid != os.getpid():
            raise Interrupted(f"this call to {self._address} is of the process that this one was forked from: make it again")
        try:
            reply: T | Exception | None = self._replies.came.get(timeout=limit_s)
        except Empty:
            self.close()
            raise DeadlineExceeded(f"the server at {self._address} sent nothing for {limit_s:g} s") from None
        if isinstance(reply, Exception):
            self.close()
            raise error_of(reply, self._address, self._access) if isinstance(reply, grpc.RpcError) else reply
        self._replies.asked.put(reply is not None)
        return reply

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
            _inherited.append(self._replies)

    def __del__(self) -> None:
        self.close()


def unavailable(address: str, access: Access, details: str) -> ServerUnavailable:
    """What to raise where there is no connection. `details` are told where a connection of our own finds no reason."""
    found = diagnose(address, access)
    if found is None:
        return ServerUnavailable(f"no server answers at {address}: {details}")
    if found.what == "unreachable":
        return ServerUnavailable(f"no server answers at {address}: {found.sentence}")
    return ServerUnavailable(f"{address}: {found.sentence}")


def error_of(error: grpc.RpcError, address: str, access: Access) -> SlotStreamError:
    """What a failed call means: the server's own code where it sent one, else what gRPC's status stands for."""
    if not isinstance(error, grpc.Call):
        return InternalFault(f"the call to {address} failed: {error}")
    details = error.details() or "no details"
    trailers = {key: value for key, value in error.trailing_metadata() or () if isinstance(value, str)}
    if code := trailers.get(CODE_KEY):
        if code == SampleFailed.code:
            return SampleFailed(details, trailers.get(REASON_KEY, ""))
        return error_from_code(code, details)
    status = error.code()
    said = f"{address}: {details}"
    match status:
        case grpc.StatusCode.UNAVAILABLE:
            return unavailable(address, access, details)
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            return DeadlineExceeded(f"no answer in time from {said}")
        case grpc.StatusCode.CANCELLED:
            return Interrupted(f"the call was cancelled, to {said}")
        case grpc.StatusCode.UNIMPLEMENTED:
            return NotServed(f"no slotstream server of this version at {said}")
        case grpc.StatusCode.RESOURCE_EXHAUSTED:
            return TooLarge(f"a limit was passed, calling {said}")
        case grpc.StatusCode.INVALID_ARGUMENT:
            return BadParams(details)
        case _:
            return InternalFault(f"{status.name} from {said}")
