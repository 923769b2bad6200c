"""One vLLM, spoken to over its OpenAI server: its tokens, and completions whose rows are captured. Safe to share by threads."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from slotstream.wire.errors import ConfigError

_TIMEOUT_S = 1800.0
_CONNECT_S = 30.0
BAD_ANSWER = "BAD_ANSWER"


class EngineAway(Exception):
    """Nothing answers at the engine's address any more."""


class EngineRefused(Exception):
    """The engine answered a request with an error, whose `code` is HTTP_ and its status, or with what is no answer to it."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class Engine:
    """`url`: as `http://127.0.0.1:8000`, also with `/v1` behind it. `key`: the API key, if the engine wants one."""

    def __init__(self, url: str, key: str | None = None) -> None:
        """Raises ConfigError."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"{url!r} is not the address of an engine, such as http://127.0.0.1:8000")
        self.url = url
        self._parts = parts
        self._root = parts.path.rstrip("/").removesuffix("/v1")
        self._headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}
        self._own = threading.local()  # A thread's connection, which it keeps.
        self._lock = threading.Lock()  # Of the sockets.
        self._sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()
        self._closed = False
        self.model = ""

    def open(self) -> str:
        """Asks what it serves; the model's path, or its name where it does not tell. Raises EngineAway and EngineRefused."""
        answer = self._ask("GET", "/v1/models")
        with self._understood("/v1/models"):
            card = json.loads(answer)["data"][0]
            self.model = str(card["id"])
            return str(card.get("root") or self.model)

    def token_ids(self, prompt: str | None, messages: Sequence[Mapping[str, Any]] | None) -> list[int]:
        """What the engine makes of a text, or of a chat that waits for its answer."""
        asked: dict[str, Any] = {"prompt": prompt} if messages is None else {"messages": messages}
        answer = self._ask("POST", "/tokenize", {"model": self.model, **asked})
        with self._understood("/tokenize"):
            return [int(token) for token in json.loads(answer)["tokens"]]

    def complete(self, body: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """Sends a completion; what the connector says of its capture, None where it says nothing.

        `error` in it, where there is one, is a mapping too.
        """
        answer = self._ask("POST", "/v1/completions", {"model": self.model, **body})
        with self._understood("/v1/completions"):
            said = (json.loads(answer).get("kv_transfer_params") or {}).get("slotstream")
            if isinstance(said, Mapping):
                (said.get("error") or {}).get("code")  # A mapping, or it is refused here.
            return said if isinstance(said, Mapping) else None

    def close(self) -> None:
        """Ends what other threads wait for, and lets nobody begin: they get EngineAway. May be called twice."""
        with self._lock:
            self._closed = True
            sockets = list(self._sockets)
        for each in sockets:
            with contextlib.suppress(OSError):
                socket.socket.shutdown(each, socket.SHUT_RDWR)  # Past TLS, whose own would wait for the other end.

    @contextlib.contextmanager
    def _understood(self, path: str) -> Iterator[None]:
        """Around the reading of an answer. Raises EngineRefused where it is not what OpenAI's servers say."""
        try:
            yield
        except (ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError) as error:
            why = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            raise EngineRefused(BAD_ANSWER, f"the engine at {self.url} gives {path} an answer that is none ({why})") from error

    def _ask(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> bytes:
        data = None if body is None else json.dumps(body).encode()
        for fresh in (False, True):  # A connection that was kept may have been closed meanwhile.
            connection = self._connection(fresh=fresh)
            try:
                if connection.sock is None:
                    self._dial(connection)
                self._watch(connection.sock)
                connection.request(method, self._root + path, data, self._headers)
                answer = connection.getresponse()
                text = answer.read()
            except (OSError, http.client.HTTPException) as error:
                connection.close()
                if fresh or self._closed:
                    raise EngineAway(f"no engine answers at {self.url}: {type(error).__name__}: {error}") from error
                continue
            if answer.status != 200:
                raise EngineRefused(f"HTTP_{answer.status}", " ".join(text.decode(errors="replace").split())[:300])
            return text
        raise AssertionError("the second try returns or raises")

    def _connection(self, *, fresh: bool) -> http.client.HTTPConnection:
        """This thread's."""
        kept: http.client.HTTPConnection | None = getattr(self._own, "connection", None)
        if kept is None or fresh:
            kept = self._own.connection = self._connect()
        return kept

    def _watch(self, connected: socket.socket) -> None:
        """A socket that `close` ends. Raises EngineAway behind that."""
        with self._lock:
            self._sockets.add(connected)
            if self._closed:
                raise EngineAway(f"the engine at {self.url} is asked for nothing any more")

    def _dial(self, connection: http.client.HTTPConnection) -> None:
        """Connects. `close` ends that too, the handshake of TLS included."""
        handles: list[socket.socket] = []

        def connected(address: tuple[str, int], *_: Any) -> socket.socket:
            plain = socket.create_connection(address, _CONNECT_S)
            plain.settimeout(_TIMEOUT_S)
            handles.append(plain.dup())  # TLS takes the socket itself away.
            self._watch(handles[0])
            return plain

        setattr(connection, "_create_connection", connected)  # noqa: B010  (http.client's own seam)
        try:
            connection.connect()
        finally:
            for handle in handles:
                with self._lock:
                    self._sockets.discard(handle)
                handle.close()

    def _connect(self) -> http.client.HTTPConnection:
        kind = http.client.HTTPSConnection if self._parts.scheme == "https" else http.client.HTTPConnection
        return kind(str(self._parts.hostname), self._parts.port, timeout=_TIMEOUT_S)
