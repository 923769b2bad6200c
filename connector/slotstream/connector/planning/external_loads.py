"""Rows that do not exist: those of tokens whose KV another connector loaded from outside.

Beside a loading connector (vLLM's MultiConnector) nobody tells us of its loads, so they are inferred. vLLM tells every
connector a request's local prefix hit (`get_num_new_matched_tokens`) and then its blocks (`update_state_after_alloc`).
A request that got blocks in a step that does not run it is being loaded asynchronously, from the hit to the end of its
blocks; in a step with `has_sync_kv_loads`, what is computed beyond the hit was loaded. Such blocks enter vLLM's prefix
cache like all others, so it is blocks that are remembered, until vLLM gives them to a request that computes them again.
Without a loading connector there is never anything to remember. Facts about vLLM are those of 0.32 and 0.33.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput


@dataclass(frozen=True, slots=True)
class _Loaded:
    """Positions [start, stop) of a block. `proven`: the load was known to have worked before anybody computed with it."""

    start: int
    stop: int
    proven: bool


class ExternalLoads:
    """What was loaded into blocks of KV-cache group `group`, whose blocks hold `block_size` tokens."""

    def __init__(self, group: int, block_size: int) -> None:
        self._group = group
        self._block_size = block_size
        self._hits: dict[str, int] = {}  # until the request gets its blocks
        self._allocated: dict[str, tuple[int | None, KVCacheBlocks]] = {}  # until the step's plan
        self._blocks: dict[int, _Loaded] = {}

    @property
    def idle(self) -> bool:
        """Nothing is remembered, and no request got blocks since the last step: `on_step` may be left out."""
        return not self._blocks and not self._allocated

    def on_match(self, req_id: str, hit_tokens: int) -> None:
        """vLLM looked for the request's tokens and found the first `hit_tokens` in its own cache."""
        self._hits[req_id] = hit_tokens

    def on_alloc(self, req_id: str, blocks: KVCacheBlocks) -> None:
        """vLLM gave the request its blocks; without a lookup before it when an asynchronous load is over."""
        self._allocated[req_id] = (self._hits.pop(req_id, None), blocks)

    def forget(self, req_id: str) -> None:
        """The request ended."""
        self._hits.pop(req_id, None)

    def on_step(self, output: SchedulerOutput, computed: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
        """Account for the step that `output` schedules; `computed` are the tokens each of its requests has computed.

        Returns the block tables of requests that now begin with blocks of which some may be remembered: only these can
        have `unusable` rows, since blocks that a running request gets are its own.
        """
        allocated, self._allocated = self._allocated, {}
        if not self._blocks and not output.has_sync_kv_loads and all(r in computed for r in allocated):
            return {}
        self._drop_new_blocks(output, allocated)
        tables = {r: tuple(block.block_id for block in blocks.blocks[self._group]) for r, (_, blocks) in allocated.items()}
        for req_id, (hit, _) in allocated.items():
            table, stop = tables[req_id], computed.get(req_id)
            if stop is None:
                self._remember(table, hit or 0, len(table) * self._block_size, proven=True)
                continue
            if output.has_sync_kv_loads and hit is not None:
                # Whether it worked is known after the step, when rows computed with it are already sent.
                self._remember(table, hit, stop, proven=False)
            self._drop_from(table, stop)
        for copy in output.kv_cache_block_copies or ():
            self._blocks.pop(copy.dst_block_id, None)
            if (loaded := self._blocks.get(copy.src_block_id)) is not None:
                self._blocks[copy.dst_block_id] = loaded
        return {r: table for r, table in tables.items() if r in computed}

    def unusable(self, table: Sequence[int], computed: int, start: int, stop: int) -> int:
        """How many tokens below `computed` keep positions [start, stop) from being captured, 0 when they may be.

        Rows of loaded tokens, and with a load that may yet turn out to have failed, rows computed with it as well.
        """
        count, size = 0, self._block_size
        for i, block in enumerate(table[: -(-computed // size)]):
            loaded = self._blocks.get(block)
            if loaded is None:
                continue
            first, end = i * size + loaded.start, min(i * size + loaded.stop, computed)
            if loaded.proven:
                first, end = max(first, start), min(end, stop)
            count += max(0, end - first)
        return count

    def _remember(self, table: Sequence[int], start: int, stop: int, *, proven: bool) -> None:
        size = self._block_size
        for i in range(start // size, min(-(-stop // size), len(table))):
            if start < stop:
                self._blocks[table[i]] = _Loaded(max(start - i * size, 0), min(stop - i * size, size), proven)

    def _drop_from(self, table: Sequence[int], start: int) -> None:
        """Positions from `start` on are computed by the table's request."""
        size = self._block_size
        for i in range(start // size, len(table)):
            loaded = self._blocks.pop(table[i], None)
            kept = start - i * size
            if loaded is not None and loaded.start < kept:
                self._blocks[table[i]] = _Loaded(loaded.start, min(loaded.stop, kept), loaded.proven)

    def _drop_new_blocks(self, output: SchedulerOutput, allocated: Mapping[str, object]) -> None:
        """Blocks that running requests got to compute into; a resumed request's are its whole table, so not those."""
        cached = output.scheduled_cached_reqs
        for req_id, new in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if new is not None and req_id not in allocated:
                for block in new[self._group]:
                    self._blocks.pop(block, None)
