"""Every expression of the dashboard and the alerts, run by a real Prometheus on what a real server and a real vLLM export."""

from __future__ import annotations

import json
import random
import re
import subprocess
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.outage import capture_is_refused
from support.stack import stack
from support.tools import tool
from support.waiting import wait_until
from support.workload import LAYER_IDS, Ask, send, text_tokens

from slotstream.demo.processes import free_port

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

ROOT = Path(__file__).resolve().parents[2]
DASHBOARD = json.loads((ROOT / "deploy" / "grafana" / "slotstream.json").read_text())
RULES = yaml.safe_load((ROOT / "deploy" / "prometheus" / "rules.yaml").read_text())
# These have nothing to show in a run without trouble and without TLS.
QUIET = re.compile(
    r"deleted_samples|refused_streams|certificate_expiry|outcome=\"failed\"|capture_off|connector_samples_failed|requests_total"
)


def _expressions() -> list[str]:
    found = [target["expr"] for panel in DASHBOARD["panels"] for target in panel.get("targets", ())]
    # What Grafana puts in for its variables when all is chosen.
    return [expression.replace("$server", ".*").replace("$engine", ".*") for expression in found]


class _Prometheus:
    def __init__(self, directory: Path, jobs: dict[str, int]) -> None:
        self.port = free_port()
        scrape = [{"job_name": job, "static_configs": [{"targets": [f"127.0.0.1:{port}"]}]} for job, port in jobs.items()]
        config = {"global": {"scrape_interval": "1s", "scrape_timeout": "1s"}, "scrape_configs": scrape}
        (directory / "prometheus.yml").write_text(yaml.safe_dump(config))
        command = [tool("prometheus"), f"--config.file={directory}/prometheus.yml", f"--storage.tsdb.path={directory}/tsdb"]
        with (directory / "prometheus.log").open("wb") as log:
            self.process = subprocess.Popen(
                [*command, f"--web.listen-address=127.0.0.1:{self.port}"], stdout=log, stderr=log, cwd=directory
            )

    def ask(self, expression: str) -> list[Any]:
        query = urllib.parse.urlencode({"query": expression})
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/api/v1/query?{query}", timeout=30.0) as answer:
            said = json.load(answer)
        assert said["status"] == "success"
        found: list[Any] = said["data"]["result"]
        return found

    def knows(self, expression: str) -> bool:
        try:
            return bool(self.ask(expression))
        except OSError:
            return False  # It is starting.


def _still_serves(port: int) -> bool:
    """One request more: vLLM tells its metrics with its steps."""
    (answer,) = send(port, [Ask(text_tokens(random.Random(0), 8))])
    return bool(answer.tokens)


def test_every_expression_finds_what_a_real_run_exports(truth_models: dict[str, Path], tmp_path: Path) -> None:
    with stack(tmp_path, truth_models["dense"], LAYER_IDS, outage_s_max=0) as running:
        prometheus = _Prometheus(tmp_path, {"slotstream": running.metrics_port, "vllm": running.vllm_port})
        try:
            for number in range(2):
                asks = [Ask(text_tokens(random.Random(f"{number}{i}"), 40), {"sample_id": f"s{number}-{i}"}) for i in range(3)]
                send(running.vllm_port, asks)
                wait_until(lambda n=number: prometheus.knows(f"slotstream_connector_samples_opened_total >= {3 * n + 3}"))  # type: ignore[misc]
            wait_until(lambda: prometheus.knows("slotstream_stored_samples{state='committed'} == 6"))
            # A rate needs two samples of the same series.
            wait_until(lambda: prometheus.knows("count_over_time(slotstream_connector_rows_total[5m]) > 3"))
            for expression in _expressions():
                assert prometheus.ask(expression) or QUIET.search(expression), expression
            for rule in (rule for group in RULES["groups"] for rule in group["rules"]):
                assert not prometheus.ask(rule["expr"]), rule["alert"]  # All is well.
            running.stop_serving()
            capture_is_refused(running, "away")
            wait_until(lambda: prometheus.knows('slotstream_connector_capture_off{reason="SERVER_UNAVAILABLE"} == 1'))
            wait_until(lambda: prometheus.knows('up{job="slotstream"} == 0'))
            for alert in ("SlotstreamDown", "SlotstreamCaptureOff", "SlotstreamConnectorOutage"):
                (rule,) = [rule for group in RULES["groups"] for rule in group["rules"] if rule["alert"] == alert]
                wait_until(lambda e=rule["expr"]: _still_serves(running.vllm_port) and prometheus.knows(e), alert)  # type: ignore[misc]
        finally:
            prometheus.process.terminate()
            prometheus.process.wait(30)
