"""docs/first-steps.md, command by command: each prints what the page shows, but for ids, times, sizes and ports.

The page's first command also installs. `make extended` itself did that, by the same target, where it began with a fresh clone.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.as_printed import Shell, commands, is_as_shown
from support.descendants import descendants
from support.ports import free_port
from support.waiting import wait_until
from support.web import Visitor

from slotstream.demo.processes import Running

pytestmark = [pytest.mark.vllm, pytest.mark.extended, pytest.mark.timeout(900)]

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "first-steps.md"


@pytest.fixture(autouse=True)
def _children_hear_ctrl_c() -> Iterator[None]:
    """A shell that started these tests in the background has them, and their children, ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def _look(url: str) -> None:
    """As the page says: the token stays empty. The tokens are shown as the text that they are."""
    visitor = Visitor(url)
    assert visitor.post("/login", {"token": ""}).status == 303
    assert "mine" in visitor.get("/").body
    answer = visitor.get("/samples/default/mine")
    assert answer.status == 200
    assert "<svg" in answer.body
    assert all(f">{letter}<" in answer.body for letter in "capitlofFrne")


def test_each_command_prints_what_the_page_shows(tmp_path: Path) -> None:
    (start, started), *others = commands(PAGE.read_text())
    # As a user calls it, and not as `make extended` would, from whose options this one would take some.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE") and name != "MFLAGS"}
    make = ["make", "-n", *shlex.split(start)[1:]]
    made = subprocess.run(make, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    words = shlex.split(made.stdout.splitlines()[-1])
    assert words[0].endswith("bin/slotstream")
    log = tmp_path / "demo.log"
    running = Running(
        "slotstream demo", ["env", "-C", str(tmp_path), sys.executable, "-m", "slotstream.cli.main", *words[1:]], log
    )
    with running as demo:
        demo.wait_until(lambda: "Samples and logs lie below" in log.read_text(), 600.0)
        said = log.read_text()
        assert is_as_shown(said, started), said
        children = descendants(demo.process.pid, "")
        found = re.search(r"export SLOTSTREAM_SERVER=(\S+) VLLM=(\S+)", said)
        assert found is not None
        port = free_port()
        names = {"slotstream web": f"slotstream web --listen 127.0.0.1:{port}"}
        shell = Shell(tmp_path, names, {"SLOTSTREAM_SERVER": found[1], "VLLM": found[2]})
        (tmp_path / ".venv" / "bin").mkdir(parents=True)
        (tmp_path / ".venv" / "bin" / "activate").touch()
        for line, shown in others[:-1]:
            if line.startswith("slotstream web"):
                code, printed = shell.run_until(
                    line, "shows the samples", signal.SIGINT, lambda: _look(f"http://127.0.0.1:{port}")
                )
                assert code == 130, printed
            else:
                code, printed = shell.run(line)
                assert code == (1 if "(NOT_FOUND)" in shown else 0), f"{line}\n{printed}"
            assert is_as_shown(printed, shown), f"{line}\n{printed}"
        demo.process.send_signal(signal.SIGINT)
        assert demo.process.wait(120.0) == 0
    wait_until(lambda: not any(Path(f"/proc/{child}").exists() for child in children), "its children to end")
    assert len(children) >= 2
    assert list((tmp_path / "demo-data" / "data").rglob("demo-00.safetensors"))
    assert shell.run(others[-1][0]) == (0, "")
    assert not (tmp_path / "demo-data").exists()
