"""Direct capture on several GPUs of one host: tensor, data and pipeline parallel engines, every row checked.

usage: python tests/gpu/parallel.py [--at-once 6] [--only SUBSTRING ...] [--logs DIR] [--write PAGE] [--on-cpu]
Needs two GPUs and vLLM; says so and exits 0 where there are none. Each engine is a `vllm serve` on both GPUs, a few at
a time. --on-cpu runs the cells that two cores can, one by one: tensor and data parallel, dense, runner V1.
"""

from __future__ import annotations

import contextlib
import datetime
import itertools
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
from support.descendants import descendants
from support.workload import FINAL_ID, LAYER_IDS, MODEL_NAME, Ask, random_prompts, send

from slotstream.client import Client, SampleFailed, SampleState, connect
from slotstream.demo.processes import SMALL_ENGINE, ProcessFailed, Running, free_port, start_vllm
from slotstream.truth import model as truth_model

_HOW = {
    "tensor": ["--tensor-parallel-size=2"],
    "data": ["--data-parallel-size=2"],
    "pipeline": ["--pipeline-parallel-size=2"],
    "pipeline-final": ["--pipeline-parallel-size=2"],  # Nothing to relay.
    "sequence": ["--tensor-parallel-size=2", '--compilation-config={"pass_config": {"enable_sp": true}}'],
}
LAYERS = [0, *LAYER_IDS]
PROMPTS, OUTPUT_TOKENS = 90, 48
START_S, LINK_S = 420.0, 60.0  # An engine is up after; linked after.
ENDS_S = 60.0  # docs/requests.md: from the death of a rank until vLLM has ended, and its samples have.
_CUT_OFF = {"FAILED ABORTED", "FAILED INTERRUPTED"}  # As the worker's side said before it ended, or else the server.


@dataclass(frozen=True, slots=True)
class Cell:
    """Which engine. `how` is one of _HOW; `runner` is vLLM's model runner, 1 or 2; `killed`: the rank that dies at the end."""

    how: str
    runner: int
    kind: truth_model.Kind
    killed: int | None = None

    @property
    def name(self) -> str:
        """Also the namespace of its samples."""
        return f"{self.how}-V{self.runner}-{self.kind}" + ("" if self.killed is None else f"-killed{self.killed}")

    @property
    def layers(self) -> list[int]:
        """The ids of what it captures, `final` last."""
        return [FINAL_ID] if self.how == "pipeline-final" else [*LAYERS, FINAL_ID]

    @property
    def may_refuse(self) -> bool:
        """Whether it is right, or refused at start: vLLM relays not every model's layers along a pipeline."""
        return self.how == "sequence" or (self.how, self.kind) == ("pipeline", "gdn")

    @property
    def key(self) -> tuple[str, ...]:
        """What tells its row of the table from others: the first columns."""
        how = {"sequence": "tensor 2, sequence-parallel pass", "pipeline-final": "pipeline 2, only `final`"}
        killed = "" if self.killed is None else f", rank {self.killed} killed"
        return how.get(self.how, f"{self.how} 2") + killed, self.kind, f"V{self.runner}"


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
    problems: list[str] = field(default_factory=list)


def cells(only: Sequence[str], *, on_cpu: bool = False) -> list[Cell]:
    kinds: tuple[truth_model.Kind, ...] = ("gdn", "swa", "dense")  # The slowest to start first.
    if on_cpu:
        every = [Cell(how, 1, "dense") for how in ("tensor", "data")]
        every += [Cell("tensor", 1, "dense", killed=rank) for rank in (0, 1)]
    else:
        every = [Cell(how, runner, kind) for kind, how, runner in itertools.product(kinds, ("tensor", "data"), (2, 1))]
        every += [Cell("pipeline", 2, kind) for kind in kinds]  # V1 relays no auxiliary states.
        every += [Cell("pipeline-final", 2, "gdn")]
        every += [Cell("tensor", runner, "dense", killed=rank) for runner, rank in itertools.product((2, 1), (0, 1))]
        every += [Cell("pipeline", 2, "dense", killed=0), Cell("sequence", 2, "dense")]
    return [cell for cell in every if engines.is_chosen(cell.name, only)]


@contextlib.contextmanager
def engine(cell: Cell, model: Path, server: str, log: Path, *, on_cpu: bool) -> Iterator[tuple[Running, int]]:
    """A `vllm serve` and its port, up. Raises ProcessFailed with the log's end when it does not start."""
    port = free_port()
    layers = [*cell.layers[:-1], "final"]
    ours = engines.slotstream(server, layers=layers, namespace=cell.name, wait_s_max=30)
    options = [f"--served-model-name={MODEL_NAME}", *_HOW[cell.how], *engines.flags({"kv_transfer_config": ours})]
    env = engines.runner_env(cell.runner)
    if on_cpu:
        options += SMALL_ENGINE
        env = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}
    else:
        shared = {"max_model_len": 2048, "max_num_batched_tokens": 512, "kv_cache_memory_bytes": 2 << 30}
        align = {"mamba_cache_mode": "align"} if cell.kind == "gdn" else {}
        options += engines.flags(engines.small(**shared, **align, **engines.of_kind(cell.kind)))
    with start_vllm(model, log, port, *options, env=env, timeout_s=START_S) as running:
        links = 2 if cell.how == "data" else 1
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

    (worker,) = descendants(running.process.pid, f"VLLM::Worker_{'PP' if cell.how == 'pipeline' else 'TP'}{cell.killed}")
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


def run(cell: Cell, model: Path, server: str, log: Path, *, on_cpu: bool) -> Found:
    found = Found()
    log.unlink(missing_ok=True)  # What an earlier run logged there is not of this engine.
    try:
        with engine(cell, model, server, log, on_cpu=on_cpu) as (running, port), connect(server) as client:
            found = capture(client, cell, port)
            if found.engines != (2 if cell.how == "data" else 1):
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
GPUs of one host. It captures layers {", ".join(map(str, LAYERS))} and `final`, and gets {PROMPTS} prompts, \
half of them with output rows.
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


def main() -> int:
    parser = engines.command_line(__doc__, only="cells", on_cpu="the cells that two cores can run", at_once=6)
    parser.add_argument("--write", type=Path, default=None, help="write the table here, over the rows that are run")
    arguments = parser.parse_args()
    if not arguments.on_cpu and not engines.has_gpus(2):
        return 0
    import torch
    import vllm

    device = "CPU" if arguments.on_cpu else f"2 x {torch.cuda.get_device_name()}"
    stamp = f"{datetime.date.today().isoformat()}, {device}, vLLM {vllm.__version__}, torch {torch.__version__}"
    chosen = cells(arguments.only, on_cpu=arguments.on_cpu)
    results: list[Found] = []
    with engines.place(arguments.logs) as here:
        models = {kind: truth_model.make(here.work / kind, kind) for kind in {cell.kind for cell in chosen}}

        def found_in(cell: Cell) -> tuple[Cell, Found]:
            log = here.logs / f"{cell.name}.log"
            return cell, run(cell, models[cell.kind], here.server, log, on_cpu=arguments.on_cpu)

        with ThreadPoolExecutor(1 if arguments.on_cpu else arguments.at_once) as pool:
            try:
                for done in as_completed([pool.submit(found_in, cell) for cell in chosen]):
                    cell, found = done.result()
                    results.append(found)
                    row = row_of(found, stamp)
                    print(f"{'BAD' if found.wrong or found.problems else 'ok '} {cell.name}: {', '.join(row[:5])}", flush=True)
                    if arguments.write is not None:  # Each time: a run that is cut short leaves what it found.
                        one_gpu, several = page.read(arguments.write)
                        arguments.write.write_text(page.joined(one_gpu, as_markdown({**rows_in(several), cell.key: row})))
            except KeyboardInterrupt:
                pool.shutdown(cancel_futures=True)  # The pool would go on with those that wait.
                raise
    print(f"{sum(found.rows for found in results):,} rows in {len(results)} engines")
    return 0 if all(not found.wrong and not found.problems for found in results) else 1


if __name__ == "__main__":
    sys.exit(main())
