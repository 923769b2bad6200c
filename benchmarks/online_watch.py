"""What the engine's own thread does, noted inside vLLM: mixed into its worker (`worker_extension_cls`), asked over its RPC.

With one GPU, vLLM's scheduler and its worker share a process and a thread, so one set of notes sees both.
"""

from __future__ import annotations

import functools
import gc
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter_ns, thread_time_ns
from typing import Any

import torch
from torch.autograd import DeviceType  # type: ignore[attr-defined]

_SHORT_US = 10.0  # A gap between kernels that is shorter is within a CUDA graph: launches take longer.
_WORST = 3  # Steps that are looked at one by one.
_DECODE, _WITH_PROMPTS = ("decode", "behind"), ("prompt", "mixed")  # Kinds of steps.
_ALLOCATIONS = {
    "num_device_alloc": "device_allocations",
    "num_device_free": "device_frees",
    "num_alloc_retries": "allocation_retries",
    "allocation.all.allocated": "allocator_calls",
}


@dataclass(slots=True)
class Step:
    """One step of the engine, from its scheduling to the next one's; nanoseconds."""

    kind: str = "empty"
    """decode: one token a request; behind: the same, behind one of the others; prompt: prompt tokens only; mixed: both."""
    tokens: int = 0
    requests: int = 0
    wall: int = 0
    """0 where the engine waited for requests after the step."""
    cpu: int = 0
    ours_cpu: int = 0
    hooks: dict[str, int] = field(default_factory=dict)
    """Wall time in each of our hooks, where they are clocked."""
    parts: dict[str, int] = field(default_factory=dict)
    """Wall time in parts of vLLM's own, and in the collector of garbage; one may be within another."""

    @property
    def ours_wall(self) -> int:
        """Wall time in all of our hooks."""
        return sum(self.hooks.values())


@dataclass(slots=True)
class Notes:
    """Taken while `on`, by the engine's thread alone."""

    on: bool = False
    clocks_hooks: bool = False
    inside: bool = False
    """In a hook of ours, which may call another."""
    steps: list[Step] = field(default_factory=list)
    hooks: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    kv_used_max: float = 0.0
    waiting_max: int = 0
    preemptions: int = 0
    collecting_since: int = 0
    _began: tuple[int, int] = (0, 0)

    def clear(self) -> None:
        self.steps, self.hooks = [], {}
        self.kv_used_max, self.waiting_max, self.preemptions = 0.0, 0, 0

    def next_step(self, *, was_idle: bool) -> None:
        now, cpu = perf_counter_ns(), thread_time_ns()
        if self.steps:
            last = self.steps[-1]
            last.cpu = cpu - self._began[1]
            last.wall = 0 if was_idle else now - self._began[0]
        self._began = (now, cpu)
        self.steps.append(Step())

    def scheduled(self, scheduler: Any, output: Any) -> None:
        counts = output.num_scheduled_tokens.values()
        step = self.steps[-1]
        step.tokens, step.requests = sum(counts), len(counts)
        several = sum(1 for count in counts if count > 1)
        if step.requests:
            follows = len(self.steps) > 1 and self.steps[-2].kind in _WITH_PROMPTS
            decode = "behind" if follows else "decode"
            step.kind = decode if not several else "prompt" if several == step.requests else "mixed"
        self.kv_used_max = max(self.kv_used_max, scheduler.kv_cache_manager.usage)
        self.waiting_max = max(self.waiting_max, len(scheduler.waiting))
        self.preemptions += len(output.preempted_req_ids or ())

    def hook(self, name: str, wall: int, cpu: int) -> None:
        self.hooks.setdefault(name, []).append((wall, cpu))
        if self.steps:
            step = self.steps[-1]
            step.ours_cpu += cpu
            step.hooks[name] = step.hooks.get(name, 0) + wall

    def part(self, name: str, wall: int) -> None:
        if self.steps:
            parts = self.steps[-1].parts
            parts[name] = parts.get(name, 0) + wall


NOTES = Notes()


def timed(name: str, inner: Callable[..., Any]) -> Callable[..., Any]:
    """`inner`, whose wall and CPU time on this thread goes into the notes; a call within another is part of that one."""

    @functools.wraps(inner)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not NOTES.clocks_hooks or NOTES.inside:
            return inner(*args, **kwargs)
        NOTES.inside = True
        cpu = thread_time_ns()  # Slow where the system is asked for it, and so no part of the wall time.
        wall = perf_counter_ns()
        try:
            return inner(*args, **kwargs)
        finally:
            wall = perf_counter_ns() - wall
            NOTES.hook(name, wall, thread_time_ns() - cpu)
            NOTES.inside = False

    return call


def _watch_scheduler() -> None:
    from vllm.v1.core.sched.scheduler import Scheduler

    schedule = Scheduler.schedule
    if getattr(schedule, "begins_steps", False):
        return

    @functools.wraps(schedule)
    def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not NOTES.on:
            return schedule(self, *args, **kwargs)
        NOTES.next_step(was_idle=not self.running)
        output = schedule(self, *args, **kwargs)
        NOTES.scheduled(self, output)
        return output

    watched.begins_steps = True  # type: ignore[attr-defined]
    setattr(Scheduler, "schedule", watched)  # noqa: B010  (mypy: a method is not assigned)


def _watch_part(owner: Any, name: str) -> None:
    """`owner`: a class, or the model itself, whose `forward` runs where no graph does."""
    inner = getattr(owner, name)
    if getattr(inner, "is_watched", False):
        return

    @functools.wraps(inner)
    def watched(*args: Any, **kwargs: Any) -> Any:
        if not NOTES.on:
            return inner(*args, **kwargs)
        wall = perf_counter_ns()
        try:
            return inner(*args, **kwargs)
        finally:
            NOTES.part(name, perf_counter_ns() - wall)

    watched.is_watched = True  # type: ignore[attr-defined]
    setattr(owner, name, watched)


def _watch_parts(runner: Any) -> None:
    from vllm.v1.core.sched.scheduler import Scheduler

    for owner, name in (
        (Scheduler, "schedule"),
        (Scheduler, "update_from_output"),
        (type(runner), "execute_model"),
        (type(runner), "sample_tokens"),
        (runner.get_model(), "forward"),
    ):
        _watch_part(owner, name)
    if _collecting not in gc.callbacks:
        gc.callbacks.append(_collecting)


def _collecting(phase: str, _: dict[str, int]) -> None:
    if phase == "start":
        NOTES.collecting_since = perf_counter_ns()
    elif NOTES.on:
        NOTES.part("gc", perf_counter_ns() - NOTES.collecting_since)


class Watch:
    """vLLM's worker has these methods beside its own."""

    model_runner: Any
    _profile: torch.profiler.profile
    _first_step: int

    def begin_watch(self) -> dict[str, Any]:
        """Take notes from now on, but clock no hook: what people wait for is measured, and clocks are slow on some hosts."""
        _watch_parts(self.model_runner)
        _watch_scheduler()
        NOTES.clear()
        self._allocations = _allocations()
        NOTES.on = True
        return {}

    def begin_watch_of_hooks(self) -> dict[str, Any]:
        """Take notes from now on, with a clock around each of our hooks."""
        self.begin_watch()
        NOTES.clocks_hooks = True
        return {}

    def begin_kernels(self) -> dict[str, Any]:
        """Note what the device does from now on, within a watch. It slows the engine."""
        kinds = torch.profiler.ProfilerActivity
        self._profile = torch.profiler.profile(activities=[kinds.CUDA if torch.cuda.is_available() else kinds.CPU])
        self._first_step = len(NOTES.steps)
        self._profile.start()
        return {}

    def end_kernels(self) -> dict[str, Any]:
        """Since `begin_kernels`, us a step: by kernel (operator, on a CPU), how often each ran, and short gaps between.

        A gap is short where the device waits for nobody: what its own change from a kernel to the next takes, in a CUDA graph.
        """
        self._profile.stop()
        steps = NOTES.steps[self._first_step :]
        kind = DeviceType.CUDA if torch.cuda.is_available() else DeviceType.CPU
        events = [event for event in self._profile.events() or () if event.device_type == kind]  # type: ignore[no-untyped-call]
        found: dict[str, tuple[int, float]] = {}
        gaps, end = 0.0, math.inf
        for event in sorted(events, key=lambda event: event.time_range.start):
            count, took = found.get(event.name, (0, 0.0))
            found[event.name] = count + 1, took + event.time_range.elapsed_us()
            gap = event.time_range.start - end
            gaps += gap if 0 < gap < _SHORT_US else 0.0
            end = event.time_range.end if math.isinf(end) else max(end, event.time_range.end)
        count = max(1, len(steps))
        return {
            "steps": len(steps),
            "of_prompts": sum(step.kind in _WITH_PROMPTS for step in steps),
            "wall_us": _spread([step.wall for step in steps if step.wall]),
            "gaps_us": round(gaps / count, 2),
            "kernels_us": {name: (round(calls / count, 2), round(took / count, 2)) for name, (calls, took) in found.items()},
        }

    def end_watch(self) -> dict[str, Any]:
        """Notes since `begin_watch`: steps by kind, hooks (us), cache use, preemptions, allocations."""
        NOTES.on = NOTES.clocks_hooks = False
        steps = NOTES.steps[:-1]  # The last one has no end.
        of_64 = [step for step in steps if step.kind in _DECODE and step.requests == 64]
        before = self._allocations
        return {
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
            "steps": {kind: _of_steps([s for s in steps if s.kind == kind]) for kind in sorted({s.kind for s in steps})},
            "decode_of_64": {**_ours(of_64), "worst_us": _worst(of_64)},
            "prompts_of_1024": _of_prompts(steps),
            "hooks": {name: _of_hook(times) for name, times in sorted(NOTES.hooks.items())},
            "kv_used_max": NOTES.kv_used_max,
            "waiting_max": NOTES.waiting_max,
            "preemptions": NOTES.preemptions,
            "allocations": {name: value - before[name] for name, value in _allocations().items()},
        }


def _allocations() -> dict[str, int]:
    stats = torch.cuda.memory_stats() if torch.cuda.is_available() else {}
    return {ours: int(stats.get(theirs, 0)) for theirs, ours in _ALLOCATIONS.items()}


def _of_steps(steps: Sequence[Step]) -> dict[str, Any]:
    return {
        "count": len(steps),
        "tokens": _mean([s.tokens for s in steps]),
        "requests": _mean([s.requests for s in steps]),
        "wall_us": _spread([s.wall for s in steps if s.wall]),
        "cpu_us": _spread([s.cpu for s in steps]),
        "parts_us": {
            name: _spread([s.parts.get(name, 0) for s in steps]) for name in sorted({n for s in steps for n in s.parts})
        },
        **_ours(steps),
    }


def _ours(steps: Sequence[Step]) -> dict[str, Any]:
    return {
        "count": len(steps),
        "ours_wall_us": _spread([s.ours_wall for s in steps]),
        "ours_cpu_us": _spread([s.ours_cpu for s in steps]),
    }


def _worst(steps: Sequence[Step]) -> list[dict[str, float]]:
    """Of the few steps that cost us most: our hooks, and the collector of garbage in all of the step; us."""
    worst = sorted(steps, key=lambda step: -step.ours_wall)[:_WORST]
    return [{name: ns / 1e3 for name, ns in {**step.hooks, "gc": step.parts.get("gc", 0)}.items() if ns} for step in worst]


def _of_prompts(steps: Sequence[Step]) -> dict[str, float]:
    """Of requests that ran one at a time: what is ours more than in as many decode steps, for one prompt; us.

    `step`: in the step that computes the prompt. `all`: in all steps, so that a read that waited for a later step is there too,
    and the end of the request.
    """
    prompts = [s.ours_wall for s in steps if s.kind == "prompt" and s.tokens == 1024]
    decodes = sorted(s.ours_wall for s in steps if s.kind == "decode")
    if not prompts or not decodes:
        return {"count": 0}
    quiet = decodes[len(decodes) // 2]
    more = sum(s.ours_wall for s in steps) - quiet * len(steps)
    return {
        "count": len(prompts),
        "step_us": (_mean(prompts) - quiet) / 1e3,
        "step_max_us": (max(prompts) - quiet) / 1e3,
        "all_us": more / len(prompts) / 1e3,
    }


def _of_hook(times: Sequence[tuple[int, int]]) -> dict[str, Any]:
    return {
        "calls": len(times),
        "wall_us": _spread([wall for wall, _ in times]),
        "cpu_us": _spread([cpu for _, cpu in times]),
    }


def _mean(values: Sequence[float]) -> float:
    return round(statistics.fmean(values), 2) if values else 0.0


def _spread(nanoseconds: Sequence[int]) -> dict[str, float]:
    """In microseconds."""
    if not nanoseconds:
        return {}
    ordered = sorted(nanoseconds)
    cuts = {"p50": ordered[len(ordered) // 2], "p99": ordered[len(ordered) * 99 // 100], "max": ordered[-1]}
    return {"mean": _mean(nanoseconds) / 1e3, **{name: value / 1e3 for name, value in cuts.items()}}
