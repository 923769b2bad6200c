"""What capturing costs a real vLLM on a GPU, and how soon a sample can be read.

    python benchmarks/gpu.py [--layers 2,18,33,36] [--json FILE]

Several engines share the GPU and take turns, so that the ratios come from one run: one without capture ("none"); slotstream
with `layers`, whose requests say `"capture": false` in one turn ("nothing captured") and are captured, output rows too, and
stored in the next; slotstream with `extract_hidden_states`; vLLM's example connector writing to memory; and slotstream with
rows that are read into staging and dropped there. Prefix caching is on in all of them, and no prompt ever hits.
benchmarks/README.md says more. Needs vLLM and a GPU (or `--shape tiny`, which a CPU can do).
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from gpu_processes import report_processes, watched_processes

_SHAPES: dict[str, dict[str, int]] = {
    "8b": {
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
    "small": {
        "vocab_size": 8192,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 8,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
    "tiny": {
        "vocab_size": 8192,
        "hidden_size": 128,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
    },
}
# Engine -> what gpu_engine.py is told of it.
_ENGINES: dict[str, dict[str, Any]] = {
    "none": {"kind": "none"},
    "nixl": {"kind": "direct", "connector": {"transport": "nixl"}},
    "grpc": {"kind": "direct", "connector": {"transport": "grpc"}},
    "grpc-unix": {"kind": "direct", "unix": True, "connector": {"transport": "grpc"}},
    "nixl-4": {"kind": "direct", "connector": {"transport": "nixl", "streams": 4}},
    "grpc-4": {"kind": "direct", "connector": {"transport": "grpc", "streams": 4}},
    "nixl-thread": {"kind": "direct", "connector": {"transport": "nixl", "sender": "thread"}},
    "grpc-thread": {"kind": "direct", "connector": {"transport": "grpc", "sender": "thread"}},
    "dropped": {"kind": "dropped", "connector": {"sender": "thread"}},
    "extraction": {"kind": "extraction", "connector": {"transport": "nixl"}},
    "example": {"kind": "example"},
}
# Layers -> load -> tokens/s with everything stored, in parts of an engine without capture.
_TARGETS = {4: {"prefill": 0.98, "decode of 64": 0.98, "decode of 8": 0.98}, 16: {"decode of 64": 0.95}}
_STORES = ("direct", "extraction")
_IDLE_TARGET = 0.99  # With nothing captured.
_DROPPED_TARGET = 0.95  # A prefill of 16 layers whose rows are dropped in staging.
_READABLE_MS = 20.0
_PAUSE_MS = 100  # Between prompts that run one at a time: the sample before is stored by then.


class EngineFailed(RuntimeError):
    """An engine ended; its log says why."""


class Engine:
    """A vLLM in a process of its own (gpu_engine.py)."""

    def __init__(self, name: str, options: dict[str, Any], log: Path) -> None:
        self.name = name
        self._log = log
        command = [sys.executable, str(Path(__file__).with_name("gpu_engine.py")), json.dumps(options)]
        path = os.pathsep.join(
            [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
        )  # dropping_connector
        with log.open("w") as err:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=err,
                text=True,
                start_new_session=True,
                env={**os.environ, "PYTHONPATH": path},
            )

    def answer(self) -> dict[str, Any]:
        """The next thing it says. Raises EngineFailed."""
        assert self._process.stdout is not None
        with self._log.open("a") as log:
            for line in self._process.stdout:
                if line.startswith("RESULT "):
                    said: dict[str, Any] = json.loads(line[7:])
                    return said
                log.write(line)
        tail = "\n".join(self._log.read_text(errors="replace").splitlines()[-15:])
        raise EngineFailed(f"the engine {self.name} ended:\n{tail}")

    def ask(self, **question: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        return self.answer()

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


@dataclass(slots=True)
class Row:
    """One line of the table: an engine and what its requests ask."""

    name: str
    engine: Engine
    capture: bool
    rounds: list[dict[str, Any]] = field(default_factory=list)

    @property
    def tokens_per_s(self) -> float:
        return float(statistics.median(one["tokens_per_s"] for one in self.rounds))


def make_model(directory: Path, shape: str) -> Path:
    """A Qwen3 configuration; its weights are vLLM's dummies."""
    from transformers import Qwen3Config

    config = Qwen3Config(
        **_SHAPES[shape],
        max_position_embeddings=40960,
        tie_word_embeddings=False,
        architectures=["Qwen3ForCausalLM"],
        dtype="bfloat16",
    )
    config.save_pretrained(directory)
    return directory


@contextmanager
def servers(work: Path, data: Path, workers: int, more: Sequence[str]) -> Iterator[dict[bool, str]]:
    """`slotstream serve` on TCP, with so many processes, and on a Unix socket: unix or not -> address."""
    from slotstream.demo.processes import Running, free_port, listening

    socket, port = work / "server.sock", free_port()

    def server(name: str, address: str, *own: str) -> Running:
        command = [sys.executable, "-m", "slotstream.cli.main", "serve", "--listen", address, "--data", str(data / name)]
        command += ["--appear-grace-s", "120", *own, *more]  # Readers wait for samples that the engine has not begun.
        return Running("slotstream serve", command, work / f"{name}.log")

    with server("tcp", f"127.0.0.1:{port}", "--workers", str(workers)) as tcp, server("unix", f"unix:{socket}") as unix:
        tcp.wait_until(lambda: listening(port), 30.0)
        unix.wait_until(socket.exists, 30.0)
        yield {False: f"127.0.0.1:{port}", True: f"unix:{socket}"}


@contextmanager
def all_rows(options: argparse.Namespace, work: Path, data: Path) -> Iterator[list[Row]]:
    """Every engine, started at the same time, and what is measured on it."""
    model = make_model(work / "model", options.shape)
    engine_options: dict[str, Any] = {}
    if options.shape != "tiny":
        engine_options = {"gpu_memory_utilization": 0.1, "kv_cache_memory_bytes": options.kv_cache_gib << 30}
        engine_options["compilation_config"] = {"cudagraph_capture_sizes": [1, 8, 64, 128]}
    else:
        engine_options = {"enforce_eager": True, "block_size": 32}
        engine_options |= {"gpu_memory_utilization": 0.05, "kv_cache_memory_bytes": 256 << 20}  # Room for several on a CPU.
    engine_options["tensor_parallel_size"] = options.tensor_parallel
    with ExitStack() as stack:
        at = stack.enter_context(servers(work, data, options.workers, options.serve.split()))
        shared = {
            "model": str(model),
            "layers": options.layers,
            "staging_bytes": (options.staging_mib << 20) or None,
            "chunk_bytes": options.chunk_mib << 20,
            "step_tokens": options.step_tokens,
            "engine": engine_options,
            "shared": str(data / "example"),
        }
        (data / "example").mkdir()

        def start(name: str) -> Engine:
            told = _ENGINES[name]
            more = {"kind": told["kind"], "server": at[told.get("unix", False)], "connector": told.get("connector", {})}
            return stack.enter_context(closing(Engine(name, {**shared, **more}, work / f"{name}.log")))

        rows = []
        for name in options.engines:
            engine = start(name)
            if _ENGINES[name]["kind"] == "direct":
                rows.append(Row(f"{name}: nothing captured", engine, False))
            rows.append(Row(f"{name}: stored" if _ENGINES[name]["kind"] in _STORES else name, engine, True))
        engines = list(dict.fromkeys(row.engine for row in rows))
        with ThreadPoolExecutor(len(engines)) as pool:
            list(pool.map(Engine.answer, engines))
        yield rows


def measure(options: argparse.Namespace, rows: Sequence[Row], load: dict[str, int]) -> list[dict[str, Any]]:
    """All rounds of all rows, one after the other; the first run of each is not counted.

    Each round begins with another row: a GPU that has just rested is faster for a while, and that must not fall to one row.
    """
    for row in rows:
        row.rounds.clear()
        row.engine.ask(what="run", capture=row.capture, **{**load, "prompts": max(4, load["prompts"] // 4)})
    began = time.monotonic()
    for number in range(options.rounds):
        if number and options.load_s and time.monotonic() - began > options.load_s:
            break
        _progress(f"round {number + 1}/{options.rounds}:")
        first = number % len(rows)
        for row in [*rows[first:], *rows[:first]]:
            row.rounds.append(row.engine.ask(what="run", capture=row.capture, **load))
            _progress(f"  {row.name} {row.rounds[-1]['tokens_per_s']:.0f}")
        _progress("\n")
    return [{"name": row.name, "rounds": list(row.rounds)} for row in rows]


def profile(options: argparse.Namespace, rows: Sequence[Row], name: str, load: dict[str, int]) -> dict[str, Any]:
    """Row -> what each process computes while it runs the load again and again for `--profile-s`, with everything captured."""
    found = {}
    for row in (row for row in rows if row.capture):
        _progress(f"profile of {row.name}\n")
        with watched_processes() as found[row.name]:
            end = time.monotonic() + options.profile_s
            while time.monotonic() < end:
                row.engine.ask(what="run", capture=True, **load)
        print(report_processes(name, row.name, found[row.name]), flush=True)
    return found


def measure_ranks(rows: Sequence[Row], load: dict[str, int]) -> list[dict[str, Any]]:
    """What each rank of each engine does of a load, median of three runs, with everything captured."""
    found = []
    for row in (row for row in rows if row.capture):
        _progress(f"ranks of {row.name}\n")
        runs = [row.engine.ask(what="ranks", capture=True, **load)["ranks"] for _ in range(3)]
        for same_rank in zip(*runs, strict=True):
            middle = {key: statistics.median(one[key] for one in same_rank) for key in same_rank[0]}
            found.append({"name": row.name, **middle})
    return found


def report_ranks(title: str, found: Sequence[dict[str, Any]]) -> str:
    """The table of `measure_ranks`: what a rank does more than the same rank of the engine without capture."""
    lines = [f"ranks, {title}", f"{'':28}{'rank':>6}{'computing ms':>18}{'copying ms':>12}{'talking ms':>12}{'peak GiB':>18}"]
    bases = {one["rank"]: one for one in found if one["name"] == "none"}
    for one in found:
        base = bases.get(one["rank"], one)
        computing = f"{one['computing']:.1f} ({one['computing'] / base['computing']:.3f})"
        peak = f"{one['peak_bytes'] / (1 << 30):.2f} ({(one['peak_bytes'] - base['peak_bytes']) / (1 << 20):+.0f} MiB)"
        lines.append(f"{one['name']:28}{one['rank']:>6}{computing:>18}{one['copying']:>12.1f}{one['talking']:>12.1f}{peak:>18}")
    return "\n".join(lines)


def _progress(text: str) -> None:
    print(text, end="", file=sys.stderr, flush=True)


def ratios(row: Row, rows: Sequence[Row]) -> list[float]:
    """Its tokens a second in parts of the engine without capture, round by round; nothing where there is no such engine."""
    base = next((one for one in rows if one.name == "none"), None)
    if base is None or row is base:
        return []
    return [ours["tokens_per_s"] / none["tokens_per_s"] for ours, none in zip(row.rounds, base.rounds, strict=True)]


def report(title: str, rows: Sequence[Row]) -> str:
    """The table of one load."""
    head = f"{'tokens/s':>10}{'ratio':>8}{'(least to most)':>18}{'stored/s':>10}"
    head += f"{'durable ms p50':>16}{'readable p50':>14}{'failed':>8}"
    lines = [title, f"{'':28}{head}"]
    for row in rows:
        found = ratios(row, rows)
        ratio = f"{statistics.median(found):.3f}" if found else "-"
        spread = f"({min(found):.3f} to {max(found):.3f})" if found else ""
        stored = statistics.median(one["all_stored_tokens_per_s"] for one in row.rounds)
        waits = [one for one in row.rounds if one.get("durable_ms")]

        def median(what: str, cut: str, waits: list[dict[str, Any]] = waits) -> str:
            found = [one[what][cut] for one in waits if one.get(what)]
            return f"{statistics.median(found):.1f}" if found else "-"

        failed = sum(len(one.get("failed", [])) for one in row.rounds)
        lines.append(
            f"{row.name:28}{row.tokens_per_s:>10.0f}{ratio:>8}{spread:>18}{stored:>10.0f}{median('durable_ms', 'p50'):>16}"
            f"{median('readable_ms', 'p50'):>14}{failed:>8}"
        )
    return "\n".join(lines)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add(
        "--shape",
        choices=sorted(_SHAPES),
        default="8b",
        help="the model (default: %(default)s, Qwen3-8B's; small: 8 fast layers)",
    )
    add("--layers", type=_numbers, default=[2, 18, 33, 36], metavar="IDS", help="captured layer ids (default: 2,18,33,36)")
    add(
        "--engines",
        type=lambda text: text.split(","),
        default=["none", "nixl", "grpc", "extraction", "example"],
        metavar="NAMES",
        help=f"of {', '.join(_ENGINES)} (default: none,nixl,grpc,extraction,example)",
    )
    add("--prompts", type=int, default=192, metavar="N", help="prompts of a run (default: %(default)s)")
    add("--prompt-tokens", type=int, default=1024, metavar="N", help="tokens of a prompt (default: %(default)s)")
    add(
        "--output-tokens", type=int, default=192, metavar="N", help="of the decode load; 0: leave it out (default: %(default)s)"
    )
    add(
        "--alone",
        type=int,
        default=16,
        metavar="N",
        help="prompts of the load that runs one at a time; 0: leave it out (default: %(default)s)",
    )
    add("--step-tokens", type=int, default=8192, metavar="N", help="tokens of a step (default: %(default)s)")
    add("--rounds", type=int, default=7, metavar="N", help="interleaved rounds to take medians of (default: %(default)s)")
    add(
        "--load-s",
        type=float,
        default=0,
        metavar="N",
        help="begin no more rounds of a load after so many seconds (default: never)",
    )
    add(
        "--profile-s",
        type=float,
        default=0,
        metavar="N",
        help="after each load, run it N seconds more in each engine, and say what every process computes (default: no)",
    )
    add("--staging-mib", type=int, default=0, metavar="N", help="the connector's staging (default: its own)")
    add("--kv-cache-gib", type=int, default=8, metavar="N", help="KV cache of each engine (default: %(default)s)")
    add("--tensor-parallel", type=int, default=1, metavar="N", help="GPUs that each engine is spread over (default: 1)")
    add("--workers", type=int, default=1, metavar="N", help="processes of the server on TCP (default: %(default)s)")
    add("--serve", default="", metavar="OPTIONS", help="more options of `slotstream serve`, in one string")
    add("--chunk-mib", type=int, default=2, metavar="N", help="the connector's chunk_bytes (default: %(default)s)")
    add("--work-dir", type=Path, default=Path("/dev/shm"), metavar="DIR", help="samples go here (default: %(default)s)")
    add("--logs", type=Path, metavar="DIR", help="keep the logs there")
    add("--json", type=Path, metavar="FILE", help="also write every figure there")
    options = parser.parse_args(arguments)
    if unknown := set(options.engines) - set(_ENGINES):
        parser.error(f"--engines: unknown {sorted(unknown)}")
    return options


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # As Ctrl-C: no process and no sample stays behind.
    prefill = {"prompts": options.prompts, "tokens": options.prompt_tokens, "output": 1}
    decode = {"tokens": 64, "output": options.output_tokens}
    alone = {"prompts": options.alone, "tokens": options.prompt_tokens, "output": 1, "pause_ms": _PAUSE_MS}
    loads = {
        "prefill": prefill,
        **({"alone": alone} if options.alone else {}),
        **({f"decode of {n}": {"prompts": n, **decode} for n in (64, 8)} if options.output_tokens else {}),
    }
    figures: dict[str, Any] = {
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "options": {k: str(v) for k, v in vars(options).items()},
    }
    with (
        tempfile.TemporaryDirectory(prefix="slotstream-gpu-", dir=options.work_dir) as data,
        tempfile.TemporaryDirectory(prefix="slotstream-gpu-") as scratch,
    ):
        work = options.logs or Path(scratch)
        work.mkdir(parents=True, exist_ok=True)
        try:
            with all_rows(options, work.absolute(), Path(data)) as rows:
                for name, load in loads.items():
                    figures[name] = measure(options, rows, load)
                    _write(options, figures)
                    print(report(f"{name}: {load}, layers {options.layers}", rows), flush=True)
                    print(verdict(options, rows, name), flush=True)
                    if options.profile_s:
                        figures.setdefault("processes", {})[name] = profile(options, rows, name, load)
                        _write(options, figures)
                if options.tensor_parallel > 1 or (options.profile_s and options.shape != "tiny"):  # And what each rank pays.
                    figures["ranks"] = {}
                    for name, load in loads.items():
                        few = {**load, "prompts": min(load["prompts"], 16)}
                        figures["ranks"][name] = measure_ranks(rows, few)
                        _write(options, figures)
                        print(report_ranks(f"{name}: {few}", figures["ranks"][name]), flush=True)
        except EngineFailed as error:
            print(f"gpu benchmark: {error}", file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            return 130
    return 0


def _write(options: argparse.Namespace, figures: dict[str, Any]) -> None:
    """After each load: a run that is cut short leaves what it found."""
    if options.json is not None:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


def verdict(options: argparse.Namespace, rows: Sequence[Row], load: str) -> str:
    """How slotstream stands to its targets in this load."""
    lines = []
    target = _TARGETS.get(len(options.layers), {}).get(load)
    for row in rows:
        found = ratios(row, rows)
        wanted = target if _ENGINES[row.engine.name]["kind"] == "direct" else None
        if not row.capture and _ENGINES[row.engine.name]["kind"] == "direct":
            wanted = _IDLE_TARGET
        if row.name == "dropped" and load == "prefill":
            wanted = _DROPPED_TARGET
        if found and wanted is not None and load != "alone":
            ratio = statistics.median(found)
            lines.append(f"{row.name}: {ratio:.3f} of no capture; target {wanted}: {_met(ratio >= wanted)}")
        readable = [one["readable_ms"]["p50"] for one in row.rounds if one.get("readable_ms")]
        if readable and load in ("prefill", "alone"):
            middle = statistics.median(readable)
            lines.append(
                f"{row.name}: readable {middle:.1f} ms after its last rows; "
                f"target {_READABLE_MS:.0f}: {_met(middle <= _READABLE_MS)}"
            )
    return "\n".join(lines)


def _met(yes: bool) -> str:
    return "met" if yes else "NOT met"


if __name__ == "__main__":
    sys.exit(main())
