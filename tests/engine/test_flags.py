"""vLLM starts with what `slotstream flags` printed, and captures the layers and sizes that it told."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
from support.outage import metric, scrape
from support.server import run_cli
from support.workload import FINAL_ID, assert_rows_are_true

from slotstream.client import connect
from slotstream.demo.processes import SMALL_ENGINE, SMALL_ENGINE_ENV, complete, free_port, start_server, start_vllm
from slotstream.truth.model import LAYERS

pytestmark = [pytest.mark.vllm, pytest.mark.extended, pytest.mark.timeout(900)]


def test_vllm_starts_with_what_was_printed(truth_models: dict[str, Path], tmp_path: Path) -> None:
    server_port, port = free_port(), free_port()
    words = ["flags", str(truth_models["dense"]), "--layers", f"1,{LAYERS},final", "--connect", f"127.0.0.1:{server_port}"]
    sizes = ["--max-num-batched-tokens", "64", "--max-num-seqs", "16"]  # Of SMALL_ENGINE.
    printed, told = run_cli(*words, *sizes), json.loads(run_cli(*words, *sizes, "--json").stdout)
    command = shlex.split(printed.stdout.splitlines()[0])
    assert command[:3] == ["vllm", "serve", str(truth_models["dense"])]
    with (
        start_server(tmp_path / "data", tmp_path / "server.log", server_port),
        start_vllm(truth_models["dense"], tmp_path / "vllm.log", port, *SMALL_ENGINE, *command[3:], env=SMALL_ENGINE_ENV),
        connect(f"127.0.0.1:{server_port}") as client,
    ):
        body = {"model": str(truth_models["dense"]), "prompt": list(range(20, 120)), "max_tokens": 2}
        said = complete(port, body)["kv_transfer_params"]["slotstream"]
        sample = client.get(said["sample_id"])
        assert list(sample.layer_names) == said["layer_names"] == told["layer_names"]
        assert list(sample.layer_ids) == told["layer_ids"] == [1, LAYERS, FINAL_ID]
        assert_rows_are_true(sample, layer_ids=told["layer_ids"])
        assert sample.hidden_states[0].nbytes == told["bytes_per_token"]
        metrics = scrape(port)
        assert metric(metrics, "slotstream_connector_staging_bytes_limit") == told["staging_bytes"]
        assert metric(metrics, "slotstream_connector_row_pool_bytes") == told["row_pool_bytes"]
