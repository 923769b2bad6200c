"""`slotstream verify`: each class of damage has its word and its exit code, through a server and on a directory."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.ingest_client import IngestClient
from support.server import ServerProcess
from support.synthetic import SyntheticSample

from slotstream.cli import main as cli


def flip_a_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1000] ^= 0x40  # In the rows: before them is the header, behind them 320 bytes of token ids.
    path.write_bytes(content)


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def remove(path: Path) -> None:
    path.unlink()


def scramble_the_header(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[8:16] = b"not json"
    path.write_bytes(content)


def put_a_stranger_beside(path: Path) -> None:
    path.with_name("stranger.safetensors").write_bytes(b"?")


@pytest.fixture(params=["server", "data"])
def where(request: pytest.FixtureRequest, server: ServerProcess) -> list[str]:
    """The options that say what to verify."""
    return ["--server", server.address] if request.param == "server" else ["--data", str(server.data_dir)]


@pytest.fixture
def path(ingest: IngestClient, server: ServerProcess, namespace: str) -> Path:
    """The file of `bad`, which is stored between two others."""
    ingest.store(*(SyntheticSample(name, namespace=namespace) for name in ("first", "bad", "last")))
    (found,) = (server.data_dir / namespace).glob("*/bad.safetensors")
    return found


def test_a_sound_store(where: list[str], path: Path, namespace: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["verify", *where, "--namespace", namespace]) == 0
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("3 samples checked, ")
    assert captured.err.endswith(": all sound\n")


@pytest.mark.parametrize(
    ("damage", "word", "code"),
    [
        (flip_a_byte, "HASH_MISMATCH", 3),
        (truncate, "TRUNCATED", 4),
        (remove, "MISSING", 5),
        (scramble_the_header, "UNREADABLE", 6),
        (put_a_stranger_beside, "FOREIGN", 7),
    ],
)
def test_each_damage_has_its_exit_code(
    where: list[str],
    path: Path,
    namespace: str,
    capsys: pytest.CaptureFixture[str],
    damage: Callable[[Path], None],
    word: str,
    code: int,
) -> None:
    damage(path)
    assert cli.main(["verify", *where, "--namespace", namespace]) == code
    captured = capsys.readouterr()
    (line,) = captured.out.splitlines()
    name = "stranger" if word == "FOREIGN" else "bad"
    assert line.startswith(f"{word}  {namespace}/")
    assert name in line
    assert captured.err.endswith(": 1 damaged\n")
    assert cli.main(["verify", *where, "--namespace", namespace, "--json"]) == code
    verdicts = [json.loads(text) for text in capsys.readouterr().out.splitlines()]
    assert [verdict["damage"] for verdict in verdicts if verdict["damage"]] == [word]
    assert all(set(verdict) == {"namespace", "sample_id", "damage", "message", "bytes"} for verdict in verdicts)
    assert {"first", "last"} <= {verdict["sample_id"] for verdict in verdicts}


def test_the_first_damage_decides(where: list[str], path: Path, namespace: str, capsys: pytest.CaptureFixture[str]) -> None:
    remove(path)
    truncate(next((path.parents[1]).glob("*/first.safetensors")))
    code = cli.main(["verify", *where, "--namespace", namespace])
    captured = capsys.readouterr()
    words = [line.split()[0] for line in captured.out.splitlines()]
    assert sorted(words) == ["MISSING", "TRUNCATED"]
    assert code == {"TRUNCATED": 4, "MISSING": 5}[words[0]]
    assert captured.err.endswith(": 2 damaged\n")


def test_one_sample(where: list[str], path: Path, namespace: str, capsys: pytest.CaptureFixture[str]) -> None:
    flip_a_byte(path)
    assert cli.main(["verify", "first", *where, "--namespace", namespace]) == 0
    assert capsys.readouterr().err.startswith("1 samples checked")
    assert cli.main(["verify", "bad", *where, "--namespace", namespace]) == 3
    capsys.readouterr()
    assert cli.main(["verify", "never", *where, "--namespace", namespace]) == 1
    assert capsys.readouterr().err.startswith("slotstream verify: ")


def test_an_id_alone_is_of_the_default_namespace(where: list[str], path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["verify", "bad", *where]) == 1
    assert "default/bad" in capsys.readouterr().err


def test_a_read_of_one_layer_is_checked_unless_told_otherwise(
    server: ServerProcess, path: Path, namespace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is damaged is layer 4; only who asks not to verify gets layer 2 of these rows."""
    flip_a_byte(path)
    out = tmp_path / "two.safetensors"
    words = ["get", "bad", "--layers", "2", "-o", str(out), "--server", server.address, "--namespace", namespace]
    assert cli.main(words) == 1
    assert "do not match their hash" in capsys.readouterr().err
    assert not out.exists()
    assert cli.main([*words, "--no-verify"]) == 0
    assert load_file(out)["hidden_states"].view(torch.uint8).numpy().tobytes() == SyntheticSample("bad").rows(layers=(2,))


def test_what_verifies_again_is_restored(
    server: ServerProcess, path: Path, namespace: str, capsys: pytest.CaptureFixture[str]
) -> None:
    flip_a_byte(path)
    there = ["--server", server.address, "--namespace", namespace]
    assert cli.main(["verify", *there, "--quarantine"]) == 3
    assert not path.exists()
    assert cli.main(["restore", *there]) == 1
    captured = capsys.readouterr()
    assert captured.out.splitlines()[-1].startswith(f"HASH_MISMATCH  {namespace}/bad  rows [")
    assert captured.err.endswith("0 samples restored, 1 files stay in the quarantine\n")
    (held,) = (server.data_dir / ".quarantine" / namespace).iterdir()
    flip_a_byte(held)
    assert cli.main(["restore", "bad", *there, "--json"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert json.loads(line)["restored"] is True
    assert path.exists()
    assert cli.main(["verify", *there]) == 0
