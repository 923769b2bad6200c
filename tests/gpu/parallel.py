"""Direct capture on several GPUs of one host: tensor, data and pipeline parallel engines, every row checked.

usage: python tests/gpu/parallel.py [--gpus 4] [--at-once 6] [--only SUBSTRING ...] [--missing] [--list]
           [--for-s SECONDS] [--logs DIR] [--write PAGE] [--on-cpu]
Needs two GPUs (or four) and vLLM; says so and exits 0 where there are none. Each engine is a `vllm serve` on all of them, a few
at a time. --on-cpu runs the cells that two cores can, one by one: tensor and data parallel, dense, runner V1.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import math
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path

import engines
import page
from parallel_cells import LAYERS, Cell, cells
from support.descendants import descendants
from support.workload import MODEL_NAME, Ask, random_prompts, send

from slotstream.client import Client, SampleFailed, SampleState, connect
from slotstream.demo.processes import SMALL_ENGINE, ProcessFailed, Running, free_port, start_vllm
from slotstream.truth import model as truth_model

OUTPUT_TOKENS = 48
START_S, LINK_S = 420.0, 60.0  # An engine is up after; linked after.
ENDS_S = 60.0  # docs/requests.md: from the death of a rank until vLLM has ended, and its samples have.
_CUT_OFF = {"FAILED ABORTED", "FAILED INTERRUPTED"}  # As the worker's side said before it ended, or else the server.


@dataclass(slots=True)
class Found:
    """What a cell's samples held."""

    rows: int = 0
    output_rows: int = 0
    wrong: int = 0
    engines: int = 0
    graphs: str = "-"
    nccl: str = ""  # That of vLLM's own wrapper, where that was at work.
    said: str = "right"  # Of an engine without problems.
    cut_off: bool = False  # The time was over before it was done.
    problems: list[str] = field(default_factory=list)


@contextlib.contextmanager
def engine(cell: Cell, model: Path, where: engines.Place, log: Path, *, on_cpu: bool) -> Iterator[tuple[Running, int]]:
    """A `vllm serve` and its port, up. Raises ProcessFailed with the log's end when it does not start."""
    port = free_port()
    layers = [*cell.layers[:-1], "final"]
    ours = engines.slotstream(where.server, layers=layers, namespace=cell.name, wait_s_max=30)
    options = [f"--served-model-name={MODEL_NAME}", *cell.layout.flags, *engines.flags({"kv_transfer_config": ours})]
    env = engines.runner_env(cell.runner)
    if on_cpu:
        options += SMALL_ENGINE
        env = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}
    else:
        shared = {"max_model_len": 2048, "max_num_batched_tokens": 512, "kv_cache_memory_bytes": 2 << 30}
        align = {"mamba_cache_mode": "align"} if cell.kind == "gdn" else {}
        options += engines.flags(engines.small(**shared, **align, **engines.of_kind(cell.kind)))
    start_s = min(START_S, where.time.left_s())
    with start_vllm(model, log, port, *options, env=env, timeout_s=start_s) as running, where.time.ends(running):
        links = cell.layout.data
        running.wait_until(lambda: log.read_text(errors="replace").count("slotstream: connected to") >= links, LINK_S)
        yield running, port


def capture(client: Client, cell: Cell, port: int) -> Found:
    """Prompts, half of them with output rows: every row of every sample is compared with the truth."""
    found, engines = Found(), set()
    send(port, [Ask([5], {"sample_id": f"w{i}"}, 1) for i in range(8)])
    for i in range(8):  # The server's first NIXL stream starts its reader: until then rows wait in staging.
        with contextlib.suppress(SampleFailed):
            client.get(f"w{i}", namespace=cell.name, wait_s=30)
    asks = [
        Ask(prompt, {"sample_id": f"p{i}", "include_output_tokens": i % 2 == 1}, OUTPUT_TOKENS)
        for i, prompt in enumerate(random_prompts(random.Random(cell.name), cell.prompts))
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
        wrong = truth_model.wrong_rows(sample.hidden_states, sample.token_ids, cell.layers, kind=cell.kind)
        found.wrong += len(wrong)
        found.rows += len(wanted)
        found.output_rows += len(wanted) - len(ask.prompt)
        engines.add(sample.metadata["engine_id"])
    found.engines = len(engines)
    return found


def kill_a_rank(client: Client, cell: Cell, running: Running, port: int) -> str:
    """Kill it while samples arrive: vLLM ends, they fail, and what was committed stays. Raises RuntimeError where not."""
    committed = {info.sample_id for info in client.list(namespace=cell.name) if info.sample_id.startswith("p")}
    # More than are computed at a time: some are always in the middle.
    long = [Ask([5], {"sample_id": f"cut{i}", "include_output_tokens": True}, 1000) for i in range(48)]

    def states() -> Counter[str]:
        cut = (info for info in client.list(namespace=cell.name) if info.sample_id.startswith("cut"))
        return Counter(f"{info.state} {info.error_code or ''}".strip() for info in cut)

    def ask() -> None:
        with contextlib.suppress(Exception):  # Nobody answers them any more.
            send(port, long)

    (worker,) = descendants(running.process.pid, cell.layout.worker(cell.killed or 0))
    asked_at = time.monotonic()
    threading.Thread(target=ask, daemon=True).start()  # It ends with vLLM, which is stopped on every path.
    while states()["ARRIVING"] < 4:
        if time.monotonic() > asked_at + ENDS_S:
            raise RuntimeError(f"no samples arrive that could be cut off: {dict(states())}")
        time.sleep(0.02)
    os.kill(worker, signal.SIGKILL)
    killed_at = time.monotonic()
    try:
        running.process.wait(ENDS_S)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"vLLM did not end within {ENDS_S:g} s of a rank's death") from None
    ended_s = time.monotonic() - killed_at
    while (left := states())["ARRIVING"]:
        if time.monotonic() > killed_at + ENDS_S:
            raise RuntimeError(f"{left['ARRIVING']} samples are still said to arrive")
        time.sleep(0.1)
    if not left.keys() & _CUT_OFF or left.keys() - _CUT_OFF - {"COMMITTED"}:
        raise RuntimeError(f"samples that were cut off: {dict(left)}")
    still = {info.sample_id for info in client.list(namespace=cell.name) if info.state is SampleState.COMMITTED}
    if lost := committed - still:
        raise RuntimeError(f"{len(lost)} committed samples are gone")
    for name in still:
        sample = client.get(name, namespace=cell.name)
        if len(truth_model.wrong_rows(sample.hidden_states, sample.token_ids, cell.layers, kind=cell.kind)):
            raise RuntimeError(f"{name} is no longer what it was")
    failed = " and ".join(sorted(state.removeprefix("FAILED ") for state in left.keys() & _CUT_OFF))
    return f"right; vLLM ended {ended_s:.0f} s after the kill, what was arriving failed as {failed}, nothing committed was lost"


def run(cell: Cell, model: Path, where: engines.Place, log: Path, *, on_cpu: bool) -> Found:
    found = Found()
    log.unlink(missing_ok=True)  # What an earlier run logged there is not of this engine.
    if where.time.is_over:
        return Found(cut_off=True)
    try:
        with engine(cell, model, where, log, on_cpu=on_cpu) as (running, port), connect(where.server) as client:
            found = capture(client, cell, port)
            if found.engines != cell.layout.data:
                found.problems.append(f"{found.engines} engines captured")
            if cell.killed is not None:
                found.said = kill_a_rank(client, cell, running, port)
    except ProcessFailed as error:
        text = log.read_text(errors="replace")
        ours, theirs = re.search(r"slotstream cannot start: (.+)", text), re.search(r"enable_sp\s+Unexpected keyword", text)
        if cell.may_refuse and ours is not None:
            found.said = f"refused at start: {ours[1].strip()}"
        elif cell.how == "sequence" and theirs is not None:
            found.said = "refused at start by vLLM, which has no such pass"
        else:
            causes = re.findall(r" ERROR .+?\] ([\w.]*Error: .+)", text)  # The first one is at the root.
            found.problems.append((causes or [" ".join(str(error).split())])[0][-300:])
    except Exception as error:
        found.problems.append(f"{type(error).__name__}: {error}")
    if found.problems and where.time.is_over:
        return Found(cut_off=True)
    text = log.read_text(errors="replace")
    modes = re.findall(r"CUDAGraphMode\.([A-Z_]+)", text)
    found.nccl = "".join(re.findall(r"vLLM is using nccl==([\d.]+)", text)[:1])
    if modes and not found.said.startswith("refused"):
        found.graphs = modes[-1]
    return found


def row_of(found: Found, run: str) -> list[str]:
    """The columns behind the key. `run`: when, on what."""
    verdict = "; ".join(found.problems[:5]) or ("wrong rows" if found.wrong else found.said)
    nccl = f", NCCL {found.nccl}" if found.nccl else ""
    return [found.graphs, f"{found.rows:,}", f"{found.output_rows:,}", str(found.wrong), verdict.replace("|", "/"), run + nccl]


def rows_in(text: str) -> dict[tuple[str, ...], list[str]]:
    """The rows of a table that an earlier run wrote."""
    return page.rows_in(text, keys=3)


_TABLE = f"""\

`python tests/gpu/parallel.py --write docs/records/compatibility.md` writes this part. Each engine is a `vllm serve` over two
GPUs of one host, or with `--gpus 4` over four. It captures layers {", ".join(map(str, LAYERS))} and `final`.
It gets 90 prompts, over four GPUs 120, half of them with output rows.
With *expert parallel* each rank has some of the experts of a layer.
Where a rank is killed, it dies while more samples arrive. They must fail with `ABORTED` or `INTERRUPTED`, and vLLM must end,
both within a minute.
Where a run names no NCCL, vLLM's own wrapper of it was not at work. Either its engines have nothing to say to each other, or
NCCL was older than vLLM asks for, and vLLM talked through torch's and its own all-reduce.

| engine | model | runner | graphs | rows | output rows | wrong | verdict | run |
| --- | --- | --- | --- | ---: | ---: | ---: | --- | --- |
"""


def as_markdown(rows: page.Rows) -> str:
    """The part of docs/records/compatibility.md about several GPUs, behind its heading."""
    return page.table(_TABLE, rows, [cell.key for cell in cells([])])


def models_of(chosen: Sequence[Cell], work: Path) -> dict[Cell, Path]:
    """The model that each serves, made where it is not there yet."""
    made: dict[tuple[str, bool], Path] = {}
    for cell in chosen:
        what = (cell.kind, cell.layout.in_each_layer)
        if what not in made:
            made[what] = truth_model.make(work / f"{cell.kind}-{what[1]}", cell.kind, experts_in_each_layer=what[1])
    return {cell: made[cell.kind, cell.layout.in_each_layer] for cell in chosen}


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = engines.command_line(__doc__, only="cells", on_cpu="the cells that two cores can run", at_once=6)
    add = parser.add_argument
    add("--gpus", type=int, choices=(2, 4), default=2, help="that each engine is spread over (default: %(default)s)")
    add("--missing", action="store_true", help="only cells that the table of --write has no row of")
    add("--list", action="store_true", help="only say which cells that are")
    add("--for-s", type=float, default=math.inf, metavar="SECONDS", help="stop what still runs then (default: never)")
    add("--write", type=Path, default=None, help="write the table here, over the rows that are run")
    found = parser.parse_args(arguments)
    if found.for_s <= 0:
        parser.error("--for-s must be more than 0")
    if found.missing and (found.write is None or found.on_cpu):
        parser.error("--missing needs the page that --write names, which has no cells of a CPU")
    return found


def chosen_cells(arguments: argparse.Namespace) -> list[Cell]:
    """In the order in which they begin."""
    there = rows_in(page.read(arguments.write)[1]) if arguments.missing else {}
    gpus = None if arguments.on_cpu else arguments.gpus
    return [cell for cell in cells(arguments.only, gpus=gpus, on_cpu=arguments.on_cpu) if cell.key not in there]


def main() -> int:
    arguments = parse()
    chosen = chosen_cells(arguments)
    if arguments.list:
        for cell in chosen:
            refused = ", or refused at start" if cell.may_refuse else ""
            print(f"{cell.name}: {', '.join(cell.key)}, {cell.prompts} prompts{refused}")
        return 0
    if not arguments.on_cpu and not engines.has_gpus(arguments.gpus):
        return 0
    import torch
    import vllm

    device = "CPU" if arguments.on_cpu else f"{arguments.gpus} x {torch.cuda.get_device_name()}"
    stamp = f"{datetime.date.today().isoformat()}, {device}, vLLM {vllm.__version__}, torch {torch.__version__}"
    results: list[Found] = []
    late: list[Cell] = []
    with engines.place(arguments.logs, arguments.for_s) as here:
        models = models_of(chosen, here.work)

        def found_in(cell: Cell) -> tuple[Cell, Found]:
            log = here.logs / f"{cell.name}.log"
            return cell, run(cell, models[cell], here, log, on_cpu=arguments.on_cpu)

        with ThreadPoolExecutor(1 if arguments.on_cpu else arguments.at_once) as pool:
            try:
                for done in as_completed([pool.submit(found_in, cell) for cell in chosen]):
                    cell, found = done.result()
                    if found.cut_off:
                        late.append(cell)
                        continue
                    results.append(found)
                    row = row_of(found, stamp)
                    print(f"{'BAD' if found.wrong or found.problems else 'ok '} {cell.name}: {', '.join(row[:5])}", flush=True)
                    if arguments.write is not None:  # Each time: a run that is cut short leaves what it found.
                        one_gpu, several = page.read(arguments.write)
                        arguments.write.write_text(page.joined(one_gpu, as_markdown({**rows_in(several), cell.key: row})))
            except KeyboardInterrupt:
                here.time.end()
                pool.shutdown(cancel_futures=True)  # The pool would go on with those that wait.
                raise
    print(f"{sum(found.rows for found in results):,} rows in {len(results)} engines")
    if late:
        print(f"not run to the end, the time was over: {', '.join(sorted(cell.name for cell in late))}")
    return 0 if not late and all(not found.wrong and not found.problems for found in results) else 1


if __name__ == "__main__":
    sys.exit(main())
