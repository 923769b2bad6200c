"""What an engine says and does while its storage server is away, and once it is back."""

from __future__ import annotations

import random
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from slotstream.client import SampleNotFound, connect
from slotstream.connector.counters import REASONS
from support.stack import Stack
from support.waiting import wait_until
from support.workload import Ask, assert_rows_are_true, send, text_tokens


def scrape(port: int) -> str:
    """The /metrics page on 127.0.0.1:`port`."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10.0) as answer:
        return str(answer.read().decode())


def metric(text: str, name: str, **labels: str) -> float:
    """The sum of a metric's series that have these labels."""
    lines = [line for line in text.splitlines() if line.startswith((f"{name}{{", f"{name} "))]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if all(f'{k}="{v}"' in line for k, v in labels.items()))


def _capture(running: Stack, sample_id: str) -> dict[str, Any]:
    prompt = text_tokens(random.Random(sample_id), 80)
    (answer,) = send(running.vllm_port, [Ask(prompt, {"namespace": "outage", "sample_id": sample_id})])
    assert len(answer.tokens) == 4  # Served, whatever became of the capture.
    assert answer.said is not None
    return answer.said


def capture_is_refused(running: Stack, name: str) -> None:
    """With the server away every completion is served, and every capture refused in answer, metrics and log."""
    for attempt in range(1000):  # Until the engine has noticed.
        said = _capture(running, f"{name}-noticing{attempt}")
        if "error" in said:
            break
    assert said["error"]["code"] == "SERVER_UNAVAILABLE"
    assert running.address in said["error"]["message"]
    with ThreadPoolExecutor(8) as pool:
        refused = list(pool.map(lambda i: _capture(running, f"{name}-away{i}"), range(16)))
    assert {s["error"]["code"] for s in refused} == {"SERVER_UNAVAILABLE"}
    page = scrape(running.vllm_port)
    assert metric(page, "slotstream_connector_samples_failed_total", code="SERVER_UNAVAILABLE") >= 17
    reasons = {reason: metric(page, "slotstream_connector_capture_off", reason=reason) for reason in REASONS}
    assert [reason for reason, value in reasons.items() if value] == ["SERVER_UNAVAILABLE"]
    assert running.engine is not None
    assert "is not captured: SERVER_UNAVAILABLE" in running.engine.log.read_text()


def capture_works(running: Stack, name: str) -> None:
    """With the server there, captures work by themselves; nothing of what was refused is stored."""
    for attempt in range(1000):  # Until the engine has noticed.
        sample_id = f"{name}-{attempt}"
        if "error" not in _capture(running, sample_id):
            break
    # vLLM's front end may answer before it has counted.
    wait_until(lambda: metric(scrape(running.vllm_port), "slotstream_connector_capture_off") == 0, "capture")
    with connect(running.address) as client:
        # The engine admits as soon as the server answers it; the worker's stream may take longer than the server's patience.
        wait_until(lambda: any(info.sample_id == sample_id for info in client.list(namespace="outage")), sample_id)
        assert_rows_are_true(client.get(sample_id, namespace="outage"))
        for info in client.list(namespace="outage"):
            assert "-away" not in info.sample_id
        try:
            client.get(f"{name}-away0", namespace="outage", wait_s=0)
        except SampleNotFound:
            return
    raise AssertionError("a refused capture is stored")
