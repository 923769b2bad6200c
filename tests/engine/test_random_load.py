"""Random workloads on real vLLM with a KV cache too small for them: every stored row is right, every missing one explained.

SLOTSTREAM_LOAD_SEEDS=7,8,9 and SLOTSTREAM_LOAD_REQUESTS=500 choose other ones.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from support.idle import assert_idle
from support.random_load import check, random_requests, run
from support.stack import stack
from support.workload import LAYER_IDS

from slotstream.client import connect
from slotstream.truth.model import Kind

# In CI a load of each source of rows runs on an engine of other tests: test_direct.py, test_requests.py.
pytestmark = [pytest.mark.vllm, pytest.mark.extended, pytest.mark.timeout(900)]

SEEDS = [int(seed) for seed in os.environ.get("SLOTSTREAM_LOAD_SEEDS", "1").split(",")]
REQUESTS = int(os.environ.get("SLOTSTREAM_LOAD_REQUESTS", "100"))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    "mode",
    [
        "sync-dense-direct",
        "sync-dense-extraction",
        "async-swa-direct",
        "async-swa-extraction",
        "async-mla-direct",
        "sync-dense-drafts",  # vLLM schedules ahead with its drafters of the GPU only.
    ],
)
def test_every_stored_row_is_right_and_every_missing_one_explained(
    seed: int, mode: str, truth_models: dict[str, Path], tmp_path: Path
) -> None:
    rng = random.Random(f"{seed}{mode}")
    scheduling, name, source = mode.split("-")
    kind: Kind = "swa" if name == "swa" else "mla" if name == "mla" else "dense"
    options = [
        f"--max-num-batched-tokens={rng.choice([64, 96, 256])}",
        "--async-scheduling" if scheduling == "async" else "--no-async-scheduling",
        # Room for three to five of the longest requests: a hybrid needs more blocks for each, its hidden states' being small.
        f"--num-gpu-blocks-override={rng.choice([100, 160]) * (6 if kind == 'swa' else 1)}",
        rng.choice(["--enable-prefix-caching", "--no-enable-prefix-caching"]),
    ]
    if source == "drafts":  # A real drafter beside the capture: what is stored are the rows of accepted tokens.
        options += ["--speculative-config", '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2}']
    # Few rows a slot: most samples have several, and rows for slots next to each other are copied at once.
    small: dict[str, Any] = {"chunk_bytes": rng.choice([4096, 1 << 16]), "sender": rng.choice(["thread", "process"])}
    small["output_rows_per_chunk"] = rng.choice([None, 12])  # Most answers are read once, or several times.
    extract = source == "extraction"
    with (
        stack(tmp_path, truth_models[kind], LAYER_IDS, *options, extract=extract, **small) as running,
        connect(running.address) as client,
    ):
        requests = random_requests(seed, REQUESTS, "load")
        outcomes = run(running.vllm_port, requests, at_once=24)
        assert_idle(running)
        states = Counter(check(client, request, outcome, kind) for request, outcome in zip(requests, outcomes, strict=True))
        assert states["committed"] >= REQUESTS // 2, states
        asked = {r.sample_id for r in requests if r.params.get("capture", True)}
        assert {info.sample_id for info in client.list(namespace="load")} <= asked
