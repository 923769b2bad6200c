"""What a token may not see shows as unknown, and a namespace that does not exist is said."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.ingest_client import IngestClient
from support.secure import bearer, entry, token, write_tokens
from support.server import ServerProcess
from support.synthetic import SyntheticSample

from slotstream.cli import main as cli

SPACES = [f"n{number:02}" for number in range(25)]


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server with a sample `s` in each of 25 namespaces."""
    directory = tmp_path_factory.mktemp("guarded")
    tokens = write_tokens(
        directory / "tokens.toml",
        entry("few", ["n00", "n01", "empty"], "read", "admin"),
        entry("root", ["*"], "ingest", "read", "delete", "admin"),
    )
    with ServerProcess(directory / "data", "--tokens", str(tokens)) as server:
        with IngestClient(server.address, metadata=bearer("root")) as sender:
            sender.store(*(SyntheticSample("s", namespace=space) for space in SPACES))
        yield server


@pytest.fixture(params=["few", "root"])
def name(request: pytest.FixtureRequest, guarded: ServerProcess, monkeypatch: pytest.MonkeyPatch) -> str:
    """Whose token the commands show."""
    monkeypatch.setenv("SLOTSTREAM_SERVER", guarded.address)
    monkeypatch.setenv("SLOTSTREAM_TOKEN", token(request.param))
    return str(request.param)


FACTS = ("free_bytes", "free_bytes_target", "quarantined_files", "quarantined_bytes", "scrub_every_s", "scrub_samples")


def test_what_only_an_admin_sees_is_unknown_to_others(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["stat"]) == 0
    lines = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()]
    told = {line[0]: line[1] for line in lines if len(line) == 2}
    for fact in ("free", "quarantine", "scrubbing"):
        assert (told[fact] == "-  (needs admin of every namespace)") == (name == "few"), told
    assert cli.main(["stat", "--json"]) == 0
    plain = json.loads(capsys.readouterr().out)
    assert {fact for fact in FACTS if plain[fact] is None} == (set(FACTS) if name == "few" else {"free_bytes_target"})


def test_stat_of_one_namespace_is_about_that_one(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["stat", "--namespace", "n01"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["NAMESPACE", "n01"]
    assert cli.main(["stat", "--namespace", "n01", "--json"]) == 0
    plain = json.loads(capsys.readouterr().out)
    assert [space["namespace"] for space in plain["namespaces"]] == ["n01"]
    assert plain["free_bytes"] is None


@pytest.mark.parametrize(
    ("words", "code"),
    [(["verify"], 1), (["restore"], 1), (["stat"], 1), (["ls"], 0), (["ls", "--json"], 0), (["ls", "--state", "failed"], 0)],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistyped_namespace_is_said(name: str, words: list[str], code: int, capsys: pytest.CaptureFixture[str]) -> None:
    typo = "empty" if name == "few" else "n0O"
    assert cli.main([*words, "--namespace", typo]) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    holding = "n00, n01" if name == "few" else ", ".join(SPACES[:20]) + " and 5 more"
    assert f"namespace {typo!r} holds no sample; of those that this token may read, these do: {holding}" in captured.err
    assert "all sound" not in captured.err
    assert captured.err.count("\n") == 1


def test_a_directory_says_which_namespaces_it_has(
    guarded: ServerProcess, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["verify", "--data", str(guarded.data_dir), "--namespace", "n0O"]) == 1
    said = capsys.readouterr().err
    assert "namespace 'n0O' holds no sample; of those that are here, these do: n00, " in said
    assert "and 5 more" in said


def test_what_is_not_in_the_quarantine_cannot_be_restored(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["restore", "s", "--namespace", "n01"]) == 1
    assert capsys.readouterr().err == "slotstream restore: the quarantine holds no file of n01/s (NOT_FOUND)\n"
    assert cli.main(["restore", "--namespace", "n01"]) == 0
    assert capsys.readouterr().err == "0 samples restored, 0 files stay in the quarantine\n"


@pytest.mark.parametrize("words", [["get", "none", "--wait", "0"], ["verify", "none"], ["restore", "none"], ["stat", "none"]])
def test_every_command_prints_the_stable_code(name: str, words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*words, "--namespace", "n01"]) == 1
    assert capsys.readouterr().err.endswith(" (NOT_FOUND)\n")


@pytest.mark.parametrize("command", ["verify", "restore"])
def test_the_help_says_where_an_id_is_looked_for(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main([command, "--help"])
    assert "(default: any; with an ID: default)" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--since", "30s", "--until", "2m"], "--since is not before --until, so that no sample can match"),
        (["--state", "failed"], "No sample matches."),
        (["--tag", "a=b", "--namespace", "n01"], "No sample matches."),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_ls_says_why_it_shows_nothing(name: str, words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["ls", *words]) == 0
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(sentence)


def test_an_empty_store_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with ServerProcess(tmp_path / "data") as server:
        for words in ([], ["--state", "failed"], ["--tag", "a=b"]):
            assert cli.main(["ls", *words, "--server", server.address]) == 0
            assert tuple(capsys.readouterr()) == ("", "This server holds no sample yet.\n")
        assert cli.main(["verify", "--server", server.address, "--namespace", "x"]) == 1
        assert "namespace 'x' holds no sample; nor does any that this token may read" in capsys.readouterr().err
        assert cli.main(["verify", "--server", server.address]) == 0  # All of it, and that is nothing.
