"""Who may import whom: the arrows of the design, held against every import statement of every module, lazy ones included."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[2]
_SOURCES = {
    path.relative_to(_ROOT / root).with_suffix("").as_posix().replace("/", ".").removesuffix(".__init__"): path
    for root in ("client", "connector", "server", "proto")
    for path in sorted((_ROOT / root).glob("slotstream/**/*.py"))
}

# Part -> the parts that it may import beside itself.
ARROWS = {
    "connector": {"transport", "wire", "v1", "common"},
    "transport": {"wire", "v1", "common"},
    "client": {"wire", "v1", "common"},
    "truth": set[str](),
    "demo": {"client", "truth"},
    "capture": {"client", "demo", "wire"},
    "certify": {"client", "capture", "demo", "truth", "wire"},
    "integrations": {"client", "wire", "common"},
    "web": {"cli", "client", "wire", "common"},
    "cli": {"server", "store", "client", "connector", "capture", "certify", "demo", "wire", "v1"},
    "server": {"store", "wire", "v1", "common"},
    "store": {"wire", "common"},
    "wire": {"v1"},
    "common": set[str](),
    "v1": set[str](),
}
# The command line speaks to a server through the client. These modules alone reach the server's halves: they start or read one.
REACHING_THE_SERVER = {"copy", "migrate", "rebuild", "retention", "serve", "serve_arguments", "token", "verify"}
# What stands in front of the client: a process or a package of its own, which nobody imports.
LEAVES = {"integrations", "web"}
# Within a half: wing, or module that stands in front of the wings -> what it may import beside itself. docs/design.md draws it.
_CONNECTOR_BASE = {"options", "vllm_config", "plan", "counters", "faults"}
_SERVER_BASE = {"config", "http", "metrics", "status", "version", "waiters", "disk_threads", "lines", "pulse", "logs"}
WINGS = {
    "connector": {
        "facade": _CONNECTOR_BASE | {"hook_guard", "metrics", "planning", "plugin", "row_sources", "worker_side"},
        "worker_side": _CONNECTOR_BASE | {"hook_guard", "reading", "row_sources", "sending"},
        "planning": _CONNECTOR_BASE | {"row_pool"},
        "reading": _CONNECTOR_BASE | {"row_pool", "sending"},
        "sending": _CONNECTOR_BASE,
        "row_sources": _CONNECTOR_BASE | {"planning", "reading", "row_pool"},
        "row_pool": {"vllm_config"},
        "plugin": {"reading", "vllm_config"},
        "seam_check": {"reading", "vllm_config"},
        "vllm_config": {"options"},
        "metrics": {"counters"},
        "faults": {"counters"},
    },
    "server": {
        "app": _SERVER_BASE
        | {
            "access",
            "health",
            "housekeeping",
            "malloc",
            "ingest",
            "listening",
            "nixl",
            "overview",
            "parts",
            "processes",
            "samples",
            "service_manager",
            "shared_store",
        },
        "shared_store": {"config"},
        "processes": _SERVER_BASE | {"access", "health", "malloc", "ingest", "listening", "nixl", "overview", "parts"},
        "ingest": _SERVER_BASE | {"access", "nixl", "overview", "parts"},
        "samples": _SERVER_BASE | {"access", "housekeeping", "overview", "parts"},
        "parts": _SERVER_BASE | {"access", "overview"},
        "nixl": _SERVER_BASE,
        "access": {"config"},
        "health": {"access", "config", "http", "pulse", "status"},
        "housekeeping": {"config", "metrics", "pulse"},
        "disk_threads": {"lines", "pulse"},
        "listening": {"access", "config"},
        "logs": {"config"},
        "metrics": {"http", "overview"},
    },
    "store": {
        "samples": {
            "records",
            "disk",
            "sample",
            "catalogue",
            "directory",
            "failure_shares",
            "parts",
            "publishing",
            "refusals",
            "shared_state",
            "upkeep",
        },
        "refusals": {"records"},
        "publishing": {"parts", "records", "disk", "sample", "catalogue"},
        "directory": {"records", "disk", "sample", "catalogue", "upkeep"},
        "upkeep": {"parts", "records", "disk", "sample", "catalogue"},
        "parts": {"records", "disk", "catalogue"},
        "sample": {"records", "disk"},
        "catalogue": {"records", "shared_state"},
        "blobs": set(),
        "cluster": {
            "samples",
            "publishing",
            "parts",
            "shared_state",
            "records",
            "disk",
            "sample",
            "catalogue",
            "upkeep",
            "blobs",
            "failure_shares",
        },
    },
}
# Heavy packages -> the only parts that may import them.
HEAVY = {
    "vllm": {"connector"},
    "torch": {"connector", "client", "truth"},
    "numpy": {"connector", "transport", "client", "web"},
    "nixl": set[str](),  # By name only, in wire/nixl.py.
    "nixl_cu12": set[str](),
    "nixl_cu13": set[str](),
    "safetensors": {"client", "truth"},
    "transformers": {"truth", "capture"},
    "grpc": {"connector", "transport", "client", "server", "v1"},
    "sqlite3": {"store"},
    "psycopg": {"store"},
    "botocore": {"store"},
    "urllib3": {"store"},
    "awscrt": {"store"},
}
# Packages that one folder alone knows: all else asks it through a Protocol.
FOLDERS = {
    "sqlite3": "slotstream.store.catalogue.sqlite",
    "psycopg": "slotstream.store.catalogue.postgres",
    **dict.fromkeys(("botocore", "urllib3", "awscrt"), "slotstream.store.blobs.s3"),
}
# An implementation of a Protocol -> what alone beside it knows which one it is.
PAIRED = {
    "slotstream.store.catalogue.sqlite": ("slotstream.store.directory",),
    "slotstream.store.catalogue.postgres": ("slotstream.store.cluster", "slotstream.cli.migrate"),
    "slotstream.store.blobs.s3": ("slotstream.store.cluster",),
}


def _imports(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Every module that the code names in an import, however deep inside a function, and the line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative imports hide the arrows"
            assert node.module is not None
            yield node.module, node.lineno
            # `from slotstream import x` and `from slotstream.x import y` may name modules as well.
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in (
            "importlib.import_module",
            "import_module",
            "__import__",
        ):
            match node.args:
                case [ast.Constant(value=str(name)), *_]:
                    yield name, node.lineno
                case [ast.JoinedStr(values=[ast.Constant(value=str(name)), *_]), *_]:
                    yield name, node.lineno


def _part(module: str) -> str:
    """The part of slotstream that a module belongs to; "" for others."""
    package, _, rest = module.partition(".")
    return rest.partition(".")[0] if package == "slotstream" else ""


def _wing(module: str) -> str:
    """The folder or module of its part that a module belongs to; "" for a part's own `__init__`, and for others."""
    names = module.split(".")
    return names[2] if len(names) > 2 and names[0] == "slotstream" else ""


@pytest.mark.parametrize("module", [module for module in _SOURCES if _part(module) in WINGS and _wing(module)])
def test_wings_keep_their_directions(module: str) -> None:
    part, wing = _part(module), _wing(module)
    for name, line in _imports(ast.parse(_SOURCES[module].read_text())):
        target = _wing(name) if _part(name) == part else ""
        if f"slotstream.{part}.{target}" not in _SOURCES or target == wing:
            continue  # A name out of a module, and not a module; or a neighbour.
        where = f"{_SOURCES[module]}:{line}"
        assert target in WINGS[part].get(wing, set()), f"{where}: {part}.{wing} must not import {name}"


def test_no_modules_import_each_other_in_a_circle() -> None:
    """By any way, lazily or for types only."""
    arrows = {
        module: {name for name, _ in _imports(ast.parse(path.read_text())) if name in _SOURCES and name != module}
        for module, path in _SOURCES.items()
    }
    done: set[str] = set()

    def visit(module: str, way: tuple[str, ...]) -> None:
        assert module not in way, " -> ".join((*way[way.index(module) :], module))
        if module not in done:
            for target in arrows[module]:
                visit(target, (*way, module))
            done.add(module)

    for module in arrows:
        visit(module, ())


def test_the_sending_half_needs_neither_torch_nor_vllm() -> None:
    """It also runs in a process of its own, which imports neither."""
    for module, path in _SOURCES.items():
        if module.startswith("slotstream.connector.sending"):
            tops = {name.partition(".")[0] for name, _ in _imports(ast.parse(path.read_text()))}
            assert not tops & {"torch", "vllm"}, module


def test_every_part_is_here() -> None:
    assert {_part(module) for module in _SOURCES} == set(ARROWS)


@pytest.mark.parametrize("module", _SOURCES)
def test_imports_follow_the_arrows(module: str) -> None:
    part = _part(module)
    for name, line in _imports(ast.parse(_SOURCES[module].read_text())):
        where = f"{_SOURCES[module]}:{line}"
        target = _part(name)
        assert not target or target == part or target in ARROWS[part], f"{where}: {part} must not import {name}"
        top = name.partition(".")[0]
        assert top not in HEAVY or part in HEAVY[top], f"{where}: {part} must not import {name}"


def test_one_folder_alone_knows_its_package() -> None:
    for module, path in _SOURCES.items():
        tops = {name.partition(".")[0] for name, _ in _imports(ast.parse(path.read_text()))}
        for top in tops & FOLDERS.keys():
            assert f"{module}.".startswith(f"{FOLDERS[top]}."), f"{module} must not import {top}"


def test_who_asks_a_protocol_does_not_know_what_is_behind_it() -> None:
    for module, path in _SOURCES.items():
        for name, line in _imports(ast.parse(path.read_text())):
            for folder, pairs in PAIRED.items():
                if f"{name}.".startswith(f"{folder}."):
                    knows = f"{module}.".startswith(tuple(f"{one}." for one in (folder, *pairs)))
                    assert knows, f"{path}:{line}: {module} must not import {name}"


def test_few_commands_reach_the_server() -> None:
    for module, path in _SOURCES.items():
        if _part(module) == "cli" and _wing(module) not in REACHING_THE_SERVER:
            parts = {_part(name) for name, _ in _imports(ast.parse(path.read_text()))}
            assert not parts & {"server", "store"}, module


def test_nobody_imports_what_stands_in_front() -> None:
    for module, path in _SOURCES.items():
        parts = {_part(name) for name, _ in _imports(ast.parse(path.read_text()))} - {_part(module)}
        assert not parts & LEAVES, module


def test_the_client_needs_grpc_protobuf_and_xxhash_alone() -> None:
    """typing_extensions is grpc's own."""
    done = subprocess.run([sys.executable, "-c", _CLIENT_ALONE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "slotstream.client\n"


_CLIENT_ALONE = """
import importlib.abc, sys

class Few(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        top = name.partition(".")[0]
        if top not in sys.stdlib_module_names | {"slotstream", "grpc", "google", "xxhash", "typing_extensions"}:
            raise ModuleNotFoundError(f"{name} is not needed here", name=name)

sys.meta_path.insert(0, Few())
import slotstream.client
print(slotstream.client.__name__)
"""


def test_only_the_connector_imports_vllm_when_it_is_imported() -> None:
    """The demo may, but lazily: its options are shown where there is no vLLM."""
    for module, path in _SOURCES.items():
        if _part(module) != "connector":
            statements = (s for s in ast.parse(path.read_text()).body if isinstance(s, (ast.Import, ast.ImportFrom)))
            names = {name for statement in statements for name, _ in _imports(statement)}
            assert not {name for name in names if name.partition(".")[0] == "vllm"}, module


def test_the_walk_sees_lazy_and_named_imports() -> None:
    code = """
def f():
    import torch.nn
    from slotstream.store import samples
    importlib.import_module("vllm.config")
    importlib.import_module(f"slotstream.server.{name}")
"""
    assert [name for name, _ in _imports(ast.parse(code))] == [
        "torch.nn",
        "slotstream.store",
        "slotstream.store.samples",
        "vllm.config",
        "slotstream.server.",
    ]


def _drawings() -> list[tuple[set[tuple[str, str]], str]]:
    """The `flowchart LR` drawings of the design page in their order: their arrows, and what stands in their box `base`."""
    page = (_ROOT / "docs" / "design.md").read_text()
    drawn = re.findall(r"```mermaid\nflowchart LR\n(.*?)```", page, re.S)
    boxes = [re.search(r'^ *base\["(.*)"\]$', text, re.M) for text in drawn]
    return [
        (set(re.findall(r"^ *(\w+) --> (\w+)$", text, re.M)), box[1] if box else "")
        for text, box in zip(drawn, boxes, strict=True)
    ]


def test_the_design_page_draws_these_arrows() -> None:
    parts, *wings = _drawings()
    assert parts == ({(part, target) for part, targets in ARROWS.items() for target in targets}, "")
    for (part, table), base, (arrows, box) in zip(WINGS.items(), (_CONNECTOR_BASE, _SERVER_BASE, set()), wings, strict=True):
        drawn = {
            (w, "base" if target in base else target) for w, targets in table.items() if w not in base for target in targets
        }
        assert arrows == drawn, part
        assert set(filter(None, box.split(" · "))) == {m for m in base if f"slotstream.{part}.{m}" in _SOURCES}, part
