"""Wrong start-up configuration: vLLM stops at start, with one sentence that says what to change."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support import tiny_llava

from slotstream.connector.plugin import config_of
from slotstream.connector.vllm_config import ConnectorConfig
from slotstream.demo.processes import (
    SMALL_ENGINE,
    ProcessFailed,
    connector_options,
    extraction_options,
    free_port,
    start_vllm,
)
from slotstream.wire.errors import ConfigError

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

_NO_LAYERS = {"method": "extract_hidden_states", "num_speculative_tokens": 1}
_NONE: dict[str, Any] = {}


def _layers(*layers: object, **options: object) -> dict[str, Any]:
    return {"kv_connector_extra_config": {"layers": list(layers), **options}}


@pytest.mark.extended  # A whole vLLM each, up to the point where it refuses.
@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        pytest.param(
            [*extraction_options([1, 3]), *connector_options(servre="127.0.0.1:50151")],
            "unknown connector options ['servre']; known: ['ack_timeout_s',",
            id="unknown option",
        ),
        pytest.param(
            connector_options(server="127.0.0.1:50151"),
            'name the layers to capture: add "layers": [3, "final"] to kv_connector_extra_config (layer ids from 0 to 6',
            id="no layers",
        ),
    ],
)
def test_vllm_stops_at_start_and_says_why(
    options: list[str], sentence: str, truth_models: dict[str, Path], tmp_path: Path
) -> None:
    log = tmp_path / "vllm.log"
    with pytest.raises(ProcessFailed, match="exited with"):
        start_vllm(truth_models["dense"], log, free_port(), *SMALL_ENGINE, *options)
    assert any(f"slotstream cannot start: {sentence}" in line for line in log.read_text().splitlines())


@pytest.mark.parametrize(
    ("speculative", "transfer", "more", "sentence"),
    [
        pytest.param(_NONE, {}, {}, 'name the layers to capture: add "layers": [3, "final"]', id="neither way to the rows"),
        pytest.param(
            _NO_LAYERS | {"draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": [1]}}},
            _layers(1),
            {},
            "are two ways to the same rows",
            id="both ways to the rows",
        ),
        pytest.param(
            _NONE, _layers(1, 7), {}, "connector option layers [1, 7] must be layer ids from 0 to 6", id="layer 7 of 6"
        ),
        pytest.param(_NONE, _layers("last"), {}, 'whole numbers from 0 on and "final"', id="a layer's name"),
        pytest.param(_NONE, _layers("final", "final"), {}, "must not name a layer twice", id="final twice"),
        pytest.param(_NONE, _layers(1, row_pool_bytes=-1), {}, "connector option row_pool_bytes must be", id="row pool"),
        pytest.param(_NONE, _layers(1), {"kv_sharing_fast_prefill": True}, "drop --kv-sharing-fast-prefill", id="fast prefill"),
        pytest.param(
            _NONE,
            _layers(1),
            {"tensor_parallel_size": 4, "decode_context_parallel_size": 2},
            "decode_context_parallel_size must be 1",
            id="context parallel",
        ),
        pytest.param(
            _NONE, _layers(1), {"pipeline_parallel_size": 2}, "layers with pipeline parallelism need model runner V2", id="V1"
        ),
        pytest.param(_NO_LAYERS, {}, {}, "set eagle_aux_hidden_state_layer_ids in the speculative config's", id="no layers"),
        pytest.param(
            _NO_LAYERS | {"draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": [1, 99]}}},
            {},
            {},
            "eagle_aux_hidden_state_layer_ids [1, 99] must be different layer ids from 0 to 6",
            id="a layer that the model lacks",
        ),
        pytest.param(
            _NO_LAYERS | {"draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": [3, 3]}}},
            {},
            {},
            "eagle_aux_hidden_state_layer_ids [3, 3] must be different layer ids",
            id="a layer twice",
        ),
        pytest.param(
            _NO_LAYERS | {"draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": [1]}}},
            {"kv_role": "kv_consumer"},
            {},
            'slotstream only sends: set "kv_role": "kv_producer"',
            id="a role that receives",
        ),
        pytest.param(
            _NO_LAYERS | {"draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": [1]}}},
            {"kv_connector_extra_config": {"server": "localhost:notaport"}},
            {},
            "address 'localhost:notaport' is neither host:port",
            id="malformed address",
        ),
        pytest.param(
            _NO_LAYERS | {"draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": [1]}}},
            {},
            {"enable_prompt_embeds": True},
            "drop --enable-prompt-embeds",
            id="prompts of embeddings",
        ),
        pytest.param(
            _NO_LAYERS | {"draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": [1]}}},
            {},
            {"runner": "pooling", "convert": "embed"},
            "a pooling model cannot be captured",
            id="pooling",
        ),
        pytest.param(
            _NONE,
            _layers(1, capture=False),
            {"runner": "pooling", "convert": "embed"},
            "leave connector option capture true: requests to a pooling model carry no parameters",
            id="pooled requests that cannot ask",
        ),
    ],
)
def test_vllms_configuration_is_checked_in_one_sentence(
    speculative: dict[str, Any], transfer: dict[str, Any], more: dict[str, Any], sentence: str, truth_models: dict[str, Path]
) -> None:
    """The same check on vLLM's own configuration objects, without waiting for an engine."""
    assert sentence in _refused(truth_models["dense"], speculative, transfer, more)


_MULTI = "MultiConnector"


def _ours(*layers: object, **options: object) -> dict[str, Any]:
    return {
        "kv_connector": "SlotStreamConnector",
        "kv_connector_module_path": "slotstream.connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"layers": list(layers), **options} if layers else options,
    }


def _together(*children: dict[str, Any]) -> dict[str, Any]:
    return {"kv_connector": _MULTI, "kv_role": "kv_both", "kv_connector_extra_config": {"connectors": list(children)}}


_SIBLING = {"kv_connector": "PretendLoader", "kv_connector_module_path": "support.siblings", "kv_role": "kv_both"}
_EXTRACTS = _NO_LAYERS | {"draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": [1]}}}


def _configuration(model: Path, transfer: dict[str, Any], speculative: dict[str, Any] | None = None) -> Any:
    from vllm.config import KVTransferConfig
    from vllm.engine.arg_utils import EngineArgs

    arguments = EngineArgs(
        model=str(model),
        max_model_len=1024,
        speculative_config=speculative or None,
        kv_transfer_config=KVTransferConfig(**transfer),
    )
    return arguments.create_engine_config()


@pytest.mark.parametrize(
    ("transfer", "speculative"),
    [
        pytest.param(_together(_ours(0, 3, capture=False), _ours(6, "final")), _NONE, id="two"),
        pytest.param(_together(_SIBLING, _ours(0, 3), _together(_ours(6), _SIBLING)), _NONE, id="one of them nested"),
        pytest.param(_together(_together(_ours(0, 3), _ours(6))), _NONE, id="both nested"),
        pytest.param(_together(_ours(), _ours()), _EXTRACTS, id="two that read what vLLM extracts"),
        pytest.param(_together(_ours(), _ours(3)), _EXTRACTS, id="one of each kind"),
    ],
)
def test_several_slotstreams_are_refused(
    transfer: dict[str, Any], speculative: dict[str, Any], truth_models: dict[str, Path]
) -> None:
    found = _configuration(truth_models["dense"], transfer, speculative)
    with pytest.raises(ConfigError, match=r"^2 slotstreams are configured, and an engine has one: keep one") as caught:
        config_of(found)
    assert "\n" not in str(caught.value)


def test_a_nested_slotstream_is_found_among_its_siblings(truth_models: dict[str, Path]) -> None:
    found = config_of(_configuration(truth_models["dense"], _together(_SIBLING, _together(_SIBLING, _ours(3)))))
    assert found is not None
    assert found.layer_ids == (3,)
    assert config_of(_configuration(truth_models["dense"], _together(_SIBLING, _together(_SIBLING)))) is None


@pytest.mark.extended
@pytest.mark.parametrize("extract", [False, True], ids=["layers", "extraction"])
def test_vllm_with_several_slotstreams_stops_before_it_loads_the_model(
    extract: bool, truth_models: dict[str, Path], tmp_path: Path
) -> None:
    children = [_ours(), _ours()] if extract else [_ours(0, 3, capture=False), _ours(6, "final")]
    options = ["--kv-transfer-config", json.dumps(_together(*children)), *(extraction_options([1, 3]) if extract else ())]
    log = tmp_path / "vllm.log"
    with pytest.raises(ProcessFailed, match="exited with"):
        start_vllm(truth_models["dense"], log, free_port(), *SMALL_ENGINE, *options)
    said = log.read_text()
    assert "slotstream cannot start: 2 slotstreams are configured" in said
    assert "Loading weights took" not in said


def test_media_with_the_model_code_of_transformers_are_refused_before_they_end_vllm(tmp_path: Path) -> None:
    """vLLM has no code of its own for ViP-LLaVA, and so takes transformers'."""
    from transformers import CLIPVisionConfig, LlamaConfig, VipLlavaConfig

    tiny = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = VipLlavaConfig(
        vision_config=CLIPVisionConfig(**tiny),
        text_config=LlamaConfig(**tiny, max_position_embeddings=4096),
        vision_feature_layers=[-1],
        dtype="bfloat16",
        architectures=["VipLlavaForConditionalGeneration"],
    )
    config.save_pretrained(tmp_path)
    tiny_llava.write_processor(tmp_path)
    speculative = _NO_LAYERS | {"draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": [1]}}}
    refused = _refused(tmp_path, speculative, {}, {})
    assert "cannot be captured: with images or other media and transformers' model code" in refused


def _refused(model: Path, speculative: dict[str, Any], transfer: dict[str, Any], more: dict[str, Any]) -> str:
    """Why the connector refuses what vLLM makes of these options: one sentence."""
    from vllm.config import KVTransferConfig
    from vllm.engine.arg_utils import EngineArgs

    connector = {
        "kv_connector": "SlotStreamConnector",
        "kv_connector_module_path": "slotstream.connector",
        "kv_role": "kv_producer",
        **transfer,
    }
    arguments = EngineArgs(
        model=str(model),
        max_model_len=1024,
        speculative_config=speculative or None,
        kv_transfer_config=KVTransferConfig(**connector),
        **more,
    )
    with pytest.raises(ConfigError) as caught:
        ConnectorConfig.from_vllm(arguments.create_engine_config())
    assert "\n" not in str(caught.value)
    return str(caught.value)
