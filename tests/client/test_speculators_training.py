"""speculators trains on rows in the store to the same draft, bit by bit, as on the same rows in files."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support import tiny_qwen3, train_on_cpu
from support.ingest_client import IngestClient
from support.server import ServerProcess
from support.synthetic import SyntheticSample

from slotstream.client import connect
from slotstream.client.exports.run import Options, export
from slotstream.client.members import Filters

pytestmark = [pytest.mark.extended, pytest.mark.timeout(900)]

TRAINERS = Path(sys.prefix) / "trainers"  # `make extended` puts them there.
LAYERS = (1, 2, 3, tiny_qwen3.LAYERS)


def train(model: Path, data: Path, out: Path, *more: str) -> None:
    words = ["--verifier-name-or-path", str(model), "--data-path", str(data), "--save-path", str(out), "--epochs", "2"]
    words += ["--on-missing", "raise", "--train-data-ratio", "0.67", "--target-layer-ids", "1", "2", "3", *more]
    tests = Path(train_on_cpu.__file__).parents[1]
    environment = {**os.environ, "PYTHONPATH": f"{TRAINERS}{os.pathsep}{tests}"}
    subprocess.run([sys.executable, train_on_cpu.__file__, *words], check=True, env=environment)


def test_a_draft_that_is_trained_out_of_the_store_is_the_one_of_the_files(
    ingest: IngestClient, server: ServerProcess, namespace: str, tmp_path: Path
) -> None:
    pytest.importorskip("transformers")
    model = tiny_qwen3.make(tmp_path / "model")
    metadata = {"num_hidden_layers": str(tiny_qwen3.LAYERS), "prompt_tokens": "5", "token_start": "0"}
    for number in range(6):
        # Token ids are 1000 + seed + row: these are of the model's vocabulary.
        one = SyntheticSample(
            f"s{number}", namespace, layer_ids=LAYERS, hidden_size=tiny_qwen3.HIDDEN, num_tokens=30 + number, seed=number - 990
        )
        ingest.store(SyntheticSample(**{**vars(one), "metadata": metadata}))
    with connect(server.address) as client:
        for name, index_only in (("files", False), ("index", True)):
            options = Options("speculators", None, Filters(namespace), loss_mask="output", index_only=index_only)
            export(client, tmp_path / name, options)
        train(model, tmp_path / "files", tmp_path / "of-files", "--hidden-states-backend", "file")
        train(model, tmp_path / "index", tmp_path / "of-store", "--slotstream-server", server.address)
        assert len(list(client.list(namespace=namespace))) == 6  # Nothing was deleted.
    for epoch in ("0", "1"):
        made = [(tmp_path / out / epoch / "model.safetensors").read_bytes() for out in ("of-files", "of-store")]
        assert made[0] == made[1]
    first, last = ((tmp_path / "of-store" / epoch / "model.safetensors").read_bytes() for epoch in ("0", "1"))
    assert first != last  # It did learn.
