"""vLLM's own scheduler with our connector in it, and no device: requests as vLLM makes them, and what is planned of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from slotstream.connector.faults import SampleFault
from slotstream.connector.plan import SampleAbort, SampleFinish, SampleOpen, StepPlan
from slotstream.demo.processes import free_port

BLOCK_SIZE = 32
BLOCKS = 400
TEXT = 7  # The token that each step samples.


@dataclass
class Planned:
    """What the plans said of one request's sample."""

    opened: SampleOpen | None = None
    rows: list[tuple[int, int]] = field(default_factory=list)
    finish: SampleFinish | None = None
    abort: SampleAbort | None = None


class RealScheduler:
    """`answers` are what vLLM hands back with the end of a request, by its id. See `real_scheduler`."""

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler
        self.samples: dict[str, Planned] = {}
        self.answers: dict[str, dict[str, Any] | None] = {}
        self.steps = 0
        self.tell: list[SampleFault] = []  # What the worker will say of its samples after the next step.

    def add(
        self, req_id: str, prompt: Sequence[int], max_tokens: int = 4, *, resumable: bool = False, **slotstream: Any
    ) -> None:
        """A request comes, as from the front end. `slotstream` are its parameters."""
        self.send(self.request(req_id, prompt, max_tokens, {"slotstream": slotstream}, resumable=resumable))

    def request(self, req_id: str, prompt: Sequence[int], max_tokens: int, params: dict[str, Any] | None, **more: Any) -> Any:
        """A request with these `kv_transfer_params`, as the front end has it before it makes ids. `more`: `n`, `resumable`."""
        from vllm.sampling_params import SamplingParams
        from vllm.v1.engine import EngineCoreRequest

        extra = {"kv_transfer_params": params} if params else None
        return EngineCoreRequest(
            request_id=req_id,
            prompt_token_ids=list(prompt),
            mm_features=None,
            sampling_params=SamplingParams(max_tokens=max_tokens, ignore_eos=True, extra_args=extra, n=more.pop("n", 1)),
            pooling_params=None,
            arrival_time=0.0,
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
            **more,
        )

    def send(self, request: Any) -> None:
        """A request comes, through what makes one of vLLM's engine core of it."""
        from vllm.v1.request import Request

        self.scheduler.add_request(Request.from_engine_core_request(request, None))

    def abort(self, req_id: str) -> None:
        """The front end gives a request up."""
        from vllm.v1.request import RequestStatus

        self.scheduler.finish_requests(req_id, RequestStatus.FINISHED_ABORTED)

    def step(self) -> None:
        """One step: schedule, note the plan, and have each request that computed all its tokens say TEXT."""
        from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

        from slotstream.connector.facade import SlotStreamWorkerMetadata

        output = self.scheduler.schedule()
        self.steps += 1
        plan: StepPlan = output.kv_connector_metadata.plan
        for opened in plan.opens:
            self.samples[opened.req_id] = Planned(opened)
        for row in plan.rows:
            self.samples[row.req_id].rows.append((row.start, row.stop))
        for finish in plan.finishes:
            self.samples[finish.req_id].finish = finish
        for abort in plan.aborts:
            self.samples.setdefault(abort.req_id, Planned()).abort = abort
        ids = list(output.num_scheduled_tokens)
        sampled = [[TEXT] if self._is_computed(req_id) else [] for req_id in ids]
        told, self.tell = self.tell, []
        said = KVConnectorOutput(
            finished_sending=set(plan.releases) or None,
            kv_connector_worker_meta=SlotStreamWorkerMetadata(told) if told else None,
        )
        result = ModelRunnerOutput(ids, {r: i for i, r in enumerate(ids)}, sampled, kv_connector_output=said)
        for outputs in self.scheduler.update_from_output(output, result).values():
            for one in outputs.outputs:
                if one.finish_reason is not None:
                    self.answers[one.request_id] = one.kv_transfer_params

    def _is_computed(self, req_id: str) -> bool:
        request = self.scheduler.requests[req_id]
        return bool(request.num_computed_tokens >= request.num_tokens)

    def run(self) -> None:
        """Steps until nothing runs or waits but for input, and two more: those carry what was left."""
        for _ in range(500):
            if not self.scheduler.has_unfinished_requests():
                break
            self.step()
        self.step()
        self.step()

    def said(self, req_id: str) -> dict[str, Any]:
        """The `slotstream` of a request's answer."""
        answer = self.answers[req_id]
        assert answer is not None
        said: dict[str, Any] = answer["slotstream"]
        return said


@contextmanager
def real_scheduler(model: Path, **options: Any) -> Iterator[RealScheduler]:
    """vLLM's scheduler for `model`. `options` are our connector's; no server is there."""
    from vllm.config import (
        CacheConfig,
        DeviceConfig,
        KVTransferConfig,
        ModelConfig,
        ParallelConfig,
        SchedulerConfig,
        VllmConfig,
        set_current_vllm_config,
    )
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.structured_output import StructuredOutputManager

    waits = {"spool_dir": "/nowhere"}  # With a spool, captures wait also for a server that was never there. Nothing is written.
    transfer = KVTransferConfig(
        kv_connector="SlotStreamConnector",
        kv_connector_module_path="slotstream.connector",
        kv_role="kv_producer",
        kv_connector_extra_config={"server": f"127.0.0.1:{free_port()}", "layers": [0, 1], **waits, **options},
    )
    model_config = ModelConfig(model=str(model), max_model_len=1024, enforce_eager=True, skip_tokenizer_init=True)
    vllm_config = VllmConfig(
        model_config=model_config,
        cache_config=CacheConfig(block_size=BLOCK_SIZE, enable_prefix_caching=False),
        scheduler_config=SchedulerConfig(
            max_num_seqs=16,
            max_num_batched_tokens=128,
            max_model_len=1024,
            is_encoder_decoder=False,
            async_scheduling=False,
        ),
        parallel_config=ParallelConfig(),
        device_config=DeviceConfig("cpu"),
        kv_transfer_config=transfer,
    )
    spec = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=32, dtype=torch.bfloat16)
    caches = KVCacheConfig(
        BLOCKS, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["model.layers.0.self_attn.attn"], spec)]
    )
    vllm_config.cache_config.num_gpu_blocks = BLOCKS
    with set_current_vllm_config(vllm_config):
        scheduler = Scheduler(vllm_config, caches, StructuredOutputManager(vllm_config), BLOCK_SIZE, log_stats=False)
        try:
            yield RealScheduler(scheduler)
        finally:
            scheduler.shutdown()
