"""Whether this vLLM has what `vllm_seams` reaches into, as far as that can be seen before there is a model."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from slotstream.connector.vllm_config import ConnectorConfig, vllm_version
from slotstream.wire.errors import ConfigError

if TYPE_CHECKING:
    from vllm.config import VllmConfig

WORKERS = "vllm.v1.worker.worker_base"
# What is called after the model is loaded, and can be looked for before.
NEEDED = (
    ("vllm.forward_context", "get_forward_context"),
    ("vllm.distributed.parallel_state", "get_pp_group"),
    ("vllm.distributed.parallel_state", "get_tensor_model_parallel_rank"),
    ("vllm.v1.kv_cache_interface", "AttentionSpec"),
    ("vllm.v1.kv_cache_interface", "CrossAttentionSpec"),
    ("vllm.v1.kv_cache_interface", "EncoderOnlyAttentionSpec"),
    ("vllm.v1.kv_cache_interface", "FullAttentionSpec"),
    ("vllm.v1.kv_cache_interface", "UniformTypeKVCacheSpecs"),
)
_INTERFACES = "vllm.model_executor.models.interfaces"


def check_connector(vllm_config: VllmConfig) -> None:
    """Raises ConfigError where another engine's connector would be given the steps of this one, and could not tell them apart.

    vLLM keeps one connector for a process. Ours knows whose step it is, but only where it is not behind MultiConnector.
    """
    try:
        from vllm.distributed.kv_transfer.kv_transfer_state import get_kv_transfer_group, has_kv_transfer_group
    except ImportError:
        return
    if not has_kv_transfer_group():
        return
    transfer = vllm_config.kv_transfer_config
    alone = transfer is not None and "connectors" not in (transfer.kv_connector_extra_config or {})
    if not (alone and getattr(get_kv_transfer_group(), "is_slotstream", False)):
        raise ConfigError(
            "another engine of this process has a KV connector, which vLLM would give this engine's steps too: start this "
            "engine in a process of its own"
        )


def check_needed(config: ConnectorConfig) -> None:
    """Raises ConfigError, naming it, where this vLLM lacks something that a capture of layers needs later."""
    for module, name in NEEDED:
        find(module, name)
    if config.residual_layer_ids:
        find(_INTERFACES, "supports_eagle3")
        check_own_layers()
    context = find("vllm.forward_context", "ForwardContext")
    if "slot_mapping" not in getattr(context, "__dataclass_fields__", {}):
        raise missing("ForwardContext.slot_mapping")
    request = find("vllm.v1.request", "Request")
    if "skip_reading_prefix_cache" not in request.__init__.__code__.co_names:
        raise missing("Request.skip_reading_prefix_cache")


def check_sessions() -> None:
    """Raises ConfigError where a request does not say that its prompt may grow: see `planning/sessions.py`."""
    request = find("vllm.v1.request", "Request", extraction=False)
    if "resumable" not in request.__init__.__code__.co_names:
        raise missing("Request.resumable", extraction=False)


def check_own_layers() -> None:
    """Raises ConfigError where a model cannot be told to give copies of its layers: see `own_layers`."""
    if not hasattr(find(_INTERFACES, "EagleModelMixin", extraction=False), "_maybe_add_hidden_state"):
        raise missing("EagleModelMixin._maybe_add_hidden_state", extraction=False)


def find(module: str, name: str, *, extraction: bool = True) -> Any:
    """Something of vLLM's, by its name in a module. Raises ConfigError where it is not there."""
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise missing(f"{module}.{name}", extraction=extraction) from error


def attribute(owner: Any, name: str) -> Any:
    """An attribute that another vLLM may not have: None then. Its wrapper of workers looks further for what it lacks."""
    try:
        return getattr(owner, name, None)
    except RecursionError:
        return None


def missing(seam: str, *, extraction: bool = True) -> ConfigError:
    """What to say of a seam that this vLLM does not have. `extraction`: whether `extract_hidden_states` does without it."""
    instead = ", or capture with extract_hidden_states instead of connector option layers" if extraction else ""
    return ConfigError(f"vLLM {vllm_version()} has no {seam} as slotstream knows it: use vLLM 0.32 or 0.33{instead}")
