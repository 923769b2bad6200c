"""`slotstream certify --files`: another extractor's safetensors, right ones and such with one fault."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.plants import LAYER_IDS, plant, write_files

from slotstream.certify import elsewhere
from slotstream.certify.files import write_prompts
from slotstream.certify.report import Report
from slotstream.cli import main as cli
from slotstream.truth.compare import Truth
from slotstream.truth.model import Kind

NAMED = "1,3,6,final"


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def certify(*words: str) -> tuple[int, dict[str, Any]]:
    """The exit code, and the report."""
    code = cli.main(["certify", "--files", "out", *words])
    report: dict[str, Any] = json.loads(Path("slotstream-certify.json").read_text())
    return code, report


def made(prompts: dict[str, list[int]], kind: Kind = "dense") -> str:
    folder = Path("made")
    folder.mkdir()
    write_prompts(folder, Truth(kind), prompts)
    return str(folder)


@pytest.mark.parametrize("kind", ["dense", "swa", "mla", "gdn"])
def test_right_files_are_right(kind: Kind, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = write_files(tmp_path / "out", kind=kind)
    code, report = certify("--truth", made(prompts, kind), "--layers", NAMED)
    assert (code, report["verdict"], report["wrong"], report["lost"], report["problems"]) == (0, "right", 0, 0, [])
    assert (report["samples"], report["rows"], report["output_rows"]) == (4, 30 + 31 + 32 + 33, 10)
    assert (report["kind"], report["layers"]) == (kind, ["1", "3", "6", "final"])
    assert {"python", "slotstream", "torch"} <= report["versions"].keys()
    assert report["device"]
    said = capsys.readouterr()
    assert "verdict    right" in said.out
    assert "the report is in slotstream-certify.json" in said.err


@pytest.mark.parametrize("kind", ["dense", "swa"])
@pytest.mark.parametrize("where", ["layers named", "in the metadata", "told by the rows"])
@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("layer swapped", "s2.safetensors row 17: token {token}, layer 1: this is layer 3 of the same token (WRONG_ROW)"),
        ("row shifted", "s2.safetensors row 17: token {token}, layer 1: this is the row of token {last}, not of {token}"),
        ("bit flipped", "s2.safetensors row 17: token {token}, layer 3: element 99 is "),
        ("bit flipped in final", "s2.safetensors row 17: token {token}, layer final: element 16 is "),
        ("token flipped", "s2.safetensors row 17: token {other}, layer 1: this is the row of token {token}, not of {other}"),
        ("sample lost", "p2 row 0: rows 0 to 31 are not there: no file has this prompt (LOST)"),
        ("rows lost", "s2.safetensors row 17: 17 tokens are stored, and the request has 32 (WRONG_TOKENS)"),
    ],
)
def test_each_fault_is_told_with_its_row(
    fault: str, said: str, where: str, kind: Kind, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = write_files(tmp_path / "out", kind=kind, metadata=where == "in the metadata")
    plant(tmp_path / "out", fault)
    named = ["--layers", NAMED] if where == "layers named" else []
    code, report = certify("--truth", made(prompts, kind), *named)
    assert (code, report["verdict"]) == (1, "wrong")
    token = prompts["p2"][17]
    assert said.format(token=token, last=prompts["p2"][-1], other=token ^ 1) in capsys.readouterr().out
    assert {problem["sample"].partition(".")[0][1:] for problem in report["problems"]} == {"2"}
    assert report["problems"][0]["row"] == (0 if fault == "sample lost" else 17)


@pytest.mark.parametrize("kind", ["mla", "gdn"])
@pytest.mark.parametrize("fault", ["row shifted", "bit flipped", "sample lost"])
def test_kinds_that_spell_no_layer_tell_the_others(fault: str, kind: Kind, tmp_path: Path) -> None:
    prompts = write_files(tmp_path / "out", kind=kind)
    plant(tmp_path / "out", fault)
    code, report = certify("--truth", made(prompts, kind), "--layers", NAMED)
    assert code == 1
    assert report["problems"][0]["row"] == (0 if fault == "sample lost" else 17)
    assert "which layer a row is of" in {gap["what"] for gap in report["not_exercised"]}


@pytest.mark.parametrize("metadata", [True, False])
def test_layers_that_are_swapped_in_every_row_are_seen(metadata: bool, tmp_path: Path) -> None:
    write_files(tmp_path / "out", metadata=metadata)
    for path in (tmp_path / "out").iterdir():
        held = load_file(path)
        said = {"layer_ids": json.dumps(LAYER_IDS)} if metadata else None
        swapped = held["hidden_states"][:, [1, 0, 2, 3]].contiguous()
        save_file({**held, "hidden_states": swapped}, path, said)
    code, report = certify()
    assert (code, report["wrong"], report["rows"]) == (1, 126, 126)
    assert len(report["problems"]) == 12  # Three of each file are named, and all are counted.
    assert report["problem_counts"] == {"WRONG_ROW": 126}


def test_without_prompts_lost_samples_are_said_to_be_unseen(tmp_path: Path) -> None:
    write_files(tmp_path / "out")
    plant(tmp_path / "out", "sample lost")
    code, report = certify()
    assert code == 0
    assert {gap["what"]: gap["needed"] for gap in report["not_exercised"]}["lost samples"] is False


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_rows_of_other_elements(dtype: torch.dtype, tmp_path: Path) -> None:
    write_files(tmp_path / "out", layer_ids=[0, 2, 6], dtype=dtype)
    assert certify("--layers", "0,2,6")[0] == 0


def test_a_file_without_rows_is_a_problem_of_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_files(tmp_path / "out")
    (tmp_path / "out" / "s9.safetensors").write_bytes(b"\0" * 100)
    save_file({"x": torch.zeros(3)}, tmp_path / "out" / "sx.safetensors")
    code, report = certify("--layers", NAMED)
    assert (code, report["problem_counts"]) == (1, {"UNREADABLE": 2})
    assert "sx.safetensors: it has no hidden_states with token_ids: ['x'] (UNREADABLE)" in capsys.readouterr().out


def test_a_file_of_no_prompt_is_told(tmp_path: Path) -> None:
    prompts = write_files(tmp_path / "out")
    del prompts["p1"]
    prompts["p2 again"] = prompts["p2"]  # Of two equal prompts, each has a file.
    shutil.copy(tmp_path / "out" / "s2.safetensors", tmp_path / "out" / "s4.safetensors")
    code, report = certify("--truth", made(prompts))
    assert (code, report["problem_counts"]) == (1, {"UNASKED": 1})
    assert report["problems"][0]["sample"] == "s1.safetensors"


def test_other_shapes_and_rows_of_nothing(tmp_path: Path) -> None:
    write_files(tmp_path / "out")
    path = tmp_path / "out" / "s0.safetensors"
    held = load_file(path)
    save_file({**held, "hidden_states": held["hidden_states"][:-1]}, path)
    zeros = load_file(tmp_path / "out" / "s1.safetensors")
    zeros["hidden_states"][4] = 0
    zeros["hidden_states"][5, 2, 7] = float("nan")
    save_file(zeros, tmp_path / "out" / "s1.safetensors")
    code, report = certify("--layers", NAMED)
    assert code == 1
    told = [(one["code"], one["sample"], one["row"]) for one in report["problems"]]
    assert told == [
        ("WRONG_LAYERS", "s0.safetensors", 29),
        ("WRONG_ROW", "s1.safetensors", 4),
        ("WRONG_ROW", "s1.safetensors", 5),
    ]
    assert "all zeros" in report["problems"][1]["message"]
    assert "layer 6: element 7 is not finite" in report["problems"][2]["message"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--files", "nowhere"], "nowhere is no folder"),
        (["--files", "."], "there is no .safetensors file in ."),
        (["--files", ".", "--", "model"], "three ways: choose one"),
        ([], "name vLLM's flags behind --, or say --files DIR or --make DIR"),
        (["--layers", "1", "--", "model"], "--truth and --layers are about --files"),
        (["--kind", "swa", "--", "model"], "an engine's kind is that of its model's config.json"),
        (["--files", ".", "--truth", "x", "--kind", "swa"], "--truth says the kind: leave --kind out"),
        (["--files", ".", "--requests", "0"], "--requests must be from 1 to 10000"),
        (["--files", ".", "--report", "no/where.json"], "--report: there is no folder no"),
        (["--keep", ".", "--", "model"], "--keep: . exists already"),
    ],
)
def test_what_does_not_go_together_exits_with_2(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["certify", *words]) == 2
    error = capsys.readouterr().err
    assert error.startswith("slotstream certify: ")
    assert said in error


def test_rows_that_tell_no_layers_must_be_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "out").mkdir()
    save_file({"hidden_states": torch.ones(4, 2, 256), "token_ids": torch.arange(4)}, tmp_path / "out" / "a.safetensors")
    assert cli.main(["certify", "--files", "out"]) == 2
    assert "name them with --layers" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("report", "said"),
    [
        ("out", "--report: out is a folder, and no file"),
        ("/proc/report.json", "--report: nothing can be written to /proc: "),
        ("nowhere/report.json", "--report: there is no folder nowhere"),
    ],
)
def test_a_report_that_cannot_be_written_is_refused_first(
    report: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_files(tmp_path / "out")
    assert cli.main(["certify", "--files", "out", "--report", report]) == 2
    told = capsys.readouterr()
    assert said in told.err
    assert told.out == ""


def test_what_was_found_is_told_also_where_the_report_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_files(tmp_path / "out")

    check_files = elsewhere.check_files

    def meanwhile(*arguments: Any) -> Report:
        found = check_files(*arguments)
        (tmp_path / "report.json").mkdir()  # Meanwhile somebody else's.
        return found

    monkeypatch.setattr(elsewhere, "check_files", meanwhile)
    assert cli.main(["certify", "--files", "out", "--report", "report.json"]) == 1
    told = capsys.readouterr()
    assert "rows       126 of 4 samples" in told.out
    assert "cannot write the report to report.json: Is a directory" in told.err
