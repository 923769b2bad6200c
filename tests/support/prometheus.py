"""A real Prometheus, and what deploy/ asks of one: the dashboard's expressions and the alerts."""

from __future__ import annotations

import json
import re
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import yaml

from slotstream.demo.processes import free_port
from support.tools import tool

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
# These have nothing to show in a run without trouble and without TLS.
QUIET = re.compile(
    r"deleted_samples|refused_streams|certificate_expiry|outcome=\"failed\"|capture_off|connector_samples_failed|requests_total"
)


def dashboard_expressions() -> list[str]:
    """Of every panel, with what Grafana puts in for its variables when all is chosen."""
    dashboard = json.loads((DEPLOY / "grafana" / "slotstream.json").read_text())
    found = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    return [expression.replace("$server", ".*").replace("$engine", ".*") for expression in found]


def alert_expressions() -> dict[str, str]:
    """By the alert's name."""
    rules = yaml.safe_load((DEPLOY / "prometheus" / "rules.yaml").read_text())
    return {rule["alert"]: rule["expr"] for group in rules["groups"] for rule in group["rules"]}


class Prometheus:
    """A real one on this machine. It asks each of `jobs` (name -> port) for its metrics every second, until the `with` ends."""

    def __init__(self, directory: Path, jobs: Mapping[str, int]) -> None:
        self.port = free_port()
        scrape = [{"job_name": job, "static_configs": [{"targets": [f"127.0.0.1:{port}"]}]} for job, port in jobs.items()]
        config = {"global": {"scrape_interval": "1s", "scrape_timeout": "1s"}, "scrape_configs": scrape}
        (directory / "prometheus.yml").write_text(yaml.safe_dump(config))
        command = [tool("prometheus"), f"--config.file={directory}/prometheus.yml", f"--storage.tsdb.path={directory}/tsdb"]
        with (directory / "prometheus.log").open("wb") as log:
            self.process = subprocess.Popen(
                [*command, f"--web.listen-address=127.0.0.1:{self.port}"], stdout=log, stderr=log, cwd=directory
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.process.terminate()
        self.process.wait(30)

    def ask(self, expression: str) -> list[Any]:
        """What it answers. Raises OSError while it is starting."""
        query = urllib.parse.urlencode({"query": expression})
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/api/v1/query?{query}", timeout=30.0) as answer:
            said = json.load(answer)
        assert said["status"] == "success"
        found: list[Any] = said["data"]["result"]
        return found

    def knows(self, expression: str) -> bool:
        """Whether it has any series for this."""
        try:
            return bool(self.ask(expression))
        except OSError:
            return False  # It is starting.
