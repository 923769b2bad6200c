"""`slotstream demo --stay`: the commands that it prints work while it stays, and Ctrl-C ends all that it started."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.descendants import descendants
from support.waiting import wait_until

from slotstream.demo.processes import Running

pytestmark = [pytest.mark.vllm, pytest.mark.extended, pytest.mark.timeout(900)]  # It starts an engine.


@pytest.fixture(autouse=True)
def _children_hear_ctrl_c() -> Iterator[None]:
    """A shell that started these tests in the background has them, and their children, ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_what_it_prints_can_be_used_until_ctrl_c(tmp_path: Path) -> None:
    log = tmp_path / "demo.log"
    command = [
        sys.executable,
        "-m",
        "slotstream.cli.main",
        "demo",
        "--stay",
        "--requests",
        "2",
        "--keep",
        str(tmp_path / "kept"),
    ]
    with Running("slotstream demo", command, log) as demo:
        demo.wait_until(lambda: "Samples and logs lie below" in log.read_text(), 540.0)
        said = log.read_text()
        assert re.search(r"\d+ rows of 2 samples checked, 0 wrong", said)
        children = descendants(demo.process.pid, "")
        lines = [line.strip() for line in said.split("In another shell:\n")[1].splitlines() if line.startswith("  ")]
        assert len(lines) == 6
        lines[4] += " || [ $? = 1 ]"  # `status` may find a problem, such as little disk.
        script = "set -e\n" + "\necho ---\n".join(lines)
        used = subprocess.run(["bash", "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
        assert used.returncode == 0, used.stderr
        _, answer, _, listed, status, read = used.stdout.split("---\n")
        assert json.loads(answer)["kv_transfer_params"]["slotstream"]["sample_id"] == "mine"
        assert "mine" in listed
        assert "demo-00" in listed
        assert (tmp_path / "mine.safetensors").stat().st_size > 0
        assert status
        assert read.startswith("<Sample default/mine: 15 tokens, layers 1,3,6,final,")
        demo.process.send_signal(signal.SIGINT)
        assert demo.process.wait(120.0) == 0
    wait_until(lambda: not any(Path(f"/proc/{child}").exists() for child in children), "its children to end")
    assert len(children) >= 2
    assert list((tmp_path / "kept" / "data").rglob("mine.safetensors"))
