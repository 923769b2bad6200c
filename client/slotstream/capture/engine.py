"""One vLLM, spoken to over its OpenAI server: its tokens, and completions whose rows are captured. Safe to share by threads."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from slotstream.wire.errors import ConfigError

_TIMEOUT_S = 1800.0


class EngineAway(Exception):
    """Nothing answers at the engine's address any more."""


class EngineRefused(Exception):
    """The engine answered a request with an error. `code` is HTTP_ and its status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.code = f"HTTP_{status}"


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
        self.model = ""

    def open(self) -> str:
        """Asks what it serves; the model's path, or its name where it does not tell. Raises EngineAway and EngineRefused."""
        card = self._ask("GET", "/v1/models")["data"][0]
        self.model = str(card["id"])
        return str(card.get("root") or self.model)

    def token_ids(self, prompt: str | None, messages: Sequence[Mapping[str, Any]] | None) -> list[int]:
        """What the engine makes of a text, or of a chat that waits for its answer."""
        asked: dict[str, Any] = {"prompt": prompt} if messages is None else {"messages": messages}
        found = self._ask("POST", "/tokenize", {"model": self.model, **asked})
        return [int(token) for token in found["tokens"]]

    def complete(self, body: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """Sends a completion; what the connector says of its capture, None where it says nothing."""
        answer = self._ask("POST", "/v1/completions", {"model": self.model, **body})
        said = (answer.get("kv_transfer_params") or {}).get("slotstream")
        return said if isinstance(said, Mapping) else None

    def _ask(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        for fresh in (False, True):  # A connection that was kept may have been closed meanwhile.
            connection = getattr(self._own, "connection", None)
            if connection is None or fresh:
                connection = self._own.connection = self._connect()
            try:
                connection.request(method, self._root + path, data, self._headers)
                answer = connection.getresponse()
                text = answer.read()
            except (OSError, http.client.HTTPException) as error:
                connection.close()
                if fresh:
                    raise EngineAway(f"no engine answers at {self.url}: {type(error).__name__}: {error}") from error
                continue
            if answer.status != 200:
                raise EngineRefused(answer.status, " ".join(text.decode(errors="replace").split())[:300])
            return json.loads(text)
        raise AssertionError("the second try returns or raises")

    def _connect(self) -> http.client.HTTPConnection:
        kind = http.client.HTTPSConnection if self._parts.scheme == "https" else http.client.HTTPConnection
        return kind(str(self._parts.hostname), self._parts.port, timeout=_TIMEOUT_S)
