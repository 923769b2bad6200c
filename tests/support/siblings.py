"""Other connectors to run beside slotstream under vLLM's MultiConnector on a CPU; vLLM loads them from this module."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata, SupportsHMA
from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import ExampleConnector
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import ExampleHiddenStatesConnector
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec


def multi_options(server: str, *siblings: dict[str, Any], **options: Any) -> list[str]:
    """The vLLM option that loads slotstream and its `siblings`, in this order."""
    ours = {
        "kv_connector": "SlotStreamConnector",
        "kv_connector_module_path": "slotstream.connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"server": server, **options},
    }
    children = [ours, *({"kv_role": "kv_both", **sibling} for sibling in siblings)]
    config = {"kv_connector": "MultiConnector", "kv_role": "kv_both", "kv_connector_extra_config": {"connectors": children}}
    return ["--kv-transfer-config", json.dumps(config)]


class _NoStream:
    """Stands in for streams and events where there is no device: everything is done at once."""

    def record(self, stream: object = None) -> None:
        return

    def wait_event(self, event: object) -> None:
        return

    def synchronize(self) -> None:
        return

    def query(self) -> bool:
        return True


class HiddenStatesOnCpu(ExampleHiddenStatesConnector):
    """vLLM's example connector as it is, but for its CUDA streams, its events and its pinned memory."""

    def _submit_async_write(self, pending: Any) -> None:
        pageable = torch.empty_like
        with (
            mock.patch.object(torch.cuda, "Event", _NoStream),
            mock.patch.object(torch.cuda, "Stream", _NoStream),
            mock.patch.object(torch.cuda, "stream", contextlib.nullcontext),
            mock.patch.object(torch, "empty_like", lambda source, device, pin_memory: pageable(source, device=device)),
        ):
            super()._submit_async_write(pending)


class ExampleOnRequest(ExampleConnector):
    """vLLM's example connector, which loads synchronously, but only for requests whose params say `{"example": true}`.

    It stores every prompt that it sees; when a request is resumed after a preemption it looks for files that it never wrote.
    """

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        if not (request.kv_transfer_params or {}).get("example"):
            return 0, False
        matched: tuple[int | None, bool] = super().get_num_new_matched_tokens(request, num_computed_tokens)
        return matched


@dataclass
class _Requests(KVConnectorMetadata):
    """What a sibling's workers are told in a step: of which requests a load begins, or which ended."""

    requests: set[str] = field(default_factory=set)


class PretendLoader(KVConnectorBase_V1, SupportsHMA):
    """Says to have loaded the tokens that a request's params name: `{"pretend": 128}` for [0, 128).

    Asynchronously, or with `{"at_once": true}` synchronously. It loads nothing, neither KV nor hidden states: the text of the
    truth models does not depend on their KV.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._beginning: set[str] = set()
        self._over: set[str] = set()

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        params = request.kv_transfer_params or {}
        if request.num_tokens == 1:
            return 0, False  # vLLM computes the last token again: it would ask for this load for ever.
        at_once = params.get("at_once", False)
        # A synchronous load must leave a token to compute; after an asynchronous one vLLM itself computes the last again.
        wanted = min(params.get("pretend", 0), request.num_tokens - at_once)
        more = max(0, wanted - num_computed_tokens)
        return more, more > 0 and not at_once

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens and not (request.kv_transfer_params or {}).get("at_once"):
            self._beginning.add(request.request_id)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        loads, self._beginning = _Requests(self._beginning), set()
        return loads

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[Sequence[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return False, None

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        loads = self._get_connector_metadata()
        assert isinstance(loads, _Requests)
        self._over |= loads.requests

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        over, self._over = self._over, set()
        return None, over or None

    def get_finished_count(self) -> int:
        return 1

    def wait_for_layer_load(self, layer_name: str) -> None:
        return

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        return

    def wait_for_save(self) -> None:
        return


class EveryRankHolds(KVConnectorBase_V1, SupportsHMA):
    """Holds the blocks of requests whose params say `{"hold": true}`, until each worker has said so, `rank` steps later.

    As connectors do that send KV from every tensor-parallel worker: `get_finished_count` stays vLLM's own, None.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._held: set[str] = set()
        self._steps: dict[str, int] = {}  # until a request is reported

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        return

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[Sequence[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        hold = bool((request.kv_transfer_params or {}).get("hold"))
        if hold:
            self._held.add(request.request_id)
        return hold, None

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        held, self._held = _Requests(self._held), set()
        return held

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        held = self._get_connector_metadata()
        assert isinstance(held, _Requests)
        rank = self._vllm_config.parallel_config.rank
        self._steps = {r: n - 1 for r, n in self._steps.items()} | dict.fromkeys(held.requests, rank)
        over = {r for r, n in self._steps.items() if n <= 0}
        for req_id in over:
            del self._steps[req_id]
        return over or None, None

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        return

    def wait_for_layer_load(self, layer_name: str) -> None:
        return

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        return

    def wait_for_save(self) -> None:
        return


class OffloadOnCpu(CPUOffloadingSpec):
    """vLLM's offloading of KV to memory, but for its worker, which wants CUDA: this one copies at once, block by block."""

    def get_worker(self, kv_caches: Any) -> Any:
        assert self.blocks_per_chunk == 1
        return _Copies(kv_caches, self.num_chunks)


class _Copies(OffloadingWorker):
    def __init__(self, kv_caches: Any, chunks: int) -> None:
        self._groups = kv_caches.group_data_refs
        self._caches = [one.tensor for one in kv_caches.tensors]
        self._memory = [cache.new_empty((chunks, cache.shape[1])) for cache in self._caches]
        self._done: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._copy(job_id, src_spec, self._caches, src_spec.block_ids, self._memory, dst_spec.block_ids)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._copy(job_id, dst_spec, self._memory, src_spec.block_ids, self._caches, dst_spec.block_ids)

    def _copy(self, job_id: int, blocks: Any, source: Any, source_ids: Any, target: Any, target_ids: Any) -> bool:
        first = 0
        for refs, count in zip(self._groups, blocks.group_sizes, strict=True):
            for ref in refs:
                for a, b in zip(source_ids[first : first + count], target_ids[first : first + count], strict=True):
                    target[ref.tensor_idx][int(b)] = source[ref.tensor_idx][int(a)]
            first += count
        self._done.append(TransferResult(job_id, True, 1, 0.001))
        return True

    def get_finished(self) -> list[TransferResult]:
        done, self._done = self._done, []
        return done

    def wait(self, job_ids: set[int]) -> None:
        return
