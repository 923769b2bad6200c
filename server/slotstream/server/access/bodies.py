"""The message of a call: read once its caller was admitted, so long, in so much time, and so many at a time.

gRPC cannot be told how long the messages of one method may be, and takes as much as may come on the port (16 MiB) once a
call's message is asked for; before that, as much as its window, which it makes as wide as the connection is fast. So the
messages of one caller are asked for one by one. A message that is here already costs nobody any time. One that does not come
makes way for those behind it; and where a call that does not go on makes the process grow, those behind it are refused.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc.aio

from slotstream.wire.errors import BadParams, TooLarge, TooMany, TooSlow
from slotstream.wire.memory import resident_bytes

BODY_S = 10.0
_READING = 16
_WAIT_S = 60.0  # How long a call waits for its turn.
_PRESSED_S = 0.5  # How long a message may take that others wait for.
_STALLED_S = 0.03  # After that long it does not go on.
_GROWTH_BYTES = 2 << 20  # So much more than before, and the calls of a caller that does not go on are refused.
_LOOK_S = 0.005
EOF: Any = grpc.aio.EOF  # type: ignore[attr-defined]  # Missing in grpc-stubs.


@dataclass(slots=True, eq=False)
class _Reading:
    caller: str
    begun: float
    patience: asyncio.Timeout

    def hurry(self, at: float) -> None:
        due = self.patience.when()
        if not self.patience.expired() and due is not None and at < due:
            self.patience.reschedule(at)


@dataclass(slots=True, eq=False)
class _Waiting:
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
        resident: Callable[[], int] = resident_bytes,
    ) -> None:
        """`bytes_max`: of one message. `resident`: bytes of memory that this process has.

        The process may grow by `growth_bytes`, and by `call_bytes` for each call that is waited for.

        `one_by_one`: as above. Without it all are asked for at once, and only what makes the process grow is refused.
        """
        self._bytes_max = bytes_max
        self._one_by_one = one_by_one
        self._growth_bytes = growth_bytes
        self._call_bytes = call_bytes
        self._resident = resident
        self._resident_before = 0
        self._looking: asyncio.TimerHandle | None = None
        self._reading: dict[_Reading, None] = {}  # In the order in which they began.
        self._waiting: dict[str, deque[_Waiting]] = {}  # by caller, in the order of their turns
        self._turns: Counter[str] = Counter()  # Those that have theirs, by caller.

    async def read(self, context: grpc.aio.ServicerContext[Any, Any], caller: str, limit_s: float) -> bytes:
        """The message of a call. Raises TooSlow when it does not come within `limit_s`, TooLarge, TooMany and BadParams."""
        message = await self.next(context, caller, limit_s)
        if message is EOF:
            raise BadParams("the call ended before it asked for anything")
        if len(message) > self._bytes_max:
            raise TooLarge(f"a request of {len(message)} bytes is longer than the {self._bytes_max} allowed")
        return bytes(message)

    async def next(self, context: grpc.aio.ServicerContext[Any, Any], caller: str, limit_s: float) -> Any:
        """The next message of a call, however long, or EOF. Raises TooSlow and TooMany."""
        async with self._turn(caller):
            now = asyncio.get_running_loop().time()
            try:
                async with asyncio.timeout_at(now + limit_s) as patience:
                    reading = _Reading(caller, now, patience)
                    self._reading[reading] = None
                    try:
                        self._watch()
                        self._press()
                        return await context.read()
                    finally:
                        del self._reading[reading]
            except TimeoutError as error:
                raise TooSlow("the message of the call did not come in time") from error

    @asynccontextmanager
    async def _turn(self, caller: str) -> AsyncIterator[None]:
        if self._has_room and self._may_read(caller):
            self._turns[caller] += 1
        else:
            await self._wait(caller)
        try:
            yield
        finally:
            self._end_turn(caller)

    async def _wait(self, caller: str) -> None:
        """Returns when it is this caller's turn, which is counted."""
        waiting = _Waiting()
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
            raise TooMany("other calls of this peer do not go on, and keep this one from its turn")

    @property
    def _has_room(self) -> bool:
        return not self._one_by_one or self._turns.total() < _READING

    def _may_read(self, caller: str) -> bool:
        return not self._one_by_one or not self._turns[caller]

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
        for reading in self._in_the_way() if self._waiting else ():
            reading.hurry(reading.begun + _PRESSED_S)

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
        if self._resident() - self._resident_before < self._growth_bytes + len(self._reading) * self._call_bytes:
            return
        stalled = [one for one in self._reading if one.begun + _STALLED_S <= loop.time()]
        of_caller = Counter(one.caller for one in stalled)
        for one in stalled:
            if of_caller[one.caller] > 1 or one.caller in self._waiting:
                one.hurry(loop.time())
        for caller in of_caller:
            for waiting in self._waiting.pop(caller, ()):
                waiting.is_refused = True
                waiting.turn.set()
