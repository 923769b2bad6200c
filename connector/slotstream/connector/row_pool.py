"""How large the row pool is, and how it is cut into pages: both halves of the connector ask here, and so agree."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from slotstream.connector.vllm_config import ConnectorConfig
from slotstream.wire.errors import ConfigError

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

PAGE_ROWS_MAX = 32  # Hybrid models have blocks of a thousand rows and more: a page is at most so large.
PAGES_MIN = 8
_ROWS_WAITING = 128  # Output rows of each request that the default pool has room for, at most.
_DEFAULT_BYTES_MAX = 2 << 30


@dataclass(frozen=True, slots=True)
class RowPoolShape:
    """`pages` pages of `page_rows` rows each. A page belongs to `page_rows` KV-cache slots next to each other."""

    pages: int
    page_rows: int

    @property
    def rows(self) -> int:
        """Of all pages."""
        return self.pages * self.page_rows


def pool_rows(config: ConnectorConfig, vllm_config: VllmConfig) -> int:
    """How many rows the pool holds: `row_pool_bytes`, or what a step and the output rows that wait need, up to 2 GiB.

    One step's rows always have room by default. Raises ConfigError for a pool of fewer than PAGES_MIN pages.
    """
    scheduler = vllm_config.scheduler_config
    step = scheduler.max_num_batched_tokens
    nbytes = config.options.row_pool_bytes
    if nbytes is None:
        # A request's first and last pages may each be shared with rows that it does not capture, or has given away. Where more
        # rows wait than that, pages get short, and rows are read earlier.
        rows = min(config.options.output_rows_per_chunk or _ROWS_WAITING, _ROWS_WAITING)
        waiting = scheduler.max_num_seqs * (rows + 2 * PAGE_ROWS_MAX)
        nbytes = min((step + waiting) * config.row_bytes, max(_DEFAULT_BYTES_MAX, step * config.row_bytes))
    rows = nbytes // config.row_bytes
    if rows < PAGES_MIN * PAGE_ROWS_MAX:
        least = PAGES_MIN * PAGE_ROWS_MAX * config.row_bytes
        raise ConfigError(
            f"connector option row_pool_bytes must be at least {least}: {PAGES_MIN} pages of {PAGE_ROWS_MAX} rows"
        )
    return rows


def step_pages(vllm_config: VllmConfig, page_rows: int) -> int:
    """The most pages that one step can want: those of its tokens, where each request begins a page with its last one."""
    scheduler = vllm_config.scheduler_config
    return int(-(-(scheduler.max_num_batched_tokens + scheduler.max_num_seqs * (page_rows - 1)) // page_rows))


def page_rows_of(block_size: int) -> int:
    """Rows of a page, for blocks of `block_size` tokens: its largest divisor that is no larger than PAGE_ROWS_MAX."""
    return max(rows for rows in range(1, min(block_size, PAGE_ROWS_MAX) + 1) if block_size % rows == 0)


def pool_shape(rows: int, block_size: int) -> RowPoolShape:
    """How a pool of `rows` rows is cut for blocks of `block_size` tokens."""
    page_rows = page_rows_of(block_size)
    return RowPoolShape(rows // page_rows, page_rows)


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """The KV-cache group whose slots name the rows: its index and its block size in tokens.

    `layer`: a layer of the target model in it, on this rank; "" where this rank has none. `keeps_blocks`: whether a request's
    blocks stay its own for as long as it runs, as those of full attention do.
    """

    index: int
    block_size: int
    layer: str
    keeps_blocks: bool


def cache_group(kv_cache_config: KVCacheConfig, num_layers: int) -> CacheGroup:
    """The group to take: one of full attention (or MLA) if there is one, else of any decoder self-attention.

    `num_layers`: of the target model; a drafter's layers count on from there. Raises ConfigError for a model without slots.
    """
    from vllm.v1.kv_cache_interface import (
        AttentionSpec,
        CrossAttentionSpec,
        EncoderOnlyAttentionSpec,
        FullAttentionSpec,
        UniformTypeKVCacheSpecs,
    )

    found: list[CacheGroup] = []
    for index, group in enumerate(kv_cache_config.kv_cache_groups):
        layers = [name for name in group.layer_names if _is_target_layer(name, num_layers)]
        if group.layer_names and not layers:
            continue  # A drafter's own.
        spec = group.kv_cache_spec
        if isinstance(spec, UniformTypeKVCacheSpecs):
            spec = next(iter(spec.kv_cache_specs.values()))
        if not isinstance(spec, AttentionSpec) or not getattr(spec, "uses_slot_mapping", True):
            continue
        if isinstance(spec, CrossAttentionSpec | EncoderOnlyAttentionSpec) or getattr(group, "host_resident", False):
            continue
        sees_all = isinstance(spec, FullAttentionSpec) and not (
            spec.sliding_window or spec.attention_chunk_size or getattr(spec, "rswa_window", None)
        )
        # A rank of a pipeline may hold none of a group's layers; its index is the same on all of them.
        found.append(CacheGroup(index, group.kv_cache_spec.block_size, layers[0] if layers else "", sees_all))
    if not found:
        raise ConfigError(
            "layers cannot be captured: this model has no decoder self-attention, whose KV-cache slots would name its rows"
        )
    return max(found, key=lambda group: (group.keeps_blocks, -group.index))


def _is_target_layer(name: str, num_layers: int) -> bool:
    """vLLM numbers a drafter's layers on from the target's, or names them `draft_model...`."""
    numbers = [int(part) for part in name.split(".") if part.isdigit()]
    return not name.startswith("draft_model") and bool(numbers) and numbers[0] < num_layers
