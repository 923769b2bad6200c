"""docs/records/compatibility.md has two parts, each a table that a script of its own writes: one GPU, and several."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

Rows = Mapping[tuple[str, ...], Sequence[str]]  # The first columns, which tell a row from others -> the other ones.

_HEADING = "\n## Several GPUs\n"


def parts(text: str) -> tuple[str, str]:
    """What is before the heading of several GPUs, and what is behind it; "" where there is no such heading."""
    before, _, behind = text.partition(_HEADING)
    return before, behind


def read(path: Path | None) -> tuple[str, str]:
    """The parts of a page that may not be there yet."""
    return parts(path.read_text() if path is not None and path.exists() else "")


def rows_in(text: str, keys: int) -> dict[tuple[str, ...], list[str]]:
    """The rows of a table that an earlier run wrote. `keys` columns tell them apart, the third the model runner; six follow."""
    lines = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    return {tuple(line[:keys]): line[keys:] for line in lines if len(line) == keys + 6 and line[2] in ("V1", "V2")}


def table(head: str, rows: Rows, every: Collection[tuple[str, ...]]) -> str:
    """`head`, the rows, their sums, and which of `every` key have none.

    Of the columns behind the keys, the second counts rows of samples, and the fourth wrong ones.
    """
    lines = head.splitlines()
    lines += [f"| {' | '.join((*key, *row))} |" for key, row in sorted(rows.items())]
    total, wrong = (sum(int(row[at].replace(",", "")) for row in rows.values()) for at in (1, 3))
    lines += ["", f"{total:,} rows in {len(rows)} engines, {wrong} wrong."]
    if missing := [key for key in every if key not in rows]:
        lines += ["", f"Not in this record yet: {len(missing)} engines.", ""]
        lines += [f"- {', '.join(key)}" for key in missing]
    return "\n".join(lines) + "\n"


def joined(one_gpu: str, several: str) -> str:
    """The page of both parts; the second may be ""."""
    return one_gpu + (_HEADING + several if several else "")
