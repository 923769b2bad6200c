"""Every call of Ingest and Samples passes here first: who is calling, and how much may they have at a time?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc.aio

from slotstream.server.access.tokens import Principal, TokenFile, digest_of
from slotstream.server.config import ServerConfig
from slotstream.wire.access import AUTHORIZATION_KEY, bearer_token
from slotstream.wire.errors import TooMany, Unauthenticated

_ANONYMOUS = "anonymous"


class Session:
    """A caller. Asked again and again while a stream lasts: a token that was withdrawn counts no more."""

    def __init__(self, tokens: TokenFile | None, digest: bytes, name: str) -> None:
        self._tokens = tokens
        self._digest = digest
        self._peer = Principal(name)
        self.name = self.principal().name

    def principal(self) -> Principal:
        """Who it is, by the tokens file as it is now. Raises Unauthenticated."""
        if self._tokens is None:
            return self._peer
        found = self._tokens.find(self._digest)
        if found is None:
            raise Unauthenticated("the bearer token is not one that this server knows")
        return found


class Gate:
    """Admits callers: by their token where there is a tokens file, else everybody that the transport let through.

    That is: whoever has a certificate signed by --tls-client-ca, can open the unix socket, or reaches the address.
    """

    def __init__(self, config: ServerConfig) -> None:
        """Raises ConfigError for a tokens file that cannot be used."""
        self._tokens = TokenFile(config.tokens_file) if config.tokens_file is not None else None

    def admit(self, context: grpc.aio.ServicerContext[Any, Any]) -> Session:
        """Raises Unauthenticated."""
        if self._tokens is None:
            return Session(None, b"", _certificate_name(context) or _ANONYMOUS)
        values = [value for key, value in context.invocation_metadata() or () if key == AUTHORIZATION_KEY]
        token = bearer_token(values[0]) if len(values) == 1 and isinstance(values[0], str) else None
        if not token:
            raise Unauthenticated("this server wants a bearer token, and the call has none")
        return Session(self._tokens, digest_of(token), "")


def _certificate_name(context: grpc.aio.ServicerContext[Any, Any]) -> str:
    """The common name in the caller's certificate, of what can be printed; "" without one."""
    names = (context.auth_context() or {}).get("x509_common_name", ())
    return "".join(c for name in names for c in name.decode(errors="replace")[:64] if c.isprintable())


class Shares:
    """How much of something is in use, in all and by each peer. Both have a limit, so that no peer can use up all of it."""

    def __init__(self, what: str, total_max: int, peer_max: int) -> None:
        self._what = what
        self._total_max = total_max
        self._peer_max = peer_max
        self._total = 0
        self._by_peer: Counter[str] = Counter()

    def take(self, peer: str) -> None:
        """Raises TooMany. The message tells the limits and not who else is there."""
        if self._by_peer[peer] >= self._peer_max:
            raise TooMany(f"{self._peer_max} {self._what} at a time are as many as this server allows one peer")
        if self._total >= self._total_max:
            raise TooMany(f"{self._total_max} {self._what} at a time are as many as this server allows")
        self._total += 1
        self._by_peer[peer] += 1

    def give_back(self, peer: str) -> None:
        self._total -= 1
        self._by_peer[peer] -= 1
        if not self._by_peer[peer]:
            del self._by_peer[peer]

    @contextmanager
    def one(self, peer: str) -> Iterator[None]:
        """One of them, while the block runs. Raises TooMany."""
        self.take(peer)
        try:
            yield
        finally:
            self.give_back(peer)
