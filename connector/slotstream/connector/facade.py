"""The class that vLLM makes, once in the engine core and once in each worker. It forwards; it decides nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ParamSpec

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)

from slotstream.connector.counters import SCHEDULER_REASONS, WORKER_REASONS, capture_off
from slotstream.connector.faults import SampleFault
from slotstream.connector.hook_guard import HookGuard
from slotstream.connector.metrics import SlotStreamPromMetrics, SlotStreamStats
from slotstream.connector.options import ConnectorOptions
from slotstream.connector.plan import EMPTY_PLAN, StepPlan
from slotstream.connector.planning.scheduler import SchedulerHalf
from slotstream.connector.planning.server_health import ServerHealth
from slotstream.connector.plugin import install
from slotstream.connector.reading.releases import Releases, every_worker_reports
from slotstream.connector.reading.staging_plan import StagingPlan, step_tokens_max
from slotstream.connector.reading.worker import WorkerHalf
from slotstream.connector.row_sources import check_capture, row_group, row_places, row_source, rows_are_lost
from slotstream.connector.sending.process.handle import sender_for
from slotstream.connector.vllm_config import ConnectorConfig, logged_refusal, vllm_version
from slotstream.transport.logs import connector_logger
from slotstream.v1 import ingest_pb2
from slotstream.wire.errors import InternalFault, SlotStreamError
from slotstream.wire.names import PROTOCOL_VERSION

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = connector_logger(__name__)
P = ParamSpec("P")


@dataclass
class SlotStreamMetadata(KVConnectorMetadata):
    """A step's plan, as vLLM carries it to the workers."""

    plan: StepPlan


@dataclass
class SlotStreamWorkerMetadata(KVConnectorWorkerMetadata):
    """Samples that failed in a worker, as vLLM carries them back."""

    faults: list[SampleFault]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> SlotStreamWorkerMetadata:
        assert isinstance(other, SlotStreamWorkerMetadata)
        return SlotStreamWorkerMetadata([*self.faults, *other.faults])


class SlotStreamConnector(KVConnectorBase_V1, SupportsHMA):
    """Streams rows to a slotstream server: of the layers that its options name, or that `extract_hidden_states` caches."""

    is_slotstream = True  # How the plug-in knows us, and whoever extends us.

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        _register(cls)

    @logged_refusal()
    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._config = ConnectorConfig.from_vllm(vllm_config)
        self._guard = HookGuard(self._count_fault)
        self._scheduler: SchedulerHalf | None = None
        self._worker: WorkerHalf | None = None
        self._releases: Releases | None = None  # Of a worker that sends nothing, where vLLM waits for its reports too.
        self._watch: ServerHealth | None = None
        self._capture_layer = ""
        self._bound: StepPlan = EMPTY_PLAN
        self._told_off: str | None = ""  # Why nothing is captured, as vLLM heard it last; "" while it heard nothing.
        self._group = row_group(self._config, vllm_config, kv_cache_config)
        if role is KVConnectorRole.SCHEDULER:
            self._watch = ServerHealth(
                self._config.options.server, self._config.options.access, patient=self._config.options.spool_dir is not None
            )
            self._scheduler = SchedulerHalf(
                self._config,
                self._group.index,
                self._group.block_size,
                vllm_config.model_config.max_model_len,
                self._why_no_capture,
                row_places(self._config, vllm_config, self._group),
            )
        elif self._config.direct:
            check_capture(self._config)

    # -- worker side

    @logged_refusal()
    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        if self._worker is not None:
            return
        source, self._capture_layer = row_source(self._config, self._vllm_config, kv_caches)
        if source is None:  # Rows are the same on every rank that has them: one worker sends.
            self._releases = self._releases or (Releases() if every_worker_reports() else None)
            return
        hello = ingest_pb2.Hello(
            protocol=PROTOCOL_VERSION,
            engine_id=self._config.engine_id,
            worker_rank=self._vllm_config.parallel_config.rank,
            vllm_version=vllm_version(),
            slotstream_version=self._config.metadata["slotstream_version"],
        )
        staging = StagingPlan.of(self._config, step_tokens_max(self._vllm_config))
        self._worker = WorkerHalf(self._config, source, sender_for(self._config, hello), staging)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        if not isinstance(connector_metadata, SlotStreamMetadata):
            return
        if self._worker is not None:
            self._bound = connector_metadata.plan
            self._on_worker(self._worker.bind, self._bound)
        elif self._releases is not None:
            self._releases.bind(connector_metadata.plan)

    def restore_kv_caches(self) -> None:
        # After a sleep: the device's memory was given away, the row pool's too.
        if self._worker is not None:
            self._guard.run(self._worker.wake, None)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        return

    def wait_for_layer_load(self, layer_name: str) -> None:
        return

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        if self._worker is not None and layer_name == self._capture_layer:
            self._on_worker(self._remember, attn_metadata)

    def _remember(self, attn_metadata: Any) -> None:
        assert self._worker is not None
        self._worker.remember_slot_mapping(attn_metadata.slot_mapping)  # Read behind the fence: vLLM may change it.

    def wait_for_save(self) -> None:
        if self._worker is None:
            return
        if self._guard.disabled:
            self._guard.run(self._worker.fail_plan, None, self._bound)
        else:
            self._on_worker(self._worker.execute)
        self._bound = EMPTY_PLAN
        self._guard.end_step()

    def _on_worker(self, hook: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
        """A part of a step: when it fails, so does every sample of the step, for some of its rows may be missing."""
        assert self._worker is not None
        if not self._guard.holds(hook, *args, **kwargs):
            self._guard.run(self._worker.fail_plan, None, self._bound)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        if self._worker is not None:
            return self._guard.run(self._worker.take_releases, set()) or None, None
        if self._releases is not None:
            return self._releases.take() or None, None
        return None, None

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        if self._worker is None:
            return None
        faults = self._guard.run(self._worker.take_faults, [])
        return SlotStreamWorkerMetadata(faults) if faults else None

    def get_finished_count(self) -> int:
        # One release a request: only one worker sends. Left at None, the scheduler would wait for every rank and never
        # free the request's blocks. MultiConnector may overrule it: see `releases`.
        return 1

    # -- scheduler side

    def on_new_request(self, request: Request) -> None:
        if self._scheduler is not None:
            self._guard.run(self._scheduler.on_new, None, request)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        if self._scheduler is not None:
            self._guard.run(self._scheduler.on_match, None, request, num_computed_tokens)
        return 0, False

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        # MultiConnector tells the number of tokens to the connector that loads them, and 0 to all others: it is no use here.
        if self._scheduler is not None:
            self._guard.run(self._scheduler.on_alloc, None, request, blocks)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        assert self._scheduler is not None, "vLLM asks its scheduler half only"
        plan = self._guard.run(self._plan, None, scheduler_output)
        if plan is None:
            self._guard.run(self._scheduler.fail_all, None)
        else:
            self._scheduler.delivered()
        self._guard.end_step()
        return SlotStreamMetadata(plan or EMPTY_PLAN)

    def _plan(self, scheduler_output: SchedulerOutput) -> StepPlan | None:
        assert self._scheduler is not None
        return self._scheduler.plan(scheduler_output)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        meta = getattr(connector_output, "kv_connector_worker_meta", None)
        if self._scheduler is not None and isinstance(meta, SlotStreamWorkerMetadata):
            self._guard.run(self._scheduler.on_faults, None, meta.faults)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        # MultiConnector calls this one when a sibling of ours knows no KV-cache groups; there is one group then.
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        assert self._scheduler is not None, "vLLM asks its scheduler half only"
        answer = self._guard.run(self._finished, None, request, block_ids)
        if answer is None:
            self._guard.run(self._scheduler.forget, None, request.request_id)
        return answer or (False, None)

    def _finished(self, request: Request, block_ids: tuple[Sequence[int], ...]) -> tuple[bool, dict[str, Any] | None] | None:
        assert self._scheduler is not None
        # A request that never got blocks has no tables.
        table = block_ids[self._group.index] if self._group.index < len(block_ids) else ()
        return self._scheduler.on_finished(request, table)

    def reset_cache(self) -> bool:
        # Nothing is kept here that a reset could make stale: rows leave in the step that computes them. Running captures go
        # on: vLLM preempts their requests, and what it computes again was either sent already or is read then. But the
        # weights may be replaced meanwhile, of which vLLM tells its connectors nothing else.
        if self._scheduler is not None:
            self._guard.run(self._scheduler.on_cache_reset, None)
        return True

    def _why_no_capture(self, longer_than_s: float) -> SlotStreamError | None:
        if self._guard.disabled:
            return InternalFault("capture is off after too many faults; the log says which")
        assert self._watch is not None
        return self._watch.problem(longer_than_s)

    # -- both

    def get_kv_connector_stats(self) -> SlotStreamStats | None:
        half = self._scheduler or self._worker
        if half is None:
            return None
        data = self._guard.run(half.take_stats, {})
        reason = self._guard.run(self._why_off, self._told_off)
        if reason != self._told_off:
            self._told_off = reason
            data = {**data, **capture_off(SCHEDULER_REASONS if self._scheduler is not None else WORKER_REASONS, reason)}
        return SlotStreamStats(data) if data else None

    def _why_off(self) -> str | None:
        """Why this half captures nothing now, if so."""
        if self._scheduler is None:
            lost = "ROWS_NOT_WRITTEN" if rows_are_lost() else None
            return "WORKER_FAULTS" if self._guard.disabled else lost
        problem = self._scheduler.why_off()
        code = None if problem is None else problem.code
        return "SCHEDULER_FAULTS" if self._guard.disabled else code

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> SlotStreamStats:
        return SlotStreamStats(data or {})

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any
    ) -> SlotStreamPromMetrics:
        return SlotStreamPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    @classmethod
    @logged_refusal()
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        # vLLM asks this in its front end, before any model is loaded: the earliest place to refuse wrong options.
        if ConnectorOptions.from_extra(extra_config or {}).layers is not None:
            install()  # Where the worker is in this very process, vLLM has asked for plug-ins too early.
        return False

    def shutdown(self) -> None:
        if self._watch is not None:
            self._guard.run(self._watch.close, None)
        if self._worker is not None:
            self._guard.run(self._worker.close, None)

    def _count_fault(self) -> None:
        half = self._scheduler or self._worker
        if half is not None:
            half.count_fault()


def _register(connector: type[SlotStreamConnector]) -> None:
    """Make a connector known to vLLM by its class name.

    MultiConnector looks its children up by that name when their stats reach vLLM's front end; for one that was loaded by
    its module path and is not registered, that raises, and ends the engine.
    """
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    with contextlib.suppress(ValueError):  # Registered already, by somebody who wants it without a module path.
        KVConnectorFactory.register_connector(connector.__name__, connector.__module__, connector.__name__)


_register(SlotStreamConnector)
