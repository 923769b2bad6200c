"""What users install: the wheel, in a clean environment far from the source tree, and the editable install of developers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tarfile
import venv
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

pytestmark = [pytest.mark.wheel, pytest.mark.timeout(600)]

_ROOT = Path(__file__).parents[2]
_ROOTS = ("client", "connector", "server", "proto")
# Whatever points a Python at the tree would hide what is missing from the wheel.
_CLEAN = {
    name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV", "COVERAGE", "MALLOC"))
}


def _run(command: Sequence[str | Path], cwd: Path) -> str:
    done = subprocess.run(
        [str(word) for word in command], cwd=cwd, env=_CLEAN, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, f"{command} exited with {done.returncode}:\n{done.stdout}\n{done.stderr}"
    return done.stdout


class Environment:
    """A virtual environment in `directory`; commands run there, outside the source tree."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        venv.create(directory, with_pip=True, symlinks=True)

    def program(self, name: str) -> Path:
        return self.directory / "bin" / name

    def pip(self, *arguments: str | Path) -> str:
        return _run([self.program("python"), "-m", "pip", "--disable-pip-version-check", *arguments], self.directory)

    def python(self, code: str) -> str:
        """What `code` prints, run isolated: no script directory, no PYTHON variables, no user site."""
        return _run([self.program("python"), "-Ic", code], self.directory)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """An sdist, the wheel made from it, and the wheel made from the tree."""
    directory = tmp_path_factory.mktemp("built")
    _run([sys.executable, "-m", "build", "--outdir", directory / "from-sdist", _ROOT], directory)
    _run([sys.executable, "-m", "build", "--wheel", "--outdir", directory / "from-tree", _ROOT], directory)
    found = {
        "sdist": list(directory.glob("from-sdist/*.tar.gz")),
        "wheel of the sdist": list(directory.glob("from-sdist/*.whl")),
        "wheel": list(directory.glob("from-tree/*.whl")),
    }
    assert {name: len(paths) for name, paths in found.items()} == dict.fromkeys(found, 1)
    return {name: paths[0] for name, paths in found.items()}


@pytest.fixture(scope="module")
def installed(built: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """An environment with the wheel and what it depends on, and nothing else."""
    environment = Environment(tmp_path_factory.mktemp("installed"))
    environment.pip("install", "--quiet", built["wheel"])
    return environment


def _names(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        return sorted(name for name in archive.namelist() if not name.endswith("/"))


def _sources() -> set[str]:
    files = (
        path for root in _ROOTS for path in (_ROOT / root).rglob("*") if path.is_file() and path.parent.name != "__pycache__"
    )
    return {path.relative_to(_ROOT).as_posix().partition("/")[2] for path in files}


def test_the_wheel_holds_every_source_of_the_three_roots_and_nothing_else(built: dict[str, Path]) -> None:
    names = [name for name in _names(built["wheel"]) if ".dist-info/" not in name]
    assert set(names) == _sources()
    assert {name.split("/")[0] for name in names} == {"slotstream"}
    # A namespace package: with an __init__.py one root would hide the others.
    assert "slotstream/__init__.py" not in names
    parts = {name.split("/")[1] for name in names}
    assert {"connector", "transport", "client", "v1", "wire", "server", "store"} <= parts
    assert not {"tests", "support", "benchmarks"} & parts


def test_the_wheel_carries_its_licence_and_its_command(built: dict[str, Path]) -> None:
    with zipfile.ZipFile(built["wheel"]) as archive:
        (licence,) = [name for name in archive.namelist() if name.endswith(".dist-info/licenses/LICENSE")]
        assert archive.read(licence) == (_ROOT / "LICENSE").read_bytes()
        (entries,) = [name for name in archive.namelist() if name.endswith(".dist-info/entry_points.txt")]
        assert "slotstream = slotstream.cli.main:main" in archive.read(entries).decode()


def test_a_wheel_of_the_sdist_is_the_same(built: dict[str, Path]) -> None:
    with zipfile.ZipFile(built["wheel"]) as of_tree, zipfile.ZipFile(built["wheel of the sdist"]) as of_sdist:
        assert _names(built["wheel"]) == _names(built["wheel of the sdist"])
        for name in _names(built["wheel"]):
            assert of_tree.read(name) == of_sdist.read(name), name


def test_the_sdist_can_be_built_and_tested(built: dict[str, Path]) -> None:
    with tarfile.open(built["sdist"]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    for wanted in (
        "pyproject.toml",
        "README.md",
        "CHANGELOG.md",
        "SECURITY.md",
        "docs/reference.md",
        "LICENSE",
        "Makefile",
        ".pre-commit-config.yaml",
        "proto/slotstream/v1/ingest.proto",
        "tests/conftest.py",
        "deploy/Dockerfile",
    ):
        assert wanted in names


def test_the_server_needs_no_model_library(installed: Environment) -> None:
    packages = {entry["name"].lower() for entry in json.loads(installed.pip("list", "--format", "json"))}
    assert "slotstream" in packages
    assert not {name for name in packages if name in ("torch", "vllm", "numpy", "safetensors") or name.startswith("nixl")}
    installed.pip("check")


@pytest.mark.parametrize(
    "module",
    [
        "slotstream.server.app",
        "slotstream.cli.main",
        "slotstream.store.samples",
        "slotstream.client",
        "slotstream.transport.grpc",
        "slotstream.wire.frames",
        "slotstream.wire.layout",
        "slotstream.v1.ingest_pb2",
        "slotstream.v1.samples_pb2_grpc",
    ],
)
def test_a_module_comes_from_the_wheel(installed: Environment, module: str) -> None:
    where = Path(installed.python(f"import {module} as m; print(m.__file__)").strip())
    assert where.is_relative_to(installed.directory)


def test_the_command_answers(installed: Environment) -> None:
    slotstream = installed.program("slotstream")
    assert _run([slotstream, "--version"], installed.directory).startswith("slotstream 0.")
    assert "--data" in _run([slotstream, "serve", "--help"], installed.directory)


def test_the_installed_server_serves_and_stops(installed: Environment) -> None:
    command: list[str | Path] = [
        installed.program("slotstream"),
        "serve",
        "--listen",
        "127.0.0.1:0",
        "--data",
        installed.directory / "data",
    ]
    with subprocess.Popen(
        command, cwd=installed.directory, env=_CLEAN, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as server:
        assert server.stdout is not None
        try:
            said = []
            for line in server.stdout:
                said.append(line)
                if "listening on" in line:
                    break
            else:
                raise AssertionError(f"the server ended before it listened: {said}")
            address = line.split()[-1]
            code = f"from slotstream.client import connect\nwith connect({address!r}) as c: print(list(c.list()))"
            assert installed.python(code).strip() == "[]"
            server.send_signal(signal.SIGTERM)
            rest = server.stdout.read()
            assert server.wait(60) == 0, rest
        finally:
            server.kill()


def test_an_editable_install_sees_every_root(tmp_path: Path) -> None:
    environment = Environment(tmp_path / "editable")
    environment.pip("install", "--quiet", "--no-deps", "--editable", _ROOT)
    code = "import json, slotstream; print(json.dumps(list(slotstream.__path__)))"
    assert {Path(path) for path in json.loads(environment.python(code))} == {_ROOT / root / "slotstream" for root in _ROOTS}
    code = "import importlib.util as u; print(all(u.find_spec(f'slotstream.{n}') for n in ('connector', 'server', 'wire')))"
    assert environment.python(code).strip() == "True"
