"""Tokens and certificates on the command line and in the client: one sentence for each way of being turned away."""

from __future__ import annotations

import os
import pickle
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.ingest_client import IngestClient
from support.secure import Authority, bearer, entry, token, write_tokens
from support.server import ServerProcess, run_cli
from support.synthetic import SyntheticSample

from slotstream.cli import main as cli
from slotstream.client import ConfigError, PermissionDenied, Unauthenticated, connect
from slotstream.server.access.tokens import digest_of, load_tokens

VARIABLES = ("TOKEN", "TOKEN_FILE", "TLS_CA", "TLS_CERT", "TLS_KEY")
CLEAN = {f"SLOTSTREAM_{name}": "" for name in VARIABLES}


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server that wants tokens, with a sample `s` in each of the namespaces a and b."""
    directory = tmp_path_factory.mktemp("guarded")
    tokens = write_tokens(
        directory / "tokens.toml", entry("alice", ["a"], "read"), entry("root", ["*"], "ingest", "read", "delete", "admin")
    )
    with ServerProcess(directory / "data", "--tokens", str(tokens)) as server:
        with IngestClient(server.address, metadata=bearer("root")) as sender:
            sender.store(SyntheticSample("s", namespace="a"), SyntheticSample("s", namespace="b"))
        yield server


def test_a_token_is_made_with_its_entry_and_shown_nowhere(tmp_path: Path) -> None:
    secret = tmp_path / "trainer.token"
    words = ("token", "trainer", "--namespace", "a", "--namespace", "b", "--right", "read", "--right", "delete")
    done = run_cli(*words, "--token-file", str(secret))
    assert (done.returncode, done.stderr) == (0, "")
    made = secret.read_text().strip()
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    assert len(made) >= 40
    assert made not in done.stdout
    ((digest, principal),) = load_tokens(write_tokens(tmp_path / "tokens.toml", done.stdout))
    assert digest == digest_of(made)
    assert (principal.name, principal.namespaces) == ("trainer", frozenset({"a", "b"}))
    assert principal.rights == frozenset({"read", "delete"})
    again = run_cli(*words, "--token-file", str(secret))
    assert again.returncode == 1
    assert "File exists" in again.stderr
    assert secret.read_text().strip() == made
    wrong = run_cli("token", "two words", "--token-file", str(tmp_path / "other"))
    assert wrong.returncode == 2
    assert not (tmp_path / "other").exists()
    everything = run_cli("token", "root", "--namespace", "*", "--token-file", str(tmp_path / "root.token"))
    assert 'namespaces = "*"' in everything.stdout


def test_the_documented_way_to_a_tokens_file_is_not_warned_of(tmp_path: Path) -> None:
    """A shell makes the file readable for everybody."""
    page = (Path(__file__).parents[2] / "docs" / "security.md").read_text()
    commands = [line for line in page.splitlines() if line.startswith("slotstream token ")]
    assert len(commands) == 2
    script = "umask 022\n" + "\n".join(commands).replace("slotstream token", f"{sys.executable} -m slotstream.cli.main token")
    subprocess.run(["sh", "-ec", script], cwd=tmp_path, check=True)
    with ServerProcess(tmp_path / "data", "--tokens", str(tmp_path / "tokens.toml")) as server:
        log = server.log()
    assert "2 tokens from" in log
    assert "WARNING" not in log
    shared = tmp_path / "tokens.toml"
    shared.chmod(0o640)  # Its owner's wish.
    subprocess.run(["sh", "-ec", script.replace(".token ", "-2.token ").replace("alice ", "bob ")], cwd=tmp_path, check=False)
    assert stat.S_IMODE(shared.stat().st_mode) == 0o640


@pytest.mark.parametrize(
    "words", [["ls"], ["stat", "s", "t"], ["get", "s"], ["rm", "s", "t", "--yes"], ["verify"]], ids=" ".join
)
def test_each_command_takes_a_token_and_is_turned_away_without(
    guarded: ServerProcess, words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in CLEAN.items():
        monkeypatch.setenv(name, value)
    assert cli.main([*words, "--server", guarded.address]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == f"slotstream {words[0]}: this server wants a bearer token, and the call has none (UNAUTHENTICATED)\n"
    monkeypatch.setenv("SLOTSTREAM_TOKEN", token("nobody"))
    assert cli.main([*words, "--server", guarded.address]) == 1
    said = f"slotstream {words[0]}: the bearer token is not one that this server knows (UNAUTHENTICATED)\n"
    assert capsys.readouterr().err == said


def test_the_token_comes_from_a_file_or_the_environment(
    guarded: ServerProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in CLEAN.items():
        monkeypatch.setenv(name, value)
    file = tmp_path / "token"
    file.write_text(token("alice") + "\n")
    ls = ["ls", "--server", guarded.address, "--json"]
    for variable, value in (("TOKEN", token("alice")), ("TOKEN_FILE", str(file))):
        with monkeypatch.context() as inside:
            inside.setenv(f"SLOTSTREAM_{variable}", value)
            assert cli.main(ls) == 0
            assert capsys.readouterr().out.count('"namespace": "a"') == 1
    monkeypatch.setenv("SLOTSTREAM_TOKEN", token("nobody"))
    assert cli.main([*ls, "--token-file", str(file)]) == 0
    shown = capsys.readouterr()
    assert (shown.out.count("\n"), shown.err) == (1, "")
    assert cli.main(["stat", "s", "--namespace", "b", "--server", guarded.address, "--token-file", str(file)]) == 1
    assert capsys.readouterr().err == "slotstream stat: s: this token is not one of namespace 'b' (PERMISSION_DENIED)\n"
    assert cli.main([*ls, "--token-file", str(tmp_path / "none")]) == 2
    assert "token_file: cannot read" in capsys.readouterr().err


def test_the_client_raises_what_the_server_says(guarded: ServerProcess, tmp_path: Path) -> None:
    with connect(guarded.address, token=token("alice")) as client:
        assert [info.namespace for info in client.list()] == ["a"]
        for refused in (
            lambda: client.stat("s", namespace="b"),
            lambda: list(client.list(namespace="b")),
            lambda: client.delete("s", namespace="a"),
            lambda: client.read("s", namespace="b"),
            lambda: list(client.verify()),
        ):
            with pytest.raises(PermissionDenied) as caught:
                refused()
            assert not caught.value.retryable
    file = tmp_path / "token"
    file.write_text(token("nobody"))
    with connect(guarded.address, token_file=file) as client:
        with pytest.raises(Unauthenticated):
            client.stat("s", namespace="a")
        file.write_text(token("root"))
        assert client.stat("s", namespace="b").num_tokens > 0  # The file is read again for each call.
        file.unlink()
        with pytest.raises(Unauthenticated, match="token_file: cannot read"):
            client.stat("s", namespace="b")


def test_a_datasets_workers_show_the_clients_token(guarded: ServerProcess) -> None:
    dataset = pytest.importorskip("slotstream.client.dataset")
    with connect(guarded.address, token=token("alice")) as client:
        elsewhere = pickle.loads(pickle.dumps(dataset.SampleDataset(client)))
    assert [(sample.namespace, sample.sample_id) for sample in elsewhere] == [("a", "s")]


def test_what_cannot_be_used_is_a_config_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in CLEAN.items():
        monkeypatch.setenv(name, value)
    authority = Authority(tmp_path)
    pair = authority.issue("mine")
    for options in (
        {"token": "short"},
        {"token": "with\nnewline-and-more-characters"},
        {"token": token("a"), "token_file": pair.key},
        {"tls_cert": pair.cert, "tls_key": pair.key},
        {"tls_ca": authority.path, "tls_cert": pair.cert},
        {"tls_ca": pair.key},
    ):
        with pytest.raises(ConfigError):
            connect("127.0.0.1:1", **options)
    with pytest.raises(ConfigError, match="unix socket"):
        connect("unix:/s", tls_ca=authority.path)
    monkeypatch.setenv("SLOTSTREAM_TLS_CA", os.fspath(tmp_path / "none"))
    with pytest.raises(ConfigError, match="tls_ca: cannot read"):
        connect("127.0.0.1:1")
