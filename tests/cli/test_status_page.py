"""docs/status.md shows what `status` and `doctor` print: of a server that says what the page shows, and of a real one."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from server.server_kit import RunningServer
from support.as_printed import is_as_shown
from support.fake_samples import serving
from support.secure import Authority, entry, token, write_tokens

from slotstream.cli import doctor
from slotstream.cli import main as cli
from slotstream.v1 import ingest_pb2
from slotstream.v1 import samples_pb2 as pb
from slotstream.wire import nixl

GIB, MIB = 1 << 30, 1 << 20
HOUR_S = 3600.0
PAGE = (Path(__file__).parents[2] / "docs" / "status.md").read_text()


def _block(command: str) -> tuple[list[str], str]:
    """The words behind `$ slotstream `, and the lines below them."""
    found = re.search(rf"^```\n\$ slotstream ({command}[^\n]*)\n(.*?)^```", PAGE, re.M | re.S)
    assert found is not None, command
    return found[1].split(), found[2]


def test_status_prints_what_the_page_shows(capsys: pytest.CaptureFixture[str]) -> None:
    report = ingest_pb2.EngineReport(
        host="node-1",
        layer_ids=[2, 18, 33],
        has_final=True,
        staging_bytes=GIB,
        staging_bytes_in_use=GIB * 12 // 100,
        links_lost=1,
    )
    engines = [
        pb.EngineStatus(
            engine_id="8a52d3…",
            connected=True,
            report=report,
            transport="nixl",
            since_s=3 * HOUR_S,
            streams=2,
            open_samples=3,
            last_sample="default/cmpl-1f0c-0-9b21",
            last_sample_s=0.0,
        ),
        pb.EngineStatus(
            engine_id="c70f19…",
            connected=True,
            transport="grpc",
            since_s=26 * HOUR_S,
            streams=1,
            last_sample="default/cmpl-77aa-0-1c03",
            last_sample_s=26 * HOUR_S,
        ),
    ]
    server = pb.ServerStatus(
        uptime_s=3 * HOUR_S,
        processes=1,
        processes_wanted=1,
        samples_per_s=12.4,
        open_samples=3,
        rates_s=60,
        received_bytes_per_s=310 * MIB,
        sent_bytes_per_s=24 * MIB,
        failed={"SLOT_MISMATCH": 2},
        counted_s=HOUR_S,
        free_bytes=340 * GIB,
        disk_bytes=1000 * GIB,
        hours_until_full=31.2,
        reads=4,
        waiting_reads=1,
        engines=engines,
    )
    reply = pb.StatusReply(version="0.1.0", health="ok", now_unix_ns=10**18, server=server)
    words, shown = _block("status")
    with serving(Status=lambda request, context: reply) as address:
        assert cli.main([*words, "--server", address]) == 1
    said = capsys.readouterr().out.replace(address, "127.0.0.1:50151")
    assert said.splitlines() == shown.splitlines()


def test_doctor_prints_what_the_page_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    authority = Authority(tmp_path)
    pair = authority.issue("server", not_after=datetime.now(UTC) + timedelta(days=61.3))
    tokens = write_tokens(tmp_path / "tokens.toml", entry("vllm", ["train"], "ingest"))
    (tmp_path / "vllm.token").write_text(token("vllm"))
    (tmp_path / "stand_in.py").write_text('print(\'{"version": "0.33.0", "problems": [], "known": true}\')')
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(doctor, "_SEAMS", "stand_in")  # A real vLLM is asked in tests/engine/test_doctor.py.
    monkeypatch.setattr(nixl, "_PACKAGES", ())
    monkeypatch.chdir(tmp_path)
    words, shown = _block("doctor")
    with RunningServer(tmp_path / "data", tls_cert=pair.cert, tls_key=pair.key, tokens_file=tokens) as server:
        assert cli.main([server.address if word == "storage:50151" else word for word in words]) == 0
        said = capsys.readouterr().out.replace(server.address, "storage:50151")
    for line, wanted in zip(said.splitlines(), shown.splitlines(), strict=True):
        assert is_as_shown(line, wanted), (line, wanted)
