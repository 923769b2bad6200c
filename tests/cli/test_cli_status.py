"""`slotstream status`: what it prints of real servers, what it calls a problem, and what it exits with."""

from __future__ import annotations

import dataclasses
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from support.fake_samples import failing, serving
from support.ingest_client import IngestClient
from support.secure import bearer, entry, token, write_tokens
from support.server import INTERRUPTIBLE, ServerProcess
from support.synthetic import SyntheticSample

from slotstream.cli import main as cli
from slotstream.client import ServerStatus, Status
from slotstream.v1 import ingest_pb2
from slotstream.v1 import samples_pb2 as pb


@pytest.fixture(scope="module")
def quiet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server of two tokens, with nothing wrong; `s` is stored in namespace a."""
    directory = tmp_path_factory.mktemp("quiet")
    tokens = write_tokens(
        directory / "tokens.toml", entry("alice", ["a"], "read"), entry("root", ["*"], "ingest", "read", "admin")
    )
    with ServerProcess(directory / "data", "--tokens", str(tokens), token=token("root")) as server:
        with IngestClient(server.address, metadata=bearer("root")) as sender:
            sender.store(SyntheticSample("s", namespace="a"))
        yield server


@pytest.fixture
def as_root(quiet: ServerProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLOTSTREAM_SERVER", quiet.address)
    monkeypatch.setenv("SLOTSTREAM_TOKEN", token("root"))


def _json(capsys: pytest.CaptureFixture[str]) -> Any:
    return json.loads(capsys.readouterr().out)


@pytest.mark.usefixtures("as_root")
def test_a_server_with_nothing_wrong_exits_with_0(quiet: ServerProcess, capsys: pytest.CaptureFixture[str]) -> None:
    with IngestClient(quiet.address, metadata=bearer("root")) as sender:
        sender.store(SyntheticSample("t", namespace="a"))
        assert cli.main(["status"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("server ")
    assert f" at {quiet.address}, ok, up " in lines[0]
    assert "no TLS, tokens, " in lines[0]
    assert [line.split()[0] for line in lines[1:8]] == ["samples", "bytes", "failed", "disk", "readers", "retention", "clock"]
    table = next(at for at, line in enumerate(lines) if line.startswith("ENGINE"))
    assert " a/t, " in lines[table + 1]
    assert lines[-1].split() == ["problems", "none"]


@pytest.mark.usefixtures("as_root")
def test_json_holds_everything_and_no_problem(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["status", "--json"]) == 0
    told = _json(capsys)
    assert (told["problems"], told["explained"]) == ([], {})
    assert set(told) == {field.name for field in dataclasses.fields(Status)} | {"problems", "explained"}
    assert set(told["server"]) == {field.name for field in dataclasses.fields(ServerStatus)}
    assert told["covers"] is None


def test_another_token_is_told_what_it_covers(
    quiet: ServerProcess, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SLOTSTREAM_SERVER", quiet.address)
    monkeypatch.setenv("SLOTSTREAM_TOKEN", token("alice"))
    assert cli.main(["status"]) == 0
    out = capsys.readouterr().out
    assert out.count("needs admin of every namespace") == 3
    assert "rights               read\n" in out
    assert "namespaces           a\n" in out
    assert cli.main(["status", "--json"]) == 0
    told = _json(capsys)
    assert (told["server"], told["rights"], told["covers"]) == (None, ["read"], ["a"])


def test_what_went_wrong_is_named_and_exits_with_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with ServerProcess(tmp_path / "data") as server:
        with IngestClient(server.address) as sender:
            sender.fail(SyntheticSample("gone"), code="ABORTED")
            assert cli.main(["status", "--server", server.address]) == 0
            sender.fail(SyntheticSample("bad"), code="SLOT_MISMATCH")
        capsys.readouterr()
        assert cli.main(["status", "--server", server.address, "--json"]) == 1
        told = _json(capsys)
        assert told["problems"] == ["samples_failed"]
        assert told["server"]["failed"] == {"ABORTED": 1, "SLOT_MISMATCH": 1}
        assert cli.main(["status", "--server", server.address]) == 1
        assert "samples_failed       samples failed within the last hour: 1 SLOT_MISMATCH\n" in capsys.readouterr().out


def _engine(**changes: Any) -> pb.EngineStatus:
    report = ingest_pb2.EngineReport(host="node-1", layer_ids=[2, 18, 33], has_final=True, staging_bytes=1000)
    report.MergeFrom(ingest_pb2.EngineReport(**changes.pop("report", {})))
    return pb.EngineStatus(engine_id="e", rank=1, connected=True, report=report, **changes)


SOUND: dict[str, Any] = {"processes": 1, "processes_wanted": 1, "counted_s": 3600.0}
NOW_S = 1_800_000_000


@pytest.mark.parametrize(
    ("changes", "health", "problem"),
    [
        ({}, "ok", None),
        ({}, "full", "disk_full"),
        ({}, "disk", "disk_away"),
        ({}, "draining", "draining"),
        ({"hours_until_full": 23.0}, "ok", "disk_filling"),
        ({"hours_until_full": 25.0}, "ok", None),
        ({"hours_until_full": 1.0, "counted_s": 20.0}, "ok", None),
        ({"processes_wanted": 2}, "ok", "processes_missing"),
        ({"failed": {"INTERNAL": 1}}, "ok", "samples_failed"),
        ({"failed": {"ABORTED": 9}}, "ok", None),
        ({"damaged": 1}, "ok", "samples_damaged"),
        ({"catalogue_behind": True}, "ok", "catalogue_behind"),
        ({"shared": pb.SharedStore(bucket="b", attempts_arriving=3, attempts_ended=4)}, "ok", None),
        ({"shared": pb.SharedStore(trouble="the bucket is away")}, "ok", "engine_away"),
        ({"shared": pb.SharedStore(attempts_late=2)}, "ok", "uploads_left"),
        ({"clock": "it leapt"}, "ok", "clock_in_doubt"),
        ({"age_held": ["a"]}, "ok", "age_held"),
        ({"rules_held": ["a"]}, "ok", "rules_held"),
        ({"rules_wait_s": 60.0}, "ok", None),
        ({"engines": [_engine()]}, "ok", None),
        ({"engines": [_engine(report_s=21.0)]}, "ok", "engine_silent"),
        ({"engines": [_engine(report={"staging_bytes_in_use": 949})]}, "ok", None),
        ({"engines": [_engine(report={"staging_bytes_in_use": 950})]}, "ok", "staging_full"),
        ({"engines": [pb.EngineStatus(engine_id="e", connected=True)]}, "ok", None),
        ({"certificate_expires_unix_s": NOW_S + 6 * 86400}, "ok", "certificate_expires"),
        ({"certificate_expires_unix_s": NOW_S + 8 * 86400}, "ok", None),
    ],
    ids=str,
)
def test_each_problem_has_its_name(changes: dict[str, Any], health: str, problem: str | None) -> None:
    server = pb.ServerStatus(**SOUND | changes)
    status = Status.from_wire(pb.StatusReply(health=health, now_unix_ns=NOW_S * 10**9, server=server))
    assert list(status.problems) == ([] if problem is None else [problem])


def test_an_engine_shows_what_it_reports_and_dashes_where_it_is_of_an_earlier_version(
    capsys: pytest.CaptureFixture[str],
) -> None:
    reporting = _engine(transport="nixl", since_s=300, report={"staging_bytes_in_use": 500, "links_lost": 2})
    older = pb.EngineStatus(engine_id="old", transport="grpc", connected=True, since_s=5, streams=1)
    gone = pb.EngineStatus(engine_id="gone", transport="grpc", since_s=7, streams=3)
    reply = pb.StatusReply(version="1", health="ok", server=pb.ServerStatus(**SOUND, engines=[reporting, older, gone]))
    with serving(Status=lambda request, context: reply) as address:
        assert cli.main(["status", "--server", address]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert cli.main(["status", "--server", address, "--json"]) == 0
    table = [line.split("  ") for line in lines if line.startswith(("e  ", "old", "gone"))]
    assert [[cell.strip() for cell in row if cell] for row in table] == [
        ["e", "1", "node-1", "2,18,final", "nixl", "50% of 1000 B", "up 5m, lost 2 times", "0", "-"],
        ["old", "0", "-", "-", "grpc", "-", "up 5s", "0", "-"],
        ["gone", "0", "-", "-", "grpc", "-", "down 7s, lost 2 times", "0", "-"],
    ]
    told = _json(capsys)["server"]["engines"]
    assert (told[0]["host"], told[0]["layers"], told[0]["links_lost"]) == ("node-1", ["2", "18", "final"], 2)
    assert {told[1][name] for name in ("host", "layers", "staging_bytes", "links_lost", "report_s")} == {None}


def test_what_peers_say_of_themselves_commands_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    report = ingest_pb2.EngineReport(host="\x1b")
    engine = pb.EngineStatus(engine_id="\x1b[2Jx", transport="\x1b", last_sample="a/\x1b", report=report)
    server = pb.ServerStatus(engines=[engine], clock="\x1b", failed={"\x1b": 1}, rules_held=["\x1b"], age_held=["\x1b"])
    usage = pb.NamespaceUsage(namespace="\x1b")
    for reply in (
        pb.StatusReply(version="\x1b", health="\x1b", server=server),
        pb.StatusReply(version="\x1b", health="\x1b", rights=["\x1b"], covers=["\x1b"], namespaces=[usage]),
    ):

        def told(request: Any, context: Any, reply: pb.StatusReply = reply) -> pb.StatusReply:
            return reply

        with serving(Status=told) as address:
            cli.main(["status", "--server", address])
            cli.main(["status", "--server", address, "--json"])
        out = capsys.readouterr().out
        assert "\x1b" not in out
        assert "\\x1b" in out


def test_an_older_server_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    with serving() as address:
        assert cli.main(["status", "--server", address]) == 1
    assert capsys.readouterr().err == (
        f"slotstream status: the server at {address} is of an earlier version, which tells no status (PROTOCOL)\n"
    )


@pytest.mark.usefixtures("as_root")
def test_watching_goes_on_until_it_is_interrupted() -> None:
    command = [sys.executable, "-c", INTERRUPTIBLE, "status", "--watch", "0.1", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as watching:
        assert watching.stdout is not None
        told = [json.loads(watching.stdout.readline()) for _ in range(3)]
        watching.send_signal(signal.SIGINT)
        assert watching.wait(60) == 130
    assert [one["problems"] for one in told] == [[], [], []]
    assert told[0]["now_unix_ns"] < told[2]["now_unix_ns"]


def test_watching_outlives_the_server_and_ends_with_a_token_that_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(time, "sleep", pauses.append)
    refusals = iter([grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.PERMISSION_DENIED])

    def status(request: Any, context: Any) -> Any:
        code = next(refusals)
        return failing(code, "no", slotstream_code=code.name)(request, context)

    with serving(Status=status) as address:
        assert cli.main(["status", "--server", address, "--watch", "2s"]) == 1
    assert pauses == [2.0]
    assert capsys.readouterr().err == ("slotstream status: no (DEADLINE_EXCEEDED)\nslotstream status: no (PERMISSION_DENIED)\n")


def test_each_of_several_servers_has_a_part_of_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with ServerProcess(tmp_path / "a") as one, ServerProcess(tmp_path / "b") as two:
        both = ["status", "--server", f"{one.address}, {two.address}"]
        assert cli.main(both) == 0
        lines = capsys.readouterr().out.splitlines()
        heads = [line for line in lines if line.startswith("server ")]
        assert [server.address in head for server, head in zip((one, two), heads, strict=True)] == [True, True]
        assert [line.split() for line in lines].count(["problems", "none"]) == 2
        assert cli.main([*both, "--json"]) == 0
        told = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        assert [(each["address"], each["problems"]) for each in told] == [(one.address, []), (two.address, [])]

        two.stop()
        assert cli.main(both) == 1
        lines = capsys.readouterr().out.splitlines()
        assert [line.split() for line in lines].count(["problems", "none"]) == 1
        (wrong,) = [line for line in lines if line.startswith("no_answer ")]
        assert f"no server answers at {two.address}: " in wrong
        assert wrong.endswith("(SERVER_UNAVAILABLE)")
        assert cli.main([*both, "--json"]) == 1
        told = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        assert [(each["address"], each["problems"]) for each in told] == [(one.address, []), (two.address, ["no_answer"])]
        assert two.address in told[1]["explained"]["no_answer"]

        with IngestClient(one.address) as sender:
            sender.fail(SyntheticSample("bad"), code="SLOT_MISMATCH")
        assert cli.main(both) == 1
        assert f"\nsamples_failed       {one.address}: samples failed" in capsys.readouterr().out


def test_a_command_that_reads_asks_a_server_that_is_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with ServerProcess(tmp_path / "a") as server:
        with IngestClient(server.address) as sender:
            sender.store(SyntheticSample("s"))
        for _ in range(4):
            assert cli.main(["ls", "--json", "--server", f"unix:{tmp_path}/nobody,{server.address}"]) == 0
            assert [json.loads(line)["sample_id"] for line in capsys.readouterr().out.splitlines()] == ["s"]
    assert cli.main(["ls", "--server", f"unix:{tmp_path}/nobody,{server.address}"]) == 1
    said = capsys.readouterr().err
    assert "none of 2 servers answers" in said
    assert server.address in said
    assert f"unix:{tmp_path}/nobody" in said
