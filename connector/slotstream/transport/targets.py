"""The servers that rows may go to, and which one is tried next. What a stream to one of them still owes before it is left.

Each part that connects (a stream, the health watch) has its own `Targets`, so that many workers spread over the servers.
"""

from __future__ import annotations

import ipaddress
import math
import random
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from slotstream.wire.address import is_socket

RECORDS_MAX = 64  # Of one name; of more, a random choice.
_DOUBLINGS_MAX = 16

Resolve = Callable[[str, int], list[str]]


@dataclass(frozen=True, slots=True)
class Target:
    """One server. `address` is what is connected to; `name` is the address as the operator gave it, as the certificate says."""

    address: str
    name: str

    def __str__(self) -> str:
        return self.address if self.address == self.name else f"{self.name} ({self.address})"


def as_targets(server: str | Targets) -> Targets:
    """A single address as its own list."""
    return server if isinstance(server, Targets) else Targets((server,))


def resolve(host: str, port: int) -> list[str]:
    """The numbers that a host's name stands for, each once; none where it stands for nothing now. May wait for DNS."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    return list(dict.fromkeys(str(address[0]) for _, _, _, _, address in found))


class Targets:
    """Which server is tried next. Not thread-safe, but for `current` and `several`.

    A round tries every server once, in random order. Names are looked up for every round: one with several records stands for
    several servers. `several`: whether the last round had more than one. `clock`: monotonic seconds.
    """

    def __init__(
        self,
        servers: Sequence[str],
        *,
        resolve: Resolve = resolve,
        rng: random.Random | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.servers = tuple(servers)
        self.current: Target | None = None
        self.several = len(servers) > 1
        self._resolve = resolve
        self._rng = rng or random.Random()
        self._clock = clock
        self._round_size = len(servers)
        self._left: list[Target] = []  # Of this round; the next one last.
        self._ended_at: dict[Target, float] = {}  # When its last try was over.
        self._in_vain = 0  # Tries since one was up, with the end of that one.

    def next(self) -> Target:
        """The server to try now."""
        if not self._left:
            self._left = self._round()
        self.current = self._left.pop()
        return self.current

    def prefer(self, target: Target) -> None:
        """Try this one next, where it is one of ours or a name's record that we have not seen yet."""
        if target.name in self.servers:
            self._left = [other for other in self._left if other != target]
            self._left.append(target)
            self._ended_at.pop(target, None)

    def ended(self, *, up: bool) -> None:
        """The try of the current one is over. `up`: it had answered; then all others are tried before it is tried again."""
        assert self.current is not None
        self._ended_at[self.current] = self._clock()
        self._in_vain = 1 if up else self._in_vain + 1
        if up:
            self._left = []

    @property
    def all_tried(self) -> bool:
        """Whether none has answered since one was up last: every server is away."""
        return self._in_vain >= self._round_size

    def pause_s(self, first_s: float, most_s: float) -> float:
        """How long to wait before `next`: none is tried twice within `first_s`, which doubles with each round, to `most_s`."""
        if not self._left:
            self._left = self._round()
        rounds = max(0, self._in_vain - 1) // self._round_size
        apart_s = min(first_s * float(2 ** min(rounds, _DOUBLINGS_MAX)), most_s)
        since_s = self._clock() - self._ended_at.get(self._left[-1], -math.inf)
        return max(0.0, apart_s - since_s)

    def _round(self) -> list[Target]:
        found = list(dict.fromkeys(target for server in self.servers for target in self._targets(server)))
        self._rng.shuffle(found)
        if self.current in found:  # It has just failed: the others first.
            found.remove(self.current)
            found.insert(0, self.current)
        self._round_size = len(found)
        self.several = len(found) > 1
        self._ended_at = {target: at for target, at in self._ended_at.items() if target in found}
        return found

    def _targets(self, server: str) -> list[Target]:
        """The servers behind one address. A name with one record, or none now, stays a name: gRPC looks it up itself."""
        itself = [Target(server, server)]
        host, _, port = server.rpartition(":")
        if is_socket(server) or _is_number(host.strip("[]")):
            return itself
        numbers = self._resolve(host, int(port))
        if len(numbers) < 2:
            return itself
        chosen = self._rng.sample(numbers, RECORDS_MAX) if len(numbers) > RECORDS_MAX else numbers
        return [Target(_joined(number, port), server) for number in chosen]


def _is_number(host: str) -> bool:
    try:
        ipaddress.ip_address(host.replace("%25", "%"))
    except ValueError:
        return False
    return True


def _joined(number: str, port: str) -> str:
    return f"[{number.replace('%', '%25')}]:{port}" if ":" in number else f"{number}:{port}"


class OpenOnStream:
    """The samples that a stream owes a verdict, by number, and whether it is being left. Its owner's lock guards it.

    A server that shuts down finishes what is open and opens no more. Where there is another server, the stream refuses new
    samples itself, so that this one notes no failure of them, and ends once nothing is open on it.
    """

    def __init__(self) -> None:
        self._numbers: set[int] = set()
        self.leaving = False

    def open(self, number: int) -> bool:
        """Notes a sample that begins; False where the stream takes no more."""
        if not self.leaving:
            self._numbers.add(number)
        return not self.leaving

    def ended(self, number: int) -> None:
        """It has its verdict."""
        self._numbers.discard(number)

    def takes(self, number: int) -> bool:
        """Whether what belongs to this sample is sent: not where it was refused here."""
        return not self.leaving or number in self._numbers

    @property
    def may_end(self) -> bool:
        """Whether the stream is being left, and owes nothing any more."""
        return self.leaving and not self._numbers

    def clear(self) -> None:
        """What was open counts no longer."""
        self._numbers.clear()
        self.leaving = False
