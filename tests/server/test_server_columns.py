"""Further columns from a connector's plan to a reader: over gRPC, through the spool, with and without worker processes.

The column `weights` is in no table but the one that the tests change while they run. Nothing else in the code knows it.
"""

from __future__ import annotations

import signal
import struct
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from safetensors.torch import load_file
from support.ingest_client import IngestClient
from support.outage_rig import Engine, Restarting
from support.ports import free_port
from support.server import ServerProcess
from support.synthetic import SyntheticSample
from support.waiting import WAIT_S, wait_until

from slotstream.cli.main import main
from slotstream.client import Client, Damaged, SampleState, UnsupportedFormat, connect
from slotstream.client import client as client_module
from slotstream.v1 import ingest_pb2 as pb
from slotstream.wire import columns
from slotstream.wire.columns import Column
from slotstream.wire.layout import file_path

_TOKENS = 50
_WEIGHTS = struct.pack(f"<{_TOKENS}f", *(row / 4 for row in range(_TOKENS)))
_MASK = bytes(row % 3 == 0 for row in range(_TOKENS))
_POSITIONS = struct.pack(f"<{_TOKENS}q", *range(0, 2 * _TOKENS, 2))
_COLUMNS = {"weights": _WEIGHTS, "loss_mask": _MASK}
_LATER = """
from slotstream.wire import columns
columns.COLUMNS["weights"] = columns.Column("weights", "F32", late=True, optional=True)
"""


@pytest.fixture
def later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The column is in this process's table; the environment of processes that are to have it too."""
    (tmp_path / "later").mkdir()
    (tmp_path / "later" / "sitecustomize.py").write_text(textwrap.dedent(_LATER))
    monkeypatch.syspath_prepend(str(tmp_path / "later"))
    monkeypatch.setitem(columns.COLUMNS, "weights", Column("weights", "F32", late=True, optional=True))
    return {"PYTHONPATH": str(tmp_path / "later")}


def _check(client: Client, sample_id: str, rows: bytes) -> None:
    whole = client.get(sample_id)
    assert whole.hidden_states.contiguous().view(torch.uint8).numpy().tobytes() == rows
    assert whole.columns.keys() == _COLUMNS.keys()
    assert whole.columns["weights"].dtype == torch.float32
    assert whole.columns["weights"].numpy().tobytes() == _WEIGHTS
    assert whole.loss_mask is not None
    assert whole.loss_mask.dtype == torch.bool
    assert whole.loss_mask.tolist() == [bool(byte) for byte in _MASK]
    part = client.get(sample_id, start=7, stop=12, layers=[2])
    assert part.columns["weights"].tolist() == [row / 4 for row in range(7, 12)]
    none = client.get(sample_id, start=3, stop=3)
    assert none.columns["weights"].shape == (0,)


@pytest.mark.parametrize("workers", [(), ("--workers", "2")], ids=["one process", "workers"])
@pytest.mark.parametrize("sender", ["thread", "process", "spool"])
def test_a_column_of_the_table_goes_all_the_way(
    tmp_path: Path, later: dict[str, str], workers: tuple[str, ...], sender: str, capsys: pytest.CaptureFixture[str]
) -> None:
    data_dir = tmp_path / "data"
    rows: dict[str, bytes] = {}
    address = f"127.0.0.1:{free_port()}" if workers else None  # Several processes can listen on a port only.
    with Restarting(data_dir, *workers, running=False, address=address) as server:
        server.environment = later
        options: dict[str, Any] = {"sender": "process" if sender == "process" else "thread", "wait_s_max": WAIT_S}
        if sender == "spool":
            options["spool_dir"] = str(tmp_path / "spool")
            dead = Engine.start(server.address, **options)
            rows["a"] = dead.rig.capture_with("a", _TOKENS, _COLUMNS)
            dead.close()
            assert len(list((tmp_path / "spool").rglob("*~a.columns"))) == 1
        server.start()
        engine = Engine.start(server.address, **options)
        wait_until(lambda: engine.rig.worker._sender.gauges()["link_up"] > 0, "the link")
        if sender != "spool":
            rows["a"] = engine.rig.capture_with("a", _TOKENS, _COLUMNS)
        rows["b"] = engine.rig.capture_with("b", _TOKENS, _COLUMNS)
        with connect(server.address) as client, connect(server.address, data_dir=data_dir) as beside:
            for sample_id in rows:
                wait_until(lambda sample_id=sample_id: _is_stored(client, sample_id), sample_id)  # type: ignore[misc]
                _check(client, sample_id, rows[sample_id])
                _check(beside, sample_id, rows[sample_id])
            assert [verdict.sound for verdict in client.verify()] == [True, True]
            output = tmp_path / "got.safetensors"
            assert main(["get", "a", "-o", str(output), "--server", server.address, "--start", "5"]) == 0
            got = load_file(output)
            assert got["weights"].numpy().tobytes() == _WEIGHTS[20:]
            assert got["loss_mask"].numpy().tobytes() == _MASK[5:]
            _flip(data_dir, "a", -len(_MASK) - 3)  # A bit of the weights, which stand before the mask.
            with pytest.raises(Damaged, match="weights does not match"):
                client.get("a")
            assert {v.sample_id: v.damage for v in client.verify()} == {"a": "HASH_MISMATCH", "b": None}
        engine.close()
        server.stop(signal.SIGTERM)  # Workers of a killed one may listen on the port for a moment longer.
        assert main(["verify", "a", "--data", str(data_dir)]) == 3
        server.options = (*workers, "--scrub-every-s", "0.2")
        server.start()
        with connect(server.address) as client:
            wait_until(lambda: client.stat("a").state is SampleState.FAILED, "the scrubber")
            assert client.stat("a").error_code == "DAMAGED"
            _check(client, "b", rows["b"])


def _is_stored(client: Client, sample_id: str) -> bool:
    return any(info.sample_id == sample_id for info in client.list(state="COMMITTED"))


def _flip(data_dir: Path, sample_id: str, at: int) -> None:
    path = data_dir / file_path("default", sample_id)
    raw = bytearray(path.read_bytes())
    raw[at] ^= 4
    path.write_bytes(raw)


def test_a_server_that_does_not_know_the_format_serves_nothing_of_it_and_keeps_the_file(
    tmp_path: Path, later: dict[str, str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    data_dir = tmp_path / "data"
    with Restarting(data_dir, running=False) as server:
        server.environment = later
        server.start()
        engine = Engine.start(server.address, wait_s_max=WAIT_S)
        with connect(server.address) as client:
            for sample_id in ("kept", "deleted"):
                engine.rig.capture_with(sample_id, _TOKENS, _COLUMNS)
                wait_until(lambda sample_id=sample_id: _is_stored(client, sample_id), sample_id)  # type: ignore[misc]
        engine.close()
        server.stop(signal.SIGTERM)
        path = data_dir / file_path("default", "kept")
        raw = path.read_bytes()
        server.environment = {}
        monkeypatch.delitem(columns.COLUMNS, "weights")  # Nor does this process.
        for lost in (False, True):
            if lost:
                for part in data_dir.glob("catalog.sqlite*"):
                    part.unlink()
            server.options = ("--scrub-every-s", "0.2", "--metrics", "127.0.0.1:0")
            server.start()
            for beside in (None, data_dir):
                with connect(server.address, data_dir=beside) as client, pytest.raises(UnsupportedFormat, match="weights"):
                    client.get("kept")
            assert main(["verify", "kept", "--server", server.address]) == 9
            assert main(["verify", "--quarantine", "--server", server.address]) == 9
            wait_until(lambda: _passes(server) >= 2, "two passes")
            assert path.read_bytes() == raw
            assert main(["restore", "--server", server.address]) == 0
            server.stop(signal.SIGTERM)
            assert main(["verify", "kept", "--data", str(data_dir)]) == 9
        server.start()
        assert main(["rm", "deleted", "--yes", "--server", server.address]) == 0
        assert not (data_dir / file_path("default", "deleted")).exists()
        assert [name.name for name in data_dir.rglob("*.safetensors")] == ["kept.safetensors"]
        assert "UNSUPPORTED_FORMAT" in capsys.readouterr().out


def _passes(server: Restarting) -> float:
    assert server.process is not None
    return server.process.metric("slotstream_scrub_passes_total")


# One version back.


@pytest.fixture
def engine(server: ServerProcess) -> Iterator[Engine]:
    """A connector of the session's server."""
    started = Engine.start(server.address)
    yield started
    started.close()


def test_a_server_that_does_not_take_the_column_is_sent_no_row(
    later: dict[str, str], server: ServerProcess, engine: Engine, ingest: IngestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert set(ingest.welcome.columns) == {"positions", "loss_mask"}
    sent: list[object] = []
    monkeypatch.setattr(engine.rig.sink, "submit", sent.append)
    wait_until(lambda: engine.rig.worker._sender._outbox.link_up)
    engine.rig.capture_with("columns-refused", _TOKENS, _COLUMNS)
    wait_until(lambda: "columns-refused" in engine.failed())
    assert engine.failed() == {"columns-refused": "UNSUPPORTED_FORMAT"}
    assert "upgrade servers before connectors" in engine.faults["columns-refused"].message
    with connect(server.address) as client:
        wait_until(lambda: "columns-refused" in {info.sample_id for info in client.list(state="FAILED")})
        info = client.stat("columns-refused")
        assert (info.state, info.error_code) == (SampleState.FAILED, "UNSUPPORTED_FORMAT")
    assert sent == []


def test_a_server_that_is_sent_an_unknown_column_refuses_the_sample(ingest: IngestClient, namespace: str) -> None:
    for name, code in (("weights", "UNSUPPORTED_FORMAT"), ("scales", "UNSUPPORTED_FORMAT"), ("token_ids", "BAD_PARAMS")):
        ingest.send(_opened(f"s-{name}", namespace, [name]))
        assert ingest.next_reply("failed").failed.code == code


def _opened(sample_id: str, namespace: str, names: list[str], rows_max: int = 4) -> pb.IngestRequest:
    request = pb.IngestRequest()
    request.open.sample = abs(hash((sample_id, namespace))) % (1 << 40)
    request.open.namespace, request.open.sample_id, request.open.dtype = namespace, sample_id, "BF16"
    request.open.layer_ids.extend([1])
    request.open.hidden_size, request.open.rows_max = 8, rows_max
    request.open.columns.extend(names)
    return request


def test_a_commit_that_could_not_be_sent_is_refused_at_the_open(ingest: IngestClient, namespace: str, engine: Engine) -> None:
    ingest.send(_opened("long", namespace, ["positions"], rows_max=1_300_000))
    assert ingest.next_reply("failed").failed.code == "TOO_LARGE"
    engine.rig.capture_with("columns-too-long", _TOKENS, {"positions": _POSITIONS}, rows_max=1_300_000)
    wait_until(lambda: engine.failed() == {"columns-too-long": "TOO_LARGE"})


def test_a_plan_whose_columns_do_not_fit_fails_its_own_sample(engine: Engine) -> None:
    engine.rig.capture_with("columns-short", _TOKENS, {"loss_mask": _MASK[:-1]})
    wait_until(lambda: engine.failed() == {"columns-short": "BAD_PARAMS"})


@pytest.mark.parametrize("in_place", [False, True], ids=["sent", "in place"])
def test_an_older_reader_gets_the_sample_without_optional_columns(
    server: ServerProcess, engine: Engine, in_place: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    masked, placed = f"columns-masked-{in_place}", f"columns-placed-{in_place}"
    rows = engine.rig.capture_with(masked, _TOKENS, {"loss_mask": _MASK})
    engine.rig.capture_with(placed, _TOKENS, {"loss_mask": _MASK, "positions": _POSITIONS})
    with connect(server.address, data_dir=server.data_dir if in_place else None) as client:
        found = client.get(placed, wait_s=60.0)
        assert found.columns["positions"].tolist() == list(range(0, 2 * _TOKENS, 2))
        assert found.loss_mask is not None
        monkeypatch.setattr(client_module, "further_columns", lambda: [])  # As one that was written before there were any.
        for name in ("loss_mask", "positions"):
            monkeypatch.delitem(columns.COLUMNS, name)
        found = client.get(masked, wait_s=60.0)
        assert found.hidden_states.contiguous().view(torch.uint8).numpy().tobytes() == rows
        assert (found.columns, found.loss_mask) == ({}, None)
        with pytest.raises(UnsupportedFormat, match="'positions', which this reader does not know"):
            client.get(placed)


def test_a_reader_in_any_language_says_what_it_knows(server: ServerProcess, engine: Engine) -> None:
    from slotstream.v1 import samples_pb2 as read_pb
    from slotstream.v1 import samples_pb2_grpc

    engine.rig.capture_with("columns-plain", _TOKENS, {"loss_mask": _MASK})
    with grpc.insecure_channel(server.address) as channel:
        stub: Any = samples_pb2_grpc.SamplesStub(channel)  # type: ignore[no-untyped-call]
        for known, named in (([], []), (["loss_mask", "unheard-of"], ["loss_mask"])):
            request = read_pb.ReadRequest(sample_id="columns-plain", wait_s=60.0, stop=0, columns=known)
            header = next(iter(stub.Read(request))).header
            assert [column.name for column in header.columns] == named


def test_the_default_pair_is_as_it_was(ingest: IngestClient, server: ServerProcess, namespace: str) -> None:
    sample = SyntheticSample("plain", namespace=namespace)
    ingest.store(sample)
    with connect(server.address) as client:
        found = client.get("plain", namespace=namespace)
    assert (found.columns, found.loss_mask) == ({}, None)
    assert "columns" not in found.metadata
