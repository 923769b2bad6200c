"""The frame of the command line: help, usage, exit codes, failures as one sentence. Needs no server."""

from __future__ import annotations

import argparse
import datetime
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import pytest
from support.fake_samples import serving
from support.server import run_cli

from slotstream.cli import common
from slotstream.cli import main as cli
from slotstream.wire.errors import ConfigError, StoreFull

COMMANDS = [*cli.COMMANDS]


def test_help_lists_every_command_and_the_exit_codes() -> None:
    done = run_cli("--help")
    assert done.returncode == 0
    assert all(f"\n    {name} " in done.stdout for name in COMMANDS)
    assert "exit codes:" in done.stdout
    assert done.stderr == ""


def test_version() -> None:
    assert run_cli("--version").stdout == f"slotstream {version('slotstream')}\n"


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_helps_with_an_example_and_every_default(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main([name, "--help"])
    assert caught.value.code == 0
    shown = capsys.readouterr().out
    assert f"slotstream {name} " in shown.split("\nexample", 1)[-1]
    parser = argparse.ArgumentParser()
    getattr(__import__(f"slotstream.cli.{cli.COMMANDS[name].module}", fromlist=["x"]), f"add_{name}_arguments")(parser)
    needed = {action for group in parser._mutually_exclusive_groups if group.required for action in group._group_actions}
    needed |= {action for action in parser._actions if action.required or action.dest == "help"}
    options = [action for action in parser._actions if action.option_strings and action not in needed]
    assert options
    if name in ("serve", "demo"):
        return  # Their options, some of them required, are the server's and the demo's own.
    assert all("default:" in str(action.help) for action in options)


@pytest.mark.parametrize("name", ["", *cli.COMMANDS])
def test_help_imports_nothing_heavy(name: str) -> None:
    """It is instant, and a server's machine has no torch."""
    heavy = {"grpc", "google.protobuf", "rich", "torch", "numpy", "transformers", "safetensors", "datasets", "vllm"}
    # serve's options name the rules of retention, which are the store's.
    heavy |= {"sqlite3"} if name != "serve" else set()
    script = (
        "import sys; from slotstream.cli import main as cli\n"
        "try: cli.main(sys.argv[2:])\n"
        "except SystemExit: pass\n"
        "heavy = sorted(set(sys.argv[1].split()) & set(sys.modules))\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)\n"
    )
    words = [" ".join(heavy), *([name] if name else []), "--help"]
    done = subprocess.run([sys.executable, "-c", script, *words], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("usage: slotstream")


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["nonsense"],
        ["rm"],
        ["--nonsense"],
        ["get"],
        ["get", "a", "b"],
        ["get", "a", "--layers", "1,x"],
        ["get", "a", "--layers", ""],
        ["get", "a", "--start", "1.5"],
        ["get", "a", "--wait", "soon"],
        ["ls", "--state", "asleep"],
        ["ls", "--limit", "-1"],
        ["ls", "--limit", "many"],
        ["ls", "--tag", "novalue"],
        ["ls", "--tag", "=v"],
        ["ls", "--since", "yesterday"],
        ["ls", "--since", "2026-01-31"],
        ["ls", "--since", "2026-01-31T12:00:00"],
        ["ls", "--since", "2026-02-31T12:00:00Z"],
        ["verify", "--server", "127.0.0.1:1", "--data", "x"],
    ],
    ids=" ".join,
)
def test_a_wrong_command_line_exits_with_2(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(words)
    assert caught.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "error:" in captured.err
    assert "Traceback" not in captured.err


@pytest.mark.parametrize(
    "words",
    [
        ["rm", "a", "--y"],
        ["verify", "--q"],
        ["ls", "--name", "x"],
        ["get", "a", "--out=x"],
        ["serve", "--dat", "x"],
        ["token", "a", "--token", "x"],
        ["demo", "--kee", "x"],
        ["--vers"],
    ],
    ids=" ".join,
)
def test_an_option_has_no_short_form(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """What is nearly --yes may be a typing error, and deletes nothing."""
    with pytest.raises(SystemExit) as caught:
        cli.main(words)
    assert caught.value.code == 2
    assert "unknown option '--" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "usage", "sentence"),
    [
        (["ls", "--tags", "a=b"], "slotstream ls ", "unknown option '--tags'; did you mean --tag?"),
        (["get", "a", "b"], "slotstream get ", "get fetches one sample; slotstream export writes many"),
        (["serve", "--dta", "x"], "slotstream serve ", "unknown option '--dta'; did you mean --data?"),
        (["ls", "--xyzzy"], "slotstream ls ", "unknown option '--xyzzy'"),
        (["ls", "-x"], "slotstream ls ", "unexpected argument: -x"),
        (["lss"], "slotstream ", "unknown command 'lss'; did you mean ls?"),
        (["verfy", "--quarantine"], "slotstream ", "unknown command 'verfy'; did you mean verify?"),
        (["--versoin"], "slotstream ", "unknown option '--versoin'; did you mean --version?"),
        (["--versoin", "ls"], "slotstream ", "unknown option '--versoin'; did you mean --version?"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistyped_word_is_answered_by_its_command(
    words: list[str], usage: str, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(words)
    assert caught.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith(f"usage: {usage}")
    assert said.endswith(f": error: {sentence}\n")


def test_what_follows_two_dashes_is_no_option(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["stat", "--server", "127.0.0.1:1", "--", "--yes"]) == 1
    assert "sample id '--yes'" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [["ls", "--server", "nonsense"], ["stat", "a", "--server", "unix:x"], ["verify", "--data", "/nonexistent/data"]],
    ids=" ".join,
)
def test_a_wrong_address_or_directory_exits_with_2(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(words) == 2
    _is_one_sentence(capsys.readouterr().err, words[0])


@pytest.mark.parametrize(
    "words",
    [
        ["ls"],
        ["stat", "a", "b"],
        ["get", "a"],
        ["rm", "a", "b", "--yes"],
        ["verify"],
    ],
    ids=" ".join,
)
def test_no_server_is_one_sentence(words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*words, "--server", f"unix:{tmp_path}/s"]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "no server answers" in captured.err
    _is_one_sentence(captured.err, words[0])


@pytest.mark.parametrize(
    "words",
    [["stat", "../a"], ["get", "a", "--layers", "1,1"], ["get", "a", "--start", "-1"], ["get", "a", "--wait", "-1"]],
    ids=" ".join,
)
def test_what_no_sample_can_be_fails_before_anything_is_sent(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*words, "--server", "127.0.0.1:1"]) == 1
    _is_one_sentence(capsys.readouterr().err, words[0])


def test_the_environment_names_the_server(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("SLOTSTREAM_SERVER", "nonsense")
    assert cli.main(["ls"]) == 2
    assert "'nonsense'" in capsys.readouterr().err
    with serving() as address:
        monkeypatch.setenv("SLOTSTREAM_SERVER", address)
        assert cli.main(["ls"]) == 1
    assert "no slotstream server of this version" in capsys.readouterr().err


def _raising(error: BaseException) -> Callable[[argparse.Namespace], int]:
    def run(arguments: argparse.Namespace) -> int:
        raise error

    return run


@pytest.mark.parametrize(
    ("error", "code", "sentence"),
    [
        (KeyboardInterrupt(), 130, None),
        (ConfigError("wrong option"), 2, "slotstream ls: wrong option\n"),
        (StoreFull("the disk is full"), 1, "slotstream ls: the disk is full (STORE_FULL)\n"),
        (common.CommandFailed("no"), 1, "slotstream ls: no\n"),
        (OSError(28, "No space left on device", "/x/y"), 1, "slotstream ls: /x/y: No space left on device\n"),
        (MemoryError(), 1, "slotstream ls: MemoryError\n"),
        (
            ZeroDivisionError("two\nlines"),
            1,
            "slotstream ls: unexpected fault, ZeroDivisionError: two lines (SLOTSTREAM_DEBUG=1 shows where)\n",
        ),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_every_failure_has_its_exit_code(
    error: BaseException, code: int, sentence: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("slotstream.cli.samples.run_ls", _raising(error))
    assert cli.main(["ls"]) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == (sentence or "")


def test_a_fault_shows_its_traceback_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slotstream.cli.samples.run_ls", _raising(ZeroDivisionError()))
    monkeypatch.setenv("SLOTSTREAM_DEBUG", "1")
    with pytest.raises(ZeroDivisionError):
        cli.main(["ls"])


def test_the_demo_without_its_extras_names_them(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "slotstream.demo.run", None)
    assert cli.main(["demo"]) == 1
    assert "slotstream[vllm,torch]" in capsys.readouterr().err


def test_ago_and_rfc_3339_are_moments(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1_800_000_000_123_456_789
    monkeypatch.setattr("time.time_ns", lambda: now)
    assert common.moment("15m") == now - 15 * 60 * 10**9
    assert common.moment("2h ago") == now - 2 * 3600 * 10**9
    assert common.moment("3d") == now - 3 * 86400 * 10**9
    assert common.moment("99999w") == 0
    expected = int(datetime.datetime(2026, 1, 31, 10, 0, 0, 250000, datetime.UTC).timestamp() * 1000) * 10**6
    assert common.moment("2026-01-31T12:00:00.25+02:00") == expected
    assert common.moment("2026-01-31t10:00:00.25z") == expected


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (102400, "100 KiB"), (5 << 30, "5.0 GiB"), (3 << 50, "3072 TiB")],
)
def test_sizes(nbytes: int, text: str) -> None:
    assert common.size_text(nbytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(-5, "0s"), (0, "0s"), (119, "119s"), (120, "2m"), (7199, "119m"), (7200, "2h"), (172799, "47h"), (172800, "2d")],
)
def test_ages(seconds: int, text: str) -> None:
    now = 1_800_000_000_000_000_000
    assert common.age_text(now - seconds * 10**9, now) == text


def test_what_cannot_be_printed_is_escaped() -> None:
    assert common.shown("a\x1b[31mb\n\u202e\udc80é") == "a\\x1b[31mb\\n\\u202e\\udc80é"


def _is_one_sentence(text: str, command: str) -> None:
    assert text.startswith(f"slotstream {command}: ")
    assert text.count("\n") == 1
    assert "Traceback" not in text
