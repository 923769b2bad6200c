"""Compiles what goes below Python by LD_PRELOAD."""

from __future__ import annotations

import atexit
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import pytest


@cache
def library(name: str) -> Path:
    """The compiled shim `name`.c, made once. Skips where there is no C compiler."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    source = Path(__file__).with_name(f"{name}.c")
    directory = Path(tempfile.mkdtemp(prefix="slotstream-faults-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    target = directory / f"{name}.so"
    subprocess.run([compiler, "-O1", "-Wall", "-shared", "-fPIC", "-o", str(target), str(source), "-ldl"], check=True)
    return target


def together(*environments: dict[str, str]) -> dict[str, str]:
    """The environment of a process with all of these shims."""
    joined = {key: value for one in environments for key, value in one.items()}
    return {**joined, "LD_PRELOAD": ":".join(one["LD_PRELOAD"] for one in environments)}
