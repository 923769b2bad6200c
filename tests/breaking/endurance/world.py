"""A storage server and senders as processes that can be killed, stopped and started again."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self

from ledger import Promise, Try, promises, tries
from pair import Pair
from support.descendants import descendants
from support.files import files_below
from support.ports import free_port

from slotstream.client import ServerUnavailable, connect
from slotstream.wire.nixl import is_installed

_START_S = 120.0
_SENDER = Path(__file__).with_name("sender.py")


class Process:
    """One process, started from a command that can be run again."""

    def __init__(
        self, name: str, command: Callable[[], list[str]], log: Path, environment: Mapping[str, str] | None = None
    ) -> None:
        """`environment`: added to this process's."""
        self.name = name
        self._environment = {**os.environ, **(environment or {})}
        self._command = command
        self._log = log
        self.stopped = False
        self.start()

    def start(self) -> None:
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                self._command(), stdin=subprocess.PIPE, stdout=log, stderr=log, env=self._environment
            )
        self.stopped = False

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def end(self, number: signal.Signals, timeout_s: float = 60.0) -> int:
        """Signals the process and waits until it is gone; its status."""
        if self.stopped:
            self.send(signal.SIGCONT)
            self.stopped = False
        self.send(number)
        return self.process.wait(timeout_s)

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def resident_bytes(self) -> int:
        found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{self.process.pid}/status").read_text())
        return int(found[1]) << 10 if found else 0

    def descriptors(self) -> int:
        """Open ones, but for those of samples that are arriving: how many that are is a matter of the moment."""
        found = 0
        for descriptor in Path(f"/proc/{self.process.pid}/fd").iterdir():
            with suppress(FileNotFoundError):  # Closed just now.
                found += not str(descriptor.readlink()).endswith(".partial")
        return found

    def threads(self) -> int:
        return len(list(Path(f"/proc/{self.process.pid}/task").iterdir()))


def _transport(number: int) -> str:
    """Of a sender: half of them go by NIXL, where there is one."""
    return "nixl" if number % 2 and is_installed() else "grpc"


class World:
    """A server in a directory of its own, `senders` senders, their ledgers, and a spool that they share, if `spool`.

    With a `pair` there are two equal servers, which keep everything in it. Ends everything on leaving.
    """

    def __init__(
        self,
        senders: int,
        seed: int,
        *,
        pause_ms: float = 10.0,
        spool: bool = False,
        workers: int = 1,
        streams: int | None = None,
        shims: Callable[[Path, Path], Mapping[str, str]] | None = None,
        server_options: Sequence[str] = (),
        pair: Pair | None = None,
    ) -> None:
        """`streams` of each sender: as many as `workers`, if not said. `shims`: the environment that puts something below the
        server, by a directory for it and the data directory.
        """
        self._dir = tempfile.TemporaryDirectory(prefix="slotstream-endurance-")
        self.work = Path(self._dir.name)
        self.data_dir = self.work / "data"
        self.pair = pair
        self._workers = workers
        sockets = [f"unix:{self.work}/s{number}" for number in range(1 if pair is None else 2)]
        self.addresses = sockets if workers == 1 else [f"127.0.0.1:{free_port()}"]
        self.address = ",".join(self.addresses)
        self._pause_ms = pause_ms
        self._streams = workers if streams is None else streams
        self._spool = self.work / "spool" if spool else None
        self._seeds = iter(range(seed * 1_000_000, (seed + 1) * 1_000_000))
        self.server_options = list(server_options)  # More of them, from its next start on.
        below = shims(self.work, self.data_dir) if shims is not None else {}
        self.servers: list[Process] = []
        for number in range(len(self.addresses)):
            name = "server" if pair is None else f"server{number}"
            environment = below if pair is None else {**below, **pair.environment}
            command = partial(self._server_command, number)
            self.servers.append(Process(name, command, self.work / f"{name}.log", environment))
        self.server = self.servers[0]
        for server in self.servers:
            self.wait_for(server)
        self.senders = [self._sender(f"sender{number}", "--transport", _transport(number)) for number in range(senders)]

    def _server_command(self, number: int) -> list[str]:
        options = ["--listen", self.addresses[number], "--drain-s", "2", "--metrics", "127.0.0.1:0"]
        place = self.data_dir / str(number)
        options += ["--data", str(self.data_dir)] if self.pair is None else self.pair.options(place)
        options += ["--workers", str(self._workers), *self.server_options]
        return [sys.executable, "-m", "slotstream.cli.main", "serve", *options, "--log-level", "info"]

    def _sender(self, name: str, *more: str) -> Process:
        def command() -> list[str]:  # Each start has a seed, and so samples, of its own.
            ledger = str(self.work / f"{name}.ledger")
            options = ["--pause-ms", str(self._pause_ms), "--streams", str(self._streams), *more]
            if self._spool is not None:
                options += ["--spool", str(self._spool)]
            return [sys.executable, str(_SENDER), self.address, ledger, name, str(next(self._seeds)), *options]

        return Process(name, command, self.work / f"{name}.log")

    def inherit(self) -> None:
        """Returns once a last sender brought the server what the others left in the spool, if anything."""
        if self._spool is None:
            return
        heir = self._sender("heir", "--heir")
        deadline = time.monotonic() + _START_S
        try:
            while (left := files_below(self._spool, ".spool")) and heir.alive:
                assert time.monotonic() < deadline, f"{left} stayed in the spool:\n{heir.log()[-4000:]}"
                time.sleep(0.05)
            allowed = self.may_end_with(heir)
            code = heir.end(signal.SIGTERM)
            assert code in allowed, f"the heir ended with {code}:\n{heir.log()[-4000:]}"
        finally:
            if heir.alive:
                heir.end(signal.SIGKILL)

    def wait_for_server(self) -> None:
        """Returns once the server answers. Raises AssertionError, with its log, when it does not."""
        self.wait_for(self.server)

    def wait_for(self, server: Process) -> None:
        """As `wait_for_server`, of one of several."""
        deadline = time.monotonic() + _START_S
        while True:
            try:
                return connect(self.addresses[self.servers.index(server)], connect_timeout_s=_START_S).close()
            except ServerUnavailable:  # A worker of a killed server may have listened still, and hung up.
                if time.monotonic() >= deadline or not server.alive:
                    raise AssertionError(f"the {server.name} did not start:\n{server.log()[-4000:]}") from None

    def any_server(self, rng: random.Random) -> Process:
        return self.server if len(self.servers) == 1 else rng.choice(self.servers)

    def server_workers(self) -> list[int]:
        """Processes of the server beside its primary."""
        return descendants(self.server.process.pid, "slotstream.server.processes.worker")

    def stream_processes(self, sender: Process) -> list[int]:
        """Processes of a sender that have one of its streams each."""
        return descendants(sender.process.pid, "slotstream.connector.sending.process.lane_main")

    def tries(self) -> dict[str, list[Try]]:
        return tries(sorted(self.work.glob("*.ledger")))

    def promises(self) -> Iterator[Promise]:
        for path in sorted(self.work.glob("*.ledger")):
            yield from promises(path)

    def ledger_bytes(self) -> int:
        return sum(path.stat().st_size for path in self.work.glob("*.ledger"))

    def wait_for_traffic(self) -> None:
        """Returns once the senders wrote something new: rounds then meet traffic, however slow the machine is."""
        before, deadline = self.ledger_bytes(), time.monotonic() + _START_S
        while self.ledger_bytes() < before + 2000:
            dead = [process.name for process in self.senders if not process.alive]
            assert not dead, f"{dead} ended by themselves:\n{self.senders[0].log()[-3000:]}"
            assert time.monotonic() < deadline, "the senders send nothing:\n" + self.senders[0].log()[-3000:]
            time.sleep(0.01)

    def may_end_with(self, process: Process) -> set[int]:
        """The statuses that SIGTERM may end it with: a sender that has not begun yet has no handler to be orderly by."""
        if process in self.servers:
            return {0}
        ledger = self.work / f"{process.name}.ledger"
        begun = ledger.exists() and f'"pid": {process.process.pid}}}' in ledger.read_text()
        return {0} if begun else {0, -signal.SIGTERM}

    def forget(self) -> None:
        """Everything is settled and deleted: ledgers start over."""
        for path in self.work.glob("*.ledger"):
            path.unlink()

    def scrape(self) -> dict[str, float]:
        """The server's gauges and counters without labels, and those with labels by their whole name."""
        url = re.findall(r"metrics on (\S+)", self.server.log())[-1].strip('",}')
        with urllib.request.urlopen(url, timeout=30) as answer:
            lines = answer.read().decode().splitlines()
        return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if not line.startswith("#")}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for process in (*self.senders, *self.servers):
            if process.alive:
                process.end(signal.SIGKILL)
        if error is not None and os.environ.get("SLOTSTREAM_KEEP_WORK"):
            self._dir._finalizer.detach()  # type: ignore[attr-defined]
            print(f"kept {self.work}", file=sys.stderr)
            return
        self._dir.cleanup()
