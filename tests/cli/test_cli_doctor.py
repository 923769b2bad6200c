"""`slotstream doctor`: each thing that it asks is broken alone, and it names that one and no other."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime, timedelta
from importlib.metadata import version
from pathlib import Path
from typing import Any

import grpc
import pytest
from server.server_kit import Peer, RunningServer, Sample
from support.answering import answering
from support.fake_samples import failing, serving
from support.secure import Authority, entry, token, write_tokens

from slotstream.cli import doctor
from slotstream.cli import main as cli
from slotstream.cli.doctor import Finding
from slotstream.demo.processes import free_port
from slotstream.store.samples import SampleStore
from slotstream.v1 import ingest_pb2
from slotstream.v1 import samples_pb2 as pb
from slotstream.wire import nixl

ORDER = ["port", "tls", "token", "versions", "clock", "disk", "nixl", "vllm"]
HOUR_NS = 3600 * 10**9


@pytest.fixture(autouse=True)
def _sound_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is asked of this machine is asked in tests of its own: it takes its time."""
    monkeypatch.setattr(doctor, "_nixl", lambda: Finding("nixl", "ok", ""))
    monkeypatch.setattr(doctor, "_vllm", lambda: Finding("vllm", "ok", ""))


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as entered:
        yield entered


def ask(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, str]:
    """What was asked, and the result of each; the exit code fits them."""
    capsys.readouterr()
    code = cli.main(["doctor", "--json", *words])
    captured = capsys.readouterr()
    findings = [json.loads(line) for line in captured.out.splitlines()]
    results = {finding["check"]: finding["result"] for finding in findings}
    assert list(results) == [name for name in ORDER if name in results]
    assert len(results) == len(findings)
    assert code == int("fail" in results.values())
    assert all(finding["todo"] for finding in findings if finding["result"] != "ok")
    unasked = [name for name in ORDER if name not in results]
    assert captured.err == (f"Not asked, because of what failed: {', '.join(unasked)}\n" if unasked else "")
    return results


def named(results: dict[str, str]) -> dict[str, str]:
    """Those that are not ok."""
    return {check: result for check, result in results.items() if result != "ok"}


def guarded(directory: Path, stack: ExitStack, **options: Any) -> RunningServer:
    """A server with TLS and tokens."""
    authority = Authority(directory / "certificates")
    pair = authority.issue("server", not_after=options.pop("not_after", None))
    tokens = write_tokens(directory / "tokens.toml", entry("alice", ["a"], "read"), entry("root", ["*"], "read", "admin"))
    chosen: dict[str, Any] = {"tls_cert": pair.cert, "tls_key": pair.key, "tokens_file": tokens, **options}
    return stack.enter_context(RunningServer(directory / "data", **chosen))


def options_for(server: RunningServer, directory: Path, who: str) -> list[str]:
    file = directory / f"{who}.token"
    file.write_text(token(who))
    ca = directory / "certificates" / "ca.pem"
    return ["--server", server.address, "--tls-ca", str(ca), "--token-file", str(file)]


def test_where_nothing_is_wrong_every_line_is_ok(tmp_path: Path, stack: ExitStack, capsys: pytest.CaptureFixture[str]) -> None:
    plain = stack.enter_context(RunningServer(tmp_path / "plain"))
    assert ask(capsys, "--server", plain.address) == dict.fromkeys(ORDER, "ok")
    server = guarded(tmp_path, stack)
    for who in ("root", "alice"):
        assert ask(capsys, *options_for(server, tmp_path, who)) == dict.fromkeys(ORDER, "ok")
    words = options_for(server, tmp_path, "alice")
    assert ask(capsys, *words, "--right", "read", "--namespace", "a") == dict.fromkeys(ORDER, "ok")
    assert cli.main(["doctor", *words]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines] == [[name, "ok"] for name in ORDER]
    assert lines[2].endswith("it may read in a")


def test_a_port_where_nothing_answers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for address in (f"127.0.0.1:{free_port()}", f"unix:{tmp_path}/s", "no-such-host.invalid:50151", "nonsense"):
        assert named(ask(capsys, "--server", address)) == {"port": "fail"}, address


def test_a_port_that_speaks_something_else(tmp_path: Path, stack: ExitStack, capsys: pytest.CaptureFixture[str]) -> None:
    server = stack.enter_context(RunningServer(tmp_path, metrics_listen="127.0.0.1:0"))
    address = server.server.metrics_address
    assert address is not None
    assert named(ask(capsys, "--server", address)) == {"port": "fail"}


def test_a_port_of_another_service_and_one_that_answers_no_question(capsys: pytest.CaptureFixture[str]) -> None:
    with serving() as address:
        assert named(ask(capsys, "--server", address)) == {"port": "fail"}
    for code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INTERNAL):
        with serving(Status=failing(code, "x")) as address:
            assert named(ask(capsys, "--server", address)) == {"port": "fail"}, code


def test_a_port_that_hangs_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As a server that takes no more connections does."""
    authority = Authority(tmp_path)
    for words in ([], ["--tls-ca", str(authority.path)]):
        with answering(b"") as address:
            assert named(ask(capsys, "--server", address, *words)) == {"port": "fail"}


def test_each_way_in_which_tls_does_not_fit(tmp_path: Path, stack: ExitStack, capsys: pytest.CaptureFixture[str]) -> None:
    server = guarded(tmp_path, stack)
    plain = stack.enter_context(RunningServer(tmp_path / "plain"))
    stranger = Authority(tmp_path / "certificates", "stranger")
    right = options_for(server, tmp_path, "root")
    missing = [word.replace("ca.pem", "none.pem") for word in right]
    wrong = ["stranger.pem".join(word.rsplit("ca.pem", 1)) if word.endswith("ca.pem") else word for word in right]
    assert str(stranger.path) in wrong
    for words in (right[:2], missing, wrong, ["--server", plain.address, *right[2:4]]):
        assert named(ask(capsys, *words)) == {"tls": "fail"}, words
    (tmp_path / "wanting").mkdir()
    wanting = guarded(tmp_path / "wanting", stack, tls_client_ca=stranger.path)
    assert named(ask(capsys, *options_for(wanting, tmp_path / "wanting", "root"))) == {"tls": "fail"}


def test_a_certificate_that_is_about_to_expire(tmp_path: Path, stack: ExitStack, capsys: pytest.CaptureFixture[str]) -> None:
    server = guarded(tmp_path, stack, not_after=datetime.now(UTC) + timedelta(days=3))
    assert named(ask(capsys, *options_for(server, tmp_path, "root"))) == {"tls": "warn"}


def test_a_token_that_is_unknown_missing_or_lacks_something(
    tmp_path: Path, stack: ExitStack, capsys: pytest.CaptureFixture[str]
) -> None:
    server = guarded(tmp_path, stack)
    alice = options_for(server, tmp_path, "alice")
    for words in (
        options_for(server, tmp_path, "nobody"),
        alice[:4],
        [*alice[:4], "--token-file", str(tmp_path / "no-such-file")],
        [*alice, "--right", "ingest", "--namespace", "a"],
        [*alice, "--right", "read"],  # In default.
        [*alice, "--namespace", "b"],
    ):
        assert named(ask(capsys, *words)) == {"token": "fail"}, words


def test_versions_that_do_not_work_together(
    tmp_path: Path, stack: ExitStack, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    server = stack.enter_context(RunningServer(tmp_path))
    major, minor = map(int, version("slotstream").split(".")[:2])
    fail, warn = {"versions": "fail"}, {"versions": "warn"}
    for ahead, found in ((-1, warn), (0, {}), (1, {}), (2, fail), (100, fail)):
        said = f"{major}.{minor + ahead}.7"
        monkeypatch.setattr("slotstream.server.samples.status.server_version", lambda said=said: said)
        assert named(ask(capsys, "--server", server.address)) == found, said


def test_an_engine_that_is_later_than_the_server(tmp_path: Path, stack: ExitStack, capsys: pytest.CaptureFixture[str]) -> None:
    major, minor = map(int, version("slotstream").split(".")[:2])
    server = stack.enter_context(RunningServer(tmp_path))
    peer = stack.enter_context(Peer(server.address, greet=False))
    hello = ingest_pb2.Hello(protocol=1, engine_id="later", slotstream_version=f"{major}.{minor + 1}.0")
    peer.say(ingest_pb2.IngestRequest(hello=hello))
    peer.hear()
    assert named(ask(capsys, "--server", server.address)) == {"versions": "warn"}


def test_a_server_of_an_earlier_version_is_said_to_be_one(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(List=lambda request, context: pb.ListReply()) as address:
        results = ask(capsys, "--server", address)
    assert named(results) == {"versions": "warn"}
    assert "clock" not in results


def test_a_clock_that_is_in_doubt_and_one_that_differs(
    tmp_path: Path, stack: ExitStack, capsys: pytest.CaptureFixture[str]
) -> None:
    ahead = SampleStore.open(tmp_path / "data", wall=lambda: time.time_ns() + 3 * HOUR_NS)
    with RunningServer(tmp_path / "data", store=ahead) as server, Peer(server.address) as peer:
        peer.put(Sample(), 1)
    server = stack.enter_context(RunningServer(tmp_path / "data"))
    assert named(ask(capsys, "--server", server.address)) == {"clock": "fail"}
    reply = pb.StatusReply(version=version("slotstream"), health="ok", now_unix_ns=time.time_ns() - 60 * 10**9)
    with serving(Status=lambda request, context: reply) as address:
        assert named(ask(capsys, "--server", address)) == {"clock": "warn"}


def test_a_disk_that_is_full_away_or_fills(tmp_path: Path, stack: ExitStack, capsys: pytest.CaptureFixture[str]) -> None:
    with RunningServer(tmp_path / "data"):
        pass  # A new store would not start on a full disk.
    full = stack.enter_context(RunningServer(tmp_path / "data", free_bytes_min=1 << 60))
    assert named(ask(capsys, "--server", full.address)) == {"disk": "fail"}
    server = pb.ServerStatus(hours_until_full=2.0, counted_s=3600.0, free_bytes=1 << 40, disk_bytes=1 << 41)
    reply = pb.StatusReply(version=version("slotstream"), health="ok", now_unix_ns=time.time_ns(), server=server)
    with serving(Status=lambda request, context: reply) as address:
        reply.now_unix_ns = time.time_ns()
        assert named(ask(capsys, "--server", address)) == {"disk": "warn"}


def test_what_a_server_says_commands_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    server = pb.ServerStatus(clock="\x1b", engines=[pb.EngineStatus(slotstream_version="\x1b", connected=True)])
    reply = pb.StatusReply(version="\x1b", health="\x1b", rights=["\x1b"], covers=["\x1b"], server=server)
    with serving(Status=lambda request, context: reply) as address:
        cli.main(["doctor", "--server", address])
    assert "\x1b" not in capsys.readouterr().out
    with serving(Status=failing(grpc.StatusCode.UNAUTHENTICATED, "\x1b", slotstream_code="UNAUTHENTICATED")) as address:
        assert cli.main(["doctor", "--server", address]) == 1
    captured = capsys.readouterr()
    assert "\x1b" not in captured.out + captured.err


@contextmanager
def _really(name: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.undo()  # What `_sound_here` put there.
    with pytest.MonkeyPatch.context() as patch:
        other = {"_nixl": "_vllm", "_vllm": "_nixl"}[name]
        patch.setattr(doctor, other, lambda: Finding(other[1:], "ok", ""))
        yield


@pytest.mark.skipif(not nixl.is_installed(), reason="needs NIXL")
@pytest.mark.parametrize("how", ["sound", "import fails", "process dies"])
def test_nixl_that_is_broken(
    how: str, tmp_path: Path, stack: ExitStack, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    server = stack.enter_context(RunningServer(tmp_path / "data", transport="grpc"))
    (tmp_path / "broken").mkdir()
    for package in nixl._PACKAGES if how != "sound" else ():
        text = "raise ImportError('broken')" if how == "import fails" else "import os; os.abort()"
        (tmp_path / "broken" / f"{package}.py").write_text(text)
    with _really("_nixl", monkeypatch), pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(tmp_path / "broken")
        assert named(ask(capsys, "--server", server.address)) == ({} if how == "sound" else {"nixl": "fail"})


def test_nixl_that_is_not_installed(
    tmp_path: Path, stack: ExitStack, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    server = stack.enter_context(RunningServer(tmp_path / "data", transport="grpc"))
    with _really("_nixl", monkeypatch), pytest.MonkeyPatch.context() as patch:
        patch.setattr(nixl, "_PACKAGES", ())
        assert named(ask(capsys, "--server", server.address)) == {"nixl": "warn"}


@pytest.mark.parametrize(
    ("module", "result"),
    [
        ("raise SystemExit('it broke')", "fail"),
        ("import os; os.abort()", "fail"),
        ("print('noise'); print('{\"version\": null, \"problems\": []}')", "warn"),
        ('print(\'{"version": "0.33.0", "problems": ["it lacks X"]}\')', "fail"),
        ('print(\'noise\')\nprint(\'{"version": "0.33.0", "problems": [], "known": true}\')', "ok"),
        ('print(\'{"version": "0.99.0", "problems": [], "known": false}\')', "warn"),
    ],
)
def test_what_the_process_that_imports_vllm_says(
    module: str, result: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """tests/engine/test_doctor.py asks a real vLLM."""
    (tmp_path / "stand_in.py").write_text(module)
    with _really("_vllm", monkeypatch), pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(tmp_path)
        patch.setattr(doctor, "_SEAMS", "stand_in")
        found = doctor._vllm()
    assert (found.check, found.result, bool(found.todo)) == ("vllm", result, result != "ok")


def test_each_of_several_servers_is_asked(tmp_path: Path, stack: ExitStack, capsys: pytest.CaptureFixture[str]) -> None:
    one, two = (stack.enter_context(RunningServer(tmp_path / name)) for name in ("one", "two"))
    dead = f"127.0.0.1:{free_port()}"
    both = f"{one.address},{two.address}"
    assert cli.main(["doctor", "--json", "--server", both]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(line["check"], line["result"]) for line in found] == [
        *((name, "ok") for _ in range(2) for name in ORDER[:6]),
        *((name, "ok") for name in ORDER[6:]),
    ]
    for at, line in enumerate(found[:12]):
        assert (one, two)[at // 6].address in line["message"]
    assert cli.main(["doctor", "--json", "--server", f"{dead},{both}"]) == 1
    captured = capsys.readouterr()
    wrong = [line for line in map(json.loads, captured.out.splitlines()) if line["result"] != "ok"]
    assert [(line["check"], line["result"]) for line in wrong] == [("port", "fail")]
    assert dead in wrong[0]["message"]
    assert captured.err == f"Not asked, because of what failed: {', '.join(f'{name} of {dead}' for name in ORDER[1:6])}\n"
    assert named(ask(capsys, "--server", f"{one.address},nonsense")) == {"port": "fail"}
