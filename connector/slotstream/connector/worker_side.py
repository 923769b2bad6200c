"""What a worker's connector has of one engine.

vLLM keeps one connector for a process and gives it the steps of every engine there: two `LLM` in one Python process share it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ParamSpec

import torch

from slotstream.connector.counters import WORKER_REASONS, capture_off
from slotstream.connector.faults import SampleFault
from slotstream.connector.hook_guard import HookGuard
from slotstream.connector.plan import EMPTY_PLAN, StepPlan
from slotstream.connector.reading.beside import Beside
from slotstream.connector.reading.forward_capture import captures
from slotstream.connector.reading.last_norm import FINAL_NORM_KEY
from slotstream.connector.reading.releases import Releases, every_worker_reports
from slotstream.connector.reading.staging_plan import StagingPlan, step_tokens_max
from slotstream.connector.reading.worker import WorkerHalf
from slotstream.connector.row_sources import row_source
from slotstream.connector.sending.process.handle import sender_for
from slotstream.connector.vllm_config import ConnectorConfig, vllm_version
from slotstream.transport.logs import connector_logger
from slotstream.transport.targets import Target
from slotstream.v1 import ingest_pb2
from slotstream.wire.errors import InternalFault
from slotstream.wire.names import PROTOCOL_VERSION

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = connector_logger(__name__)

_READ_S = 5.0  # That a read may take beside waiting for room.
P = ParamSpec("P")


class WorkerSide:
    """One engine's half in this worker, behind a guard: after the constructor nothing raises.

    `kv_caches` are that engine's, by layer. Raises ConfigError where its rows cannot be read.
    """

    def __init__(self, config: ConnectorConfig, vllm_config: VllmConfig, kv_caches: dict[str, torch.Tensor]) -> None:
        self.config = config
        self.half: WorkerHalf | None = None
        self._releases: Releases | None = None  # Of a worker that sends nothing, where vLLM waits for its reports too.
        self._guard = HookGuard(self._count_fault)
        self._bound: StepPlan = EMPTY_PLAN
        self._told_off: str | None = ""  # Why nothing is captured, as vLLM heard it last; "" while it heard nothing.
        source, self._capture_layer = row_source(config, vllm_config, kv_caches)
        self.wants_layers = bool(self._capture_layer)  # Whether it has to be told of layers whose attention ran.
        self._capture = captures.get(config.instance)
        if source is None:  # Rows are the same on every rank that has them: one worker sends.
            self._releases = Releases() if every_worker_reports() else None
            return
        hello = ingest_pb2.Hello(
            protocol=PROTOCOL_VERSION,
            engine_id=config.engine_id,
            worker_rank=vllm_config.parallel_config.rank,
            vllm_version=vllm_version(),
            slotstream_version=config.metadata["slotstream_version"],
        )
        if self._capture is not None and self._capture.final_norm:  # Known since there is a model.
            config = replace(config, metadata={**config.metadata, FINAL_NORM_KEY: self._capture.final_norm})
        staging = StagingPlan.of(config, step_tokens_max(vllm_config))
        self.half = WorkerHalf(config, source, sender_for(config, hello), staging)
        self._beside = Beside(source.device)

    # -- hooks, in the order of a step

    def bind(self, plan: StepPlan) -> None:
        """A step of this engine begins."""
        if self.half is not None:
            if self._bound is not EMPTY_PLAN:
                self._in_step(self._beside.finish)
            if plan is not EMPTY_PLAN and not plan:
                plan = EMPTY_PLAN  # One of another process is not the same object.
            self._bound = plan
            if plan is not EMPTY_PLAN or self.half.begins_every_step:
                self._in_step(self.half.bind, plan)
        elif self._releases is not None:
            self._releases.bind(plan)

    def saw_layer(self, layer_name: str, attn_metadata: Any) -> None:
        """A layer's attention ran. The slots of the layer with the rows are remembered."""
        if self.half is not None and layer_name == self._capture_layer:
            self._in_step(self._remember, attn_metadata)

    def _remember(self, attn_metadata: Any) -> None:
        assert self.half is not None
        self.half.remember_slot_mapping(attn_metadata.slot_mapping)  # Read behind the fence: vLLM may change it.

    def save(self) -> None:
        """The forward passes of the step are over."""
        if self.half is None:
            return
        if self._guard.disabled:
            self._guard.run(self.half.fail_plan, None, self._bound)
        elif self._bound is not EMPTY_PLAN:
            if self._bound.rows:
                self._in_step(self.half.remember_stream)
            if not (self._bound.beside and self._guard.holds(self._beside.hand_over, self.half.execute)):
                self._in_step(self.half.execute)
                self._bound = EMPTY_PLAN
        if not self._guard.is_clean:
            self._guard.end_step()

    def _in_step(self, hook: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
        """A part of a step: when it fails, so does every sample of the step, for some of its rows may be missing."""
        assert self.half is not None
        if not self._guard.holds(hook, *args, **kwargs):
            self._guard.run(self.half.fail_plan, None, self._bound)

    def take_releases(self) -> set[str]:
        """Requests whose blocks vLLM may free."""
        if self.half is not None:
            return self._guard.run(self.half.take_releases, set()) if self.half.releases.now else set()
        return self._releases.take() if self._releases is not None else set()

    @property
    def has_news(self) -> bool:
        """Whether `take_faults` or `take_server` may have something to tell."""
        return self.half is not None and self.half.has_news

    def take_faults(self) -> list[SampleFault]:
        """Samples that failed since the last call."""
        return [] if self.half is None else self._guard.run(self.half.take_faults, [])

    def take_server(self) -> Target | None:
        """The server that the stream came up to, where that is another one than at the last call."""
        return None if self.half is None else self._guard.run(self.half.take_server, None)

    def take_stats(self) -> dict[str, float]:
        """Counts and gauges since the last call; empty where there is nothing to tell."""
        if self.half is None:
            return {}
        data = self._guard.run(self.half.take_stats, {}) if self.half.has_stats else {}
        reason = self._why_off()
        if reason != self._told_off:
            self._told_off = reason
            data = {**data, **capture_off(WORKER_REASONS, reason)}
        return data

    def _why_off(self) -> str | None:
        """Why this worker captures nothing now, if so."""
        if self._guard.disabled:
            return "WORKER_FAULTS"
        return "ROWS_NOT_WRITTEN" if self._capture is not None and self._capture.off else None

    # -- outside of steps

    def wake(self) -> None:
        """After a sleep: the device's memory was given away, the row pool's too."""
        if self.half is not None:
            self._in_step(self._beside.finish)
            self._guard.run(self.half.wake, None)

    def close(self) -> None:
        """Let what is in flight finish, and stop."""
        if self.half is not None:
            self._in_step(self._beside.close, self.config.options.wait_s_max + _READ_S)
            self._guard.run(self.half.close, None)

    def _count_fault(self) -> None:
        if self.half is not None:
            self.half.count_fault()


class Stranger:
    """A step of an engine that this worker has no caches of: its samples fail, and vLLM gets its blocks back.

    No vLLM that we know has such steps.
    """

    has_news = True

    def __init__(self, plan: StepPlan, engine_id: str) -> None:
        logger.error("slotstream: engine %s captures here, and this worker has caches of others only", engine_id)
        self._plan = plan

    def saw_layer(self, layer_name: str, attn_metadata: Any) -> None:
        """Nothing is read."""

    def save(self) -> None:
        """Nothing is read."""

    def take_releases(self) -> set[str]:
        """Requests whose blocks vLLM may free."""
        return set(self._plan.releases)

    def take_faults(self) -> list[SampleFault]:
        """Every sample that the step opens."""
        why = "this worker has no rows of this engine: the log says more"
        return [SampleFault(opened.req_id, InternalFault.code, why) for opened in self._plan.opens]

    def take_server(self) -> Target | None:
        """None."""
        return None

    def take_stats(self) -> dict[str, float]:
        """None."""
        return {}
