"""What the pages name exists: files, modules, tests, make targets, commands, and the pages they link to."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from slotstream.cli.main import COMMANDS

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", *sorted(DOCS.rglob("*.md"))]
LINKING = [*PAGES, ROOT / "CHANGELOG.md", ROOT / "deploy" / "README.md", ROOT / "benchmarks" / "README.md"]
# What a path may begin below: pages leave out the source roots and `tests`.
_SOURCE_ROOTS = [ROOT / root / "slotstream" for root in ("client", "connector", "server", "proto")]
_BELOW = [ROOT, *_SOURCE_ROOTS, ROOT / "tests"]
_KEPT = ("benchmarks", "client", "connector", "deploy", "docs", "proto", "server", "tests")
NAMES = {path.name for top in _KEPT for path in (ROOT / top).rglob("*")} | {path.name for path in ROOT.iterdir()}
TARGETS = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.M))

# What the Helm chart defines for others to include has dots in its name, too.
_TEMPLATES = {
    name for file in (ROOT / "deploy" / "helm").rglob("*.tpl") for name in re.findall(r'define "([\w.]+)"', file.read_text())
}
_FILE = re.compile(r"[\w.-]+(/[\w.-]+)*\.(py|md|proto|yaml|toml)")
_BARE = re.compile(r"[\w-]+(\.(py|md|proto)|/)")
_BELOW_A_FOLDER = re.compile(r"\w[\w.-]*(/[\w.-]+)+/?")
_PLACEHOLDER = re.compile(r"(^|[/-])[A-Z]{3,}($|/)")


def _id(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def _fences(text: str) -> list[str]:
    return re.findall(r"^```\w*\n(.*?)^```", text, re.M | re.S)


def _inline_code(text: str) -> list[str]:
    """Paragraph by paragraph: code may go on in the next line."""
    paragraphs = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S).split("\n\n")
    return [" ".join(code.split()) for paragraph in paragraphs for code in re.findall(r"`([^`]+)`", paragraph)]


def _words(text: str) -> Iterator[str]:
    """What in a page's code may be a path: words of inline code, and of code blocks those below a folder of ours."""
    for code in _inline_code(text):
        yield from (word.strip("(),;\"'") for word in code.split())
    for block in _fences(text):
        yield from re.findall(rf"(?<![\w./-])(?:{'|'.join(_KEPT)})/[\w./-]+\w", block)


def _is_there(word: str) -> bool:
    """Whether a word that looks like a path leads somewhere; also for words that are none, and for vLLM's own files."""
    if word.startswith("vllm/") or _PLACEHOLDER.search(word) or any((root / word).exists() for root in _BELOW):
        return True
    if _BARE.fullmatch(word):
        return word.rstrip("/") in NAMES
    first = word.partition("/")[0]
    ours = any((root / first).is_dir() for root in _BELOW)
    return not (_BELOW_A_FOLDER.fullmatch(word) and (ours or _FILE.fullmatch(word)))


def _module_is_there(name: str) -> bool:
    """Whether `slotstream.a.b.c` is a module, or a name that the module before it speaks of."""
    path = Path(*name.split(".")[1:])
    if name in _TEMPLATES:
        return True
    for root in _SOURCE_ROOTS:
        if (root / path).is_dir() or (root / path).with_suffix(".py").exists():
            return True
        for source in ((root / path.parent).with_suffix(".py"), root / path.parent / "__init__.py"):
            if path.parent.name and source.exists() and re.search(rf"\b{path.name}\b", source.read_text()):
                return True
    specification = "".join(file.read_text() for file in (ROOT / "proto/slotstream/v1").glob("*.proto"))
    return path.parent.name == "v1" and bool(re.search(rf"^(service|message) {path.name}\b", specification, re.M))


def _anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=_id)
def test_every_path_that_a_page_names_exists(page: Path) -> None:
    missing = [word for word in _words(page.read_text()) if not _is_there(word.partition("::")[0])]
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=_id)
def test_every_test_that_a_page_names_exists(page: Path) -> None:
    for file, test in re.findall(r"([\w/]+\.py)::(\w+)", page.read_text()):
        source = next(root / file for root in _BELOW if (root / file).exists())
        assert f"def {test}(" in source.read_text(), f"{file}::{test}"


@pytest.mark.parametrize("page", PAGES, ids=_id)
def test_every_module_that_a_page_names_exists(page: Path) -> None:
    text = page.read_text()
    code = "\n".join([*_inline_code(text), *_fences(text)])
    assert not [name for name in re.findall(r"(?<![\w./-])slotstream(?:\.\w+)+", code) if not _module_is_there(name)]


@pytest.mark.parametrize("page", PAGES, ids=_id)
def test_every_make_target_and_command_that_a_page_names_exists(page: Path) -> None:
    text = page.read_text()
    lines = [*_inline_code(text), *(line for block in _fences(text) for line in block.splitlines())]
    for line in lines:
        if said := re.match(r"make ([a-z-]+)", line):
            assert said[1] in TARGETS, line
        if said := re.match(r"slotstream ([a-z]+)", line):
            assert said[1] in COMMANDS, line


@pytest.mark.parametrize("page", LINKING, ids=_id)
def test_every_link_leads_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if not target.startswith("https://"):
            path, _, anchor = target.partition("#")
            linked = page.parent / path if path else page
            assert linked.exists(), target
            assert not anchor or anchor in _anchors(linked), target


def test_the_index_names_every_page() -> None:
    index = (DOCS / "README.md").read_text()
    pages = [page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")]
    assert not [page for page in pages if page != "README.md" and f"]({page})" not in index]


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 110


@pytest.mark.parametrize(
    ("word", "there"),
    [
        ("connector/facade.py", True),
        ("store/test_store_power.py", True),
        ("facade.py", True),
        ("planning/", True),
        ("tests/engine", True),
        ("tests/breaking/fuzz/corpus/TARGET/found-NAME", True),
        ("vllm/model_executor/models/interfaces.py", True),
        ("host:port/path", True),
        ("kubernetes.io/tls", True),
        ("connector/fence.py", False),
        ("tests/nowhere", False),
        ("spool_files.py", False),
        ("elsewhere/x.py", False),
        ("rooms/", False),
    ],
)
def test_a_path_is_told_from_other_words(word: str, there: bool) -> None:
    assert _is_there(word) is there


def test_a_module_is_told_from_one_that_was_moved() -> None:
    assert _module_is_there("slotstream.cli.main")
    assert _module_is_there("slotstream.client.dataset.SampleDataset")
    assert _module_is_there("slotstream.v1.Ingest")
    assert _module_is_there("slotstream.sidecar.volumes")
    assert not _module_is_there("slotstream.server.cli")
    assert not _module_is_there("slotstream.client.Nothing")


def test_the_install_page_names_the_columns_that_the_demo_prints() -> None:
    page = " ".join((DOCS / "install.md").read_text().split())
    told = re.search(r"It ends with a table of the samples: ([^.]*), and the time", page)
    columns = re.search(r"for name in (\(.*\)):\n +table.add_column", (ROOT / "client/slotstream/demo/run.py").read_text())
    assert told is not None
    assert columns is not None
    assert set(told[1].split(", ")) <= set(re.findall(r'"([a-z ]+)"', columns[1]))
