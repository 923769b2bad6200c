"""The examples run as their pages say, and show what they say that they show."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def _said(name: str, *options: str) -> str:
    done = subprocess.run([sys.executable, EXAMPLES / name, *options], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_embedding_does_not_know_its_place_and_the_layers_above_it_do() -> None:
    scores = [float(score) for score in re.findall(r"^layer \d: (\S+) of", _said("probe.py", "--prompts", "120"), re.M)]
    assert len(scores) == 4
    assert 0.4 < scores[0] < 0.6
    assert min(scores[1:]) > 0.8


@pytest.mark.extended
def test_the_closed_loop_runs_through_with_hardly_any_training(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Whether drafts get better takes `make loop`. The text is the same with good ones and bad ones."""
    monkeypatch.setenv("PYTHONPATH", str(Path(sys.prefix) / "trainers"))
    short = ("--steps", "20", "--traffic", "24", "--tests", "4", "--epochs", "1")
    command = [sys.executable, str(EXAMPLES / "closed_loop.py"), "--work", str(tmp_path), *short]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    rows = re.findall(r"^(untrained|generation 1|generation 2)((?: +[01]\.\d{4}){3}) +\d+  text as", done.stdout, re.M)
    assert [name for name, _ in rows] == ["untrained", "generation 1", "generation 2"], done.stdout + done.stderr


@pytest.mark.extended
def test_an_autoencoder_explains_rows_that_it_never_saw(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(sys.prefix) / "trainers"))  # `make extended` puts SAELens there.
    before, after = map(float, re.findall(r"explained: (\S+) before training, (\S+) after", _said("sae.py"))[0])
    assert before < 0.3
    assert after > 0.7
