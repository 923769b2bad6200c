"""Connections are closed for calls that do not end, but not one that somebody else uses, as behind a proxy.

There the calls are cut first, and gRPC frees what came of a call that has ended. Until they have ended the connection takes
next to nothing. It is closed if the process grows on after that. Only calls whose message came count, and only those of other
callers: a good call of their own buys nothing.
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
_Context = grpc.aio.ServicerContext[Any, Any]


class Sockets(Protocol):
    """What can be done to connections. `peers` are named as gRPC names them."""

    def hang_up(self, peers: Iterable[str]) -> None:
        """Closes those over which much came."""

    def throttle(self, peers: Iterable[str], *, on: bool) -> None:
        """While it is on, next to nothing comes over them."""


class NoSockets:
    """Where connections cannot be closed."""

    def hang_up(self, peers: Iterable[str]) -> None:
        pass

    def throttle(self, peers: Iterable[str], *, on: bool) -> None:
        pass


@dataclass(slots=True, eq=False)
class Call:
    """From its beginning until it has ended."""

    peer: str  # As gRPC names it.
    caller: str
    came: bool = False  # Its message.


@dataclass(slots=True, eq=False)
class _Spared:
    """A connection whose calls were cut, and which is not closed."""

    since: float
    callers: set[str]  # Of these the calls are cut.
    changed: float  # When one of them last came or ended.
    ended_bytes: int | None = None  # What the process had when all had ended.


class SharedConnections:
    """Belongs to one event loop."""

    def __init__(self, sockets: Sockets | None = None, resident: Callable[[], int] = resident_bytes) -> None:
        """`resident`: bytes of memory that this process has."""
        self._sockets: Sockets = sockets or NoSockets()
        self._resident = resident
        self._calls: dict[str, set[Call]] = {}  # by connection
        self._spared: dict[str, _Spared] = {}  # by connection

    def begin(self, context: _Context, caller: str) -> Call:
        """A call. Its caller says once its message came, and it counts until gRPC says that it has ended."""
        call = Call(context.peer(), caller)
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
        """Closes these connections, each with the callers whose calls are cut there, or spares them."""
        self._sockets.hang_up([peer for peer, callers in greedy.items() if not self._is_spared(peer, callers)])

    def _is_spared(self, peer: str, callers: set[str]) -> bool:
        if not any(call.came and call.caller not in callers for call in self._calls.get(peer, ())):
            return False
        loop = asyncio.get_running_loop()
        now = loop.time()
        self._spared = {peer: one for peer, one in self._spared.items() if now < one.since + _SPARED_S}
        spared = self._spared.get(peer)
        if spared is None:
            spared = self._spared[peer] = _Spared(now, set(callers), now)
            self._sockets.throttle([peer], on=True)
            loop.call_later(_QUIET_S, self._look, peer, spared)
        spared.callers |= callers
        return spared.ended_bytes is None or self._resident() < spared.ended_bytes + _GROWTH_BYTES

    def _look(self, peer: str, spared: _Spared) -> None:
        """Again and again, until the calls that are cut have ended."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        left = any(call.caller in spared.callers and not call.came for call in self._calls.get(peer, ()))
        if now < spared.since + _CUTTING_S and (left or now < spared.changed + _QUIET_S):
            loop.call_later(_QUIET_S, self._look, peer, spared)
        else:
            spared.ended_bytes = self._resident()
            self._sockets.throttle([peer], on=False)
