"""What capture costs those who wait for a token: vLLM's own client against `vllm serve`, with capture and without, in turns.

    python benchmarks/online.py [--contenders nixl,grpc,again] [--seconds N] [--json FILE]
    python benchmarks/online.py --merge A.json B.json [--json FILE]
    python benchmarks/online.py --kernels [--contenders nixl,none2] [--json FILE]

Engines without capture ("none") and with it share the GPU, two at a time, and take turns under the same load: the same
prompts, lengths and arrivals, each first and last equally often. A round counts only if every engine's KV cache had room: none
preempted a request or used over 85% of it. "again" is no capture against itself: what a ratio of 1 looks like.
benchmarks/README.md says more. Needs vLLM and a GPU (or `--shape tiny`, which a CPU can do).
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from gpu import make_model
from machine import cpu_use, machine, plain, progress, quietest_core
from online_client import Load, LoadClient
from online_engine import AGAIN, BEFORE, NAMES, Contender, Setting, known, needs_before, start
from online_figures import BASE, Turn, kernels_table, report

from slotstream.demo.processes import ProcessFailed

_LOADS = "closed-8,closed-32,closed-64,open-10,open-16,open-22,hooks-64,hooks-1024"
_NOT_NOTED = ("json", "logs", "merge", "merge_before", "before")  # Where files lay says nothing of a run.
_MOMENTS_S, _LOOK_S = (1.0, 2.0, 4.0, 6.0), 0.3  # When kernels are looked at, and how long.
_SMALL_CACHE_GIB, _SMALL_CACHE_LOAD = 4, "open-20"


def loads(options: argparse.Namespace) -> dict[str, Load]:
    """What the client is told, by name. Raises ValueError."""
    found: dict[str, Load] = {}
    lengths = {"tokens": options.prompt_tokens, "output": options.output_tokens}
    for name in options.loads.split(","):
        kind, _, number = name.partition("-")
        if kind == "closed":
            found[name] = Load(name, int(number) * options.waves, at_once=int(number), **lengths)
        elif kind == "open":
            found[name] = Load(name, max(2, round(float(number) * options.open_s)), rate=float(number), **lengths)
        elif name == "hooks-64":
            found[name] = Load(name, 64, 32, options.output_tokens + 64, spread=0.0, at_once=64)
        elif name == "hooks-1024":
            found[name] = Load(name, 3 * options.waves, 1024, 12, spread=0.0, at_once=1)
        else:
            raise ValueError(f"unknown load {name!r}: closed-N, open-N, hooks-64 or hooks-1024")
    return found


def make_tokenizer(model: Path) -> None:
    """A token is a word, so that the client's text has exactly the tokens that it chose."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    size = json.loads((model / "config.json").read_text())["vocab_size"]
    words = Tokenizer(models.WordLevel({f"w{number}": number for number in range(size)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w0").save_pretrained(model)


def take_turn(contender: Contender, client: LoadClient, load: Load, seed: int) -> Turn:
    """One load on one engine; what the client and the engine say of it."""
    cpu, everything = contender.cpu(), cpu_use()
    contender.ask("begin_watch_of_hooks" if load.is_of_hooks else "begin_watch")
    found = client.run(contender.port, load, seed)
    watch = contender.ask("end_watch")
    of_machine = {name: round(seconds - everything[name], 2) for name, seconds in cpu_use().items()}
    used = {name: round(seconds - cpu.get(name, 0.0), 3) for name, seconds in contender.cpu().items()}
    samples = contender.forget_samples()
    wanted = load.prompts if contender.captures else 0
    return {
        **found,
        "watch": watch,
        "cpu_s": {name: seconds for name, seconds in used.items() if seconds > 0},
        "machine_cpu_s": of_machine,
        "samples": samples,
        "not_stored": wanted - samples.get("COMMITTED", 0),
    }


def look_at_kernels(contender: Contender, client: LoadClient, load: Load, moments: Sequence[float]) -> list[dict[str, Any]]:
    """What the device did in the third of a second from each of these seconds of a load on."""
    contender.ask("begin_watch")
    contender.ask("begin_kernels")  # The first time takes long.
    contender.ask("end_kernels")
    found: list[dict[str, Any]] = []
    began = time.monotonic()

    def look() -> None:
        for at in moments:
            time.sleep(max(0.0, began + at - time.monotonic()))
            contender.ask("begin_kernels")
            time.sleep(_LOOK_S)
            found.append({"contender": contender.name, "at_s": at, **contender.ask("end_kernels")})

    with ThreadPoolExecutor(1) as pool:
        looking = pool.submit(look)
        client.run(contender.port, load, seed=3)
        looking.result()
    contender.ask("end_watch")
    contender.forget_samples()
    return found


def turns_of(number: int, contenders: Sequence[str], *, again: bool) -> list[str]:
    """Who takes which turn in round `number`: over the rounds, each comes first, second and last equally often.

    `again`: no capture once more, in every other round.
    """
    order = [*contenders, AGAIN] if again and number % 2 == 0 else list(contenders)
    times, first = divmod(number // 2 if again else number, len(order))
    order = order[first:] + order[:first]
    return order[::-1] if times % 2 else order


class Run:
    """Engines that take turns until the time or the rounds are over; the figures are in a file after each load."""

    def __init__(self, options: argparse.Namespace, figures: dict[str, Any]) -> None:
        self._options = options
        self._figures = figures
        self._turns: list[Turn] = figures["turns"]
        self._loads = loads(options)
        self._began = time.monotonic()
        self._cores = os.sched_getaffinity(0)
        self._took: dict[str, float] = {}

    def run(self, setting: Setting) -> None:
        """Raises ProcessFailed."""
        others = [name for name in self._options.contenders if name not in (BASE, AGAIN)]
        each = self._options.at_once - 1
        groups = [others[at : at + each] for at in range(0, len(others), each)] or [[]]
        client = LoadClient(setting.model, setting.work / "client.log")
        with ExitStack() as stays:
            base = start([BASE], setting, stays)
            for number, names in enumerate(groups):
                with ExitStack() as stack:
                    contenders = base | start(names, setting, stack)
                    for contender in contenders.values():
                        contender.wait_ready()
                    self._group(number, contenders, client, self._deadline(number + 1, len(groups)))

    def _deadline(self, groups_done: int, groups: int) -> float:
        if self._options.seconds is None:
            return float("inf")
        return self._began + float(self._options.seconds) * groups_done / groups

    def _group(self, group: int, contenders: dict[str, Contender], client: LoadClient, deadline: float) -> None:
        progress(f"[{self._since():.0f} s] {', '.join(contenders)}: warming up\n")
        warm = Load("warm", 48, self._options.prompt_tokens, self._options.output_tokens, at_once=32)
        for contender in contenders.values():
            client.run(contender.port, warm, seed=1)
            contender.forget_samples()
        if self._options.kernels:
            load = Load("kernels", 8, 64, self._options.output_tokens, spread=0.0, at_once=8)
            for contender in contenders.values():
                self._figures.setdefault("kernels", []).extend(look_at_kernels(contender, client, load, _MOMENTS_S))
                self._write()
                progress(f"[{self._since():.0f} s] kernels of {contender.name}\n")
            return
        for number in range(self._options.rounds):
            order = turns_of(number, list(contenders), again=AGAIN in self._options.contenders)
            for at, (name, load) in enumerate(self._loads.items()):
                if time.monotonic() + self._took.get(name, 0.0) > deadline:
                    continue
                began = time.monotonic()
                seed = self._options.seed + 100 * number + at
                # All turns of a round are on one core: they are compared.
                core = quietest_core(self._cores) if self._options.pin else None
                for who in order:
                    contender = contenders[BASE if who == AGAIN else who]
                    if core is not None:
                        contender.pin(core, self._cores)
                    turn = take_turn(contender, client, load, seed)
                    told = {"run": 0, "group": group, "round": number, "seed": seed, "load": name, "contender": who}
                    self._turns.append({**told, "core": core, **turn})
                self._took[name] = max(self._took.get(name, 0.0), time.monotonic() - began)
                self._write()
                progress(f"[{self._since():.0f} s] round {number + 1}, {name}\n")

    def _since(self) -> float:
        return time.monotonic() - self._began

    def _write(self) -> None:
        write(self._options.json, self._figures)


def write(file: Path | None, figures: dict[str, Any]) -> None:
    """Whole or not at all: a run may be cut off."""
    if file is not None:
        new = file.with_name(file.name + ".new")
        new.write_text(json.dumps(figures) + "\n")
        new.replace(file)


def merged(files: Sequence[Path], before: Sequence[Path] = ()) -> dict[str, Any]:
    """The figures of several runs as those of one; each keeps its rounds to itself. `before`: runs of an older slotstream."""
    parts = [json.loads(file.read_text()) for file in [*files, *before]]
    turns: list[Turn] = []
    for number, part in enumerate(parts):
        first = 1 + max((turn["run"] for turn in turns), default=-1)
        for turn in part["turns"]:
            older = number >= len(files) and turn["contender"] not in (BASE, AGAIN)
            name = turn["contender"] + (BEFORE if older else "")
            turns.append({**turn, "run": first + turn["run"], "contender": name})
    return {"benchmark": "online", "runs": [run for part in parts for run in part["runs"]], "turns": turns}


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--shape", choices=("8b", "small", "tiny"), default="8b", help="the model (default: %(default)s, Qwen3-8B's)")
    add("--layers", type=_numbers, default=(2, 18, 33, 36), metavar="IDS", help="captured layer ids (default: 2,18,33,36)")
    add(
        "--contenders",
        type=lambda text: text.split(","),
        default=["nixl", "grpc", AGAIN],
        metavar="NAMES",
        help=f"beside none: of {', '.join(NAMES[1:])}, or one of them with -before; {AGAIN}: none itself, in every other round "
        f"(default: nixl,grpc,{AGAIN})",
    )
    add("--before", type=Path, metavar="DIR", help="an older slotstream, checked out or exported, for contenders NAME-before")
    add("--at-once", type=int, default=2, metavar="N", help="engines that are there at a time (default: %(default)s)")
    add(
        "--loads",
        default=_LOADS,
        metavar="NAMES",
        help="closed-N: N at once; open-N: N a second (default: %(default)s)",
    )
    add("--waves", type=int, default=4, metavar="N", help="closed loop: requests for each in flight (default: %(default)s)")
    add("--open-s", type=float, default=15.0, metavar="N", help="open loop: seconds of arrivals (default: %(default)s)")
    add("--prompt-tokens", type=int, default=512, metavar="N", help="mean, half to one and a half (default: %(default)s)")
    add("--output-tokens", type=int, metavar="N", help="mean, likewise (default: 128)")
    add("--rounds", type=int, default=8, metavar="N", help="at most so many of each load (default: %(default)s)")
    add("--seconds", type=float, metavar="N", help="end by then: loads that would take longer are left out (default: no end)")
    add("--kv-cache-gib", type=float, default=14, metavar="N", help="KV cache of each engine (default: %(default)s)")
    add(
        "--small-cache",
        action="store_true",
        help=f"{_SMALL_CACHE_GIB} GiB of KV cache and {_SMALL_CACHE_LOAD} alone; requests wait, and each round counts",
    )
    add(
        "--kernels",
        action="store_true",
        help="instead of loads: what the device does in decode steps of 8, by kernel, "
        f"{', '.join(map('{:g}'.format, _MOMENTS_S))} s after they began (1,000 output tokens unless told)",
    )
    add(
        "--pin",
        action="store_true",
        help="keep the engine's thread of a turn alone on a core, in each round the one that is fastest then: for hosts that "
        "others use too",
    )
    add("--step-tokens", type=int, default=8192, metavar="N", help="tokens of a step (default: %(default)s)")
    add("--seed", type=int, default=0, metavar="N", help="the first round's (default: %(default)s)")
    add("--work-dir", type=Path, default=Path("/dev/shm"), metavar="DIR", help="samples go here (default: %(default)s)")
    add("--logs", type=Path, metavar="DIR", help="keep the logs there")
    add("--merge", type=Path, nargs="+", metavar="FILE", help="measure nothing: the tables of these runs together")
    add(
        "--merge-before",
        type=Path,
        nargs="+",
        default=[],
        metavar="FILE",
        help="runs of an older slotstream beside them",
    )
    add("--json", type=Path, metavar="FILE", help="also write every figure there, after each load")
    options = parser.parse_args(arguments)
    options.output_tokens = options.output_tokens or (1000 if options.kernels else 128)
    if options.small_cache:
        options.loads, options.kv_cache_gib = _SMALL_CACHE_LOAD, _SMALL_CACHE_GIB
    try:
        loads(options)
    except ValueError as error:
        parser.error(f"--loads: {error}")
    if unknown := [name for name in options.contenders if not known(name)]:
        parser.error(f"--contenders: unknown {unknown}")
    if options.before is None and any(map(needs_before, options.contenders)):
        parser.error("contenders of before need --before DIR")
    if options.at_once < 2:
        parser.error("--at-once: no capture and one other, so 2 or more")
    return options


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def measure(options: argparse.Namespace, figures: dict[str, Any]) -> int:
    """Runs the benchmark; the exit status."""
    with (
        tempfile.TemporaryDirectory(prefix="slotstream-online-", dir=options.work_dir) as data,
        tempfile.TemporaryDirectory(prefix="slotstream-online-") as scratch,
    ):
        work = (options.logs or Path(scratch)).absolute()
        work.mkdir(parents=True, exist_ok=True)
        place = Path(tempfile.gettempdir()) / f"slotstream-online-{options.shape}"  # vLLM's compile cache knows it by its path.
        place.mkdir(exist_ok=True)
        model = make_model(place, options.shape)
        make_tokenizer(model)
        setting = Setting(
            model=model,
            tiny=options.shape == "tiny",
            layers=options.layers,
            kv_cache_bytes=int(options.kv_cache_gib * (1 << 30)) if options.shape != "tiny" else 256 << 20,
            step_tokens=options.step_tokens,
            work=work,
            data=Path(data),
            before=options.before.absolute() if options.before else None,
        )
        try:
            Run(options, figures).run(setting)
        except ProcessFailed as error:
            print(f"online benchmark: {error}", file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            return 130
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # As Ctrl-C: no process and no sample stays behind.
    status = 0
    if options.merge:
        figures = merged(options.merge, options.merge_before)
    else:
        chosen = {name: value for name, value in plain(options).items() if name not in _NOT_NOTED}
        run = {"date": f"{datetime.now(UTC):%Y-%m-%d}", "options": chosen, "machine": machine()}
        figures = {"benchmark": "online", "runs": [run], "turns": []}
        status = measure(options, figures)
    write(options.json, figures)
    small = all(float(run["options"]["kv_cache_gib"]) <= _SMALL_CACHE_GIB for run in figures["runs"])
    print(kernels_table(figures["kernels"]) if "kernels" in figures else report(figures["turns"], keep_void=small))
    return status


if __name__ == "__main__":
    sys.exit(main())
