"""What must be zero once nothing runs: a leak of a block, a slot, a stream or a row of the catalogue shows here."""

from __future__ import annotations

import random
import sqlite3

from support.files import files_below
from support.outage import metric, scrape
from support.stack import Stack
from support.workload import Ask, send, text_tokens

IDLE_AT_ZERO = (
    "slotstream_connector_samples_in_flight",
    "slotstream_connector_staging_bytes_in_use",
    "slotstream_connector_row_pool_pages_in_use",
    "slotstream_connector_hook_faults_total",
    "slotstream_open_samples",
    "vllm:kv_cache_usage_perc",
    "vllm:num_requests_running",
)


def assert_idle(running: Stack) -> None:
    """Every gauge of both ends is zero, within a few steps, and neither partial files nor arriving rows are left."""
    for attempt in range(100):
        # Counts travel with steps: a request that captures nothing makes some.
        send(running.vllm_port, [Ask(text_tokens(random.Random(attempt), 5), {"capture": False})])
        pages = scrape(running.vllm_port) + scrape(running.metrics_port)
        gauges = {name: metric(pages, name) for name in IDLE_AT_ZERO}
        if not any(gauges.values()):
            break
    assert not any(gauges.values()), gauges
    for name in IDLE_AT_ZERO:
        assert f"# TYPE {name} " in pages, name
    assert not files_below(running.work / "data", ".partial")
    with sqlite3.connect(f"file:{running.work / 'data' / 'catalog.sqlite'}?mode=ro", uri=True) as catalogue:
        (arriving,) = catalogue.execute("SELECT count(*) FROM samples WHERE state = 'arriving'").fetchone()
    assert arriving == 0
