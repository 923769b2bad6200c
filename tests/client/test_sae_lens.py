"""SAELens trains on `rows` as on the same rows out of memory."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from support.ingest_client import IngestClient
from support.server import ServerProcess
from support.synthetic import SyntheticSample

pytestmark = [pytest.mark.extended, pytest.mark.timeout(600)]

TRAINERS = Path(sys.prefix) / "trainers"  # `make extended` puts them there.
LAYER, HIDDEN = 4, 32


@dataclass(frozen=True)
class _Part(SyntheticSample):
    """Rows [first, first + num_tokens) of a table, F32, beside a layer that nobody asks for."""

    table: tuple[torch.Tensor, ...] = ()
    first: int = 0
    dtype: str = "F32"
    layer_ids: tuple[int, ...] = (1, LAYER)
    hidden_size: int = HIDDEN

    def rows(self, start: int = 0, stop: int | None = None, layers: tuple[int, ...] | None = None) -> bytes:
        stop = self.num_tokens if stop is None else stop
        wanted = self.table[0][self.first + start : self.first + stop]
        return torch.stack([torch.zeros_like(wanted), wanted], dim=1).numpy().tobytes()


def test_an_autoencoder_is_the_same_as_from_memory(
    server: ServerProcess, ingest: IngestClient, namespace: str, tmp_path: Path
) -> None:
    truth = torch.randn(5000, HIDDEN, generator=torch.Generator().manual_seed(1))
    truth[:, 0] = torch.arange(5000)
    torch.save(truth, tmp_path / "truth.pt")
    ends = [0, 700, 710, 1900, 1901, 4000, 5000]
    for first, stop in pairwise(ends):
        ingest.store(_Part(f"p{first}", namespace=namespace, num_tokens=stop - first, table=(truth,), first=first))
    script = Path(__file__).parents[1] / "support" / "train_sae.py"
    command = [sys.executable, str(script), server.address, namespace, str(LAYER), str(tmp_path / "truth.pt")]
    environment = {**os.environ, "PYTHONPATH": str(TRAINERS)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    found = re.search(r"^(\d+) of (\d+) parameters differ; moved by (\S+)$", done.stdout, re.M)
    assert found is not None, done.stdout + done.stderr
    assert (int(found[1]), int(found[2]) > 2, float(found[3]) > 0.01) == (0, True, True)
