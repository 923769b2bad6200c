"""Which source rows come from, as the options say, and what each half of the connector needs of it, at start."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from slotstream.connector.planning.page_allocator import PageAllocator
from slotstream.connector.planning.row_places import BlockPlaces, PagePlaces, RowPlaces
from slotstream.connector.reading import forward_capture
from slotstream.connector.reading.row_source import CachedRows, RowSource
from slotstream.connector.row_pool import CacheGroup, cache_group, pool_rows, pool_shape, step_pages
from slotstream.connector.vllm_config import ConnectorConfig
from slotstream.wire.errors import ConfigError

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


def row_group(config: ConnectorConfig, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> CacheGroup:
    """The KV-cache group whose slots name the rows. Raises ConfigError when it cannot be told."""
    if config.direct:
        return cache_group(kv_cache_config, vllm_config.model_config.get_total_num_hidden_layers())
    index = _hidden_state_group(kv_cache_config)
    group = kv_cache_config.kv_cache_groups[index]
    return CacheGroup(index, group.kv_cache_spec.block_size, "", keeps_blocks=True)


def row_places(config: ConnectorConfig, vllm_config: VllmConfig, group: CacheGroup) -> RowPlaces:
    """The engine core's half of the source. Raises ConfigError for a row pool that is too small."""
    if not config.direct:
        return BlockPlaces()
    shape = pool_shape(pool_rows(config, vllm_config), group.block_size)
    pages = PageAllocator(shape, group.block_size, step_pages(vllm_config, shape.page_rows))
    step_tokens = vllm_config.scheduler_config.max_num_batched_tokens
    return PagePlaces(pages, row_bytes=config.row_bytes, keeps_blocks=group.keeps_blocks, step_tokens=step_tokens)


def check_capture(config: ConnectorConfig, reach_workers: Callable[[], None]) -> None:
    """Raises ConfigError where this engine's model was loaded without what its capture needs.

    `reach_workers` is what should have been done before: it raises the reason where it cannot.
    """
    if config.instance in forward_capture.captures:
        return
    reach_workers()
    if config.direct:
        raise ConfigError(
            "the model was loaded without slotstream's plug-in, which connector option layers needs: vLLM must see the entry "
            "point `slotstream` of vllm.general_plugins (pip install slotstream where vLLM runs), and VLLM_PLUGINS, where it "
            "is set, must name slotstream"
        )


def row_source(
    config: ConnectorConfig, vllm_config: VllmConfig, kv_caches: dict[str, torch.Tensor]
) -> tuple[RowSource | None, str]:
    """The worker's half of the source, and the layer whose `save_kv_layer` tells its slots; (None, "") on ranks without rows.

    Raises ConfigError where the cache is not what the configuration says.
    """
    if config.direct:
        capture = forward_capture.captures[config.instance]
        capture.serving = True
        return capture.pages, ""
    from vllm.config import get_layers_from_vllm_config
    from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
    from vllm.model_executor.models.extract_hidden_states import CacheOnlyAttentionLayer

    layers = list(get_layers_from_vllm_config(vllm_config, CacheOnlyAttentionLayer, list(kv_caches)))
    # Only the last pipeline rank has the layer.
    if not layers or get_tensor_model_parallel_rank() != 0:
        return None, ""
    if len(layers) > 1:
        raise ConfigError(f"expected one layer of hidden states, found {len(layers)}")
    return CachedRows(kv_caches[layers[0]], config.row_kind, config.hidden_size), layers[0]


def _hidden_state_group(kv_cache_config: KVCacheConfig) -> int:
    """The KV-cache group that holds the hidden states. Raises ConfigError when it cannot be told.

    Models whose layers all keep every token (full attention, MLA, sparse MLA) have one group, which the hidden states share.
    Hybrids (sliding windows, chunked local attention, states) give the hidden states a group of their own. vLLM 0.32
    makes no other layout, or refuses the model itself: docs/requests.md, "Models".
    """
    from vllm.v1.kv_cache_interface import HiddenStateCacheSpec

    groups = kv_cache_config.kv_cache_groups
    found = [i for i, group in enumerate(groups) if isinstance(group.kv_cache_spec, HiddenStateCacheSpec)]
    if len(found) == 1:
        return found[0]
    if len(groups) == 1:
        return 0
    raise ConfigError(
        f"none of this model's {len(groups)} KV-cache groups is the hidden states' own, so nothing says which block table "
        "their rows are in: this model cannot be captured with extract_hidden_states (connector option layers may)"
    )
