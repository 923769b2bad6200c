"""Wrong start-up configuration: vLLM stops at start, with one sentence that says what to change."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slotstream.demo.processes import (
    SMALL_ENGINE,
    ProcessFailed,
    connector_options,
    extraction_options,
    free_port,
    start_vllm,
)

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

_NO_LAYERS = ["--speculative-config", json.dumps({"method": "extract_hidden_states", "num_speculative_tokens": 1})]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        pytest.param(
            [*extraction_options([1, 3]), *connector_options(servre="127.0.0.1:50151")],
            "unknown connector options ['servre']; known: ['ack_timeout_s',",
            id="unknown option",
        ),
        pytest.param(
            [*extraction_options([1, 3]), *connector_options(server="localhost:notaport")],
            "address 'localhost:notaport' is neither host:port",
            id="malformed address",
        ),
        pytest.param(
            connector_options(server="127.0.0.1:50151"),
            'slotstream needs vLLM to extract hidden states: add --speculative-config \'{"method": "extract_hidden_states"',
            id="no extraction",
        ),
        pytest.param(
            [*extraction_options([1, 99]), *connector_options(server="127.0.0.1:50151")],
            "eagle_aux_hidden_state_layer_ids [1, 99] must be different layer ids from 0 to 6",
            id="layers that the model lacks",
        ),
        # vLLM itself refuses this one, before it makes any connector.
        pytest.param([*_NO_LAYERS, *connector_options()], "eagle_aux_hidden_state_layer_ids", id="no layers"),
    ],
)
def test_vllm_stops_at_start_and_says_why(
    options: list[str], sentence: str, truth_models: dict[str, Path], tmp_path: Path
) -> None:
    log = tmp_path / "vllm.log"
    with pytest.raises(ProcessFailed, match="exited with"):
        start_vllm(truth_models["dense"], log, free_port(), *SMALL_ENGINE, *options)
    assert sentence in log.read_text()
