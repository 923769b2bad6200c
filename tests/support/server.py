"""A real `slotstream serve` in a process of its own."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from slotstream.client import ServerUnavailable, connect


class ServerProcess:
    """Listens on a socket of its own until the `with` block ends. `address`, `data_dir`, and `log()` for when it failed."""

    def __init__(
        self,
        data_dir: Path | None,
        *options: str,
        address: str | None = None,
        start_timeout_s: float = 60.0,
        transport: str = "grpc",
        environment: dict[str, str] | None = None,
        wait: bool = True,
        **access: Any,
    ) -> None:
        """`data_dir`: None where the options say `--store`. `transport`: the default of `--transport`; a server that may use
        NIXL ("auto") starts a reader, a third of a second of processor. `environment`: added to this process's. `wait`: return
        once it answers. `access`: how to connect, where the options ask for it: arguments of `slotstream.client.connect`.
        """
        # Not in the test's own directory: a socket's path may be 107 bytes long.
        self._sockets = tempfile.TemporaryDirectory(prefix="slotstream-")
        self._log_path = Path(self._sockets.name) / "log"
        self.data_dir = data_dir or Path()
        self.address = address or f"unix:{self._sockets.name}/s"
        command = [sys.executable, "-m", "slotstream.cli.main", "serve", "--listen", self.address]
        command += [] if data_dir is None else ["--data", str(data_dir)]
        with self._log_path.open("wb") as log:
            self.process = subprocess.Popen(
                [*command, *options],
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                env={"SLOTSTREAM_SERVE_TRANSPORT": transport, **os.environ, **(environment or {})},
            )
        if wait:
            self._wait_until_up(start_timeout_s, access)

    def log(self) -> str:
        return self._log_path.read_text(errors="replace")

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric's series that have these labels; the server was started with --metrics."""
        found = re.search(r"metrics on (http://\S+/metrics)", self.log())
        assert found is not None, self.log()
        with urllib.request.urlopen(found[1], timeout=10.0) as answer:
            lines = answer.read().decode().splitlines()
        series = [line for line in lines if line.startswith((f"{name}{{", f"{name} "))]
        return sum(float(line.rsplit(" ", 1)[1]) for line in series if all(f'{k}="{v}"' in line for k, v in labels.items()))

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Signals the server and waits for its exit; the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        try:
            return self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise AssertionError(f"the server did not stop:\n{self.log()}") from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            self.stop()
        finally:
            self._sockets.cleanup()

    def _wait_until_up(self, timeout_s: float, access: dict[str, Any]) -> None:
        try:
            connect(self.address, connect_timeout_s=timeout_s, **access).close()
        except ServerUnavailable:
            self.process.kill()
            self.process.wait()
            raise AssertionError(f"the server did not start:\n{self.log()}") from None


# The command line, by `python -c`. Python leaves SIGINT alone where it was ignored, as for what a shell runs in the background.
INTERRUPTIBLE = (
    "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
    "from slotstream.cli.main import main; sys.exit(main(sys.argv[1:]))"
)


def run_cli(*arguments: str, stdin: str = "", environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """`slotstream ...` in a process of its own, its output captured: what a script sees."""
    command: Sequence[str] = [sys.executable, "-m", "slotstream.cli.main", *arguments]
    env = {**os.environ, "COLUMNS": "80", **(environment or {})}
    return subprocess.run(command, input=stdin, capture_output=True, text=True, env=env, timeout=120, check=False)
