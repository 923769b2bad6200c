"""The simulation: hundreds of seeds pass, the same seed is the same run, and faults that are planted are found.

`run.py` is started as people start it: in a process of its own, where nothing but the simulation runs.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

_RUN = Path(__file__).with_name("run.py")
_PLANTS = Path(__file__).with_name("plants.py").read_text().split('\n@_plant("')[1:]
PLANTS = [text[: text.index('"')] for text in _PLANTS]
# In CI those that are found soon, one a kind: durability, other content, a race, recovery, a lost wake-up, a leak.
FOUND_SOON = [
    "rows-not-synced",
    "any-content-is-a-duplicate",
    "ids-not-locked",
    "files-without-rows-are-lost",
    "verdict-not-told",
    "reader-left-open",
]


def _simulate(*arguments: str, timeout_s: float = 280.0) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(_RUN), *arguments], capture_output=True, text=True, timeout=timeout_s)


@pytest.mark.timeout(900)
def test_four_hundred_seeds() -> None:
    ran = _simulate("--seeds", "400", timeout_s=850)
    assert ran.returncode == 0, ran.stdout[-6000:] + ran.stderr[-2000:]


@pytest.mark.extended
@pytest.mark.timeout(7200)
def test_ten_thousand_seeds() -> None:
    ran = _simulate("--seeds", "10000", timeout_s=7000)
    assert ran.returncode == 0, ran.stdout[-6000:] + ran.stderr[-2000:]


def test_a_seed_is_the_same_run_in_every_process() -> None:
    """Also after other seeds, which leave their memory and their threads behind."""
    first = _simulate("--seeds", "30", "--digests").stdout.splitlines()
    again = _simulate("--seeds", "12:30", "--digests").stdout.splitlines()
    assert len(first) == 31
    assert first[12:30] == again[:18]
    assert len({line.split()[1] for line in first[:30]}) == 30


def _is_found(plant: str, seeds: int) -> None:
    ran = _simulate("--seeds", str(seeds), "--most", "1", "--plant", plant, timeout_s=1500)
    assert ran.returncode == 1, f"{plant} was not found in {seeds} seeds\n{ran.stdout[-1000:]}{ran.stderr[-2000:]}"
    assert f"--plant {plant} --trace" in ran.stdout


@pytest.mark.parametrize("plant", FOUND_SOON)
def test_a_planted_fault_is_found(plant: str) -> None:
    _is_found(plant, 150)


@pytest.mark.extended
@pytest.mark.timeout(1600)
@pytest.mark.parametrize("plant", PLANTS)
def test_every_planted_fault_is_found(plant: str) -> None:
    """Most show within 40 seeds; a deletion whose sync nobody makes up for took 3,526."""
    _is_found(plant, 5000)
