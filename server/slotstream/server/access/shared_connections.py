"""Connections are closed for calls that do not end, but not one that somebody else uses, as behind a proxy.

Behind a proxy the calls are cut first, and gRPC frees what came of a call that has ended. Until they have ended the connection
takes next to nothing. It is closed if the process grows on after that. Only calls whose message came count, and only those of
other callers: a good call of their own buys nothing. Nor does one of the health service, which everybody may call.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import grpc.aio

from slotstream.common.memory import resident_bytes

_CUTTING_S = 2.0  # So long calls that were cut may take to end: the event loop may be busy, and it has them one by one.
_QUIET_S = 0.1  # After that long without any, the last was the last.
_GROWTH_BYTES = 8 << 20  # So much more than when they had ended, and their connection is closed.
_SPARED_S = 60.0  # After that long, calls are cut first again.
_AGAIN_S = 1.0  # After a look that could not end a throttle.
_Context = grpc.aio.ServicerContext[Any, Any]


class Sockets(Protocol):
    """What can be done to connections. `peers` are named as gRPC names them."""

    def hang_up(self, peers: Iterable[str]) -> None:
        """Closes those over which much came."""

    def throttle(self, peers: Iterable[str], *, on: bool) -> bool:
        """While it is on, next to nothing comes over them. False: not all were reached, so ask again."""


class NoSockets:
    """Where connections cannot be closed."""

    def hang_up(self, peers: Iterable[str]) -> None:
        pass

    def throttle(self, peers: Iterable[str], *, on: bool) -> bool:
        return True


@dataclass(slots=True, eq=False)
class Call:
    """From its beginning until it has ended."""

    peer: str  # As gRPC names it.
    caller: str
    saves: bool  # Its connection, once its message came.
    came: bool = False  # Its message.


@dataclass(slots=True, eq=False)
class _Spared:
    """A connection whose calls were cut, and which is not closed."""

    since: float
    callers: set[str]  # Of these the calls are cut.
    changed: float  # When one of them last came or ended.
    ended_bytes: int | None = None  # What the process had when all had ended. None: the connection is throttled.


class SharedConnections:
    """Belongs to one event loop."""

    def __init__(self, sockets: Sockets | None = None, resident: Callable[[], int] = resident_bytes) -> None:
        """`resident`: bytes of memory that this process has."""
        self._sockets: Sockets = sockets or NoSockets()
        self._resident = resident
        self._calls: dict[str, set[Call]] = {}  # by connection
        self._spared: dict[str, _Spared] = {}  # by connection
        self._looking: asyncio.TimerHandle | None = None

    def begin(self, context: _Context, caller: str, *, saves: bool = True) -> Call:
        """A call. Its caller says once its message came, and it counts until gRPC says that it has ended.

        `saves`: its connection, from being closed for calls of other callers.
        """
        call = Call(context.peer(), caller, saves)
        self._calls.setdefault(call.peer, set()).add(call)
        self._note_change(call)
        ended: Any = partial(self._end, call)
        context.add_done_callback(ended)
        return call

    def _end(self, call: Call, _: _Context) -> None:
        calls = self._calls[call.peer]
        calls.discard(call)
        if not calls:
            del self._calls[call.peer]
        self._note_change(call)

    def _note_change(self, call: Call) -> None:
        spared = self._spared.get(call.peer)
        if spared is not None and call.caller in spared.callers:
            spared.changed = asyncio.get_running_loop().time()

    def hang_up(self, greedy: Mapping[str, set[str]]) -> None:
        """Closes these connections, each with the callers whose calls are cut there, or spares them.

        All at once: each time the sockets look at every descriptor, and the event loop waits for it.
        """
        now = asyncio.get_running_loop().time()
        self._spared = {p: one for p, one in self._spared.items() if one.ended_bytes is None or now < one.since + _SPARED_S}
        resident = self._resident()
        closed, throttled = [], []
        for peer, callers in greedy.items():
            spared = self._spared.get(peer)
            if not any(call.came and call.saves and call.caller not in callers for call in self._calls.get(peer, ())):
                closed.append(peer)
            elif spared is None:
                self._spared[peer] = _Spared(now, set(callers), now)
                throttled.append(peer)
            else:
                spared.callers |= callers
                if spared.ended_bytes is not None and resident >= spared.ended_bytes + _GROWTH_BYTES:
                    closed.append(peer)
        if closed:
            self._sockets.hang_up(closed)
        if throttled:
            self._sockets.throttle(throttled, on=True)
            if self._looking is None:
                self._looking = asyncio.get_running_loop().call_later(_QUIET_S, self._look)

    def _look(self) -> None:
        """Again and again, until the calls that are cut have ended, and no connection is throttled."""
        self._looking = None
        throttled = {peer: one for peer, one in self._spared.items() if one.ended_bytes is None}
        ended = {peer: one for peer, one in throttled.items() if self._has_ended(peer, one)}
        resident = self._resident()
        done = not ended or self._sockets.throttle(ended, on=False)
        if done:
            for one in ended.values():
                one.ended_bytes = resident
        if not done or len(ended) < len(throttled):
            self._looking = asyncio.get_running_loop().call_later(_QUIET_S if done else _AGAIN_S, self._look)

    def _has_ended(self, peer: str, spared: _Spared) -> bool:
        """What is cut there, or it had its time."""
        now = asyncio.get_running_loop().time()
        left = any(call.caller in spared.callers and not call.came for call in self._calls.get(peer, ()))
        return now >= spared.since + _CUTTING_S or not (left or now < spared.changed + _QUIET_S)
