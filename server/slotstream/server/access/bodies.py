"""The message of a call: read once its caller was admitted, so long, in so much time, and so many at a time.

gRPC cannot be told how long the messages of one method may be, and takes as much as may come on the port (16 MiB) once a
call's message is asked for; before that, as much as its window, which it makes as wide as the connection is fast. So the
messages of one caller are asked for one by one, or a few at a time. A message that is here already costs nobody any time. One
that does not come makes way for those behind it; and where a call that does not go on makes the process grow, those behind it
are refused. Until that is done, gRPC takes what comes on their connection: where it is a lot, the connection is closed, if
nobody else uses it (shared_connections.py).
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc.aio

from slotstream.common.memory import resident_bytes
from slotstream.server.access.shared_connections import SharedConnections
from slotstream.wire.errors import BadParams, TooLarge, TooMany, TooSlow

BODY_S = 10.0
_READING = 16
_READING_OF_CALLER = 8  # Where they are not asked for one by one.
_WAIT_S = 60.0  # How long a call waits for its turn.
_PRESSED_S = 0.5  # How long a message may take that others wait for.
_SILENT_S = 0.03  # After that long a call that may say nothing gives its turn away.
_LOOKS = 6  # A message that is not here after so many looks does not go on. Not so much time: the event loop may be late.
_LOOKS_MIN = 2  # The faster the process grows, the fewer.
_GROWTH_BYTES = 2 << 20  # So much more than before, and the calls of a caller that does not go on are refused,
_REFUSED_S = 0.5  # and for so long those that it begins.
_HANG_UP_BYTES = 8 << 20  # So much more than that, and its connection is closed.
_LOOK_S = 0.005
_TOGETHER_S = 0.02  # Connections to be closed are collected for so long.
_Context = grpc.aio.ServicerContext[Any, Any]
EOF: Any = grpc.aio.EOF  # type: ignore[attr-defined]  # Missing in grpc-stubs.


@dataclass(slots=True, eq=False)
class _Reading:
    peer: str  # As gRPC names it. Asked for in time: a call that has ended must not be asked for anything.
    caller: str
    begun: float
    patience: asyncio.Timeout
    looks: int = 0

    def hurry(self, at: float) -> None:
        due = self.patience.when()
        if not self.patience.expired() and due is not None and at < due:
            self.patience.reschedule(at)


@dataclass(slots=True, eq=False)
class _Waiting:
    peer: str
    turn: asyncio.Event = field(default_factory=asyncio.Event)
    is_refused: bool = False


class Bodies:
    """Messages of calls of one service. Belongs to one event loop."""

    def __init__(
        self,
        bytes_max: int,
        *,
        one_by_one: bool = True,
        growth_bytes: int = _GROWTH_BYTES,
        call_bytes: int = 0,
        connections: SharedConnections | None = None,
        saves_connections: bool = True,
        resident: Callable[[], int] = resident_bytes,
    ) -> None:
        """`bytes_max`: of one message. `resident`: bytes of memory that this process has. `connections`: those that the calls
        come over. `saves_connections`: a call whose message came saves its connection from calls of other callers.

        The process may grow by `growth_bytes`, and by `call_bytes` for each call that is waited for.

        `one_by_one`: as above. Without it some are asked for at a time. A call that says nothing keeps nobody waiting, and
        is itself waited for as long as it likes; only what makes the process grow is refused.
        """
        self._bytes_max = bytes_max
        self._one_by_one = one_by_one
        self._growth_bytes = growth_bytes
        self._call_bytes = call_bytes
        self._connections = connections or SharedConnections()
        self._saves_connections = saves_connections
        self._resident = resident
        self._resident_before = 0
        self._looking: asyncio.TimerHandle | None = None
        self._reading: dict[_Reading, None] = {}  # In the order in which they began.
        self._waiting: dict[str, deque[_Waiting]] = {}  # by caller, in the order of their turns
        self._turns: Counter[str] = Counter()  # Those that have theirs, by caller.
        self._unwanted: dict[str, set[str]] = {}  # Connections that are closed within a moment, each with its greedy callers.
        self._refused_until: dict[str, float] = {}  # by caller; on the loop's clock

    async def read(self, context: _Context, caller: str, limit_s: float) -> bytes:
        """The message of a call. Raises TooSlow when it does not come within `limit_s`, TooLarge, TooMany and BadParams."""
        message = await self.next(context, caller, limit_s)
        if message is EOF:
            raise BadParams("the call ended before it asked for anything")
        if len(message) > self._bytes_max:
            raise TooLarge(f"a request of {len(message)} bytes is longer than the {self._bytes_max} allowed")
        return bytes(message)

    async def next(self, context: _Context, caller: str, limit_s: float) -> Any:
        """The next message of a call, however long, or EOF. Raises TooSlow and TooMany."""
        self.admit(context, caller)
        call = self._connections.begin(context, caller, saves=self._saves_connections)
        async with self._turn(call.peer, caller):
            now = asyncio.get_running_loop().time()
            try:
                async with asyncio.timeout_at(now + limit_s) as patience:
                    reading = _Reading(call.peer, caller, now, patience)
                    self._reading[reading] = None
                    try:
                        self._watch()
                        self._press()
                        message = await context.read()
                    finally:
                        del self._reading[reading]
                call.came = message is not EOF
                return message
            except TimeoutError as error:
                raise TooSlow("the message of the call did not come in time") from error

    def admit(self, context: _Context, caller: str) -> None:
        """Raises TooMany for a caller whose calls did not go on a moment ago."""
        if asyncio.get_running_loop().time() < self._refused_until.get(caller, 0.0):
            call = self._connections.begin(context, caller)
            if self._growth >= self._growth_bytes + _HANG_UP_BYTES:
                self._hang_up_soon(call.peer, caller)
            raise _do_not_go_on()

    @asynccontextmanager
    async def _turn(self, peer: str, caller: str) -> AsyncIterator[None]:
        if self._has_room and self._may_read(caller):
            self._turns[caller] += 1
        else:
            await self._wait(peer, caller)
        with ExitStack() as ending:
            ending.callback(self._end_turn, caller)
            if not self._one_by_one:  # Once, then or at the end.
                early = asyncio.get_running_loop().call_later(_SILENT_S, ending.close)
                ending.callback(early.cancel)
            yield

    async def _wait(self, peer: str, caller: str) -> None:
        """Returns when it is this caller's turn, which is counted."""
        waiting = _Waiting(peer)
        self._waiting.setdefault(caller, deque()).append(waiting)
        self._watch()
        self._press()
        try:
            async with asyncio.timeout(_WAIT_S):
                await waiting.turn.wait()
        except (TimeoutError, asyncio.CancelledError) as error:
            if waiting.turn.is_set():
                if not waiting.is_refused:
                    self._end_turn(caller)
            else:
                self._waiting[caller].remove(waiting)
                if not self._waiting[caller]:
                    del self._waiting[caller]
            if isinstance(error, asyncio.CancelledError):
                raise
            waiting.is_refused = True
        if waiting.is_refused:
            raise _do_not_go_on()

    @property
    def _has_room(self) -> bool:
        return self._turns.total() < _READING

    def _may_read(self, caller: str) -> bool:
        return self._turns[caller] < (1 if self._one_by_one else _READING_OF_CALLER)

    def _end_turn(self, caller: str) -> None:
        self._turns[caller] -= 1
        if not self._turns[caller]:
            del self._turns[caller]
        if self._has_room and (following := next(filter(self._may_read, self._waiting), None)) is not None:
            waiting = self._waiting.pop(following)
            self._turns[following] += 1
            waiting.popleft().turn.set()
            if waiting:
                self._waiting[following] = waiting  # Behind all other callers.

    def _in_the_way(self) -> list[_Reading]:
        return [one for one in self._reading if one.caller in self._waiting or (self._waiting and not self._has_room)]

    def _press(self) -> None:
        if self._one_by_one:
            for reading in self._in_the_way():
                reading.hurry(reading.begun + _PRESSED_S)

    def _hang_up_soon(self, peer: str, caller: str) -> None:
        """With others that come meanwhile: it looks at every descriptor each time."""
        if not self._unwanted:
            asyncio.get_running_loop().call_later(_TOGETHER_S, self._hang_up_now)
        self._unwanted.setdefault(peer, set()).add(caller)

    def _hang_up_now(self) -> None:
        unwanted, self._unwanted = self._unwanted, {}
        self._connections.hang_up(unwanted)

    @property
    def _growth(self) -> int:
        """Bytes, since there are several calls."""
        return self._resident() - self._resident_before

    def _watch(self) -> None:
        """While there are several calls, see that they do not make the process grow."""
        if self._looking is None and len(self._reading) + len(self._waiting) > 1:
            self._resident_before = self._resident()
            self._looking = asyncio.get_running_loop().call_later(_LOOK_S, self._look)

    def _look(self) -> None:
        self._looking = None
        if len(self._reading) + len(self._waiting) <= 1:
            return
        loop = asyncio.get_running_loop()
        self._looking = loop.call_later(_LOOK_S, self._look)
        for one in self._reading:
            one.looks += 1
        growth = self._growth
        growth_max = self._growth_bytes + len(self._reading) * self._call_bytes
        if growth < growth_max:
            return
        looks = max(_LOOKS_MIN, _LOOKS * growth_max // growth)
        stalled = [one for one in self._reading if one.looks >= looks]
        of_caller = Counter(one.caller for one in stalled)
        greedy = {caller for caller, count in of_caller.items() if count > 1 or caller in self._waiting}
        refused = [one for caller in greedy for one in self._waiting.pop(caller, ())]
        cut = [one for one in stalled if one.caller in greedy]
        if growth >= growth_max + _HANG_UP_BYTES:
            peers = {one.peer for one in cut} | {one.peer for one in refused}
            self._connections.hang_up(dict.fromkeys(peers, greedy))
        now = loop.time()
        for reading in cut:
            reading.hurry(now)
        for waiting in refused:
            waiting.is_refused = True
            waiting.turn.set()
        self._refused_until = {caller: until for caller, until in self._refused_until.items() if until > now}
        self._refused_until |= dict.fromkeys(greedy, now + _REFUSED_S)


def _do_not_go_on() -> TooMany:
    return TooMany("other calls of this peer do not go on, and keep this one from its turn")
