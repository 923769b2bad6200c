"""docs/upgrade.md, command by command: a backup, an upgrade from 0.1.0, the way back, and forward again.

Version 0.1.0 is taken out of git's history. systemctl and pip are stood in for: a start is a real server of the version that
pip would have installed last.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
from io import BytesIO
from pathlib import Path

import pytest
import torch
from support.as_printed import Shell, commands, is_as_shown
from support.ingest_client import IngestClient
from support.server import ServerProcess
from support.synthetic import SyntheticSample

from slotstream.client import connect

_ROOT = Path(__file__).parents[2]
_PAGE = _ROOT / "docs" / "upgrade.md"
_FIRST = "8c77034e9bb557a7a5b0c746b652b95da679c325"  # 0.1.0, which has no tag.


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> str:
    """PYTHONPATH of version 0.1.0."""
    if not (_ROOT / ".git").exists() or shutil.which("git") is None:
        pytest.skip("not a clone of the repository: version 0.1.0 is in its history")
    tree = tmp_path_factory.mktemp("first")
    archive = subprocess.run(["git", "archive", _FIRST], cwd=_ROOT, stdout=subprocess.PIPE, check=True)
    with tarfile.open(fileobj=BytesIO(archive.stdout)) as files:
        files.extractall(tree, filter="data")
    path = os.pathsep.join(str(tree / name) for name in ("connector", "server", "proto"))
    code = "import slotstream.server.app as app; print(app.__file__)"
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": path}, stdout=subprocess.PIPE, check=True
    )
    assert Path(done.stdout.decode().strip()).is_relative_to(tree)
    return path


class Machine:
    """A server under systemd, and the shell of its operator."""

    def __init__(self, folder: Path, first: str) -> None:
        self.data_dir = folder / "data"
        self._first = first
        self.version = first
        self._server: ServerProcess | None = None
        self._shell = Shell(folder, {"/var/lib/slotstream": str(self.data_dir)}, {})

    @property
    def running(self) -> ServerProcess:
        assert self._server is not None
        return self._server

    def start(self) -> None:
        self._server = ServerProcess(self.data_dir, environment={"PYTHONPATH": self.version})

    def stop(self) -> None:
        if self._server is not None:
            assert self._server.stop() == 0
            self._server = None

    def run(self, line: str) -> str:
        words = line.split()
        if words[0] == "systemctl":
            {"start": self.start, "stop": self.stop}[words[1]]()
            return ""
        if words[0] == "/opt/slotstream/bin/pip":
            assert self._server is None
            self.version = os.pathsep.join(path for path in sys.path if path) if words[-1] == "." else self._first
            return ""
        address = "" if self._server is None else self._server.address
        command = f"export SLOTSTREAM_SERVER={address} PYTHONPATH={self.version}; "
        if words[0] == "slotstream":
            command += f"{sys.executable} -m slotstream.cli.main {' '.join(words[1:])}"
        else:
            command += line
        code, said = self._shell.run(command)
        assert code == 0, f"{line}\n{said}"
        return said


def _sections() -> dict[str, list[tuple[str, str]]]:
    found: dict[str, list[tuple[str, str]]] = {}
    for part in _PAGE.read_text().split("\n## ")[1:]:
        found[part.partition("\n")[0]] = commands(part)
    return found


def test_each_command_does_what_the_page_says(first: str, tmp_path: Path) -> None:
    sections = _sections()
    machine = Machine(tmp_path, first)

    def walk(title: str) -> None:
        for line, shown in sections.pop(title):
            said = machine.run(line)
            assert is_as_shown(said, shown), f"{line}\n{said}"

    rows: dict[str, torch.Tensor] = {}

    def store(*names: str) -> None:
        with IngestClient(machine.running.address) as sender, connect(machine.running.address) as client:
            sender.store(*(SyntheticSample(name) for name in names))
            rows.update({name: client.get(name).hidden_states for name in names})

    def holds(*, failed: bool) -> None:
        with connect(machine.running.address) as client:
            assert {info.sample_id for info in client.list(state="COMMITTED")} == rows.keys()
            assert all(client.get(name).hidden_states.equal(was) for name, was in rows.items())
            assert [info.sample_id for info in client.list(state="FAILED")] == (["broken"] if failed else [])

    try:
        machine.start()
        store("one", "two", "three")
        with IngestClient(machine.running.address) as sender:
            sender.fail(SyntheticSample("broken"))
        walk("Back up")
        now = os.pathsep.join(path for path in sys.path if path)
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(machine, "version", now)  # The backup is restored on another machine.
            walk("Restore a backup")
        with ServerProcess(tmp_path / "restored") as restored, connect(restored.address) as client:
            assert all(client.get(name).hidden_states.equal(was) for name, was in rows.items())
        walk("Upgrade")
        holds(failed=True)
        store("four")
        walk("Go back")
        holds(failed=False)
        walk("Forward again")
        holds(failed=False)
        assert not sections
    finally:
        machine.stop()
