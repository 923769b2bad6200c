"""What the turns of the online benchmark say: ratios by round to no capture, their geometric mean and 95% interval."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

BASE = "none"
KV_USED_MAX = 0.85
# Student's t, 97.5%, by degrees of freedom.
_T = (12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110)
_T_FROM_18 = 2.10

Turn = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Metric:
    """A figure of a turn; `target` is the most that its ratio may be (for `more_is_better` the least)."""

    name: str
    of: Callable[[Turn], float]
    target: float
    slack: float = 0.0
    """How far past the target that end of the interval may be."""
    more_is_better: bool = False
    unit: str = "ms"


def _cut(what: str, cut: str) -> Callable[[Turn], float]:
    return lambda turn: float(turn[what][cut])


CLOSED = (
    Metric("tokens/s", lambda turn: float(turn["tokens_per_s"]), 0.97, more_is_better=True, unit=""),
    Metric("ITL mean", _cut("itl_ms", "mean"), 1.03),
)
OPEN = (
    *(
        Metric(f"{name} {cut}", _cut(what, cut), target, slack)
        for name, what in (("TTFT", "ttft_ms"), ("ITL", "itl_ms"))
        for cut, target, slack in (("p50", 1.03, 0.02), ("p90", 1.05, 0.03), ("p99", 1.10, 0.06))
    ),
    Metric("e2e p50", _cut("e2e_ms", "p50"), 1.03, 0.02),
    Metric("goodput", lambda turn: float(turn["goodput"]), 0.97, more_is_better=True, unit=""),
)


FORWARD = Metric("forward", lambda turn: _of_mixed(turn, "parts_us", "forward"), math.inf, unit="us")
STEP = Metric("its step", lambda turn: _of_mixed(turn, "wall_us"), math.inf, unit="us")


@dataclass(frozen=True, slots=True)
class Ratio:
    """Geometric mean over `rounds` rounds, and its 95% interval (none with one round)."""

    mean: float
    low: float
    high: float
    rounds: int

    def __str__(self) -> str:
        if self.rounds < 2:
            return f"{self.mean:.3f}"
        return f"{self.mean:.3f} ({self.low:.3f} to {self.high:.3f})"


def ratio(values: Sequence[float]) -> Ratio:
    logs = [math.log(value) for value in values]
    middle = statistics.fmean(logs)
    if len(logs) < 2:
        return Ratio(math.exp(middle), math.nan, math.nan, len(logs))
    half = _t(len(logs) - 1) * statistics.stdev(logs) / math.sqrt(len(logs))
    return Ratio(math.exp(middle), math.exp(middle - half), math.exp(middle + half), len(logs))


def _t(freedom: int) -> float:
    return _T[freedom - 1] if freedom <= len(_T) else _T_FROM_18


def rounds_of(turns: Iterable[Turn], load: str) -> list[dict[str, Turn]]:
    """The rounds of a load: contender -> turn. A round is what one run measured with one seed, with the same engines."""
    found: dict[tuple[Any, ...], dict[str, Turn]] = {}
    for turn in turns:
        if turn["load"] == load:
            found.setdefault((turn["run"], turn["group"], turn["round"]), {})[turn["contender"]] = turn
    return list(found.values())


def why_void(turns: Iterable[Turn]) -> str | None:
    """Why a round does not count: some engine's KV cache was short, or requests failed."""
    for turn in turns:
        watch = turn["watch"]
        if watch["preemptions"]:
            return f"{watch['preemptions']} preemptions in a turn of {turn['contender']}"
        if watch["kv_used_max"] > KV_USED_MAX:
            return f"{watch['kv_used_max']:.0%} of the KV cache used in a turn of {turn['contender']}"
        if turn["failed"]:
            return f"{turn['failed']} failed requests in a turn of {turn['contender']}"
        if turn["not_stored"]:
            return f"{turn['not_stored']} samples not stored in a turn of {turn['contender']}"
    return None


def counted(rounds: Sequence[dict[str, Turn]], *, keep_void: bool) -> list[dict[str, Turn]]:
    return [one for one in rounds if keep_void or why_void(one.values()) is None]


def ratios(rounds: Sequence[dict[str, Turn]], contender: str, base: str, metric: Metric) -> Ratio | None:
    """Of the rounds that have both; None where no round has, or where a value is 0."""
    pairs = [(metric.of(one[contender]), metric.of(one[base])) for one in rounds if contender in one and base in one]
    values = [ours / theirs for ours, theirs in pairs if ours > 0 and theirs > 0]
    return ratio(values) if values and len(values) == len(pairs) else None


def at_equal_forward(rounds: Sequence[dict[str, Turn]], contender: str, base: str, metric: Metric) -> Ratio | None:
    """What the ratio would be in rounds in which the model's forward pass took both engines equally long.

    In a step with prompt tokens that pass is the same launches with capture and without, but for those that give and write the
    rows. Where a host's processor is faster in one turn than in the next, that is most of what a ratio says. So a line is drawn
    through all rounds: the metric's ratio over that of the forward passes, both as logarithms. It is read where the
    latter is 0. None with fewer than 5 rounds.
    """
    both = [(one[contender], one[base]) for one in rounds if contender in one and base in one]
    if any(min(each.of(turn) for each in (FORWARD, metric)) <= 0 for pair in both for turn in pair):
        return None
    x = [math.log(FORWARD.of(ours) / FORWARD.of(theirs)) for ours, theirs in both]
    y = [math.log(metric.of(ours) / metric.of(theirs)) for ours, theirs in both]
    if len(x) < 5 or statistics.pvariance(x) == 0:
        return None
    slope, at_0 = statistics.linear_regression(x, y)
    squares = sum((b - at_0 - slope * a) ** 2 for a, b in zip(x, y, strict=True)) / (len(x) - 2)
    middle = statistics.fmean(x)
    spread = sum((a - middle) ** 2 for a in x)
    half = _t(len(x) - 2) * math.sqrt(squares * (1 / len(x) + middle**2 / spread))
    return Ratio(math.exp(at_0), math.exp(at_0 - half), math.exp(at_0 + half), len(x))


def _of_mixed(turn: Turn, *names: str) -> float:
    """A mean of steps with prompt tokens beside others; 0 where it was not noted."""
    found = turn["watch"]["steps"].get("mixed", {})
    for name in names:
        found = found.get(name, {})
    return float(found.get("mean", 0.0))


def metrics_of(load: str) -> tuple[Metric, ...]:
    return CLOSED if load.startswith("closed") else OPEN


def contenders_of(turns: Iterable[Turn]) -> list[str]:
    return list(dict.fromkeys(turn["contender"] for turn in turns))


def loads_of(turns: Iterable[Turn]) -> list[str]:
    return list(dict.fromkeys(turn["load"] for turn in turns))


def report(turns: Sequence[Turn], *, keep_void: bool = False) -> str:
    """Every table."""
    parts = []
    for load in loads_of(turns):
        rounds = rounds_of(turns, load)
        parts.append(hooks_table(load, rounds) if load.startswith("hooks") else load_table(load, rounds, keep_void=keep_void))
    parts.append(thread_table([turn for turn in turns if not turn["load"].startswith("hooks")]))
    parts.append(cpu_table(turns))
    return "\n\n".join(part for part in parts if part)


def load_table(load: str, rounds: Sequence[dict[str, Turn]], *, keep_void: bool) -> str:
    """Ratios to no capture, and of pairs with another base: gRPC to NIXL, after to before."""
    good = counted(rounds, keep_void=keep_void)
    void = [why for one in rounds if (why := why_void(one.values()))]
    names = contenders_of(turn for one in rounds for turn in one.values())
    metrics = metrics_of(load)
    not_good = f"; {len(void)} {'kept' if keep_void else 'void'} (the first for {void[0]})" if void else ""
    lines = [f"{load}: {len(good)} rounds{not_good}"]
    if not good:
        return lines[0]
    wide = max(len(metric.name) for metric in metrics)
    pairs = [(name, BASE) for name in names if name != BASE]
    pairs += [(f"grpc{end}", f"nixl{end}") for end in ("", "-before") if {f"grpc{end}", f"nixl{end}"} <= {*names}]
    pairs += [(name, f"{name}-before") for name in names if f"{name}-before" in names]
    columns = ["no capture", *(f"{name} / {base}" if base != BASE else name for name, base in pairs)]
    lines.append(f"{'':{wide}}" + "".join(f"  {column:>24}" for column in columns))
    for metric in metrics:
        base = [metric.of(one[BASE]) for one in good if BASE in one]
        cells = [f"{statistics.median(base):.4g} {metric.unit}".strip() if base else "-"]
        cells += [str(found) if (found := ratios(good, name, other, metric)) else "-" for name, other in pairs]
        lines.append(f"{metric.name:{wide}}" + "".join(f"  {cell:>24}" for cell in cells))
    if load.startswith("open"):
        lines.append("how long the forward pass of a prompt's step took; and had it taken equally long, its step, and the same")
        for metric in (FORWARD, STEP, *metrics):
            found_of = ratios if metric is FORWARD else at_equal_forward
            cells = [str(found) if (found := found_of(good, name, other, metric)) else "-" for name, other in pairs]
            lines.append(f"{metric.name:{wide}}" + "".join(f"  {cell:>24}" for cell in ["", *cells]))
    lines += _verdicts(good, names, metrics)
    return "\n".join(lines)


def _verdicts(rounds: Sequence[dict[str, Turn]], names: Sequence[str], metrics: Sequence[Metric]) -> list[str]:
    lines = []
    for name in names:
        if name in (BASE, "none2", "again"):
            continue
        missed = []
        for metric in metrics:
            found = ratios(rounds, name, BASE, metric)
            if found is None:
                continue
            if metric.more_is_better:
                met = found.mean >= metric.target
            else:
                met = found.mean <= metric.target and not (metric.slack and found.high > metric.target + metric.slack)
            if not met:
                sign = ">=" if metric.more_is_better else "<="
                missed.append(f"{metric.name} {found}, target {sign} {metric.target}")
        lines.append(f"{name}: " + ("every target met" if not missed else "NOT met: " + "; ".join(missed)))
    return lines


def thread_table(turns: Sequence[Turn]) -> str:
    """The engine's thread by kind of step, and our hooks on it where they were clocked: medians over turns."""
    lines = [
        "engine's thread, us a step (median of turns): wall and CPU of all; of ours, clocked: wall, CPU, worst; parts: wall"
    ]
    for load in loads_of(turns):
        for name in contenders_of(turns):
            here = [turn["watch"] for turn in turns if (turn["load"], turn["contender"]) == (load, name)]
            clocked = any(watch["hooks"] for watch in here)
            for kind in ("decode", "behind", "mixed", "prompt"):
                steps = [watch["steps"][kind] for watch in here if kind in watch["steps"]]
                if not steps:
                    continue
                cells = [_middle(steps, what, "mean") for what in ("wall_us", "cpu_us")]
                if clocked:
                    cells += [_middle(steps, what, "mean") for what in ("ours_wall_us", "ours_cpu_us")]
                    cells.append(max(one["ours_wall_us"]["max"] for one in steps))
                count = statistics.median(one["count"] for one in steps)
                figures = "".join(f"{cell:>10.1f}" for cell in cells)
                lines.append(f"{load:10} {name:14} {kind:7}{count:>8.0f} steps{figures:50}  {_parts(steps)}".rstrip())
    return "\n".join(lines) if len(lines) > 1 else ""


def kernels_table(looks: Sequence[dict[str, Any]], rows: int = 40) -> str:
    """Device time a decode step by kernel, us, and how often it ran: those that differ most between two engines first."""
    heads = [f"{look['contender']} {look['at_s']:g} s" for look in looks]
    lines = ["us of the device a step (times it ran)  " + "".join(f"{head:>20}" for head in heads)]
    of_all = [("steps, of them with prompts", [f"{look['steps']} {look['of_prompts']}" for look in looks])]
    of_all += [("step, wall p50", [f"{look['wall_us'].get('p50', math.nan):.0f}" for look in looks])]
    of_all += [("all kernels", [f"{sum(us for _, us in look['kernels_us'].values()):.0f}" for look in looks])]
    of_all += [("short gaps between them", [f"{look['gaps_us']:.0f}" for look in looks])]
    found: dict[str, list[tuple[float, float]]] = {}
    for at, look in enumerate(looks):
        for name, one in look["kernels_us"].items():
            found.setdefault(name, [(0.0, 0.0)] * len(looks))[at] = (one[0], one[1])
    apart = sorted(found.items(), key=lambda item: min(us for _, us in item[1]) - max(us for _, us in item[1]))
    of_all += [(name, [f"{us:.1f} ({calls:g})" for calls, us in each]) for name, each in apart[:rows]]
    return "\n".join([*lines, *(f"{name[:38]:40}" + "".join(f"{cell:>20}" for cell in cells) for name, cells in of_all)])


def _parts(steps: Sequence[dict[str, Any]]) -> str:
    """Of vLLM's own work; older files have none."""
    parts = [one.get("parts_us", {}) for one in steps]
    names = dict.fromkeys(name for one in parts for name in one)
    return ", ".join(f"{name} {_median([one[name]['mean'] for one in parts if name in one]):.0f}" for name in names)


def cpu_table(turns: Sequence[Turn]) -> str:
    """Processor by process: seconds for 1,000 output tokens, medians over turns. The file has them by thread."""
    lines = ["CPU seconds for 1,000 output tokens (median of turns), by process"]
    for load in loads_of(turns):
        for name in contenders_of(turns):
            here = [turn for turn in turns if (turn["load"], turn["contender"]) == (load, name)]
            used: dict[str, list[float]] = {}
            for turn in here:
                for process, seconds in _by_process(turn["cpu_s"]).items():
                    used.setdefault(process, []).append(1e3 * seconds / turn["output_tokens"])
            middles = {process: statistics.median(found) for process, found in used.items()}
            shown = ", ".join(f"{process} {seconds:.2f}" for process, seconds in middles.items() if seconds >= 0.005)
            if here:
                lines.append(f"{load:10} {name:14} {shown}")
    return "\n".join(lines) if len(lines) > 1 else ""


def _by_process(threads: dict[str, float]) -> dict[str, float]:
    """CPU seconds by process, of those by part, process and thread."""
    found: dict[str, float] = {}
    for name, seconds in threads.items():
        process = name.split("/")[1]
        found[process] = found.get(process, 0.0) + seconds
    return found


def _middle(steps: Sequence[dict[str, Any]], what: str, cut: str) -> float:
    return _median([one[what][cut] for one in steps if one[what]])


def _median(values: Sequence[float]) -> float:
    return statistics.median(values) if values else math.nan


def hooks_table(load: str, rounds: Sequence[dict[str, Turn]]) -> str:
    """What the cost on the engine's thread is judged by."""
    if load == "hooks-64":
        lines = ["ours on the engine's thread, wall us, decode steps of 64: mean, worst (steps)"]
    else:
        lines = ["ours on the engine's thread, wall us more for a prompt of 1,024: in its step, worst, in all steps (prompts)"]
    for name in contenders_of(turn for one in rounds for turn in one.values()):
        watches = [one[name]["watch"] for one in rounds if name in one]
        found = [watch["decode_of_64" if load == "hooks-64" else "prompts_of_1024"] for watch in watches]
        found = [one for one in found if one["count"]]
        count = sum(one["count"] for one in found)
        if load == "hooks-64":
            cells = [
                _middle(found, "ours_wall_us", "mean"),
                max((one["ours_wall_us"]["max"] for one in found), default=math.nan),
            ]
        else:
            cells = [_median([one[what] for one in found]) for what in ("step_us", "step_max_us", "all_us")]
        lines.append(f"{name:14}" + "".join(f"{cell:>10.1f}" for cell in cells) + f"   ({count})")
        hooks: dict[str, list[dict[str, Any]]] = {}
        for watch in watches:
            for hook, figures in watch["hooks"].items():
                hooks.setdefault(hook, []).append(figures)
        for hook, found in sorted(hooks.items(), key=lambda item: -_total_us(item[1])):
            calls = sum(one["calls"] for one in found)
            wall, cpu = _middle(found, "wall_us", "mean"), _middle(found, "cpu_us", "mean")
            lines.append(f"    {hook:36}{calls:>8} calls{wall:>9.1f} wall{cpu:>9.1f} CPU")
    return "\n".join(lines)


def _total_us(found: Sequence[dict[str, Any]]) -> float:
    return sum(float(one["calls"] * one["wall_us"]["mean"]) for one in found)
