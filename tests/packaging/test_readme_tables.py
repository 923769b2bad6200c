"""The README's tables say what the code says."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path

from slotstream.connector.counters import METRICS
from slotstream.connector.options import ConnectorOptions
from slotstream.server.metrics import Metrics
from slotstream.store.samples import SampleStore

README = (Path(__file__).resolve().parents[2] / "README.md").read_text()


def test_every_connector_option_has_its_row() -> None:
    for option in fields(ConnectorOptions):
        default = option.default if isinstance(option.default, str) else json.dumps(option.default)
        assert f"| `{option.name}` | `{default}` | {option.metadata['help']} |" in README


def test_every_connector_metric_has_its_row() -> None:
    for metric in METRICS:
        assert f"| `slotstream_connector_{metric.name}` | {metric.help} |" in README


def test_every_server_metric_has_its_row(tmp_path: Path) -> None:
    store = SampleStore.open(tmp_path)
    try:
        for family in Metrics(store).registry.collect():
            assert f"| `{family.name}` | {family.documentation} |" in README
    finally:
        store.close()
