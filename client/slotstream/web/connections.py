"""How long a connection may take. uvicorn itself waits without end for the head of a request, and for a reader of an answer."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any, ClassVar

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

CONNECTIONS_MAX = 256
HEAD_BYTES_MAX = 16 << 10
_DRAIN_S = 5


class ImpatientProtocol(H11Protocol):
    """uvicorn's, which ends a connection that brings no whole head of a request in time, or does not take its answer."""

    REQUEST_S: ClassVar[float] = 15.0
    ANSWER_S: ClassVar[float] = 120.0
    LOOK_S: ClassVar[float] = 5.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._state: tuple[Any, bool] = (None, False)
        self._since_s = self.loop.time()
        self.loop.call_later(self.LOOK_S, self._look)

    def _look(self) -> None:
        if self not in self.connections:
            return  # It ended by itself.
        answering = self.cycle is not None and not self.cycle.response_complete
        state, now_s = (self.cycle, answering), self.loop.time()
        if state != self._state:
            self._state, self._since_s = state, now_s
        elif now_s - self._since_s >= (self.ANSWER_S if answering else self.REQUEST_S):
            self.transport.abort()  # `close` would wait until the answer is taken.
            return
        self.loop.call_later(self.LOOK_S, self._look)


class Server(uvicorn.Server):
    """uvicorn's, which calls `started` once it takes requests, and signals."""

    def __init__(self, config: uvicorn.Config, started: Callable[[], None] = lambda: None) -> None:
        super().__init__(config)
        self._on_start = started

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_start()


def uvicorn_config(app: ASGIApp, protocol: type[ImpatientProtocol] = ImpatientProtocol, **tls: Any) -> uvicorn.Config:
    """How uvicorn serves `app`. It believes no header of a proxy, keeps no log of requests, and names itself to nobody."""
    return uvicorn.Config(
        app,
        http=protocol,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        limit_concurrency=CONNECTIONS_MAX,
        timeout_graceful_shutdown=_DRAIN_S,
        h11_max_incomplete_event_size=HEAD_BYTES_MAX,
        **tls,
    )
