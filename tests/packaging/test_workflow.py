"""`make` says what it can do, pre-commit does what `make lint` does, and `make unit` needs no vLLM and leaves nothing out."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
MAKEFILE = (ROOT / "Makefile").read_text()
HOOKS = ".pre-commit-config.yaml"


def _run(*command: str, cwd: Path = ROOT, env: dict[str, str] | None = None, status: int = 0) -> str:
    env = {**os.environ, **(env or {})}
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_help_lists_every_target_once() -> None:
    listed = [line.split()[0] for line in _run("make", "--no-print-directory", "help").splitlines()]
    (phony,) = re.findall(r"^\.PHONY: ((?:.*\\\n)*.*)$", MAKEFILE, re.M)
    assert sorted(listed) == sorted(phony.replace("\\", "").split())
    assert listed[:4] == ["help", "demo", "test", "unit"]


def test_no_hook_comes_from_the_network() -> None:
    config: dict[str, Any] = yaml.safe_load((ROOT / HOOKS).read_text())
    assert {repo["repo"] for repo in config["repos"]} == {"local"}
    assert {hook["language"] for repo in config["repos"] for hook in repo["hooks"]} == {"system"}
    _run(sys.executable, "-m", "pre_commit", "validate-config", HOOKS)


@pytest.mark.parametrize("status", [0, 1])
def test_a_commit_stands_or_falls_with_make_lint(tmp_path: Path, status: int) -> None:
    """In a repository whose Makefile is made up, with our hooks installed: they run `make lint`, and that once."""
    shutil.copy(ROOT / HOOKS, tmp_path)
    (tmp_path / "Makefile").write_text(f"lint:\n\t@echo linted >> {tmp_path}/log; exit {status}\n")
    env = {"PRE_COMMIT_HOME": str(tmp_path / "cache"), "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}
    env |= {f"GIT_{who}_{what}": "test" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    _run("git", "init", "--quiet", cwd=tmp_path, env=env)
    _run(sys.executable, "-m", "pre_commit", "install", cwd=tmp_path, env=env)
    _run("git", "add", "Makefile", HOOKS, cwd=tmp_path, env=env)
    _run("git", "commit", "--quiet", "--message", "a change", cwd=tmp_path, env=env, status=status)
    assert (tmp_path / "log").read_text() == "linted\n"


def test_what_starts_vllm_is_in_one_directory_and_is_all_of_it() -> None:
    """`make unit` leaves `tests/engine` out, since some of it cannot be imported without vLLM."""
    assert "--ignore tests/engine" in MAKEFILE
    for path in (ROOT / "tests").rglob("test_*.py"):
        marked = re.search(r"^pytestmark = .*\bpytest\.mark\.vllm\b", path.read_text(), re.M) is not None
        assert marked == (path.parent.name == "engine"), path


def test_everything_else_can_be_imported_without_vllm() -> None:
    """As in the environment that `make unit` makes."""
    code = """
import sys
import pytest
for name in ("vllm", "transformers", "tokenizers"):
    sys.modules[name] = None  # Its import fails from here on.
sys.exit(pytest.main(["--collect-only", "--quiet", "-m", "not vllm and not wheel", "--ignore", "tests/engine"]))
"""
    _run(sys.executable, "-c", code)
