"""Direct capture on several GPUs of one host: tensor, data and pipeline parallel engines, every row checked.

usage: python tests/gpu/parallel.py [--at-once 4] [--only SUBSTRING ...] [--logs DIR] [--json FILE] [--on-cpu]
Needs two GPUs and vLLM; says so and exits 0 where there are none. Each engine is a `vllm serve` on both GPUs, a few at
a time. --on-cpu runs the cells that two cores can, one by one: tensor and data parallel, dense, runner V1.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from support.descendants import descendants
from support.workload import FINAL_ID, LAYER_IDS, MODEL_NAME, Answer, Ask, random_prompts, send

from slotstream.client import Client, connect
from slotstream.demo import truth_model
from slotstream.demo.processes import (
    SMALL_ENGINE,
    ProcessFailed,
    Running,
    connector_options,
    free_port,
    start_server,
    start_vllm,
)

_HOW = {
    "tensor": ["--tensor-parallel-size=2"],
    "data": ["--data-parallel-size=2"],
    "pipeline": ["--pipeline-parallel-size=2"],
    # Right, or refused at start.
    "sequence": ["--tensor-parallel-size=2", '--compilation-config={"pass_config": {"enable_sp": true}}'],
    "killed": ["--tensor-parallel-size=2"],
}
PROMPTS, OUTPUT_TOKENS = 90, 48
START_S, LINK_S, ENDS_S = 420.0, 60.0, 180.0  # An engine is up after; linked after; ended after the death of a rank.


@dataclass(frozen=True, slots=True)
class Cell:
    """Which engine. `how` is one of _HOW; `runner` is vLLM's model runner, 1 or 2."""

    how: str
    runner: int
    kind: truth_model.Kind

    @property
    def name(self) -> str:
        return f"{self.how}-V{self.runner}-{self.kind}"


@dataclass(slots=True)
class Found:
    """What a cell's samples held."""

    rows: int = 0
    output_rows: int = 0
    wrong: int = 0
    engines: int = 0
    problems: list[str] = field(default_factory=list)


def cells(only: Sequence[str], *, on_cpu: bool) -> list[Cell]:
    kinds: tuple[truth_model.Kind, ...] = ("gdn", "swa", "dense")  # The slowest to start first.
    if on_cpu:
        every = [Cell(how, 1, "dense") for how in ("tensor", "data", "killed")]
    else:
        every = [Cell(how, runner, kind) for kind, how, runner in itertools.product(kinds, ("tensor", "data"), (2, 1))]
        every += [Cell("pipeline", 2, kind) for kind in kinds]  # V1 relays no auxiliary states.
        every += [Cell("sequence", 2, "dense"), Cell("killed", 2, "dense"), Cell("killed", 1, "dense")]
    return [cell for cell in every if not only or any(text in cell.name for text in only)]


@contextlib.contextmanager
def engine(cell: Cell, model: Path, server: str, log: Path, *, on_cpu: bool) -> Iterator[tuple[Running, int]]:
    """A `vllm serve` and its port, up. Raises ProcessFailed with the log's end when it does not start."""
    port = free_port()
    options = [f"--served-model-name={MODEL_NAME}", *_HOW[cell.how]]
    options += connector_options(server=server, layers=[*LAYER_IDS, "final"], namespace=cell.name)
    env = {"VLLM_USE_V2_MODEL_RUNNER": str(cell.runner - 1)}
    if on_cpu:
        options += SMALL_ENGINE
        env = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}
    else:
        options += ["--dtype=bfloat16", "--max-model-len=2048", "--max-num-seqs=32", "--max-num-batched-tokens=512"]
        # Profiling would take what another engine frees meanwhile for its own.
        options += ["--gpu-memory-utilization=0.08", f"--kv-cache-memory-bytes={2 << 30}"]
        if cell.kind == "gdn":
            options += ['--additional-config={"gdn_prefill_backend": "triton"}', "--mamba-cache-mode=align"]
    with start_vllm(model, log, port, *options, env=env, timeout_s=START_S) as running:
        # The server's first NIXL stream starts its reader. Where processors are short that takes seconds, and staging fills.
        links = 2 if cell.how == "data" else 1
        running.wait_until(lambda: log.read_text(errors="replace").count("slotstream: connected to") >= links, LINK_S)
        yield running, port


def capture(client: Client, cell: Cell, port: int) -> Found:
    """Prompts, half of them with output rows: every row of every sample is compared with the truth."""
    found, engines = Found(), set()
    asks = [
        Ask(prompt, {"sample_id": f"p{i}", "include_output_tokens": i % 2 == 1}, OUTPUT_TOKENS)
        for i, prompt in enumerate(random_prompts(random.Random(cell.name), PROMPTS))
    ]
    for ask, answer in zip(asks, send(port, asks), strict=True):
        name = ask.params["sample_id"]
        if answer.said is None or "error" in answer.said:
            found.problems.append(f"{name}: {answer.said}")
            continue
        sample = client.get(name, namespace=cell.name, wait_s=30)
        wanted = ask.prompt + (answer.tokens[:-1] if ask.params["include_output_tokens"] else [])
        if sample.token_ids.tolist() != wanted:
            found.problems.append(f"{name}: {len(sample.token_ids)} token ids, expected {len(wanted)}")
            continue
        wrong = truth_model.wrong_rows(sample.hidden_states, sample.token_ids, [*LAYER_IDS, FINAL_ID], kind=cell.kind)
        found.wrong += len(wrong)
        found.rows += len(wanted)
        found.output_rows += len(wanted) - len(ask.prompt)
        engines.add(sample.metadata["engine_id"])
    found.engines = len(engines)
    return found


def kill_a_rank(client: Client, cell: Cell, running: Running, port: int) -> list[str]:
    """Kill the rank that sends no rows while samples arrive: vLLM ends, they fail, and what was committed stays."""
    committed = {info.sample_id for info in client.list(namespace=cell.name)}
    endless = [Ask([5], {"sample_id": f"cut{i}", "include_output_tokens": True}, 1000) for i in range(4)]

    def outcome() -> list[Answer] | None:
        with contextlib.suppress(Exception):  # Nobody answers them any more.
            return send(port, endless)
        return None

    with ThreadPoolExecutor(1) as pool:
        answers = pool.submit(outcome)
        time.sleep(1.0)
        workers = sorted(descendants(running.process.pid, "VLLM::Worker"))
        os.kill(workers[-1], signal.SIGKILL)
        try:
            running.process.wait(ENDS_S)
        except subprocess.TimeoutExpired:
            return [f"vLLM did not end within {ENDS_S:g} s of a rank's death"]
        if answers.result() is not None:
            return ["the requests were over before the rank was killed"]
    deadline = time.monotonic() + ENDS_S
    while time.monotonic() < deadline:
        states = Counter(str(info.state) for info in client.list(namespace=cell.name) if info.sample_id.startswith("cut"))
        if set(states) == {"FAILED"}:
            break
        time.sleep(0.5)
    else:
        return [f"samples that were cut off: {dict(states)}"]
    return [f"{name} is gone" for name in committed if not len(client.get(name, namespace=cell.name).token_ids)]


def run(cell: Cell, model: Path, server: str, log: Path, *, on_cpu: bool) -> Found:
    found = Found()
    try:
        with engine(cell, model, server, log, on_cpu=on_cpu) as (running, port), connect(server) as client:
            found = capture(client, cell, port)
            if found.engines != (2 if cell.how == "data" else 1):
                found.problems.append(f"{found.engines} engines captured")
            if cell.how == "killed":
                found.problems += kill_a_rank(client, cell, running, port)
    except ProcessFailed as error:
        refusal = "slotstream cannot start" in log.read_text(errors="replace")
        if cell.how == "sequence" and refusal:
            return found
        found.problems.append(" ".join(str(error).split())[-300:])
    except Exception as error:
        found.problems.append(f"{type(error).__name__}: {error}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--at-once", type=int, default=4, help="engines that share the GPUs at a time (default: %(default)s)")
    parser.add_argument("--only", action="append", default=[], metavar="TEXT", help="only cells whose name contains TEXT")
    parser.add_argument("--logs", type=Path, default=None, help="keep the engines' logs here")
    parser.add_argument("--json", type=Path, default=None, help="write what was found there, after each cell")
    parser.add_argument("--on-cpu", action="store_true", help="the cells that two cores can run")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # As Ctrl-C: no process stays behind.
    import torch

    if torch.cuda.device_count() < 2 and not arguments.on_cpu:
        print("no two GPUs here: nothing to run")
        return 0
    every: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="slotstream-gpu-") as scratch:
        work = Path(scratch)
        logs = arguments.logs or work
        logs.mkdir(parents=True, exist_ok=True)
        chosen = cells(arguments.only, on_cpu=arguments.on_cpu)
        models = {kind: truth_model.make(work / kind, kind) for kind in {cell.kind for cell in chosen}}
        port = free_port()

        def timed(cell: Cell) -> tuple[Cell, Found, float]:
            began = time.monotonic()
            log = logs / f"{cell.name}.log"
            found = run(cell, models[cell.kind], f"127.0.0.1:{port}", log, on_cpu=arguments.on_cpu)
            return cell, found, time.monotonic() - began

        places = 1 if arguments.on_cpu else arguments.at_once
        with start_server(work / "data", logs / "server.log", port), ThreadPoolExecutor(places) as pool:
            try:
                for done in as_completed([pool.submit(timed, cell) for cell in chosen]):
                    cell, found, seconds = done.result()
                    verdict = "BAD" if found.wrong or found.problems else "ok "
                    every.append({"cell": cell.name, **asdict(found), "seconds": round(seconds)})
                    print(f"{verdict} {cell.name}: {found.rows} rows, {found.wrong} wrong, {found.problems[:5]}", flush=True)
                    if arguments.json is not None:
                        arguments.json.write_text(json.dumps(every, indent=2) + "\n")
            except KeyboardInterrupt:
                pool.shutdown(cancel_futures=True)  # The pool would go on with those that wait.
                raise
    print(f"{sum(one['rows'] for one in every):,} rows in {len(every)} engines")
    return 0 if all(not one["wrong"] and not one["problems"] for one in every) else 1


if __name__ == "__main__":
    sys.exit(main())
