"""Who is logged in, and who guessed wrong. In memory alone: a restart logs everybody out."""

from __future__ import annotations

import hashlib
import ipaddress
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from slotstream.client import Client
from slotstream.wire.errors import TooMany

SESSIONS_MAX = 1000
SESSIONS_OF_TOKEN_MAX = 100
SESSION_S = 12 * 3600.0
ADDRESSES_MAX = 1000
WRONG_FREE = 3  # Wrong tokens of one address that cost nothing yet: people mistype.
WAIT_S_MAX = 60.0
Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Session:
    client: Client  # Asks the server with the visitor's token.
    owner: bytes  # Digest of that token.
    ends_s: float


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()


class Sessions:
    """By what the visitor's cookie holds, of which only a digest is kept. Thread safe."""

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._sessions: OrderedDict[bytes, Session] = OrderedDict()  # The first one ends first.

    def begin(self, client: Client, token: str) -> str:
        """What the cookie holds from now on. A token's 101st session ends its first. Raises TooMany."""
        name, owner = secrets.token_urlsafe(32), _digest(token)
        with self._lock:
            self._drop_ended()
            own = [key for key, session in self._sessions.items() if session.owner == owner]
            if len(own) >= SESSIONS_OF_TOKEN_MAX:
                del self._sessions[own[0]]
            if len(self._sessions) >= SESSIONS_MAX:
                raise TooMany(f"{SESSIONS_MAX} visitors are logged in, which is the most: try again later")
            self._sessions[_digest(name)] = Session(client, owner, self._clock() + SESSION_S)
        return name

    def find(self, name: str) -> Session | None:
        with self._lock:
            session = self._sessions.get(_digest(name))
            return session if session is not None and session.ends_s > self._clock() else None

    def end(self, name: str) -> None:
        with self._lock:
            self._sessions.pop(_digest(name), None)

    def _drop_ended(self) -> None:
        now = self._clock()
        while self._sessions and next(iter(self._sessions.values())).ends_s <= now:
            self._sessions.popitem(last=False)


class WrongTokens:
    """Slows down who guesses: after a few wrong tokens, an address waits twice as long after each. Thread safe."""

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._wrong: OrderedDict[str, tuple[int, float]] = OrderedDict()  # Address -> how many, and when it may try again.

    def wait_s(self, address: str) -> float:
        """For how long the address may not try; 0: it may."""
        with self._lock:
            _, at = self._wrong.get(_network(address), (0, 0.0))
            return max(0.0, at - self._clock())

    def add(self, address: str) -> None:
        """It sent a wrong one."""
        with self._lock:
            network, now = _network(address), self._clock()
            count, at = self._wrong.pop(network, (0, 0.0))
            if at + SESSION_S < now:
                count = 0
            wait_s = 0.0 if count < WRONG_FREE else min(WAIT_S_MAX, 2.0 ** (count - WRONG_FREE))
            self._wrong[network] = (min(count + 1, 64), now + wait_s)
            if len(self._wrong) > ADDRESSES_MAX:
                self._wrong.popitem(last=False)

    def forget(self, address: str) -> None:
        """It sent a right one."""
        with self._lock:
            self._wrong.pop(_network(address), None)


def _network(address: str) -> str:
    """Of IPv6 the /64, all of which one visitor may have."""
    try:
        number = ipaddress.ip_address(address)
    except ValueError:
        return address
    return str(ipaddress.ip_network((number, 64), strict=False)) if number.version == 6 else address
