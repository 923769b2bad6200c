"""The contenders of the transport benchmark, and how one of them is measured."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import transport_mooncake as mooncake
from children import Child, tree_cpu_seconds
from contenders import Server
from load import SOURCE_BYTES, Load, Senders
from null_store import serve_nothing
from transport_others import CopyStream, FlightStream, PlainFileStream, SocketStream, receive_sockets, serve_flight
from transport_ours import SinkStream

from slotstream.wire.names import CHUNK_BYTES_MAX
from slotstream.wire.nixl import is_installed

STORED = " stored"  # Ends the names of those that store what they move.
PLAIN_FILE = "write + fdatasync"
OURS = ("gRPC TCP", "gRPC unix", "NIXL CMA", "NIXL TCP")
_ALONE = 16  # Chunks that are sent one at a time.
_UCX_TCP = "tcp,cuda_copy" if Path("/dev/nvidiactl").exists() else "tcp"  # NIXL wants the one with a GPU, UCX warns without.
_GB = 1e9


@dataclass(frozen=True, slots=True)
class Round:
    """One contender's figures of one run: CPU of all processes, milliseconds of chunks; None where there are none."""

    gb_per_s: float
    cpu_s_per_gb: float
    p50_ms: float | None
    p99_ms: float | None
    alone_ms: float | None


@dataclass(slots=True)
class Contender:
    """Who moves a load: senders, and what receives (nothing where one process does all)."""

    name: str
    senders: Senders
    receivers: Sequence[int] = ()  # Process ids.
    chunk_bytes_max: int | None = None

    def takes(self, load: Load) -> bool:
        return self.chunk_bytes_max is None or load.chunk_bytes <= self.chunk_bytes_max

    def measure(self, load: Load) -> Round:
        """Run it twice, and say what the second run took: see `ingest.measure` for why. Raises ChildFailed."""
        self.senders.prepare(load)
        self.senders.all("run")
        self.senders.all("clear")
        pids = [*self.senders.pids, *self.receivers]
        before = sum(map(tree_cpu_seconds, pids))
        seconds, answers = self.senders.all("run")
        used = sum(map(tree_cpu_seconds, pids)) - before
        self.senders.all("clear")
        alone = self.senders.one("alone", max(1, min(_ALONE, SOURCE_BYTES // load.chunk_bytes)))
        self.senders.all("clear")
        self.senders.all("release")
        gb = load.total_bytes / _GB
        taken = sorted(1e3 * one for answer in answers for one in answer)
        return Round(
            gb / seconds,
            used / gb,
            statistics.median(taken) if taken else None,
            taken[int(len(taken) * 0.99)] if taken else None,
            1e3 * statistics.median(alone) if alone else None,
        )


class _Assembly:
    """Starts contenders, and ends them with `stack`."""

    def __init__(self, stack: ExitStack, sockets: Path, data: Path) -> None:
        self._stack = stack
        self._sockets = sockets
        self._data = data

    def _senders(self, name: str, make: Callable[..., Any], *arguments: Any, env: Mapping[str, str]) -> Senders:
        senders = Senders(name, make, *arguments, environment=env)
        self._stack.callback(senders.close)
        return senders

    def _receiver(self, name: str, main: Callable[..., None], *arguments: Any, env: Mapping[str, str]) -> tuple[int, str]:
        child = Child(name, main, *arguments, tuned=True, environment=env)
        self._stack.callback(child.close)
        return child.pid, child.answer()

    def directory(self, name: str) -> Path:
        path = self._data / name
        path.mkdir()
        return path

    def alone(self, name: str, make: Callable[..., Any], *arguments: Any) -> Contender:
        return Contender(name, self._senders(name, make, *arguments, env={}))

    def socket(self, name: str, address: str) -> Contender:
        pid, bound = self._receiver(name, receive_sockets, address, env={})
        return Contender(name, self._senders(name, SocketStream, bound, env={}), (pid,))

    def flight(self, name: str, directory: Path | None) -> Contender:
        pid, location = self._receiver(name, serve_flight, env={})
        return Contender(name, self._senders(name, FlightStream, location, directory, env={}), (pid,))

    def mooncake(self, name: str) -> Contender:
        receiver = mooncake.MooncakeReceiver()
        self._stack.callback(receiver.close)
        senders = self._senders(name, mooncake.MooncakeStream, receiver.address, env=mooncake.ENVIRONMENT)
        return Contender(name, senders, receiver.pids)

    def ours(self, name: str, *, stored: bool) -> Contender:
        transport = "nixl" if "NIXL" in name else "grpc"
        environment = {"UCX_TLS": _UCX_TCP} if name.startswith("NIXL TCP") else {}
        kind = f"{len(name)}{'s' if stored else 'n'}{transport}"
        listen = f"unix:{self._sockets}/{kind}" if "unix" in name else "127.0.0.1:0"
        if stored:
            data = self.directory(name.replace(" ", "-"))
            server = Server(listen, data, "--transport", transport, environment=environment)
            self._stack.callback(server.close)
            pid, address = server.pid, server.address
        else:
            pid, address = self._receiver(name, serve_nothing, listen, transport, env=environment)
        senders = self._senders(name, SinkStream, address, transport, stored, env=environment)
        return Contender(name, senders, (pid,), CHUNK_BYTES_MAX)


def missing() -> dict[str, str]:
    """What of the contenders cannot run here -> why."""
    found = {
        "Arrow Flight": "" if find_spec("pyarrow") else "pyarrow is not installed",
        "Mooncake": mooncake.missing(),
        "NIXL": "" if is_installed() else "NIXL is not installed",
    }
    return {name: why for name, why in found.items() if why}


@contextmanager
def assembled(names: Sequence[str], sockets: Path, data: Path) -> Iterator[list[Contender]]:
    """The contenders of these names, started."""
    with ExitStack() as stack:
        make = _Assembly(stack, sockets, data)
        ways: dict[str, Callable[[], Contender]] = {
            "memcpy": lambda: make.alone("memcpy", CopyStream),
            "raw TCP": lambda: make.socket("raw TCP", "127.0.0.1:0"),
            "raw unix": lambda: make.socket("raw unix", f"unix:{sockets}/raw"),
            "Arrow Flight": lambda: make.flight("Arrow Flight", None),
            "Mooncake": lambda: make.mooncake("Mooncake"),
            PLAIN_FILE: lambda: make.alone(PLAIN_FILE, PlainFileStream, make.directory("plain")),
            f"Arrow Flight{STORED}": lambda: make.flight(f"Arrow Flight{STORED}", make.directory("flight")),
        }
        for ours in OURS:
            ways[ours] = lambda ours=ours: make.ours(ours, stored=False)  # type: ignore[misc]
            ways[ours + STORED] = lambda ours=ours: make.ours(ours + STORED, stored=True)  # type: ignore[misc]
        yield [ways[name]() for name in names]


NULL = ("memcpy", "raw TCP", "raw unix", "Arrow Flight", "Mooncake", *OURS)
DURABLE = (PLAIN_FILE, f"Arrow Flight{STORED}", *(name + STORED for name in OURS))
