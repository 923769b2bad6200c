"""The class that vLLM makes, once in the engine core and once in each worker. It forwards; it decides nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from vllm import envs
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)

from slotstream.connector.counters import SCHEDULER_REASONS, capture_off
from slotstream.connector.faults import SampleFault
from slotstream.connector.hook_guard import HookGuard
from slotstream.connector.metrics import SlotStreamPromMetrics, SlotStreamStats
from slotstream.connector.options import ConnectorOptions
from slotstream.connector.plan import EMPTY_PLAN, StepPlan
from slotstream.connector.planning.scheduler import SchedulerHalf
from slotstream.connector.planning.server_health import ServerHealth
from slotstream.connector.plugin import config_of, install, keep_caller_ids
from slotstream.connector.row_sources import check_capture, row_group, row_places
from slotstream.connector.vllm_config import ConnectorConfig, current_config, instance_of, known_vllm, logged_refusal
from slotstream.connector.worker_side import Stranger, WorkerSide
from slotstream.transport.targets import Target, Targets
from slotstream.wire.errors import ConfigError, InternalFault, SlotStreamError

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request


@dataclass
class SlotStreamMetadata(KVConnectorMetadata):
    """A step's plan, as vLLM carries it to the workers, and whose it is."""

    plan: StepPlan
    engine_id: str


@dataclass
class SlotStreamWorkerMetadata(KVConnectorWorkerMetadata):
    """What a worker tells the engine core, as vLLM carries it back: samples that failed, and which server it sends to."""

    faults: list[SampleFault]
    server: Target | None = None  # Where it is another one than before.

    def aggregate(self, other: KVConnectorWorkerMetadata) -> SlotStreamWorkerMetadata:
        assert isinstance(other, SlotStreamWorkerMetadata)
        return SlotStreamWorkerMetadata([*self.faults, *other.faults], other.server or self.server)


class SlotStreamConnector(KVConnectorBase_V1, SupportsHMA):
    """Streams rows to a slotstream server: of the layers that its options name, or that `extract_hidden_states` caches."""

    is_slotstream = True  # How the plug-in knows us, and whoever extends us.
    wants_layers = True  # Whether the layers of this step have to call us: see `vllm_seams.spare_layers`.
    _extends_layers = False  # Whether this class is another's, which does something of its own when they call.

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        hooks = (SlotStreamConnector.wait_for_layer_load, SlotStreamConnector.save_kv_layer)
        cls._extends_layers = (cls.wait_for_layer_load, cls.save_kv_layer) != hooks
        _register(cls)

    @logged_refusal()
    @known_vllm()
    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._config = ConnectorConfig.from_vllm(vllm_config)
        self._scheduler: SchedulerHalf | None = None
        self._watch: ServerHealth | None = None
        self._guard = HookGuard(self._count_fault)  # Of the scheduler half. A worker's side has its own.
        self._told_off: str | None = ""  # Why nothing is captured, as vLLM heard it last; "" while it heard nothing.
        self._sides: dict[str, WorkerSide] = {}  # In a worker: by engine id.
        self._side: WorkerSide | Stranger | None = None  # Of the engine whose step this is.
        self._quiet = SlotStreamMetadata(EMPTY_PLAN, self._config.engine_id)  # Of each step without a plan.
        self._group = row_group(self._config, vllm_config, kv_cache_config)
        if role is KVConnectorRole.SCHEDULER:
            keep_caller_ids()
            self._watch = ServerHealth(
                Targets(self._config.options.servers),
                self._config.options.access,
                patient=self._config.options.spool_dir is not None,
            )
            self._scheduler = SchedulerHalf(
                self._config,
                self._group.index,
                self._group.block_size,
                vllm_config.model_config.max_model_len,
                self._why_no_capture,
                row_places(self._config, vllm_config, self._group),
                may_wait=envs.VLLM_ENABLE_V1_MULTIPROCESSING,  # Else `LLM` makes no step after its last request's.
            )
        else:
            config_of(current_config())  # Siblings are seen here only, where the model was loaded without the plug-in.
            check_capture(self._config, install)

    # -- worker side

    @logged_refusal()
    @known_vllm()
    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        config, vllm_config = self._config, self._vllm_config
        current = current_config()
        if current is not None and instance_of(current) != config.instance:
            # Another engine of this process, to which vLLM gives the connector that it has.
            theirs = config_of(current)
            if theirs is None:
                return
            config, vllm_config = theirs, current
        side = self._sides.get(config.engine_id)
        if side is None:
            self._sides[config.engine_id] = WorkerSide(config, vllm_config, kv_caches)
        elif side.config.instance != config.instance:
            raise ConfigError(f"another engine of this process has engine_id {config.engine_id}: give each its own, or none")

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        self._side = None
        self.wants_layers = self._extends_layers
        if not isinstance(connector_metadata, SlotStreamMetadata):
            return  # Another engine of this process has another connector.
        plan, engine_id = connector_metadata.plan, connector_metadata.engine_id
        side = self._sides.get(engine_id)
        if side is not None:
            side.bind(plan)
            self.wants_layers = self._extends_layers or side.wants_layers
        self._side = side or (Stranger(plan, engine_id) if plan else None)

    def restore_kv_caches(self) -> None:
        # After a sleep: which engine woke is not said.
        for side in self._sides.values():
            side.wake()

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        return

    def wait_for_layer_load(self, layer_name: str) -> None:
        return

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        if self._side is not None:
            self._side.saw_layer(layer_name, attn_metadata)

    def wait_for_save(self) -> None:
        if self._side is not None:
            self._side.save()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        return (self._side.take_releases() or None) if self._side is not None else None, None

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        if self._side is None or not self._side.has_news:
            return None
        faults, server = self._side.take_faults(), self._side.take_server()
        return SlotStreamWorkerMetadata(faults, server) if faults or server is not None else None

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
        plan = self._guard.run(self._scheduler.plan, None, scheduler_output)
        if plan is None:
            self._guard.run(self._scheduler.fail_all, None)
            plan = EMPTY_PLAN
        elif plan is not EMPTY_PLAN:
            self._scheduler.delivered()
        if not self._guard.is_clean:
            self._guard.end_step()
        return self._quiet if plan is EMPTY_PLAN else SlotStreamMetadata(plan, self._config.engine_id)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        meta = getattr(connector_output, "kv_connector_worker_meta", None)
        if self._scheduler is not None and isinstance(meta, SlotStreamWorkerMetadata):
            self._guard.run(self._scheduler.on_faults, None, meta.faults)
            if meta.server is not None and self._watch is not None:
                self._guard.run(self._watch.follow, None, meta.server)

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

    def has_pending_push_work(self) -> bool:
        # vLLM asks where no request would run: before it pauses, and may give the device's memory away. It makes steps then,
        # which compute nothing, until there is no more to read.
        return self._scheduler is not None and self._guard.run(self._scheduler.has_unread, False)

    def reset_cache(self) -> bool:
        # Nothing is kept here that a reset could make stale: rows stay until they are read. Running captures go on: vLLM
        # preempts their requests, and what it computes again was either planned already or is read then. But the weights may
        # be replaced meanwhile, of which vLLM tells its connectors nothing else.
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
        if self._scheduler is None:
            told = self._side.take_stats() if self._side is not None else {}
            return SlotStreamStats(told) if told else None
        data = self._guard.run(self._scheduler.take_stats, {})
        if not self._scheduler.tells_gauges:
            return SlotStreamStats(data) if data else None
        reason = self._guard.run(self._why_off, self._told_off)
        if reason != self._told_off:
            self._told_off = reason
            data = {**data, **capture_off(SCHEDULER_REASONS, reason)}
        return SlotStreamStats(data) if data else None

    def _why_off(self) -> str | None:
        """Why the scheduler half captures nothing now, if so."""
        assert self._scheduler is not None
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
        ConnectorOptions.from_extra(extra_config or {})
        install()  # Where the worker is in this very process, vLLM has asked for plug-ins too early.
        return False

    def shutdown(self) -> None:
        if self._watch is not None:
            self._guard.run(self._watch.close, None)
        for side in self._sides.values():
            side.close()

    def _count_fault(self) -> None:
        if self._scheduler is not None:
            self._scheduler.count_fault()


def _register(connector: type[SlotStreamConnector]) -> None:
    """Make a connector known to vLLM by its class name.

    MultiConnector looks its children up by that name when their stats reach vLLM's front end; for one that was loaded by
    its module path and is not registered, that raises, and ends the engine.
    """
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    with contextlib.suppress(ValueError):  # Registered already, by somebody who wants it without a module path.
        KVConnectorFactory.register_connector(connector.__name__, connector.__module__, connector.__name__)


_register(SlotStreamConnector)
