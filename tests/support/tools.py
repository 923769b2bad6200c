"""Tools that are no Python packages: `make tools` puts them beside the environment."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

TOOLS = Path(sys.prefix) / "tools"


def tool(name: str) -> str:
    """The path of a tool. The test fails where it is missing: what was not looked at is not right."""
    path = TOOLS / name
    if not path.exists():
        pytest.fail(f"{name} is not in {TOOLS}: run `make tools`")
    return str(path)


def run_tool(name: str, *arguments: str, cwd: Path | None = None, status: int | None = 0) -> str:
    """What the tool prints; `status` None: for any exit status, and then what it complains of as well."""
    done = subprocess.run([tool(name), *arguments], cwd=cwd, capture_output=True, text=True, timeout=120, check=False)
    if status is None:
        return done.stdout + done.stderr
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout
