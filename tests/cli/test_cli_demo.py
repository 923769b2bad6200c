"""`slotstream demo --stay` and the processes that a demo starts, without vLLM."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.waiting import wait_until

from slotstream.demo import run
from slotstream.demo.processes import ProcessFailed, Running

_IGNORES_SIGTERM = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); signal.pause()"


@pytest.fixture(autouse=True)
def _children_hear_ctrl_c() -> Iterator[None]:
    """A shell that started these tests in the background has them, and their children, ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_staying_ends_when_a_process_does(tmp_path: Path) -> None:
    log = tmp_path / "log"
    ends = "import signal; print('last words', flush=True); signal.pause()"
    with (
        Running("one", [sys.executable, "-c", "import signal; signal.pause()"], tmp_path / "one") as one,
        Running("the other", [sys.executable, "-c", ends], log) as other,
    ):
        wait_until(lambda: "last words" in log.read_text())
        other.process.kill()
        with pytest.raises(ProcessFailed, match=r"^the other exited with -9:\nlast words$"):
            run._stay(one, other)


def test_ctrl_c_ends_staying(tmp_path: Path) -> None:
    # The first look is where the wait has begun.
    script = (
        "import sys; from pathlib import Path; from slotstream.demo import run; from slotstream.demo.processes import Running\n"
        "class Looked(Running):\n"
        "    def check_alive(self):\n"
        "        print(self.process.pid, flush=True)\n"
        "        super().check_alive()\n"
        "with Looked('one', [sys.executable, '-c', 'import signal; signal.pause()'], Path(sys.argv[1])) as one:\n"
        "    run._stay(one)\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "one")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as staying:
        assert staying.stdout is not None
        child = int(staying.stdout.readline())
        staying.send_signal(signal.SIGINT)
        assert staying.wait(60) == 0
    assert not Path(f"/proc/{child}").exists()


def test_a_second_ctrl_c_leaves_no_process_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "log"
    running = Running("one", [sys.executable, "-c", _IGNORES_SIGTERM], log)
    wait_until(lambda: "up" in log.read_text())
    waits = running.process.wait

    def interrupted(timeout: float | None = None) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(running.process, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        running.stop()
    assert waits(60) == -signal.SIGKILL


def test_the_users_own_server_is_not_the_demos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLOTSTREAM_SERVE_TOKENS", "tokens.toml")
    monkeypatch.setenv("NOTIFY_SOCKET", "/nowhere")
    monkeypatch.setenv("SLOTSTREAM_DEBUG", "1")
    log = tmp_path / "log"
    with Running("env", ["env"], log, {"MORE": "2"}) as shows:
        shows.process.wait(60)
    lines = log.read_text().splitlines()
    assert {"SLOTSTREAM_DEBUG=1", "MORE=2"} <= {*lines}
    assert not [line for line in lines if line.startswith(("SLOTSTREAM_SERVE_", "NOTIFY_SOCKET"))]
    assert os.environ["NOTIFY_SOCKET"] == "/nowhere"


@pytest.mark.parametrize("kept", [True, False])
def test_what_is_printed_can_be_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: bool) -> None:
    found: Any = None
    monkeypatch.setattr("shutil.which", lambda name: found)
    work = tmp_path / "a folder"
    said = run._how_to_use("127.0.0.1:1", 2, work, kept=kept)
    lines = [line for line in said.splitlines() if line.startswith("  ")]
    commands = [shlex.split(line) for line in lines]
    assert commands[0] == ["export", "SLOTSTREAM_SERVER=127.0.0.1:1", "VLLM=http://127.0.0.1:2"]
    assert commands[2][:5] == [sys.executable, "-m", "slotstream.cli.main", "get", "mine"]
    compile(commands[-1][-1], "printed", "exec")
    assert str(work) in said
    assert ("go with Ctrl-C" in said) != kept
    found = "/usr/bin/slotstream"
    assert "\n  slotstream ls\n" in run._how_to_use("127.0.0.1:1", 2, work, kept=kept)
