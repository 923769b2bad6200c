"""The GPU matrix: every combination of runner, graphs, model kind, prefix caching and chunking, each in an engine of its own.

usage: python tests/gpu/matrix.py [--at-once 6] [--only SUBSTRING ...] [--missing] [--logs DIR] [--write PAGE]
Needs a GPU and vLLM; says so and exits 0 where there is none.
"""

from __future__ import annotations

import datetime
import itertools
import json
import os
import queue
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict
from pathlib import Path
from typing import Any

import engines
import page
from cell import SPECIALS, Cell

from slotstream.truth import model as truth_model

CELL_TIMEOUT_S = 420


def cells(only: Sequence[str]) -> list[Cell]:
    """The slowest kinds first, so that the last ones to run are short."""
    kinds: tuple[truth_model.Kind, ...] = ("gdn", "swa", "dense")
    plain = ((True, True), (False, False))  # Prefix caching and chunked prompts: both, or neither.
    every = [
        Cell("layers", runner, mode, kind, prefix, chunked)
        for kind, mode, runner, (prefix, chunked) in itertools.product(kinds, ("full", "piecewise", "eager"), (2, 1), plain)
    ]
    every += [Cell("layers", 2, "full", "mla", prefix, chunked) for prefix, chunked in plain]
    every += [
        Cell("layers", runner, "full", kinds[1 if special == "preempted" else 2], True, True, special)
        for special, runner in itertools.product((special for special in SPECIALS if special), (2, 1))
    ]
    both = (True, False)
    every += [
        Cell("extract_hidden_states", runner, mode, kind, prefix, chunked)
        for kind, runner, mode, prefix, chunked in itertools.product(kinds, (2, 1), ("graphs", "eager"), both, both)
    ]
    every += [
        Cell("extract_hidden_states", runner, mode, "dense", True, True, "sleep1")
        for runner, mode in itertools.product((2, 1), ("graphs", "eager"))
    ]
    return [cell for cell in every if engines.is_chosen(cell.name, only)]


def visible_gpus() -> list[str]:
    """The GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    import torch

    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return named.split(",") if named else [str(number) for number in range(torch.cuda.device_count())]


def run_cell(cell: Cell, model: Path, server: str, logs: Path, free: queue.SimpleQueue[str]) -> tuple[Cell, dict[str, Any]]:
    """`free`: a GPU as often as one more engine may share it; one is taken while the cell runs."""
    gpu = free.get()
    try:
        return cell, _run_cell(cell, model, server, logs, gpu)
    finally:
        free.put(gpu)


def _run_cell(cell: Cell, model: Path, server: str, logs: Path, gpu: str) -> dict[str, Any]:
    log = logs / f"{cell.name}.log"
    script = str(Path(__file__).with_name("cell.py"))
    asked = (json.dumps(asdict(cell)), str(model), server)
    how: dict[str, Any] = {"log": log, "runner": cell.runner, "timeout_s": CELL_TIMEOUT_S, "CUDA_VISIBLE_DEVICES": gpu}
    engines.run_script(script, *asked, **how)
    found = engines.found_in(log, {**asdict(cell), "name": cell.name})
    verdict = "ok " if engines.is_green(found) else "BAD"
    print(f"{verdict} {found['name']}: {found['rows']} rows, {found['wrong']} wrong, {found['problems']}", flush=True)
    return found


def key_of(cell: Cell) -> tuple[str, ...]:
    """What tells its row of the table from others: the first columns."""
    prompts = ("chunked" if cell.chunked else "whole") + (f", {cell.special}" if cell.special else "")
    return cell.source, cell.kind, f"V{cell.runner}", cell.mode, "on" if cell.prefix_caching else "off", prompts


def row_of(found: dict[str, Any], device: str) -> list[str]:
    """The other columns."""
    verdict = "right" if engines.is_green(found) else "; ".join(found["problems"]) or "wrong rows"
    if found.get("explained"):
        verdict += f", {found['explained']} samples explained"
    run = f"{datetime.date.today().isoformat()}, {device}, vLLM {found.get('vllm', '?')}, torch {found.get('torch', '?')}"
    rows = [f"{found['rows']:,}", f"{found.get('output_rows', 0):,}", str(found["wrong"])]
    return [found.get("graphs", "?"), *rows, verdict.replace("|", "/"), run]


def rows_in(text: str) -> dict[tuple[str, ...], list[str]]:
    """The rows of a table that an earlier run wrote."""
    return page.rows_in(text, keys=6)


_HEAD = """\
# Compatibility

`python tests/gpu/matrix.py --write docs/records/compatibility.md` writes this page but for its last part. A run of some
engines leaves the rows of the others. Each engine runs the same prompts twice; half of the requests capture output rows too.
Every row of every sample is compared with the truth model's. *graphs* is the CUDA graph mode that vLLM resolved.

| model | what it is |
| --- | --- |
| dense | a Llama: one KV-cache group |
| swa | a Llama with sliding windows beside full attention: a hybrid |
| mla | a DeepSeek-V2 shape: multi-head latent attention |
| gdn | a Qwen3-Next with gated delta nets beside full attention: a hybrid |

With `layers` three layers and the last norm's output (`final`) are captured. The dense engines and the eager ones of swa add
layer 0, where vLLM would hand out memory that it writes again. A captured request computes all its tokens,
also those that the prefix cache holds. *ngram* drafts three tokens a step. *preempted* has room for two long requests.
*tiny pool* has 12 row pages, so that some samples fail with `ROW_POOL_FULL`. *aborts* ends requests in the middle and captures
windows of prompts. *sleep1* and *sleep2* sleep between the two passes.

With `extract_hidden_states`, model runner V1 needs `--no-async-scheduling`. On a GPU the connector refuses to start without
it, because vLLM 0.33 then loses track of the text after an accepted draft token
([vLLM issue 56417](https://github.com/vllm-project/vllm/issues/56417)). `tests/gpu/decode.py` shows it, with vLLM's own
example connector too. `tests/gpu/hybrid.py` compares rows of a gated-delta-net hybrid with transformers'.
`tests/gpu/multi.py` compares slotstream's rows with those that `ExampleHiddenStatesConnector` wrote in the same engine.

| source | model | runner | mode | prefix caching | prompts | graphs | rows | output rows | wrong | verdict | run |
| --- | --- | --- | --- | --- | --- | --- | ---: | ---: | ---: | --- | --- |
"""


def as_markdown(rows: page.Rows) -> str:
    """docs/records/compatibility.md, up to the part about several GPUs."""
    return page.table(_HEAD, rows, [key_of(cell) for cell in cells([])])


def main() -> int:
    parser = engines.command_line(__doc__, only="cells", at_once=6)
    parser.add_argument("--missing", action="store_true", help="only cells that the table of --write has no row of")
    parser.add_argument("--write", type=Path, default=None, help="write the table here, over the rows that are run")
    arguments = parser.parse_args()
    if not engines.has_gpus():
        return 0
    import torch

    one_gpu, several = page.read(arguments.write)
    table = rows_in(one_gpu)
    chosen = [cell for cell in cells(arguments.only) if not (arguments.missing and key_of(cell) in table)]
    free: queue.SimpleQueue[str] = queue.SimpleQueue()
    places = visible_gpus() * arguments.at_once
    for gpu in places:
        free.put(gpu)
    green = True
    with engines.place(arguments.logs) as here:
        models = {kind: truth_model.make(here.work / kind, kind) for kind in {c.kind for c in chosen}}
        with ThreadPoolExecutor(len(places)) as pool:
            runs = [pool.submit(run_cell, c, models[c.kind], here.server, here.logs, free) for c in chosen]
            try:
                for run in as_completed(runs):
                    cell, found = run.result()
                    green &= engines.is_green(found)
                    table[key_of(cell)] = row_of(found, torch.cuda.get_device_name())
                    if arguments.write is not None:  # Each time: a run that is cut short leaves what it found.
                        arguments.write.write_text(page.joined(as_markdown(table), several))
            except KeyboardInterrupt:
                pool.shutdown(cancel_futures=True)  # The pool would go on with those that wait.
                raise
    return 0 if green else 1


if __name__ == "__main__":
    sys.exit(main())
