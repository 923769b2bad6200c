"""Runs the demo: make a model, start a server and vLLM, send completions, read every sample back, check every row."""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import shlex
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from slotstream.client import Sample, connect
from slotstream.demo.arguments import add_demo_arguments
from slotstream.demo.processes import (
    POLL_S,
    SMALL_ENGINE,
    ProcessFailed,
    Running,
    complete,
    connector_options,
    free_port,
    start_server,
    start_vllm,
)
from slotstream.truth import model as truth_model

LAYERS = [1, 3, truth_model.LAYERS, "final"]
_PREFIX_TOKENS = 256
_STEP_TOKENS = 64


@dataclass(frozen=True, slots=True)
class _Checked:
    """One sample, and what was found out about it."""

    sample: Sample
    wrong_rows: int
    chunks: int
    durable_ms: float


def run_demo(arguments: argparse.Namespace) -> int:
    """Run the demo; returns the exit status. 0 only when every row of every sample was right."""
    console = Console()
    if not 1 <= arguments.requests <= 1000:
        print("slotstream demo: --requests must be from 1 to 1000", file=sys.stderr)
        return 2
    if arguments.keep is not None and arguments.keep.exists():
        print(f"slotstream demo: {arguments.keep} exists already", file=sys.stderr)
        return 1
    # A plain SIGTERM would leave the server and the engine behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    work = arguments.keep or Path(tempfile.mkdtemp(prefix="slotstream-demo-"))
    work.mkdir(parents=True, exist_ok=True)
    try:
        return _demo(work, arguments, console)
    except ProcessFailed as error:
        print(f"slotstream demo: {error}", file=sys.stderr)
        return 1
    finally:
        if arguments.keep is None:
            shutil.rmtree(work, ignore_errors=True)


def _demo(work: Path, arguments: argparse.Namespace, console: Console) -> int:
    console.print("[1/4] making a tiny model whose hidden states spell their token and layer")
    model = truth_model.make(work / "model")
    server_port, vllm_port = free_port(), free_port()
    address = f"127.0.0.1:{server_port}"
    console.print(f"[2/4] starting slotstream serve on {address} and vLLM on 127.0.0.1:{vllm_port} (about half a minute)")
    with (
        start_server(work / "data", work / "server.log", server_port) as server,
        start_vllm(
            model,
            work / "vllm.log",
            vllm_port,
            *SMALL_ENGINE,
            "--served-model-name=truth",
            *connector_options(server=address, layers=LAYERS),
        ) as engine,
    ):
        prompts = _prompts(arguments.requests, random.Random(arguments.seed))
        console.print(f"[3/4] sending {arguments.requests} completions, a third of them with a shared prefix")
        answers = _send(vllm_port, prompts)
        console.print("[4/4] reading every sample back and checking every row")
        with connect(address) as client:
            checked = [
                _check(client.get(answer["sample_id"], namespace=answer["namespace"]), prompt)
                for answer, prompt in zip(answers, prompts, strict=True)
            ]
        console.print(_table(checked))
        wrong = sum(c.wrong_rows for c in checked)
        rows = sum(len(c.sample.token_ids) for c in checked)
        console.print(f"{rows} rows of {len(checked)} samples checked, {wrong} wrong")
        if arguments.stay:
            # As it is: a line that rich breaks cannot be copied.
            print(_how_to_use(address, vllm_port, work, kept=arguments.keep is not None), flush=True)
            _stay(server, engine)
    return 1 if wrong else 0


def _how_to_use(address: str, vllm_port: int, work: Path, *, kept: bool) -> str:
    command = "slotstream" if shutil.which("slotstream") else f"{shlex.quote(sys.executable)} -m slotstream.cli.main"
    prompt = [truth_model.FIRST_TEXT_TOKEN + i for i in range(8)]
    params = {"slotstream": {"sample_id": "mine", "include_output_tokens": True}}
    body = json.dumps({"model": "truth", "prompt": prompt, "max_tokens": 8, "kv_transfer_params": params})
    read = f'from slotstream.client import connect; print(connect("{address}").get("mine"))'
    return f"""
The server on {address} and vLLM on 127.0.0.1:{vllm_port} stay up until Ctrl-C. In another shell:

  export SLOTSTREAM_SERVER={address} VLLM=http://127.0.0.1:{vllm_port}
  curl -s http://127.0.0.1:{vllm_port}/v1/completions -H 'Content-Type: application/json' -d {shlex.quote(body)}
  {command} get mine -o mine.safetensors
  {command} ls
  {command} status
  {shlex.quote(sys.executable)} -c {shlex.quote(read)}

Samples and logs lie below {work}{"" if kept else ", and go with Ctrl-C; --keep DIR keeps them"}.
"""


def _stay(*running: Running) -> None:
    """Returns at Ctrl-C. Raises ProcessFailed when one of them ends before."""
    with contextlib.suppress(KeyboardInterrupt):
        while True:
            for each in running:
                each.check_alive()
            time.sleep(POLL_S)


def _prompts(count: int, rng: random.Random) -> list[list[int]]:
    """Prompts of up to 900 tokens; every third begins with the same tokens."""

    def text(tokens: int) -> list[int]:
        first = truth_model.FIRST_TEXT_TOKEN
        return [rng.randrange(first, first + truth_model.TEXT_TOKENS) for _ in range(tokens)]

    prefix = text(_PREFIX_TOKENS)
    return [
        prefix + text(rng.randrange(1, 640)) if i % 3 == 0 else text(rng.randrange(2 * _STEP_TOKENS, 900)) for i in range(count)
    ]


def _send(port: int, prompts: Sequence[list[int]]) -> list[dict[str, Any]]:
    """Send the prompts, the first one ahead so that its prefix is cached for the others; returns what was said of each."""

    def one(number: int, prompt: list[int]) -> dict[str, Any]:
        params = {"slotstream": {"sample_id": f"demo-{number:02d}"}}
        body = {"model": "truth", "prompt": prompt, "max_tokens": 4, "temperature": 0, "kv_transfer_params": params}
        answer = complete(port, body)
        said: dict[str, Any] = answer["kv_transfer_params"]["slotstream"]
        if "error" in said:
            raise ProcessFailed(f"a capture failed: {said['error']['code']}: {said['error']['message']}")
        return said

    with ThreadPoolExecutor(8) as pool:
        return [one(0, prompts[0]), *pool.map(one, range(1, len(prompts)), prompts[1:])]


def _check(sample: Sample, prompt: list[int]) -> _Checked:
    if sample.token_ids.tolist() != prompt:
        wrong = max(len(prompt), len(sample.token_ids))
    else:
        wrong = len(truth_model.wrong_rows(sample.hidden_states, sample.token_ids, list(sample.layer_ids)))
    said = sample.metadata
    durable_ns = int(said["committed_unix_ns"]) - int(said["last_rows_unix_ns"])
    return _Checked(sample, wrong, int(said["chunks"]), durable_ns / 1e6)


def _table(checked: Sequence[_Checked]) -> Table:
    table = Table(title="samples, checked row by row")
    table.add_column("sample", overflow="fold")
    for name in ("tokens", "chunks", "bytes", "durable after", "rows right"):
        table.add_column(name, justify="right")
    for c in checked:
        tokens = len(c.sample.token_ids)
        table.add_row(
            c.sample.sample_id,
            str(tokens),
            str(c.chunks),
            f"{c.sample.hidden_states.nbytes:,}",
            f"{c.durable_ms:.1f} ms",
            "all" if c.wrong_rows == 0 else f"[red]{tokens - c.wrong_rows} of {tokens}[/red]",
        )
    table.caption = "durable after: from the last row's step to the disk"
    return table


def main(arguments: Sequence[str] | None = None) -> int:
    """`python -m slotstream.demo.run`."""
    parser = argparse.ArgumentParser(prog="slotstream demo", description=__doc__, allow_abbrev=False)
    add_demo_arguments(parser)
    began = time.monotonic()
    status = run_demo(parser.parse_args(arguments))
    print(f"took {time.monotonic() - began:.0f} s")
    return status


if __name__ == "__main__":
    sys.exit(main())
