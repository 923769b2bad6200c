"""Calls: what gRPC is between a client and a service. Messages take time, keep their order, and are lost when a call is cut."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
from simulation.scheduler import SimThread, running

from slotstream.server.access.bodies import EOF
from slotstream.wire.errors import CODE_KEY, REASON_KEY

if TYPE_CHECKING:
    from simulation.server import SimServer

_LATENCY_S = 0.002
_WINDOW = 4  # Replies that are on their way before `write` waits.
CANCELLED, UNAVAILABLE, OK = "CANCELLED", "UNAVAILABLE", "OK"


class Call:
    """One call. Its client uses it from a simulated thread of its own, the service as a gRPC context on its event loop."""

    def __init__(self, server: SimServer | None, method: str, client: str) -> None:
        """`method`: service and name. `client`: an IPv4 address. Without a server, nobody answers."""
        self.method = method
        self.status = ""  # Once it has ended, as the client sees it.
        self.code = ""  # slotstream's own.
        self.reason = ""  # Of SAMPLE_FAILED: the code that the sample failed with.
        self.slow_s = 0.0  # How much longer the client takes for each reply.
        self._peer = f"ipv4:{client}:1"
        self._server = server
        self._requests: deque[bytes] = deque()
        self._no_more_requests = False
        self._replies: deque[bytes] = deque()
        self._serializer: Callable[[Any], bytes] | None = None
        self._client: SimThread | None = None
        self._ended: tuple[str, str] | None = None  # Status and code, as the service left them.
        self._said: tuple[str, str] | None = None
        self._done: list[Callable[[Any], None]] = []  # What the service asked to be told of the end.
        if server is None or not server.is_up:
            self.status = UNAVAILABLE
            return
        self._arrived = asyncio.Event()
        self._taken = asyncio.Event()
        self._task: asyncio.Task[tuple[str, str]] | None = None
        server.calls[self] = None
        self._on_loop(self._begin)

    # The client's half.

    def send(self, message: bytes) -> None:
        self._travel()
        if not self.status:
            self._requests.append(message)
            self._on_loop(self._arrived.set)

    def half_close(self) -> None:
        self._travel()
        if not self.status:
            self._no_more_requests = True
            self._on_loop(self._arrived.set)

    def receive(self, timeout_s: float) -> bytes | None:
        """The next reply; None once the call has ended, or nothing came for so long: then there is no status."""
        scheduler = running()
        ends_at = scheduler.now + timeout_s
        while not self._replies:
            if self.status:
                return None
            if self._ended is not None:
                self.status, self.code = self._ended
                return None
            if scheduler.now >= ends_at:
                return None
            self._client = scheduler.current
            scheduler.block(ends_at - scheduler.now)
            self._client = None
        self._travel()
        if self.slow_s:
            scheduler.pause(self.slow_s)
        if not self._replies:
            return None  # They were lost meanwhile.
        reply = self._replies.popleft()
        if not self.status:
            self._on_loop(self._taken.set)
        return reply

    def cut(self, status: str = CANCELLED) -> None:
        """The client hangs up, or the network does: what is on its way is lost, and the service's task is cancelled."""
        if self.status or self._ended is not None:
            return
        self.status = status
        self._requests.clear()
        self._replies.clear()
        self._wake()
        self._on_loop(self._cancel)

    def server_died(self) -> None:
        """Some of the last replies may have been on their way already."""
        if self._ended is None and not self.status:
            arrived = running().rng.randint(0, len(self._replies))
            while len(self._replies) > arrived:
                self._replies.pop()
            self.status = UNAVAILABLE
            self._wake()

    def _travel(self) -> None:
        running().pause(_LATENCY_S * running().rng.random() ** 3)

    def _on_loop(self, call: Callable[[], object]) -> None:
        assert self._server is not None
        if not self._server.process.dead:
            self._server.loop.call_soon_threadsafe(call)

    def _wake(self) -> None:
        if self._client is not None:
            running().wake(self._client)

    # The service's half: a task, and a context for it.

    def _begin(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._serve())
        self._task.add_done_callback(self._over)

    def _over(self, task: asyncio.Task[tuple[str, str]]) -> None:
        """Called for a task that was cancelled before its first step too."""
        assert self._server is not None
        self._ended = (CANCELLED, "") if task.cancelled() else task.result()
        self._server.calls.pop(self, None)
        self._wake()
        for callback in self._done:
            callback(self)

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _serve(self) -> tuple[str, str]:
        """The status and the code that the service ends with."""
        assert self._server is not None
        try:
            handler = self._server.handler(SimpleNamespace(method="/slotstream.v1." + self.method, invocation_metadata=()))
            self._serializer = handler.response_serializer
            if handler.response_streaming:
                await handler.stream_stream(None, self)
            else:
                reply = await handler.stream_unary(None, self)
                if not self.status:  # What was cut meanwhile gets none: gRPC does not tell the service.
                    await self.write(reply)
        except grpc.aio.AbortError:
            assert self._said is not None
            return self._said
        except Exception as error:
            running().fail(f"{self.method} raised {type(error).__name__}: {error}")
            return "UNKNOWN", ""
        return OK, ""

    async def read(self) -> Any:
        while not self._requests:
            if self._no_more_requests:
                return EOF
            self._arrived.clear()
            await self._arrived.wait()
        return self._requests.popleft()

    async def write(self, message: Any) -> None:
        while len(self._replies) >= _WINDOW:
            self._taken.clear()
            await self._taken.wait()
        if self.status:
            raise asyncio.InvalidStateError("the call is over")
        self._replies.append(message if self._serializer is None else self._serializer(message))
        self._wake()

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing_metadata: Any = ()) -> None:
        self._said = (code.name, dict(trailing_metadata).get(CODE_KEY, ""))
        self.reason = dict(trailing_metadata).get(REASON_KEY, "")
        raise grpc.aio.AbortError

    def peer(self) -> str:
        return self._peer

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        self._done.append(callback)

    def invocation_metadata(self) -> tuple[()]:
        return ()

    def auth_context(self) -> dict[str, Any]:
        return {}
