"""`slotstream ls`, `stat`, `rm` and `get` against a real server: what people and scripts see."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load, load_file
from support.ingest_client import IngestClient
from support.server import ServerProcess, run_cli
from support.synthetic import SyntheticSample

from slotstream.cli import main as cli
from slotstream.client import connect

LONG_ID = "a-" + "very." * 20 + "long_id"


@pytest.fixture(autouse=True)
def _this_server(server: ServerProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLOTSTREAM_SERVER", server.address)


@pytest.fixture
def stored(ingest: IngestClient, namespace: str) -> SyntheticSample:
    """Two committed samples, the newer of them returned, and a failed one that is newest."""
    sample = SyntheticSample("one", namespace=namespace, tags={"split": "train"}, metadata={"engine_id": "e\x1b[31m"})
    ingest.store(SyntheticSample(LONG_ID, namespace=namespace, num_tokens=3, model="m\x1b[2J", layer_ids=tuple(range(9))))
    ingest.store(sample)
    ingest.fail(SyntheticSample("broken", namespace=namespace))
    return sample


class Terminal(io.StringIO):
    """A stdin that a person sits at."""

    def isatty(self) -> bool:
        return True


def json_lines(text: str) -> list[dict[str, object]]:
    return [json.loads(line) for line in text.splitlines()]


def test_ls_is_a_table_without_cut_or_wrapped_ids(stored: SyntheticSample, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["ls", "--namespace", stored.namespace]) == 0
    captured = capsys.readouterr()
    header, *rows = captured.out.splitlines()
    assert header.split() == ["SAMPLE", "NAMESPACE", "STATE", "TOKENS", "LAYERS", "SIZE", "AGE", "MODEL", "TAGS"]
    assert [row.split()[0] for row in rows] == ["broken", "one", LONG_ID]
    assert "failed SLOT_MISMATCH" in rows[0]
    assert re.search(r"committed\s+40\s+1,2,4\s+[0-9.]+ KiB\s+[0-9]+s\s+test/model\s+split=train$", rows[1])
    assert "0,1…8 (9)" in rows[2]
    assert "m\\x1b[2J" in rows[2]
    assert "\x1b" not in captured.out
    assert captured.err == ""


def test_ls_json_is_one_object_a_line(stored: SyntheticSample, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["ls", "--namespace", stored.namespace, "--json"]) == 0
    broken, one, _ = json_lines(capsys.readouterr().out)
    assert (broken["state"], broken["error_code"]) == ("FAILED", "SLOT_MISMATCH")
    assert one["sample_id"] == "one"
    assert one["layer_ids"] == [1, 2, 4]
    assert one["tags"] == {"split": "train"}
    assert one["num_tokens"] == 40
    assert one["error_code"] is None


@pytest.mark.parametrize(
    ("options", "ids"),
    [
        (["--state", "committed"], ["one", LONG_ID]),
        (["--state", "FAILED"], ["broken"]),
        (["--tag", "split=train"], ["one"]),
        (["--tag", "split=train", "--tag", "split2=x"], []),
        (["--model", "test/model"], ["broken", "one"]),
        (["--since", "1h"], ["broken", "one", LONG_ID]),
        (["--until", "1h"], []),
        (["--until", "2020-01-01T00:00:00Z"], []),
        (["--limit", "0"], ["broken", "one", LONG_ID]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) and value and value[0].startswith("--") else "",
)
def test_ls_filters(stored: SyntheticSample, capsys: pytest.CaptureFixture[str], options: list[str], ids: list[str]) -> None:
    assert cli.main(["ls", "--namespace", stored.namespace, "--json", *options]) == 0
    assert [info["sample_id"] for info in json_lines(capsys.readouterr().out)] == ids


@pytest.mark.parametrize("as_json", [[], ["--json"]], ids=["table", "json"])
def test_ls_says_when_there_is_more(stored: SyntheticSample, capsys: pytest.CaptureFixture[str], as_json: list[str]) -> None:
    assert cli.main(["ls", "--namespace", stored.namespace, "--limit", "2", *as_json]) == 0
    captured = capsys.readouterr()
    assert "one" in captured.out
    assert LONG_ID not in captured.out
    assert captured.err.startswith("There are more than 2:")
    assert cli.main(["ls", "--namespace", stored.namespace, "--limit", "3", *as_json]) == 0
    assert capsys.readouterr().err == ""


def test_ls_of_nothing(stored: SyntheticSample, namespace: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["ls", "--namespace", namespace + "x"]) == 0
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"namespace '{namespace}x' holds no sample")
    assert cli.main(["ls", "--model", "none"]) == 0
    assert tuple(capsys.readouterr()) == ("", "No sample matches.\n")


def test_a_terminal_gets_colours_and_whole_ids(stored: SyntheticSample) -> None:
    parent, child = pty.openpty()
    environment = {**os.environ, "COLUMNS": "80", "TERM": "xterm"}
    command = [sys.executable, "-m", "slotstream.cli.main", "ls", "--namespace", stored.namespace]
    process = subprocess.Popen(command, stdin=child, stdout=child, stderr=child, env=environment)
    os.close(child)
    output = b""
    while chunk := _read(parent):
        output += chunk
    os.close(parent)
    assert process.wait(60) == 0
    assert b"\x1b[" in output
    lines = re.sub(r"\x1b\[[0-9;]*m", "", output.decode()).splitlines()
    assert [line.split()[0] for line in lines] == ["SAMPLE", "broken", "one", LONG_ID]


def _read(fd: int) -> bytes:
    try:
        return os.read(fd, 65536)
    except OSError:  # Linux: the other end was closed.
        return b""


def test_stat_shows_all_facts(stored: SyntheticSample, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["stat", "one", "broken", "--namespace", stored.namespace]) == 0
    out = capsys.readouterr().out
    for line in (
        r"sample +one",
        r"state +committed",
        r"tokens +40",
        r"layers +1,2,4",
        r"dtype +BF16",
        r"file +[0-9.]+ KiB \([0-9]+ bytes\)",
        r"created +20[0-9]{2}-[0-9-]+T[0-9:]+Z \([0-9]+s ago\)",
        r"tag split +train",
        r"metadata engine_id +e\\x1b\[31m",
        r"state +failed",
        r"error +SLOT_MISMATCH: the slots do not match",
    ):
        assert re.search(f"(?m)^{line}$", out), line


def test_stat_says_how_many_others_failed_under_a_committed_id(
    stored: SyntheticSample, ingest: IngestClient, capsys: pytest.CaptureFixture[str]
) -> None:
    other = SyntheticSample("one", namespace=stored.namespace)
    ingest.fail(other, "BAD_PARAMS", "a typo")
    ingest.fail(other, "ROWS_NOT_COMPUTED", "loaded")
    ingest.fail(other, "ROWS_NOT_COMPUTED", "loaded")
    assert cli.main(["stat", "one", "--namespace", stored.namespace]) == 0
    assert re.search(r"^refused +1 BAD_PARAMS, 2 ROWS_NOT_COMPUTED$", capsys.readouterr().out, re.MULTILINE)
    assert cli.main(["stat", "one", "--namespace", stored.namespace, "--json"]) == 0
    assert json_lines(capsys.readouterr().out)[0]["refused"] == {"BAD_PARAMS": 1, "ROWS_NOT_COMPUTED": 2}


def test_stat_goes_on_after_one_that_is_not_there(stored: SyntheticSample, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["stat", "never", "one", "--namespace", stored.namespace, "--json"]) == 1
    captured = capsys.readouterr()
    assert [info["sample_id"] for info in json_lines(captured.out)] == ["one"]
    assert re.fullmatch(r"slotstream stat: never: .* \(NOT_FOUND\)\n", captured.err)


def test_rm_reports_each(stored: SyntheticSample, server: ServerProcess, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["rm", "one", "never", "broken", "--namespace", stored.namespace, "--yes"]) == 1
    captured = capsys.readouterr()
    assert captured.out == f"deleted {stored.namespace}/one\ndeleted {stored.namespace}/broken\n"
    assert captured.err.startswith("slotstream rm: never: ")
    with connect(server.address) as client:
        assert [info.sample_id for info in client.list(namespace=stored.namespace)] == [LONG_ID]


@pytest.mark.parametrize(("answer", "deleted"), [("y\n", True), ("Yes\n", True), ("n\n", False), ("\n", False), ("", False)])
def test_rm_asks_a_person(
    stored: SyntheticSample, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], answer: str, deleted: bool
) -> None:
    monkeypatch.setattr(sys, "stdin", Terminal(answer))
    assert cli.main(["rm", "one", "--namespace", stored.namespace]) == (0 if deleted else 1)
    captured = capsys.readouterr()
    assert f"Delete sample {stored.namespace}/one for good? [y/N]" in captured.err
    assert (captured.out != "") == deleted
    assert cli.main(["stat", "one", "--namespace", stored.namespace]) == (1 if deleted else 0)


@pytest.mark.parametrize("answer", ["n\n", "y\n", ""])
def test_rm_deletes_nothing_unasked_where_nobody_can_be_asked(
    stored: SyntheticSample, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], answer: str
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(answer))
    assert cli.main(["rm", "one", "--namespace", stored.namespace]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("slotstream rm: ")
    assert "--yes" in captured.err
    assert cli.main(["stat", "one", "--namespace", stored.namespace]) == 0
    assert cli.main(["rm", "one", "--namespace", stored.namespace, "--yes"]) == 0


@pytest.mark.parametrize("in_place", [False, True], ids=["sent", "in place"])
def test_get_writes_a_file_that_safetensors_reads(
    stored: SyntheticSample, server: ServerProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str], in_place: bool
) -> None:
    path = tmp_path / "one.safetensors"
    where = ["--data", str(server.data_dir)] if in_place else []
    assert cli.main(["get", "one", "--namespace", stored.namespace, "-o", str(path), *where]) == 0
    with connect(server.address) as client:
        sample = client.get("one", namespace=stored.namespace)
    tensors = load_file(path)
    assert set(tensors) == {"hidden_states", "token_ids"}
    assert torch.equal(tensors["hidden_states"], sample.hidden_states)
    assert torch.equal(tensors["token_ids"], sample.token_ids)
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    assert metadata["sample_id"] == "one"
    assert metadata["namespace"] == stored.namespace
    assert json.loads(metadata["layer_ids"]) == [1, 2, 4]
    assert json.loads(metadata["tags"]) == {"split": "train"}
    assert capsys.readouterr().out.startswith(f"{path}: rows [0, 40) of layers 1,2,4: 40 rows x 3 layers x 16 of BF16")
    assert list(tmp_path.iterdir()) == [path]


def test_get_writes_a_part(stored: SyntheticSample, server: ServerProcess, tmp_path: Path) -> None:
    path = tmp_path / "part.safetensors"
    options = ["--start", "5", "--stop", "20", "--layers", "4,2"]
    assert cli.main(["get", "one", "--namespace", stored.namespace, "-o", str(path), *options]) == 0
    with connect(server.address) as client:
        sample = client.get("one", namespace=stored.namespace, start=5, stop=20, layers=[4, 2])
    tensors = load_file(path)
    assert torch.equal(tensors["hidden_states"], sample.hidden_states)
    assert tensors["token_ids"].tolist() == stored.token_ids[5:20]
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    assert (json.loads(metadata["layer_ids"]), metadata["first_row"], metadata["sample_rows"]) == ([4, 2], "5", "40")


def test_the_last_norms_output_is_shown_and_fetched_by_its_name(
    ingest: IngestClient, namespace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = {"layer_names": '["1", "2", "final"]'}
    ingest.store(SyntheticSample("f", namespace=namespace, layer_ids=(1, 2, 7), metadata=names))
    output = tmp_path / "f.safetensors"
    assert cli.main(["get", "f", "--namespace", namespace, "--layers", "final,2", "-o", str(output)]) == 0
    assert "of layers final,2:" in capsys.readouterr().out
    with safe_open(output, framework="pt") as file:
        assert file.metadata()["layer_ids"] == "[7,2]"
        assert json.loads(file.metadata()["layer_names"]) == ["final", "2"]
    assert cli.main(["stat", "f", "--namespace", namespace]) == 0
    assert "1,2,final" in capsys.readouterr().out


def test_get_overwrites_only_when_forced(stored: SyntheticSample, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "kept"
    path.write_text("mine")
    words = ["get", "one", "--namespace", stored.namespace, "-o", str(path)]
    assert cli.main(words) == 1
    assert capsys.readouterr().err == f"slotstream get: {path} exists; --force replaces it\n"
    assert path.read_text() == "mine"
    assert cli.main([*words, "--force"]) == 0
    assert load_file(path)["token_ids"].tolist() == stored.token_ids
    assert cli.main(["get", "one", "-o", str(tmp_path), "--force"]) == 1
    assert "is a directory" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [path]


def test_get_leaves_no_trace_of_a_failure(stored: SyntheticSample, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    in_namespace = ["--namespace", stored.namespace, "--wait", "0"]
    for words in (["never"], ["broken"], ["one", "--stop", "41"], ["one", "--layers", "3"]):
        assert cli.main(["get", *words, "-o", str(tmp_path / "x"), *in_namespace]) == 1
        assert capsys.readouterr().err.startswith("slotstream get: ")
    assert cli.main(["get", "one", "-o", str(tmp_path / "no" / "such" / "x"), *in_namespace]) == 1
    assert "No such file or directory" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_the_callers_id_finds_the_samples(
    ingest: IngestClient, namespace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """vLLM answered `cmpl-x`, and calls the prompts and sequences of that request otherwise."""
    several = ["cmpl-y-0-89abcdef", "1_cmpl-y-0-89abcdef"]
    for name in ("cmpl-x-0-01234567", *several, "cmpl-xyz-0-01234567"):
        ingest.store(SyntheticSample(name, namespace=namespace))
    there = ["--namespace", namespace]
    assert cli.main(["stat", "cmpl-x", *there]) == 0
    assert re.search(r"(?m)^sample +cmpl-x-0-01234567$", capsys.readouterr().out)
    assert cli.main(["get", "cmpl-x", *there, "-o", str(tmp_path / "x")]) == 0
    assert len(load_file(tmp_path / "x")["token_ids"]) == 40
    capsys.readouterr()
    assert cli.main(["stat", "cmpl-y", *there]) == 0
    captured = capsys.readouterr()
    assert {line.split()[0] for line in captured.out.splitlines()[1:]} == set(several)
    assert captured.err == "2 samples are of request cmpl-y:\n"
    assert cli.main(["stat", "cmpl-y", *there, "--json"]) == 0
    assert {info["sample_id"] for info in json_lines(capsys.readouterr().out)} == set(several)
    assert cli.main(["get", "cmpl-y", *there]) == 1
    assert all(name in capsys.readouterr().err for name in several[:1])
    assert cli.main(["ls", "--request", "cmpl-y", *there, "--json"]) == 0
    assert {info["sample_id"] for info in json_lines(capsys.readouterr().out)} == set(several)
    assert cli.main(["stat", "cmpl-z", *there]) == 1
    assert capsys.readouterr().err.endswith("(NOT_FOUND)\n")


def test_the_last_norms_output_has_its_name_in_json(
    ingest: IngestClient, namespace: str, capsys: pytest.CaptureFixture[str]
) -> None:
    names = {"layer_names": '["1", "2", "final"]'}
    ingest.store(SyntheticSample("f", namespace=namespace, layer_ids=(1, 2, 7), metadata=names))
    for words in (["stat", "f"], ["ls"]):
        assert cli.main([*words, "--namespace", namespace, "--json"]) == 0
        (info,) = json_lines(capsys.readouterr().out)
        assert (info["layer_ids"], info["layer_names"]) == ([1, 2, 7], ["1", "2", "final"])


def test_get_to_stdout_writes_bytes_there_and_remarks_to_stderr(stored: SyntheticSample, server: ServerProcess) -> None:
    command = [sys.executable, "-m", "slotstream.cli.main", "get", "one", "--namespace", stored.namespace, "-o", "-"]
    done = subprocess.run(command, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    assert load(done.stdout)["token_ids"].tolist() == stored.token_ids
    assert done.stderr.decode().startswith("stdout: rows [0, 40) of layers 1,2,4")
    assert not Path("-").exists()
    missing = subprocess.run([*command[:4], "never", *command[5:], "--wait", "0"], capture_output=True, check=False)
    assert (missing.returncode, missing.stdout) == (1, b"")


def test_get_writes_no_bytes_to_a_terminal(stored: SyntheticSample, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(sys, "stdout", Terminal())
    assert cli.main(["get", "one", "--namespace", stored.namespace, "-o", "-"]) == 1
    assert "stdout is a terminal" in capsys.readouterr().err


@pytest.mark.parametrize(("name", "reason"), [("nodir/f", "No such file or directory"), ("file/f", "Not a directory")])
def test_get_names_the_file_that_was_asked_for(
    stored: SyntheticSample, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, reason: str
) -> None:
    (tmp_path / "file").touch()
    assert cli.main(["get", "one", "--namespace", stored.namespace, "-o", str(tmp_path / name)]) == 1
    assert capsys.readouterr().err == f"slotstream get: {tmp_path / name}: {reason}\n"


def test_get_without_a_file_shows_what_there_is(stored: SyntheticSample, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["get", "one", "--namespace", stored.namespace, "--start", "8", "--layers", "2"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"(?m)^sample +one$", out)
    assert "rows [8, 40) of layers 2: 32 rows x 1 layers x 16 of BF16, 1.0 KiB" in out


def test_a_closed_pipe_is_silent(stored: SyntheticSample) -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    command = [sys.executable, "-m", "slotstream.cli.main", "ls", "--namespace", stored.namespace]
    done = subprocess.run(command, stdout=write_end, stderr=subprocess.PIPE, text=True, check=False)
    os.close(write_end)
    assert (done.returncode, done.stderr) == (141, "")


def test_in_a_process_of_its_own(stored: SyntheticSample) -> None:
    done = run_cli("ls", "--namespace", stored.namespace, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    assert len(json_lines(done.stdout)) == 3


def test_json_escapes_what_would_steer_a_terminal_and_leaves_other_text(
    ingest: IngestClient,
    server: ServerProcess,
    namespace: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    controls = "".join(map(chr, [*range(0x20), *range(0x7F, 0xA0)]))
    marks = "\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
    other = "äß文字עברית \N{SNAIL}\u200d\N{SNAIL}\u00ad"
    ingest.store(SyntheticSample("s", namespace=namespace, metadata={"steers": controls + marks, "is": other}))
    monkeypatch.setenv("SLOTSTREAM_SERVER", server.address)
    for words in (["ls"], ["stat", "s"]):
        assert cli.main([*words, "--namespace", namespace, "--json"]) == 0
        (line,) = capsys.readouterr().out.splitlines()
        assert not set(line) & {*controls, *marks}
        assert other in line
        assert json.loads(line)["metadata"].items() >= {"steers": controls + marks, "is": other}.items()
