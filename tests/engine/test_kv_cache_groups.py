"""Where vLLM puts the hidden states among its KV-cache groups, by the kinds of layers that a model has.

vLLM's own grouping is asked, without an engine: docs/requests.md has the table of what it answers.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import VllmConfig
from vllm.config.attention import HiSparseConfig
from vllm.v1.core.kv_cache_utils import get_kv_cache_groups
from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    HiddenStateCacheSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    SparseCacheRole,
    UniformTypeKVCacheSpecs,
)

from slotstream.connector.row_sources import _hidden_state_group
from slotstream.wire.errors import ConfigError

pytestmark = pytest.mark.vllm

_SHAPE: dict[str, Any] = {"block_size": 64, "num_kv_heads": 8, "head_size": 128, "dtype": torch.bfloat16}
_LATENT: dict[str, Any] = {"block_size": 64, "num_kv_heads": 1, "dtype": torch.bfloat16}
FULL = FullAttentionSpec(**_SHAPE)
WINDOW = SlidingWindowSpec(**_SHAPE, sliding_window=256)
LOCAL = ChunkedLocalAttentionSpec(**_SHAPE, attention_chunk_size=256)
MLA = MLAAttentionSpec(**_LATENT, head_size=576)
INDEXER = MLAAttentionSpec(**_LATENT, head_size=132)
STATE = MambaSpec(block_size=64, shapes=((4, 1024), (16, 64, 64)), dtypes=(torch.bfloat16, torch.bfloat16))
HIDDEN = HiddenStateCacheSpec(block_size=64, num_kv_heads=4, head_size=4096, dtype=torch.bfloat16)
BLOCKS_OUTSIDE, LAYERS_OUTSIDE = "BLHNC", "LBHNC"  # The two ways that vLLM lays caches out in memory.


def _groups(
    layers: list[KVCacheSpec], layout: str, *, hybrid_manager: bool = True, hisparse: bool = False
) -> list[KVCacheGroupSpec]:
    """vLLM's groups for a model of these layers, its hidden states among them as the layer `hidden`."""
    config = VllmConfig()
    if hisparse:  # No model is loaded for it: the grouping asks the configuration for one number.
        config.attention_config.hisparse_config = HiSparseConfig()
        config.model_config = SimpleNamespace(hf_config=SimpleNamespace(index_topk=2048))
    config.cache_config.kv_cache_layout = layout
    config.scheduler_config.disable_hybrid_kv_cache_manager = not hybrid_manager
    register_all_kvcache_specs(config)
    specs = {f"layers.{number}": spec for number, spec in enumerate(layers)}
    groups: list[KVCacheGroupSpec] = get_kv_cache_groups(config, {**specs, "hidden": HIDDEN})
    return groups


def _found(groups: list[KVCacheGroupSpec]) -> int:
    return _hidden_state_group(KVCacheConfig(num_blocks=4, kv_cache_tensors=[], kv_cache_groups=groups))


@pytest.mark.parametrize("layout", [BLOCKS_OUTSIDE, LAYERS_OUTSIDE])
@pytest.mark.parametrize(
    "layers",
    [
        pytest.param([FULL] * 4, id="dense"),
        pytest.param([MLA] * 4, id="MLA"),
        pytest.param([MLA, INDEXER] * 2, id="sparse MLA"),
    ],
)
def test_full_and_mla_attention_share_their_one_group_with_the_hidden_states(layers: list[KVCacheSpec], layout: str) -> None:
    (group,) = groups = _groups(layers, layout)
    assert "hidden" in group.layer_names
    assert _found(groups) == 0


@pytest.mark.parametrize("layout", [BLOCKS_OUTSIDE, LAYERS_OUTSIDE])
@pytest.mark.parametrize(
    "layers",
    [
        pytest.param([FULL, WINDOW, WINDOW, FULL], id="sliding windows beside full attention"),
        pytest.param([WINDOW] * 4, id="sliding windows alone"),
        pytest.param([FULL, LOCAL, LOCAL, FULL], id="chunked local attention"),
        pytest.param([FULL, STATE, STATE, FULL], id="states beside full attention"),
        pytest.param([STATE] * 4, id="states alone"),
    ],
)
def test_hybrids_give_the_hidden_states_a_group_of_their_own(layers: list[KVCacheSpec], layout: str) -> None:
    groups = _groups(layers, layout)
    assert len(groups) > 1
    assert groups[_found(groups)].layer_names == ["hidden"]


def test_without_the_hybrid_manager_a_hybrid_has_one_group() -> None:
    groups = _groups([FULL, WINDOW, WINDOW, FULL], BLOCKS_OUTSIDE, hybrid_manager=False)
    assert len(groups) == 1
    assert _found(groups) == 0


@pytest.mark.parametrize("others", [pytest.param(WINDOW, id="sliding windows"), pytest.param(STATE, id="states")])
def test_mla_in_a_hybrid_has_a_group_of_its_own_too_or_vllm_refuses_the_model(others: KVCacheSpec) -> None:
    layers = [MLA, others, others, MLA]
    groups = _groups(layers, BLOCKS_OUTSIDE)
    assert groups[_found(groups)].layer_names == ["hidden"]
    with pytest.raises(NotImplementedError, match="page size is not divisible"):
        _groups(layers, LAYERS_OUTSIDE)


def test_hisparse_is_refused_by_vllm_together_with_hidden_states() -> None:
    indexer = replace(INDEXER, cache_role=SparseCacheRole.INDEXER)
    with pytest.raises(ValueError, match="HiSparse hot-cache groups require one page size"):
        _groups([MLA, indexer] * 2, BLOCKS_OUTSIDE, hisparse=True)


def test_several_groups_none_of_which_is_the_hidden_states_are_refused() -> None:
    mixed = UniformTypeKVCacheSpecs(block_size=64, kv_cache_specs={"layers.0": MLA, "hidden": HIDDEN})
    groups = [KVCacheGroupSpec(["layers.0", "hidden"], mixed), KVCacheGroupSpec(["layers.1"], WINDOW)]
    with pytest.raises(ConfigError, match="none of this model's 2 KV-cache groups is the hidden states' own") as refused:
        _found(groups)
    assert "MLA" not in str(refused.value)
