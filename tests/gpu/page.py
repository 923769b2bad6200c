"""docs/compatibility.md has two parts, each written by a script of its own: one GPU, and several."""

from __future__ import annotations

_HEADING = "\n## Several GPUs\n"


def parts(text: str) -> tuple[str, str]:
    """What is before the heading of several GPUs, and what is behind it; "" where there is no such heading."""
    before, _, behind = text.partition(_HEADING)
    return before, behind


def joined(one_gpu: str, several: str) -> str:
    """The page of both parts; the second may be ""."""
    return one_gpu + (_HEADING + several if several else "")
