"""Layers by name, resolved from the configs of real models: no engine is started."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support import tiny_eagle3

from slotstream.connector.vllm_config import ConnectorConfig
from slotstream.wire.errors import ConfigError

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]


def config_of(model: Path, layers: Any) -> ConnectorConfig:
    from vllm.config import KVTransferConfig
    from vllm.engine.arg_utils import EngineArgs

    transfer = KVTransferConfig(
        kv_connector="SlotStreamConnector",
        kv_connector_module_path="slotstream.connector",
        kv_role="kv_producer",
        kv_connector_extra_config={"layers": layers},
    )
    arguments = EngineArgs(model=str(model), max_model_len=1024, kv_transfer_config=transfer)
    return ConnectorConfig.from_vllm(arguments.create_engine_config())


def test_names_become_the_layers_of_the_model(truth_models: dict[str, Path], tmp_path: Path) -> None:
    model = truth_models["dense"]  # Of six layers.
    eagle3 = config_of(model, "eagle3")
    assert (eagle3.layer_ids, eagle3.eagle3, eagle3.direct) == ((2, 3, 6), True, True)
    assert json.loads(eagle3.metadata["layer_names"]) == ["2", "3", "6"]
    draft = tiny_eagle3.make(tmp_path / "draft", model, [1, 4, 5])
    drafts = config_of(model, {"draft": str(draft)})
    assert (drafts.layer_ids, drafts.eagle3) == ((1, 4, 5, 6), False)
    with pytest.raises(ConfigError, match="cannot be read"):
        config_of(model, {"draft": str(tmp_path / "nothing")})
