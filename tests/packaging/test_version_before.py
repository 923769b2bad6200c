"""One version back, both ways: the server of before with this connector and client, and the reverse.

The version of before is taken out of git's history. Each of its parts runs in a process of its own, with its own code alone.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sqlite3
import subprocess
import sys
import tarfile
import textwrap
from collections.abc import Iterator
from contextlib import closing
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from support.outage_rig import Engine, account
from support.ports import free_port
from support.server import ServerProcess
from support.waiting import wait_until

from slotstream.client import SampleState, connect

_ROOT = Path(__file__).parents[2]
# The last commit before files could have further columns. Version 0.1.0 has no tag; it speaks the same protocol.
_BEFORE = "fb176e6640b6ccae40fe83825a32bf721043ef98"
_TOKENS = 40
_MASK = bytes(row % 2 for row in range(_TOKENS))
_POSITIONS = b"".join((2 * row).to_bytes(8, "little") for row in range(_TOKENS))

# What its connector does: `work` requests, and waits until the server has answered for all of them. Its spool, if it has one.
_ENGINE = """
import json, sys
from support.outage_rig import Engine
from support.waiting import wait_until
address, count, spool_dir = sys.argv[1], int(sys.argv[2]), sys.argv[3]
engine = Engine.start(address, 7, "before", **({"spool_dir": spool_dir} if spool_dir else {}))
engine.work(count)
wait_until(lambda: engine.settled, "the server's answers")
failed = engine.failed()
engine.close()
print(json.dumps({"promised": {k: None if v is None else v.hex() for k, v in engine.promised.items()}, "failed": failed}))
"""
# What its client reads: the rows of each sample as hex, or the class and code of the error.
_CLIENT = """
import json, sys, torch
from slotstream.client import SlotStreamError, connect
address, data_dir, *names = sys.argv[1:]
found = {}
with connect(address, data_dir=data_dir or None) as client:
    for name in names:
        try:
            sample = client.get(name, wait_s=60.0)
            found[name] = sample.hidden_states.contiguous().view(torch.uint8).numpy().tobytes().hex()
            assert sample.token_ids.tolist() == list(range(len(sample.token_ids)))
        except SlotStreamError as error:
            found[name] = f"{type(error).__name__} {error}"
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a process that runs the version of before."""
    if not (_ROOT / ".git").exists() or shutil.which("git") is None:
        pytest.skip("not a clone of the repository: the version of before is in its history")
    archive = subprocess.run(["git", "archive", _BEFORE], cwd=_ROOT, stdout=subprocess.PIPE, check=True)
    tree = tmp_path_factory.mktemp("before")
    with tarfile.open(fileobj=BytesIO(archive.stdout)) as files:
        files.extractall(tree, filter="data")
    roots = [tree / name for name in ("connector", "server", "proto", "tests")]
    environment = {"PYTHONPATH": os.pathsep.join(map(str, roots))}
    modules = ("wire.layout", "store.sample.file", "server.app", "cli.main", "client.reading", "connector.plan")
    shown = _run(
        "import sys, importlib; [print(importlib.import_module(n).__file__) for n in sys.argv[1:]]",
        environment,
        *(f"slotstream.{name}" for name in modules),
    )
    assert all(Path(line).is_relative_to(tree) for line in shown.splitlines()), shown
    return environment


def _run(code: str, environment: dict[str, str], *arguments: str) -> str:
    """What Python code writes, run with these modules first."""
    command = [sys.executable, "-c", textwrap.dedent(code), *arguments]
    done = subprocess.run(command, env={**os.environ, **environment}, stdout=subprocess.PIPE, timeout=240, check=True)
    return done.stdout.decode()


@pytest.fixture(scope="module")
def old_server(before: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server of before."""
    with ServerProcess(tmp_path_factory.mktemp("old"), "--appear-grace-s", "60", environment=before) as process:
        yield process


@pytest.mark.parametrize("in_place", [False, True], ids=["sent", "in place"])
def test_the_server_of_before_with_this_connector_and_client(old_server: ServerProcess, in_place: bool) -> None:
    engine = Engine.start(old_server.address, int(in_place), f"new-{in_place}")
    engine.work(30)
    wait_until(lambda: engine.settled)
    failed = account(old_server.address, engine.promised)
    assert set(failed.values()) <= {"ABORTED"}
    with connect(old_server.address, data_dir=old_server.data_dir if in_place else None) as client:
        stored = [sample_id for sample_id in engine.promised if sample_id not in failed]
        for sample_id in stored:
            sample = client.get(sample_id)
            assert (sample.columns, sample.loss_mask) == ({}, None)
        assert {verdict.damage for verdict in client.verify()} == {None}
    with connect(old_server.address) as client:  # It counts by itself, and is not told once more: here, and in `account`.
        assert [client.stat(sample_id).reads for sample_id in stored] == [2] * len(stored)
    engine.close()


def test_the_server_of_before_gets_one_stream(old_server: ServerProcess) -> None:
    before = old_server.log()
    with closing(Engine.start(old_server.address, 7, "several", streams=4)) as engine:
        engine.work(20)
        wait_until(lambda: engine.settled)
        assert engine.rig.worker._sender.gauges()["streams_up"] == 1
        assert set(account(old_server.address, engine.promised).values()) <= {"ABORTED"}
    said = old_server.log().removeprefix(before)
    assert not [line for line in said.splitlines() if "WARNING" in line or "ERROR" in line], said


def test_the_server_of_before_is_sent_no_row_with_a_column(old_server: ServerProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine.start(old_server.address, 0, "columns")
    wait_until(lambda: engine.rig.worker._sender._outbox.link_up)
    sent: list[object] = []
    monkeypatch.setattr(engine.rig.sink, "submit", sent.append)
    engine.rig.capture_with("masked", _TOKENS, {"loss_mask": _MASK})
    wait_until(lambda: "masked" in engine.failed())
    assert engine.failed() == {"masked": "UNSUPPORTED_FORMAT"}
    assert sent == []
    with connect(old_server.address) as client:
        wait_until(lambda: any(info.sample_id == "masked" for info in client.list(state="FAILED")), "the report")
        assert (client.stat("masked").state, client.stat("masked").error_code) == (SampleState.FAILED, "UNSUPPORTED_FORMAT")
    engine.close()


@pytest.mark.parametrize("workers", [False, True], ids=["one process", "workers"])
def test_the_connector_and_client_of_before_with_this_server(before: dict[str, str], tmp_path: Path, workers: bool) -> None:
    options: tuple[str, ...] = ("--workers", "2") if workers else ()
    address = f"127.0.0.1:{free_port()}" if workers else None
    with ServerProcess(tmp_path / "data", *options, address=address) as server:
        told: dict[str, Any] = json.loads(_run(_ENGINE, before, server.address, "30", ""))
        promised = {name: None if rows is None else bytes.fromhex(rows) for name, rows in told["promised"].items()}
        assert account(server.address, promised) == told["failed"]
        assert set(told["failed"].values()) <= {"ABORTED"}
        stored = {name: rows.hex() for name, rows in promised.items() if rows is not None and name not in told["failed"]}
        engine = Engine.start(server.address, 0, "after")
        stored["plain"] = engine.rig.capture_with("plain", _TOKENS, {}).hex()
        stored["masked"] = engine.rig.capture_with("masked", _TOKENS, {"loss_mask": _MASK}).hex()
        engine.rig.capture_with("placed", _TOKENS, {"positions": _POSITIONS})
        wait_until(lambda: engine.settled)
        engine.close()
        for data_dir in ("", str(server.data_dir)):
            found = json.loads(_run(_CLIENT, before, server.address, data_dir, *stored, "placed"))
            refused = found.pop("placed")
            assert found == stored  # Without the mask, which it does not know and need not know.
            assert refused.startswith("InternalFault the sample has column 'positions'")
        with connect(server.address) as client:
            # Sent, and in place; what was promised also by `account`.
            assert {name: client.stat(name).reads for name in stored} == {name: 2 + (name in promised) for name in stored}
        with connect(server.address) as client:
            mask = client.get("masked").loss_mask
            assert mask is not None
            assert mask.tolist() == [bool(byte) for byte in _MASK]


def test_the_connector_of_before_leaves_spooled_columns_alone(before: dict[str, str], tmp_path: Path) -> None:
    spool = tmp_path / "spool"
    dead = Engine.start("127.0.0.1:9", 0, "dead", spool_dir=str(spool))
    rows = {
        "masked": dead.rig.capture_with("masked", _TOKENS, {"loss_mask": _MASK}),
        "plain": dead.rig.capture_with("plain", _TOKENS, {}),
    }
    dead.close()
    (kept,) = spool.rglob("*.columns")
    raw = kept.read_bytes()
    with ServerProcess(tmp_path / "data") as server, connect(server.address) as client:
        _run(_ENGINE, before, server.address, "1", str(spool))
        wait_until(lambda: any(info.sample_id == "plain" for info in client.list(state="COMMITTED")), "what it adopts")
        assert account(server.address, {"plain": rows["plain"]}) == {}
        assert kept.read_bytes() == raw
        engine = Engine.start(server.address, 1, "after", spool_dir=str(spool))
        assert client.get("masked", wait_s=60.0).loss_mask is not None
        assert account(server.address, {"masked": rows["masked"]}) == {}
        wait_until(lambda: not list(spool.rglob("*.columns")), "the file's removal")
        engine.close()


def test_a_downgrade_puts_such_files_aside_and_the_way_back_restores_them(before: dict[str, str], tmp_path: Path) -> None:
    """And the query of docs/storage.md names them before."""
    data_dir = tmp_path / "data"
    with ServerProcess(data_dir) as server:
        engine = Engine.start(server.address, 0, "new")
        engine.rig.capture_with("plain", _TOKENS, {})
        rows = engine.rig.capture_with("masked", _TOKENS, {"loss_mask": _MASK})
        wait_until(lambda: engine.settled)
        engine.close()
    page = (_ROOT / "docs/storage.md").read_text()
    found = re.search(r'\?mode=ro" "(SELECT .*?)"\n', page, re.DOTALL)
    assert found is not None
    with closing(sqlite3.connect(f"file:{data_dir}/catalog.sqlite?mode=ro", uri=True)) as db:
        assert db.execute(found[1]).fetchall() == [("default", "masked")]
    with ServerProcess(data_dir, environment=before) as server, connect(server.address) as client:
        assert {v.sample_id: v.quarantined for v in client.verify(quarantine=True)} == {"masked": True, "plain": False}
    with ServerProcess(data_dir) as server, connect(server.address) as client:
        assert [one.restored for one in client.restore()] == [True]
        assert client.get("masked").loss_mask is not None
        assert account(server.address, {"masked": rows}) == {}
