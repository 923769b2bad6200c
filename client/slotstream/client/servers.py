"""The servers of a client: a channel each, and which one is asked now. A client and its copies with other tokens share them."""

from __future__ import annotations

import os
import random
import threading
import weakref
from collections.abc import Collection, Sequence
from typing import Any, Protocol

import grpc

from slotstream.client.call_errors import error_of, is_away, is_silent, no_answer
from slotstream.client.diagnosis import diagnose
from slotstream.common.channel import channel_options
from slotstream.v1 import samples_pb2, samples_pb2_grpc
from slotstream.wire.access import Access
from slotstream.wire.errors import SlotStreamError
from slotstream.wire.names import MESSAGE_BYTES_MAX

_HEALTH_CHECK = "/grpc.health.v1.Health/Check"
_READ = "/slotstream.v1.Samples/Read"
_READ_MANY = "/slotstream.v1.Samples/ReadMany"
# A trainer should notice a restarted server at once.
_CHANNEL_OPTIONS = (*channel_options(MESSAGE_BYTES_MAX), ("grpc.max_reconnect_backoff_ms", 2000))
_BACK_S = 5.0  # How long a server that takes connections again is waited for: longer than gRPC pauses between two tries.
# Channels to one address else share a connection, also one that a forked process inherited and cannot use.
_FORKED_OPTIONS = (*_CHANNEL_OPTIONS, ("grpc.use_local_subchannel_pool", 1))
# Of a process that was forked: what its parent has connected. Never closed here: it is the parent's.
inherited: list[object] = []


class Ending(Protocol):
    """A call under way that a client ends when it is closed."""

    def end(self) -> None:
        """Ends it."""


class Server:
    """The channel to one server, and its calls."""

    def __init__(self, address: str, access: Access, options: Sequence[tuple[str, int]]) -> None:
        self.address = address
        files = access.tls_files()
        if files is None:
            self.channel = grpc.insecure_channel(address, options=options)
        else:
            self.channel = grpc.secure_channel(address, grpc.ssl_channel_credentials(*files), options=options)
        self.stub: Any = samples_pb2_grpc.SamplesStub(self.channel)  # type: ignore[no-untyped-call]
        # Its replies stay bytes, which the stub's would not: protobuf copies rows several times over (slotstream.wire.frames).
        self.read = self.channel.unary_stream(_READ, samples_pb2.ReadRequest.SerializeToString, None)
        self.read_many = self.channel.unary_stream(_READ_MANY, samples_pb2.ReadManyRequest.SerializeToString, None)

    def probe(self, timeout_s: float, *, wait_for_ready: bool) -> grpc.RpcError | None:
        """Why the server does not answer; None where it does."""
        # Any answer will do, also that there is no such service. Not channel_ready_future: its thread delays close by 0.2 s.
        probe = self.channel.unary_unary(_HEALTH_CHECK, request_serializer=None, response_deserializer=None)
        away = (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE)
        try:
            probe(b"", timeout=timeout_s, wait_for_ready=wait_for_ready)
        except grpc.RpcError as error:
            return error if isinstance(error, grpc.Call) and error.code() in away else None
        return None


class Servers:
    """For any thread. A process that was forked makes new connections when it asks.

    The first one to be asked is any of them. It stays the one until it is away; then all threads ask the next one.
    """

    def __init__(self, addresses: Sequence[str], access: Access) -> None:
        self._addresses = random.sample(addresses, len(addresses))
        self._access = access
        self._closed = threading.Event()
        self._at = 0
        self._connect(_CHANNEL_OPTIONS)

    def _connect(self, options: Sequence[tuple[str, int]]) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._calls: weakref.WeakSet[Ending] = weakref.WeakSet()
        self._servers = [Server(address, self._access, options) for address in self._addresses]

    def current(self) -> Server:
        """The one that is asked now. Raises ValueError where the client is closed."""
        self.check_open()
        with self._lock:
            return self._servers[self._at]

    def after(self, failed: Server, asked: Collection[str] = ()) -> Server | None:
        """`failed` is away: it is the next one's turn, unless that was seen already. The one to ask, of addresses that `asked`
        does not name; None where it names all."""
        with self._lock:
            count = len(self._servers)
            if self._servers[self._at] is failed:
                self._at = (self._at + 1) % count
            ring = (self._servers[(self._at + step) % count] for step in range(count))
            return next((server for server in ring if server.address not in asked), None)

    def turn_to(self, address: str) -> Server:
        """The server at `address`: it is its turn."""
        with self._lock:
            self._at = self._addresses.index(address)
            return self._servers[self._at]

    def watch(self, call: Ending) -> None:
        """Ends the call when the client is closed."""
        with self._lock:
            self._calls.add(call)
        if self._closed.is_set():  # Meanwhile.
            call.end()

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed.is_set()

    def pause(self, seconds: float) -> None:
        """Sleeps for so long, or until `close`."""
        self._closed.wait(seconds)

    def check_open(self) -> None:
        """Raises ValueError where the client is closed. Connects again in a process that was forked."""
        if self._closed.is_set():
            raise ValueError("this client is closed")
        if self._pid != os.getpid():  # gRPC may still write to the parent's connection, in the first call or two.
            inherited.extend(self._servers)
            self._connect(_FORKED_OPTIONS)

    def close(self) -> None:
        """Ends calls still under way. May be called twice."""
        self._closed.set()
        if self._pid != os.getpid():
            return  # What there is belongs to the parent.
        with self._lock:
            calls = list(self._calls)
        for call in calls:
            call.end()
        for server in self._servers:
            server.channel.close()


class Walk:
    """One call's way over the servers: each is asked once, and once more where it is back, until one answers. Not thread-safe.

    `may_move`: whether another server may be asked after one that was away, which may have acted all the same.
    """

    def __init__(self, servers: Servers, access: Access, *, may_move: bool = True) -> None:
        self.server = servers.current()
        self._servers = servers
        self._access = access
        self._may_move = may_move
        self._failed: dict[str, grpc.RpcError] = {}  # By address.
        self._back: set[str] = set()  # Of these, asked once more.

    def go_on(self, error: grpc.RpcError) -> None:
        """The call failed with `error`: `server` is the one to ask now. Raises what the failure means where there is none."""
        failed = self.server
        if not self._turns(error) or not is_away(error) or not self._may_move:
            raise self.broke(error) from error
        self._failed[failed.address] = error
        following = self._servers.after(failed, self._failed) or self._one_that_is_back()
        if following is None:
            raise no_answer(list(self._failed.items()), self._access) from error
        self.server = following

    def _one_that_is_back(self) -> Server | None:
        """Of several. gRPC tries only now and then to connect to a server that was away, and says in between that it is. Where
        servers restart one after the other, the next one is down before it has seen that the first is up."""
        if len(self._failed) > 1:
            for address in [address for address in self._failed if address not in self._back]:
                if diagnose(address, self._access) is None:
                    self._back.add(address)
                    server = self._servers.turn_to(address)
                    if server.probe(_BACK_S, wait_for_ready=True) is None:
                        return server
        return None

    def broke(self, error: grpc.RpcError) -> SlotStreamError:
        """What it means that a call broke, or was refused. Where its server is away, the next call goes to another."""
        if self._turns(error):
            self._servers.after(self.server)
        return error_of(error, self.server.address, self._access)

    def was_silent(self) -> None:
        """The server said nothing for too long: the next call goes to another."""
        self._servers.after(self.server)

    def _turns(self, error: grpc.RpcError) -> bool:
        """Whether the next call had better go elsewhere."""
        return not self._servers.closed and (is_away(error) or is_silent(error))
