"""docs/reference.md is what the code says."""

from __future__ import annotations

import json
import sys
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import regenerate_reference as script

from slotstream.connector.counters import METRICS
from slotstream.connector.options import ConnectorOptions
from slotstream.connector.planning.captured_request import CapturedRequest
from slotstream.connector.planning.request_params import parse_params
from slotstream.connector.planning.scheduler import SchedulerHalf
from slotstream.connector.vllm_config import ConnectorConfig
from slotstream.server.metrics import Metrics
from slotstream.store.samples import SampleStore
from slotstream.wire.columns import RowFormat
from slotstream.wire.errors import BadParams, SlotStreamError, _all_subclasses

REFERENCE = (Path(__file__).resolve().parents[2] / "docs" / "reference.md").read_text()


def test_the_page_is_what_the_script_writes() -> None:
    assert script.reference() == REFERENCE, "run `python tests/regenerate_reference.py`"


def test_every_connector_option_has_its_row() -> None:
    for option in fields(ConnectorOptions):
        default = option.default if isinstance(option.default, str) else json.dumps(option.default)
        assert f"| `{option.name}` | `{default}` | {option.metadata['help']} |" in REFERENCE


def test_every_connector_metric_has_its_row() -> None:
    for metric in METRICS:
        assert f"| `slotstream_connector_{metric.name}` | {metric.help} |" in REFERENCE


def test_every_server_metric_has_its_row(tmp_path: Path) -> None:
    store = SampleStore.open(tmp_path)
    try:
        for family in Metrics(store).registry.collect():
            assert f"| `{family.name}` | {family.documentation} |" in REFERENCE
    finally:
        store.close()


def test_every_error_code_has_its_row() -> None:
    for kind in _all_subclasses(SlotStreamError):
        if kind.__module__.startswith("slotstream.wire"):
            retry = "yes" if kind.retryable else "no"
            assert f"| `{kind.code}` | {retry} | {' '.join(str(kind.__doc__).split())} |" in REFERENCE


def test_answers_have_the_keys_that_the_page_names() -> None:
    config = ConnectorConfig(ConnectorOptions(), "engine", "model", (1, 3), RowFormat.of("BF16", 2, 8), {})
    half = SchedulerHalf(config, 0, 16, 1024, lambda longer_than_s: None)
    params = parse_params(None, req_id="r", namespace="default", capture=True, include_output_tokens=False)
    request: Any = SimpleNamespace(request_id="r", kv_transfer_params={"slotstrem": {}})
    answer = half._response(request, CapturedRequest(request, params, 0, 4, next=0), BadParams("no"))["slotstream"]
    assert answer.keys() == script.ANSWER.keys()


def test_a_sentence_that_is_missing_stops_the_script(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(script.PARAMS, "tags")
    with pytest.raises(ValueError, match=r"request parameters: .* for \['tags'\]"):
        script.reference()


def test_check_says_that_a_page_is_stale(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "reference.md"
    monkeypatch.setattr(script, "PAGE", page)
    monkeypatch.setattr(sys, "argv", ["regenerate_reference.py", "--check"])
    assert script.main() == 1
    assert "run `python tests/regenerate_reference.py`" in capsys.readouterr().err
    page.write_text(REFERENCE)
    assert script.main() == 0
