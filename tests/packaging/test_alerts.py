"""The alerts fire in the stories of alerts.yaml and in no other, and each has one."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import yaml
from support.tools import run_tool

from slotstream.connector.counters import METRICS
from slotstream.server.metrics import Metrics
from slotstream.store.samples import SampleStore

ROOT = Path(__file__).resolve().parents[2]
RULES = ROOT / "deploy" / "prometheus" / "rules.yaml"
STORIES = Path(__file__).with_name("alerts.yaml")


def test_the_stories(tmp_path: Path) -> None:
    shutil.copy(RULES, tmp_path)
    shutil.copy(STORIES, tmp_path)
    assert "SUCCESS" in run_tool("promtool", "test", "rules", "alerts.yaml", cwd=tmp_path)
    assert "SUCCESS" in run_tool("promtool", "check", "rules", "rules.yaml", cwd=tmp_path)


def test_each_alert_fires_in_a_story() -> None:
    stories = yaml.safe_load(STORIES.read_text())["tests"]
    fired = {test["alertname"] for story in stories for test in story.get("alert_rule_test", ()) if test["exp_alerts"]}
    for story in stories:
        for test in story.get("promql_expr_test", ()):
            fired |= {sample["labels"].split('alertname="')[1].split('"')[0] for sample in test["exp_samples"]}
    rules = [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]
    assert fired == {rule["alert"] for rule in rules}
    for rule in rules:
        assert "namespace" not in rule["expr"], "a name that peers choose"


DASHBOARD = json.loads((ROOT / "deploy" / "grafana" / "slotstream.json").read_text())


def test_each_panel_asks_for_what_is_exported_by_the_data_source_that_is_chosen(tmp_path: Path) -> None:
    """`engine/test_dense.py` runs each expression against what a real run exports."""
    store = SampleStore.open(tmp_path)
    try:
        families = list(Metrics(store).registry.collect())
    finally:
        store.close()
    known = {re.sub("_total$", "", family.name) for family in families} | {f"slotstream_connector_{m.name}" for m in METRICS}
    panels = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
    assert len(panels) > 20
    for panel in panels:
        assert panel["datasource"]["uid"] == "${DS_PROMETHEUS}"
        for target in panel["targets"]:
            assert target["datasource"]["uid"] == "${DS_PROMETHEUS}"
            names = {re.sub("_(total|bucket)$", "", name) for name in re.findall(r"\bslotstream_\w+", target["expr"])}
            assert names <= known, (panel["title"], names - known)
            assert "namespace" not in target["expr"] + target["legendFormat"], "a name that peers choose"
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
