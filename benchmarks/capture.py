"""What `slotstream capture` costs a data set: the same requests sent by the command and without any capture, in turns.

    python benchmarks/capture.py [--rounds N] [--json FILE]

Two engines share the GPU, one without a connector and one that captures, and take turns, forwards and backwards. A turn is a
whole process: its start, the listing of what is stored and the wait for the last commit count. The turn without capture sends
the same bodies by the command's own HTTP client, from as many threads. Needs vLLM and a GPU (or `--shape tiny`, on a CPU).
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from gpu import make_model
from machine import machine, plain, progress
from online import make_tokenizer
from online_engine import Contender, Setting, start

from slotstream.capture.engine import Engine

_BASE = "none"
_VOCABULARY = 2000  # Less than any shape's.


def write_prompts(file: Path, lines: int, tokens: int, seed: int) -> int:
    """A file of prompts of `tokens` token ids on average, half to one and a half; how many they are in all."""
    rng, total = random.Random(seed), 0
    with file.open("w") as out:
        for _ in range(lines):
            ids = [rng.randrange(10, _VOCABULARY) for _ in range(rng.randint(tokens // 2, tokens * 3 // 2))]
            total += len(ids)
            out.write(json.dumps({"token_ids": ids}) + "\n")
    return total


def send_only(url: str, file: Path, max_tokens: int, jobs: int) -> None:
    """The requests of `slotstream capture`, without the connector's parameters."""
    engine = Engine(url)
    engine.open()

    def ask(line: str) -> None:
        engine.complete({"prompt": json.loads(line)["token_ids"], "max_tokens": max_tokens, "temperature": 0.0})

    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(ask, file.read_text().splitlines()))


def take_turn(contender: Contender, file: Path, output: int, options: argparse.Namespace) -> float:
    """Seconds of one turn. Raises CalledProcessError."""
    url = f"http://127.0.0.1:{contender.port}"
    if contender.server is None:
        command = [sys.executable, __file__, "--send", url, str(file), str(output), str(options.jobs)]
    else:
        layers = ",".join(map(str, options.layers))
        command = [sys.executable, "-m", "slotstream.cli.main", "capture", str(file), "--url", url, "--to", contender.server]
        command += ["--layers", layers, "--max-tokens", str(output), "-j", str(options.jobs)]
        command += ["--output-rows"] if output > 1 else []
    began = time.monotonic()
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    took_s = time.monotonic() - began
    if done.returncode != 0:
        raise subprocess.CalledProcessError(done.returncode, command, done.stdout)
    contender.forget_samples()
    return took_s


def run(options: argparse.Namespace, figures: dict[str, Any], work: Path, data: Path) -> None:
    model = work / "model"
    make_model(model, options.shape)
    make_tokenizer(model)
    cache = round(options.kv_cache_gib * 2**30)
    setting = Setting(model, options.shape == "tiny", options.layers, cache, 2048, work, data, None)
    with ExitStack() as stack:
        contenders = start([_BASE, *options.contenders], setting, stack)
        for contender in contenders.values():
            contender.wait_ready()
        for number in range(options.rounds + 1):  # The first warms up.
            order = list(contenders)[:: 1 if number % 2 else -1]
            for output in options.output_tokens:
                file = work / f"{number}-{output}.jsonl"
                tokens = write_prompts(file, options.lines, options.prompt_tokens, 1000 * number + output)
                for name in order:
                    took_s = take_turn(contenders[name], file, output, options)
                    turn = {"round": number, "output": output, "contender": name, "tokens": tokens, "took_s": took_s}
                    progress(f"{turn}\n")
                    if number:
                        figures["turns"].append(turn)


def report(figures: dict[str, Any]) -> str:
    """A line a contender and length of output: its speed as the ratio to no capture, round by round."""
    took = {(t["output"], t["contender"], t["round"]): t["took_s"] for t in figures["turns"]}
    lines = []
    for output, name in sorted({key[:2] for key in took}):
        if name != _BASE:
            rounds = sorted(number for o, c, number in took if (o, c) == (output, name))
            ratios = [took[output, _BASE, number] / took[output, name, number] for number in rounds]
            each = ", ".join(f"{ratio:.3f}" for ratio in ratios)
            lines.append(f"{output} out, {name}: {statistics.median(ratios):.3f} of no capture ({each})")
    return "\n".join(lines)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--shape", choices=("8b", "small", "tiny"), default="8b", help="the model (default: %(default)s, Qwen3-8B's)")
    add("--layers", type=_numbers, default=(2, 18, 33, 36), metavar="IDS", help="captured layer ids (default: 2,18,33,36)")
    add("--contenders", type=lambda t: t.split(","), default=["nixl"], metavar="NAMES", help="of nixl, grpc (default: nixl)")
    add("--lines", type=int, default=1000, metavar="N", help="prompts a turn (default: %(default)s)")
    add("--prompt-tokens", type=int, default=512, metavar="N", help="mean, half to one and a half (default: %(default)s)")
    add("--output-tokens", type=_numbers, default=(1, 64), metavar="NUMBERS", help="of each answer (default: 1,64)")
    add("--jobs", type=int, default=128, metavar="N", help="requests at a time (default: %(default)s)")
    add("--rounds", type=int, default=5, metavar="N", help="beside one that warms up (default: %(default)s)")
    add("--kv-cache-gib", type=float, default=14, metavar="N", help="KV cache of each engine (default: %(default)s)")
    add("--json", type=Path, metavar="FILE", help="write every turn there")
    return parser.parse_args(arguments)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(","))


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    figures: dict[str, Any] = {"benchmark": "capture", "machine": machine(), "options": plain(options), "turns": []}
    with tempfile.TemporaryDirectory() as work, tempfile.TemporaryDirectory(dir="/dev/shm") as data:
        run(options, figures, Path(work), Path(data))
    if options.json is not None:
        options.json.write_text(json.dumps(figures) + "\n")
    print(report(figures))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--send"]:
        send_only(sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5]))
    else:
        main()
