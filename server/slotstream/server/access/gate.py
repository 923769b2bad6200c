"""Every call of Ingest and Samples passes here first: who is calling, and how much may they have at a time?"""

from __future__ import annotations

import ipaddress
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import unquote

import grpc.aio

from slotstream.server.access.shared_connections import SharedConnections
from slotstream.server.access.tokens import Principal, TokenFile, digest_of
from slotstream.server.config import ServerConfig
from slotstream.wire.access import AUTHORIZATION_KEY, bearer_token
from slotstream.wire.errors import TooMany, Unauthenticated

PEERS_ASSUMED = 4  # So many peers may each have all the requests that one may have.
_ANONYMOUS = "anonymous"
_ADDRESS_KEY, _CERTIFICATE_KEY = "slotstream-address", "slotstream-certificate-bin"  # From a worker to its primary only.
_HOST_PREFIX_BITS = 64
Context = grpc.aio.ServicerContext[Any, Any]


class Session:
    """A caller. Asked again and again while a stream lasts: a token that was withdrawn no longer counts.

    `name` is for logs. `peer` has a share of what the server has: a token; else a certificate's name; else an address. `caller`
    is that peer at one address.
    """

    def __init__(self, tokens: TokenFile | None, digest: bytes, certificate: str, address: str) -> None:
        self._tokens = tokens
        self._digest = digest
        self._anybody = Principal(certificate or _ANONYMOUS)
        self.name = self.principal().name
        self.peer = address if tokens is None and not certificate else self.name
        self.caller = f"{self.peer} {address}"

    def principal(self) -> Principal:
        """Who it is, by the tokens file as it is now. Raises Unauthenticated."""
        if self._tokens is None:
            return self._anybody
        found = self._tokens.find(self._digest)
        if found is None:
            raise Unauthenticated("the bearer token is not one that this server knows")
        return found


class Gate:
    """Admits callers: by their token where there is a tokens file, else everybody that the transport let through.

    That is: every peer that has a certificate signed by --tls-client-ca, can open the unix socket, or reaches the address.
    """

    def __init__(
        self,
        config: ServerConfig,
        *,
        note: Callable[[Context], None] = lambda context: None,
        connections: SharedConnections | None = None,
        between_processes: bool = False,
    ) -> None:
        """Raises ConfigError for a tokens file that cannot be used. `note` gets every call that is admitted. `connections`:
        those that calls come over.

        `between_processes`: callers are this server's own workers, which say for whom they call (`told_of`).
        """
        self._tokens = TokenFile(config.tokens_file) if config.tokens_file is not None else None
        self._between_processes = between_processes
        self._note = note
        self.connections = connections or SharedConnections()

    def admit(self, context: Context) -> Session:
        """Raises Unauthenticated."""
        session = self._session(context)
        self._note(context)
        return session

    def _session(self, context: Context) -> Session:
        if self._tokens is None:
            return Session(None, b"", self._certificate_name(context), self._address(context))
        values = [value for key, value in context.invocation_metadata() or () if key == AUTHORIZATION_KEY]
        token = bearer_token(values[0]) if len(values) == 1 and isinstance(values[0], str) else None
        if not token:
            raise Unauthenticated("this server wants a bearer token, and the call has none")
        return Session(self._tokens, digest_of(token), "", self._address(context))

    def told_of(self, context: Context) -> tuple[tuple[str, str | bytes], ...]:
        """Metadata that say who is calling, for the process that answers instead of this one."""
        told: list[tuple[str, str | bytes]] = [(k, v) for k, v in context.invocation_metadata() or () if k == AUTHORIZATION_KEY]
        return *told, (_ADDRESS_KEY, self._address(context)), (_CERTIFICATE_KEY, self._certificate_name(context).encode())

    def _address(self, context: Context) -> str:
        told = _metadata(context, _ADDRESS_KEY) if self._between_processes else address_of(context)
        return told if isinstance(told, str) else ""

    def _certificate_name(self, context: Context) -> str:
        """The common name in the caller's certificate, of what can be printed; "" without one."""
        if self._between_processes:
            told = _metadata(context, _CERTIFICATE_KEY)
            return told.decode() if isinstance(told, bytes) else ""
        names = (context.auth_context() or {}).get("x509_common_name", ())
        return "".join(c for name in names for c in name.decode(errors="replace")[:64] if c.isprintable())


def host_of(peer: str) -> tuple[str, int] | None:
    """Host and port of a caller, as gRPC names it; None on a unix socket."""
    kind, _, rest = peer.partition(":")
    host, _, port = unquote(rest).rpartition(":")
    return (plain_host(host.strip("[]")), int(port)) if kind in ("ipv4", "ipv6") and port.isdigit() else None


def plain_host(host: str) -> str:
    """An address as it is written when it is not wrapped into another kind."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    return str(getattr(address, "ipv4_mapped", None) or address)


def address_of(context: Context) -> str:
    """Where a call comes from, without its port. On a unix socket everybody is one."""
    peer = context.peer()
    host = host_of(peer)
    return network_of(host[0]) if host is not None else peer.partition(":")[0]


def network_of(host: str) -> str:
    """The address that shares are counted by. Of IPv6 the network: a host has as many addresses there as it likes."""
    return str(ipaddress.ip_network((host, _HOST_PREFIX_BITS), strict=False)) if ":" in host else host


def _metadata(context: Context, key: str) -> str | bytes | None:
    return next((value for name, value in context.invocation_metadata() or () if name == key), None)


def beyond_first(total: int) -> int:
    """How many of `total` there may be before only peers get one that hold none: all but the last quarter."""
    return total + -total // PEERS_ASSUMED


class Shares:
    """How much of something is in use, in all and by each peer. Both have a limit, so that no peer can use up all of it.

    Nor can a few peers together: the last quarter goes to peers that hold none, one each.
    """

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
        if self._by_peer[peer] and self._total >= beyond_first(self._total_max):
            raise TooMany(f"the last of the {self._total_max} {self._what} at a time are for peers that have none")
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
