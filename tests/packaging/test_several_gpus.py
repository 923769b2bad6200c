"""What is run over two and four GPUs of one host: the engines, how they are spread, and one call for all of it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import engines
import page
import parallel
import parallel_cells
import pytest
import several
import torch
from parallel_cells import Cell, Layout, cells

from slotstream.demo.processes import Running
from slotstream.truth import model as truth_model


def test_every_engine_uses_all_of_its_gpus_and_no_two_have_one_name_or_row() -> None:
    every = cells([])
    assert len({cell.name for cell in every}) == len({cell.key for cell in every}) == len(every)
    assert {cell.layout.gpus for cell in every} == {2, 4}
    assert [*cells([], gpus=2), *cells([], gpus=4)] == every
    assert {cell.how for cell in every} == parallel_cells.LAYOUTS.keys()
    assert {cell.kind for cell in every if cell.layout.experts} == {"gdn"}  # The kind that has experts.
    assert all(cell.killed is None or cell.killed < cell.layout.gpus for cell in every)
    assert [cell.name for cell in cells(["tensor-V1-dense"])] == [
        "tensor-V1-dense",
        *(f"tensor-V1-dense-killed{r}" for r in (0, 1)),
    ]


def test_four_gpus_have_what_is_asked_of_them() -> None:
    four = cells([], gpus=4)
    plain = {(cell.how, cell.kind, cell.runner) for cell in four if cell.killed is None}
    assert {("tensor4", kind, runner) for kind in ("dense", "swa", "gdn") for runner in (1, 2)} <= plain
    assert {("tensor2-pipeline2", "dense", 2), ("tensor2-pipeline2", "swa", 2), ("tensor2-pipeline2-final", "gdn", 2)} <= plain
    experts = {how for how, _, _ in plain if how.startswith("tensor2-data2-experts")}
    assert {(how, "gdn", runner) for how in experts for runner in (1, 2)} <= plain
    assert len(experts) == 2
    assert {cell.how for cell in four if cell.killed is not None} == {
        "tensor4",
        "tensor2-pipeline2",
        "tensor2-data2-experts-each",
    }
    sure = [cell for cell in four if not cell.may_refuse]
    assert sum(cell.prompts for cell in sure) * 250 > 3e5  # 22,400 rows came of 90 prompts.


@pytest.mark.parametrize(
    ("layout", "rank", "flags", "worker"),
    [
        (Layout("", tensor=4), 2, ["--tensor-parallel-size=4"], "VLLM::Worker_TP2"),
        (Layout("", pipeline=2), 1, ["--pipeline-parallel-size=2"], "VLLM::Worker_PP1"),
        (
            Layout("", tensor=2, pipeline=2),
            2,
            ["--tensor-parallel-size=2", "--pipeline-parallel-size=2"],
            "VLLM::Worker_PP1_TP0",
        ),
        (
            Layout("", tensor=2, data=2, experts=True, more=("--more",)),
            3,
            ["--tensor-parallel-size=2", "--data-parallel-size=2", "--enable-expert-parallel", "--more"],
            "VLLM::Worker_DP1_TP1",
        ),
    ],
)
def test_a_layout_is_said_to_vllm_and_names_its_workers_as_vllm_does(
    layout: Layout, rank: int, flags: list[str], worker: str
) -> None:
    assert layout.flags == flags
    assert layout.worker(rank) == worker


def test_only_engines_without_a_row_are_left_to_run(tmp_path: Path) -> None:
    record = tmp_path / "record.md"
    done = Cell("tensor4", 2, "swa")
    row = parallel.row_of(parallel.Found(rows=7), "today")
    record.write_text(page.joined("one\n", parallel.as_markdown({done.key: row})))
    arguments = parallel.parse(["--gpus=4", "--missing", f"--write={record}"])
    assert parallel.chosen_cells(arguments) == [cell for cell in cells([], gpus=4) if cell != done]
    assert parallel.chosen_cells(parallel.parse(["--gpus=4", f"--write={record}"])) == cells([], gpus=4)
    assert parallel.chosen_cells(parallel.parse(["--on-cpu"])) == cells([], on_cpu=True)


@pytest.mark.parametrize("wrong", [["--gpus=3"], ["--missing"], ["--for-s=0"], ["--missing", "--on-cpu", "--write=page"]])
def test_what_cannot_be_run_is_refused(wrong: list[str]) -> None:
    with pytest.raises(SystemExit):
        parallel.parse(wrong)


@pytest.mark.parametrize("wrong", [["--gpus=2"], ["--out=x"], ["--gpus=3", "--out=x"], ["--gpus=2", "--out=x", "--for-s=60"]])
def test_a_call_without_its_gpus_its_place_or_its_time_is_refused(wrong: list[str]) -> None:
    with pytest.raises(SystemExit):
        several.parse(wrong)


@pytest.mark.parametrize("gpus", [2, 4])
def test_one_call_runs_both_parts_in_its_time(gpus: int, tmp_path: Path) -> None:
    options = several.parse([f"--gpus={gpus}", f"--out={tmp_path}", "--only=tensor", "--again"])
    rows, cost = several.parts(options)
    assert rows.seconds + cost.seconds == pytest.approx(570)
    told = parallel.parse(rows.command[2:])
    assert parallel.chosen_cells(told) == cells(["tensor"], gpus=gpus)
    assert told.for_s < rows.seconds
    assert f"--tensor-parallel={gpus}" in cost.command
    (alone,) = several.parts(several.parse([f"--gpus={gpus}", f"--out={tmp_path}", "--part=cost", "--for-s=300"]))
    assert (alone.name, alone.seconds) == ("cost", 300)


def test_the_call_says_what_it_would_run(tmp_path: Path) -> None:
    command = [sys.executable, several.__file__, "--gpus=4", f"--out={tmp_path}", "--list"]
    said = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout.splitlines()
    there = parallel.rows_in(page.read(several.RECORD)[1])
    missing = [cell for cell in cells([], gpus=4) if cell.key not in there]
    assert [line.partition(":")[0] for line in said if line.startswith("tensor")] == [cell.name for cell in missing]
    assert "gpu.py" in said[-1]


def test_the_benchmark_takes_what_the_call_tells_it(tmp_path: Path) -> None:
    _, cost = several.parts(several.parse(["--gpus=4", f"--out={tmp_path}"]))
    command = [
        sys.executable,
        "-c",
        "import sys, gpu; o = gpu.parse(sys.argv[1:]); print(o.tensor_parallel, o.load_s > 9, o.engines)",
    ]
    said = subprocess.run(
        [*command, *cost.command[2:]],
        check=True,
        capture_output=True,
        text=True,
        timeout=120,
        cwd=several.ROOT / "benchmarks",
    ).stdout
    assert said.strip() == "4 True ['none', 'nixl', 'grpc']"


def test_what_still_runs_when_the_time_is_over_is_stopped(tmp_path: Path) -> None:
    deadline = engines.Deadline(0.2)
    command = [sys.executable, "-c", "import time; time.sleep(600)"]
    with Running("a sleeper", command, tmp_path / "log") as running, deadline.ends(running):
        running.process.wait(60)
    assert deadline.is_over
    assert deadline.left_s() == 0
    with Running("a late one", command, tmp_path / "log") as running, deadline.ends(running):
        running.process.wait(60)
    where = engines.Place(tmp_path, tmp_path, "", deadline)
    found = parallel.run(Cell("tensor", 1, "dense"), tmp_path, where, tmp_path / "cell.log", on_cpu=True)
    assert found.cut_off


def test_a_deadline_without_a_time_ends_when_it_is_told_to(tmp_path: Path) -> None:
    deadline = engines.Deadline()
    assert not deadline.is_over
    command = [sys.executable, "-c", "import time; time.sleep(600)"]
    with Running("a sleeper", command, tmp_path / "log") as running, deadline.ends(running):
        deadline.end()
        assert running.process.poll() is not None
    assert deadline.is_over


def test_experts_in_each_layer_are_of_one_kind_only(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no experts"):
        truth_model.make(tmp_path / "dense", "dense", experts_in_each_layer=True)


def test_a_model_with_experts_in_each_layer_states_its_truth_too(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    path = truth_model.make(tmp_path / "gdn", "gdn", experts_in_each_layer=True)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    assert all(hasattr(layer.mlp, "experts") for layer in model.model.layers)
    token_ids = torch.arange(2, 66)
    with torch.no_grad():
        answer = model(token_ids.unsqueeze(0), output_hidden_states=True)
    rows = torch.stack([answer.hidden_states[layer][0] for layer in (0, 1, 3)], dim=1)
    assert not len(truth_model.wrong_rows(rows, token_ids, [0, 1, 3], kind="gdn"))
