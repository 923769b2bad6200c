"""docs/compatibility.md is the whole GPU matrix, and what a later run of a part of it leaves of the rest."""

from __future__ import annotations

from pathlib import Path

import matrix

ROOT = Path(__file__).resolve().parents[2]
TABLE = (ROOT / "docs" / "compatibility.md").read_text()


def test_every_cell_is_in_the_record_and_right() -> None:
    rows = matrix.rows_in(TABLE)
    assert rows.keys() == {matrix.key_of(cell) for cell in matrix.cells([])}
    assert {row[3] for row in rows.values()} == {"right"}
    assert matrix.as_markdown(rows) == TABLE


def test_a_run_of_one_cell_leaves_the_other_rows_as_they_are() -> None:
    rows = matrix.rows_in(TABLE)
    cell = matrix.cells(["V2-graphs-swa-prefix-whole"])[0]
    found = {"rows": 1234, "wrong": 5, "problems": ["a | b"], "output_rows": 6, "vllm": "1.2", "torch": "3.4"}
    after = matrix.rows_in(matrix.as_markdown({**rows, matrix.key_of(cell): matrix.row_of(found, "GPU")}))
    changed = [key for key in rows if after[key] != rows[key]]
    assert changed == [("swa", "V2", "graphs", "on", "whole")]
    assert after[changed[0]][:4] == ["1,234", "6", "5", "a / b"]
    assert "GPU, vLLM 1.2, torch 3.4" in after[changed[0]][4]
