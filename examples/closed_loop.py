"""The closed loop: live traffic, captured beside the draft in use, trains the next draft. Two generations, on two cores.

    pip install speculators hs-connectors datasets
    python examples/closed_loop.py --work closed-loop

A small Llama is trained first, once for each work folder. It then serves prompts without a draft, and slotstream captures them:
these rows train generation 1. Generation 1 serves more prompts, and what is captured beside it trains generation 2. What counts
is how many of a draft's tokens the model accepts, by their position, on prompts that nothing was trained on. The text must stay
the same, but for near ties: places where two tokens are as good, and rounding decides.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from small_llama import docstrings, trained

from slotstream.client import connect
from slotstream.demo.processes import SMALL_ENGINE, complete, connector_options, free_port, start_server, start_vllm

DRAFT_LAYERS, DRAFT_TOKENS = (1, 2, 3), 3
PROMPT_CHARS, ANSWER_TOKENS, AT_ONCE = 80, 64, 8
NEAR = 0.2  # Of two logits: from 8 to 16, bf16 knows one in 0.0625 only.
BEFORE = "no draft"
_OWN = Path(__file__).parent
_ONE_THREAD = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}


@dataclass(frozen=True)
class Answer:
    prompt: list[int]
    tokens: list[int]


@dataclass(frozen=True)
class Acceptance:
    """accepted: of so many drafts, how many had their token at each position accepted."""

    drafts: int
    accepted: tuple[int, ...]

    @property
    def first(self) -> float:
        """The share at the first position."""
        return self.accepted[0] / max(self.drafts, 1)

    def __str__(self) -> str:
        return "  ".join(f"{count / max(self.drafts, 1):8.4f}" for count in self.accepted) + f"  {self.drafts:8}"


@contextlib.contextmanager
def engine(run: Path, name: str, model: Path, address: str, asked: Path, draft: Path | None) -> Iterator[int]:
    """The port of a vLLM that serves with `draft`, and captures on demand what the draft `asked` for is trained on."""
    options = [*SMALL_ENGINE, "--max-num-batched-tokens=256", "--served-model-name=model"]
    if draft is not None:
        speculative = {"method": "eagle3", "model": str(draft), "num_speculative_tokens": DRAFT_TOKENS}
        options += ["--speculative-config", json.dumps(speculative)]
    options += connector_options(server=address, layers={"draft": str(asked)}, capture=False)
    port = free_port()
    with start_vllm(model, run / f"{name}.vllm.log", port, *options, env=_ONE_THREAD):
        yield port


def answers(port: int, prompts: Sequence[str], captured_as: str = "") -> list[Answer]:
    """Greedy answers, several at a time. `captured_as`: the tag of their samples, which hold what was answered too."""

    def one(number: int) -> Answer:
        params: dict[str, Any] = {}
        if captured_as:
            params = {"capture": True, "include_output_tokens": True, "loss_mask": "output"}
            params |= {"sample_id": f"{captured_as}-{number}".replace(" ", "-"), "tags": {"beside": captured_as}}
        body = {"model": "model", "prompt": prompts[number], "max_tokens": ANSWER_TOKENS, "temperature": 0, "ignore_eos": True}
        said = complete(port, {**body, "return_token_ids": True, "kv_transfer_params": {"slotstream": params}})
        return Answer(said["choices"][0]["prompt_token_ids"], said["choices"][0]["token_ids"])

    with ThreadPoolExecutor(AT_ONCE) as pool:
        return list(pool.map(one, range(len(prompts))))


def counted(port: int) -> Acceptance:
    """What vLLM has counted since its start."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30.0) as page:
        text = page.read().decode()
    drafts = re.findall(r"^vllm:spec_decode_num_drafts_total\{.*\} (\S+)$", text, re.M)
    by_position = re.findall(
        r"^vllm:spec_decode_num_accepted_tokens_per_pos_total\{.*position=\"(\d+)\".*\} (\S+)$", text, re.M
    )
    found = {int(position): int(float(count)) for position, count in by_position}
    return Acceptance(sum(int(float(count)) for count in drafts), tuple(found[position] for position in sorted(found)))


def train(run: Path, name: str, model: Path, start: Path | None, address: str, beside: str, epochs: int) -> Path:
    """A draft that goes on from `start` with the rows that were captured beside `beside`; None: an untrained one."""
    out, data = run / name, run / f"{name}-data"
    words = ["--verifier-name-or-path", str(model), "--save-path", str(out)]
    if start is None:
        words += ["--num-layers", "1", "--full-attention-indices", "0", "--dry-run"]
        words += ["--target-layer-ids", *map(str, DRAFT_LAYERS)]
    else:
        export = ["export", "--format", "speculators", "--index-only", "--to", str(data), "--tag", f"beside={beside}"]
        _call(run / f"{name}.log", "-m", "slotstream.cli.main", *export, "--server", address)
        words += ["--from-pretrained", str(start), "--data-path", str(data), "--slotstream-server", address]
        words += ["--on-missing", "raise", "--train-data-ratio", "0.95", "--total-seq-len", "256", "--epochs", str(epochs)]
    _call(run / f"{name}.log", str(_OWN / "speculators_on_cpu.py"), "train", *words)
    made = out if start is None else out / str(epochs - 1)
    if not (made / "config.json").exists():  # speculators ends with 0 also when it is told to end.
        raise SystemExit(f"no draft came out of the training of {name}: {run / name}.log says why")
    return made


def _call(log: Path, *words: str) -> None:
    with log.open("ab") as written:
        done = subprocess.run(
            [sys.executable, *words], stdout=written, stderr=subprocess.STDOUT, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
    if done.returncode:
        raise SystemExit(f"{' '.join(words[:2])} ended with {done.returncode}: {log} says why")


def near_ties(model: Path, wanted: Sequence[Answer], found: Sequence[Answer]) -> list[float]:
    """How far apart two logits are where an answer parts from the one wanted. Ends the command where that is no near tie."""
    from transformers import LlamaForCausalLM

    judge: Any = LlamaForCausalLM.from_pretrained(model, dtype=torch.float32)
    gaps = []
    for number, (one, other) in enumerate(zip(wanted, found, strict=True)):
        at = next((at for at, (a, b) in enumerate(zip(one.tokens, other.tokens, strict=True)) if a != b), None)
        if at is None:
            continue
        with torch.no_grad():
            logits = judge(torch.tensor([one.prompt + one.tokens[:at]])).logits[0, -1]
        gap = abs(float(logits[one.tokens[at]] - logits[other.tokens[at]]))
        if gap > NEAR:
            raise SystemExit(f"answer {number} is another one from its token {at} on, which is no near tie ({gap:.3f})")
        gaps.append(gap)
    return gaps


def loop(work: Path, traffic: int, tests: int, steps: int, epochs: int) -> list[Acceptance]:
    """Of the untrained draft and of both generations."""
    texts, held_out = docstrings()
    print("training a small Llama, unless it is there", flush=True)
    model = trained(work / "model", texts, steps, threads=os.cpu_count() or 1)
    run = work / "run"
    shutil.rmtree(run, ignore_errors=True)
    run.mkdir()
    prompts = [text[:PROMPT_CHARS] for text in texts[: 2 * traffic]]
    unseen = [text[:PROMPT_CHARS] for text in held_out[:tests]]
    draft = untrained = train(run, "untrained", model, None, "", "", 0)
    port = free_port()
    address = f"127.0.0.1:{port}"
    begun = time.monotonic()

    def say(what: str) -> None:
        print(f"{time.monotonic() - begun:5.0f} s  {what}", flush=True)

    rows: list[tuple[str, Acceptance, list[float]]] = []
    with start_server(run / "data", run / "server.log", port), connect(address) as client:

        def capture(vllm: int, part: Sequence[str], beside: str) -> None:
            answers(vllm, part, beside)
            for number in range(len(part)):  # A sample is stored a moment after its answer.
                client.read(f"{beside}-{number}".replace(" ", "-"), stop=0, wait_s=60.0).close()
            say(f"{len(part)} answers captured beside {beside}")

        with engine(run, "no-draft", model, address, untrained, None) as vllm:
            wanted = answers(vllm, unseen)
            capture(vllm, prompts[:traffic], BEFORE)
        for generation, beside in enumerate((None, BEFORE, "generation 1")):
            name = f"generation {generation}" if generation else "untrained"
            if beside is not None:
                draft = train(run, name.replace(" ", "-"), model, draft, address, beside, epochs)
                say(f"{name} trained on what was captured beside {beside}")
            with engine(run, name.replace(" ", "-"), model, address, untrained, draft) as vllm:
                found, acceptance = answers(vllm, unseen), counted(vllm)
                say(f"{name} asked {len(unseen)} prompts that nothing was trained on")
                if generation == 1:
                    capture(vllm, prompts[traffic:], name)
            rows.append((name, acceptance, near_ties(model, wanted, found)))
    positions = "  ".join(f"{f'at {position + 1}':>8}" for position in range(DRAFT_TOKENS))
    print(f"\naccepted, of a draft's tokens by position\n{'':14}{positions}  {'drafts':>8}")
    for name, acceptance, gaps in rows:
        ties = f"{len(gaps)} near ties" + (f" (logits {max(gaps):.3f} apart at most)" if gaps else "")
        print(f"{name:14}{acceptance}  text as without a draft, but for {ties} in {len(unseen)} answers")
    return [acceptance for _, acceptance, _ in rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder for the Llama, which is kept, and all else")
    parser.add_argument("--traffic", type=int, default=400, help="prompts captured for each generation (default: %(default)s)")
    parser.add_argument("--tests", type=int, default=60, help="prompts that are only asked (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=1500, help="of the Llama's training (default: %(default)s)")
    parser.add_argument("--epochs", type=int, default=2, help="of each draft's training (default: %(default)s)")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # Else vLLM and the server would stay.
    arguments.work.mkdir(parents=True, exist_ok=True)
    work: Path = arguments.work.resolve()
    untrained, first, second = loop(work, arguments.traffic, arguments.tests, arguments.steps, arguments.epochs)
    if untrained.first >= 0.05 or first.first < 0.4 or second.first < first.first - 0.03:
        raise SystemExit("the loop is not closed: a draft should be of use once it is trained, and not get worse")


if __name__ == "__main__":
    main()
