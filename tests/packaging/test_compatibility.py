"""docs/records/compatibility.md is the whole GPU matrix, and what a later run of a part of it leaves of the rest."""

from __future__ import annotations

from pathlib import Path

import matrix
import page
import parallel
import parallel_cells

ROOT = Path(__file__).resolve().parents[2]
ONE_GPU, SEVERAL = page.parts((ROOT / "docs" / "records" / "compatibility.md").read_text())


def test_what_is_in_the_record_is_right_and_what_is_not_is_named() -> None:
    rows = matrix.rows_in(ONE_GPU)
    every = {matrix.key_of(cell) for cell in matrix.cells([])}
    assert rows.keys() <= every
    assert {key for key in every if key[0] == "extract_hidden_states"} <= rows.keys()
    assert {row[4].partition(",")[0] for row in rows.values()} == {"right"}
    assert matrix.as_markdown(rows) == ONE_GPU
    assert all(f"- {', '.join(key)}" in ONE_GPU.splitlines() for key in every - rows.keys())


def test_what_is_in_the_record_of_several_gpus_is_right_or_was_refused_where_it_may_be() -> None:
    rows = parallel.rows_in(SEVERAL)
    every = {cell.key: cell for cell in parallel_cells.cells([])}
    assert rows.keys() <= every.keys()
    refused = {key for key, row in rows.items() if row[4].startswith("refused at start")}
    assert refused <= {key for key, cell in every.items() if cell.may_refuse}
    assert {row[4].partition(";")[0] for key, row in rows.items() if key not in refused} == {"right"}
    assert {row[3] for row in rows.values()} == {"0"}
    assert parallel.as_markdown(rows) == SEVERAL
    assert all(f"- {', '.join(key)}" in SEVERAL.splitlines() for key in every.keys() - rows.keys())


def test_a_run_of_one_cell_leaves_the_other_rows_as_they_are() -> None:
    rows = matrix.rows_in(ONE_GPU)
    cell = matrix.cells(["extract-V2-graphs-swa-prefix-whole"])[0]
    found = {"rows": 1234, "wrong": 5, "problems": ["a | b"], "output_rows": 6, "vllm": "1.2", "torch": "3.4"}
    after = matrix.rows_in(matrix.as_markdown({**rows, matrix.key_of(cell): matrix.row_of(found, "GPU")}))
    changed = [key for key in rows if after[key] != rows[key]]
    assert changed == [("extract_hidden_states", "swa", "V2", "graphs", "on", "whole")]
    assert after[changed[0]][:5] == ["?", "1,234", "6", "5", "a / b"]
    assert "GPU, vLLM 1.2, torch 3.4" in after[changed[0]][5]


def test_a_run_of_one_cell_on_several_gpus_leaves_the_other_rows_and_the_other_part_as_they_are() -> None:
    rows = parallel.rows_in(SEVERAL)
    cell = parallel_cells.cells(["data-V1-swa"])[0]
    found = parallel.Found(rows=1234, output_rows=6, wrong=5, graphs="PIECEWISE", problems=["a | b"])
    text = page.joined(ONE_GPU, parallel.as_markdown({**rows, cell.key: parallel.row_of(found, "today")}))
    one_gpu, several = page.parts(text)
    assert one_gpu == ONE_GPU
    after = parallel.rows_in(several)
    assert [key for key in rows if after[key] != rows[key]] == [("data 2", "swa", "V1")]
    assert after[cell.key] == ["PIECEWISE", "1,234", "6", "5", "a / b", "today"]
    assert page.parts(page.joined("one", "")) == ("one", "")
