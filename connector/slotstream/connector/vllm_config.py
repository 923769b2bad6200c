"""What the connector has to know of its engine, read once from vLLM's configuration and checked."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from slotstream.connector.options import ConnectorOptions
from slotstream.wire.errors import ConfigError
from slotstream.wire.names import LAYERS_MAX

if TYPE_CHECKING:
    from vllm.config import VllmConfig


@dataclass(frozen=True, slots=True)
class ConnectorConfig:
    """Everything the connector needs to know of its engine, checked. `layer_ids` are in the order of the rows."""

    options: ConnectorOptions
    engine_id: str
    model: str
    layer_ids: tuple[int, ...]
    hidden_size: int
    dtype: str
    metadata: Mapping[str, str]

    @classmethod
    def from_vllm(cls, vllm_config: VllmConfig) -> Self:
        """Read and check vLLM's configuration. Raises ConfigError, in one sentence that says what to change."""
        transfer = vllm_config.kv_transfer_config
        assert transfer is not None, "vLLM makes no connector without a kv_transfer_config"
        options = ConnectorOptions.from_extra(transfer.kv_connector_extra_config or {})
        if not transfer.is_kv_producer:
            raise ConfigError(f'slotstream only sends: set "kv_role": "kv_producer", not {transfer.kv_role!r}')
        model_config = vllm_config.model_config
        layer_ids = _layer_ids(vllm_config)
        if model_config.runner_type == "pooling":
            # The model runner returns before the draft forward, and so never calls wait_for_save.
            raise ConfigError(
                "a pooling model cannot be captured: vLLM extracts no hidden states from requests that are pooled"
            )
        if model_config.is_multimodal_model and model_config.using_transformers_backend():
            # vLLM records the layers of the outermost module, and only the language model inside it offers them: what vLLM
            # then unpacks is not there, at the first request.
            raise ConfigError(
                f"{model_config.architecture} cannot be captured: with images or other media and transformers' model code "
                "instead of its own, vLLM extracts no hidden states and ends at the first request"
            )
        if model_config.enable_prompt_embeds and not vllm_config.use_v2_model_runner:
            # ExtractHiddenStatesProposer.prepare_next_token_ids_padded asks for token ids that such a prompt does not have.
            raise ConfigError(
                "drop --enable-prompt-embeds: with model runner V1, a prompt of embeddings kills a vLLM that extracts"
            )
        if vllm_config.scheduler_config.async_scheduling and not vllm_config.use_v2_model_runner and not _on_cpu():
            # https://github.com/vllm-project/vllm/issues/56417; tests/gpu/decode.py shows it, vLLM's own connector included.
            raise ConfigError(
                "add --no-async-scheduling, or use model runner V2: with V1 on a GPU, vLLM loses track of the text after an "
                "accepted draft token (vLLM issue 56417), and its hidden states are wrong from there on"
            )
        parallel = vllm_config.parallel_config
        for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
            if getattr(parallel, name, 1) > 1:
                raise ConfigError(f"{name} must be 1: with context parallelism no worker holds all rows of a sample")
        model = model_config.served_model_name
        return cls(
            options=options,
            engine_id=str(transfer.engine_id),
            model=str(model if isinstance(model, str) else model_config.model)[:1024],
            layer_ids=layer_ids,
            hidden_size=model_config.get_hidden_size(),
            dtype=_dtype_name(model_config.dtype),
            metadata={
                "engine_id": str(transfer.engine_id),
                "vllm_version": vllm_version(),
                "slotstream_version": importlib.metadata.version("slotstream"),
                "model_path": str(model_config.model)[:1024],
                "model_revision": str(model_config.revision or ""),
                "num_hidden_layers": str(model_config.get_total_num_hidden_layers()),
                "final_norm_applied": "false",
            },
        )


def _on_cpu() -> bool:
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


def vllm_version() -> str:
    """The version of the vLLM that is running, whichever distribution brought it."""
    import vllm

    return str(vllm.__version__)


def _layer_ids(vllm_config: VllmConfig) -> tuple[int, ...]:
    speculative = vllm_config.speculative_config
    if speculative is None or speculative.method != "extract_hidden_states":
        raise ConfigError(
            "slotstream needs vLLM to extract hidden states: add --speculative-config "
            '\'{"method": "extract_hidden_states", "num_speculative_tokens": 1, '
            '"draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}}}\''
        )
    ids = getattr(speculative.draft_model_config.hf_config, "eagle_aux_hidden_state_layer_ids", None)
    num_layers = vllm_config.model_config.get_total_num_hidden_layers()
    if not ids:
        raise ConfigError(
            "no layers to extract: set eagle_aux_hidden_state_layer_ids in the speculative config's "
            f"draft_model_config.hf_config to layer ids from 0 to {num_layers}"
        )
    if len(set(ids)) != len(ids) or not all(isinstance(i, int) and 0 <= i <= num_layers for i in ids):
        raise ConfigError(
            f"eagle_aux_hidden_state_layer_ids {list(ids)} must be different layer ids from 0 to {num_layers}, "
            "the number of this model's layers"
        )
    if len(ids) > LAYERS_MAX:
        raise ConfigError(f"{len(ids)} layer ids are more than the {LAYERS_MAX} allowed")
    # vLLM captures layers in the order the model runs them, whatever the order they were given in.
    return tuple(sorted(ids))


def _dtype_name(dtype: object) -> str:
    names = {"torch.bfloat16": "BF16", "torch.float16": "F16", "torch.float32": "F32"}
    if str(dtype) not in names:
        raise ConfigError(f"hidden states of dtype {dtype} cannot be stored; run the model in bfloat16, float16 or float32")
    return names[str(dtype)]
