"""A scheduler half over row pages, and as much of vLLM's scheduler as it takes to have it plan steps: no device, no chance."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from slotstream.connector.plan import StepPlan
from slotstream.connector.planning.page_allocator import PageAllocator
from slotstream.connector.planning.row_places import PagePlaces
from slotstream.connector.planning.scheduler import SchedulerHalf
from slotstream.connector.row_pool import RowPoolShape
from support.worker_rig import config

BLOCK = 16


@dataclass
class PlannedRequest:
    """As much of vLLM's Request as the scheduler half looks at."""

    request_id: str
    num_prompt_tokens: int
    max_tokens: int
    kv_transfer_params: Mapping[str, Any]
    all_token_ids: list[int]
    num_computed_tokens: int = 0
    skip_reading_prefix_cache: bool = False
    status: Any = None
    table: list[int] = field(default_factory=list)
    mm_features: tuple[()] = ()
    sampling_params: Any = None
    prompt_embeds: Any = None

    @property
    def prompt_token_ids(self) -> list[int]:
        return self.all_token_ids[: self.num_prompt_tokens]

    @property
    def num_output_tokens(self) -> int:
        return len(self.all_token_ids) - self.num_prompt_tokens

    def is_finished(self) -> bool:
        return self.status is not None

    def get_finished_reason(self) -> str:
        return "length"


class PlanRig:
    """Every request runs in every step, a prompt as a whole: what is sampled is known before the next one."""

    def __init__(self, pages: int = 4096, step_pages: int = 600, step_tokens: int = 8192, **options: object) -> None:
        self.seconds = 0.0
        self.pages = PageAllocator(RowPoolShape(pages, BLOCK), BLOCK, step_pages)
        places = PagePlaces(self.pages, row_bytes=16, keeps_blocks=True, step_tokens=step_tokens)
        chosen = config(layers=[0], include_output_tokens=True, **options)
        self.half = SchedulerHalf(chosen, 0, BLOCK, 8192, lambda _: None, places, lambda: self.seconds)
        self.running: dict[str, PlannedRequest] = {}
        self.preempted: list[PlannedRequest] = []  # Since the last step.
        self._numbers = itertools.count()
        self._blocks = itertools.count(1)

    def add(self, prompt: int, **params: object) -> PlannedRequest:
        """A request of `prompt` tokens, which runs from the next step on."""
        req_id = f"r{next(self._numbers)}"
        request = PlannedRequest(req_id, prompt, 4000, {"slotstream": params}, list(range(prompt)))
        self.half.on_new(request)
        blocks: Any = SimpleNamespace(blocks=([],))
        self.half.on_alloc(request, blocks)
        self.running[req_id] = request
        return request

    def output(self) -> Any:
        """What vLLM's scheduler says of the next step, once it has given blocks for it."""
        requests = list(self.running.values())
        resumed = {r.request_id for r in requests if not r.table and r.num_output_tokens}
        counts = [len(r.all_token_ids) - r.num_computed_tokens for r in requests]
        new_blocks: list[tuple[list[int]] | None] = []
        for request, count in zip(requests, counts, strict=True):
            wanted = -(-(request.num_computed_tokens + count) // BLOCK)
            got = [next(self._blocks) for _ in range(wanted - len(request.table))]
            request.table += got
            new_blocks.append((got,) if got else None)
        return SimpleNamespace(
            num_scheduled_tokens={r.request_id: count for r, count in zip(requests, counts, strict=True)},
            total_num_scheduled_tokens=sum(counts),
            scheduled_spec_decode_tokens={},
            scheduled_new_reqs=[],
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=[r.request_id for r in requests],
                resumed_req_ids=resumed,
                num_computed_tokens=[r.num_computed_tokens for r in requests],
                new_block_ids=new_blocks,
                num_output_tokens=[r.num_output_tokens for r in requests],
            ),
            preempted_req_ids={r.request_id for r in self.preempted},
            has_sync_kv_loads=False,
            kv_cache_block_copies=None,
            kv_connector_block_state=SimpleNamespace(get_block_ids=lambda r: (list(self.running[r].table),)),
        )

    def preempt(self, request: PlannedRequest) -> None:
        """The request loses its blocks, and does not run."""
        del self.running[request.request_id]
        request.num_computed_tokens, request.table = 0, []
        self.preempted.append(request)

    def computed(self) -> None:
        """The step is over: each request has a token more."""
        self.preempted.clear()
        for request in self.running.values():
            request.num_computed_tokens = len(request.all_token_ids)
            request.all_token_ids.append(7)

    def step(self) -> StepPlan:
        """Plan a step, and have it computed."""
        plan = self.half.plan(self.output())
        self.half.delivered()
        self.computed()
        return plan

    def finish(self, request: PlannedRequest, status: str = "FINISHED_LENGTH_CAPPED") -> dict[str, Any]:
        """The request ended; what its answer says."""
        del self.running[request.request_id]
        request.status = SimpleNamespace(name=status)
        _, answer = self.half.on_finished(request, request.table)
        assert answer is not None
        said: dict[str, Any] = answer["slotstream"]
        return said


def rows_of(plan: StepPlan) -> Sequence[tuple[str, int, int]]:
    """Whose rows a plan reads: (request, start, stop)."""
    return [(rows.req_id, rows.start, rows.stop) for rows in plan.rows]
