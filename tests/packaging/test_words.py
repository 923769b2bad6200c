"""Plain words: docstrings, comments of the protocol and the pages use everyday words, and the pages short sentences."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", *sorted((ROOT / "docs").rglob("*.md"))]
SOURCES = [
    path
    for root in ("client", "connector", "server", "proto", "tests", "benchmarks")
    for path in sorted((ROOT / root).rglob("*.py"))
    if not path.name.endswith(("_pb2.py", "_pb2_grpc.py"))
]
SPECIFICATIONS = sorted((ROOT / "proto").rglob("*.proto"))
SENTENCE_WORDS_MAX = 30
# Half of the readers are not native speakers: these are words of literature, or idioms, for which there is a plain one.
_LITERARY = re.compile(
    r"\b(whoever|whomever|whatever|whichever|whereof|thereof|of late|anew|for ever|nobody's|counts no more"
    r"|of its own accord|let(s|ting)? go of|(is|are|was|were) to be)\b",
    re.I,
)


def _id(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def docstrings(source: str) -> Iterator[str]:
    """Those of a module, its classes and its functions."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and (
            text := ast.get_docstring(node)
        ):
            yield text


def prose(page: str) -> Iterator[str]:
    """The paragraphs, list items, headings and table cells of a page, each on one line, with `code` and links as one word."""
    text = re.sub(r"^```.*?^```", "", page, flags=re.M | re.S)
    text = re.sub(r"^( *([-*]|\d+\.)|#+|\|)\s", r"\n\n", text, flags=re.M)  # Each of these begins a piece.
    for piece in re.split(r"\n\s*\n| \|(?= |$)", text, flags=re.M):
        words = re.sub(r"`[^`]*`", "CODE", " ".join(piece.split()))
        yield re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", words)


def sentences(page: str) -> Iterator[str]:
    for piece in prose(page):
        yield from re.split(r"(?<=[.!?])\)?\s+", piece)


def count(sentence: str) -> int:
    return len(re.findall(r"[\w.,'’/%+-]*\w[\w.,'’/%+-]*", sentence))


@pytest.mark.parametrize("path", SOURCES, ids=_id)
def test_docstrings_use_everyday_words(path: Path) -> None:
    found = [(said[0], text.splitlines()[0]) for text in docstrings(path.read_text()) if (said := _LITERARY.search(text))]
    assert not found


@pytest.mark.parametrize("path", SPECIFICATIONS, ids=_id)
def test_the_specification_uses_everyday_words(path: Path) -> None:
    comments = [line.partition("//")[2] for line in path.read_text().splitlines()]
    assert not [line for line in comments if _LITERARY.search(line)]


@pytest.mark.parametrize("page", PAGES, ids=_id)
def test_pages_use_everyday_words(page: Path) -> None:
    assert not [piece for piece in prose(page.read_text()) if _LITERARY.search(piece)]


@pytest.mark.parametrize("page", PAGES, ids=_id)
def test_pages_have_short_sentences(page: Path) -> None:
    long = [(count(sentence), sentence) for sentence in sentences(page.read_text()) if count(sentence) > SENTENCE_WORDS_MAX]
    assert not long


def test_sentences_are_told_apart() -> None:
    page = """# A heading

A first sentence, about `some code here`. A [second one](link.md)
over two lines.
- an item
- another. And more

| one | two |
| --- | --- |
| a cell. Its second sentence | b |

```
Not this, however long. Nor this.
```
"""
    assert [sentence for sentence in sentences(page) if sentence] == [
        "A heading",
        "A first sentence, about CODE.",
        "A second one over two lines.",
        "an item",
        "another.",
        "And more",
        "one",
        "two",
        "---",
        "---",
        "a cell.",
        "Its second sentence",
        "b",
    ]
    assert count("It took 1.5 s, of `x`: that is 20% more (a/b).") == 11
