"""vLLM's own benchmark client, imported once and kept in this process: what it measures of one load."""

from __future__ import annotations

import contextlib
import functools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

GOOD_TTFT_MS, GOOD_ITL_MS = 200.0, 30.0


@dataclass(frozen=True, slots=True)
class Load:
    """Random prompts: `at_once` of them in flight (closed loop), or `rate` a second by Poisson (open loop)."""

    name: str
    prompts: int
    tokens: int
    output: int
    spread: float = 0.5
    """Lengths are uniform, from 1 - spread of these to 1 + spread."""
    at_once: int | None = None
    rate: float | None = None

    @property
    def is_of_hooks(self) -> bool:
        """Whether our hooks are what is measured, and not what people wait for."""
        return self.name.startswith("hooks-")


class LoadClient:
    """Sends loads to one server after the other. Importing vLLM takes seconds, and this does so once."""

    def __init__(self, model: Path, log: Path) -> None:
        from vllm.benchmarks import serve
        from vllm.utils.argparse_utils import FlexibleArgumentParser

        # The client would read the tokenizer for each load, and make the prompts again for each engine.
        serve.get_tokenizer = functools.cache(serve.get_tokenizer)
        serve.get_samples = _kept(serve.get_samples)
        self._main = serve.main
        self._parser = FlexibleArgumentParser()
        serve.add_cli_args(self._parser)
        self._model, self._log = model, log

    def run(self, port: int, load: Load, seed: int) -> dict[str, Any]:
        """Times in ms; the same seed makes the same prompts, lengths and arrivals."""
        chosen = {
            "base-url": f"http://127.0.0.1:{port}",
            "model": self._model,
            "dataset-name": "random",
            "random-input-len": load.tokens,
            "random-output-len": load.output,
            "random-range-ratio": load.spread,
            "num-prompts": load.prompts,
            "request-rate": load.rate or "inf",
            "seed": seed,
            "temperature": 0,
            "percentile-metrics": "ttft,itl",
            **({"max-concurrency": load.at_once} if load.at_once else {}),
        }
        words = [word for name, value in chosen.items() for word in (f"--{name}", str(value))]
        arguments = self._parser.parse_args([*words, "--disable-tqdm", "--save-detailed"])
        with self._log.open("a") as log, contextlib.redirect_stdout(log):
            found = self._main(arguments)
        return figures(found)


def _kept(get_samples: Callable[..., Any]) -> Callable[..., Any]:
    """`get_samples`, which makes the requests of a load once. Arrivals come from the same seed either way."""
    kept: dict[str, Any] = {}

    def get(args: Any, tokenizer: Any) -> Any:
        named = (args.seed, args.num_prompts, args.random_input_len, args.random_output_len, args.random_range_ratio)
        if str(named) not in kept:
            kept.clear()  # Engines take turns with one load.
            kept[str(named)] = get_samples(args, tokenizer)
        random.seed(args.seed)
        np.random.seed(args.seed)
        return kept[str(named)]

    return get


def figures(found: dict[str, Any]) -> dict[str, Any]:
    """What the client's lists say of a load: tokens a second, and of the requests that succeeded the times in ms."""
    requests = [
        (first * 1e3, [gap * 1e3 for gap in gaps], (first + sum(gaps)) * 1e3)
        for first, gaps, error in zip(found["ttfts"], found["itls"], found["errors"], strict=True)
        if not error
    ]
    gaps = [gap for _, of_request, _ in requests for gap in of_request]
    good = [
        first <= GOOD_TTFT_MS and sum(of_request) <= GOOD_ITL_MS * max(1, len(of_request)) for first, of_request, _ in requests
    ]
    return {
        "seconds": found["duration"],
        "requests": len(found["ttfts"]),
        "failed": len(found["ttfts"]) - len(requests),
        "output_tokens": found["total_output_tokens"],
        "tokens_per_s": found["total_output_tokens"] / found["duration"],
        "ttft_ms": spread([first for first, _, _ in requests]),
        "itl_ms": spread(gaps),
        "e2e_ms": spread([whole for _, _, whole in requests]),
        "goodput": sum(good) / len(found["ttfts"]),
    }


def spread(values: Sequence[float]) -> dict[str, float]:
    """Mean and percentiles, between the two nearest values."""
    if not values:
        return {}
    ordered = sorted(values)

    def cut(part: float) -> float:
        at = part * (len(ordered) - 1)
        low = int(at)
        high = min(low + 1, len(ordered) - 1)
        return ordered[low] + (ordered[high] - ordered[low]) * (at - low)

    return {"mean": sum(ordered) / len(ordered), "p50": cut(0.5), "p90": cut(0.9), "p99": cut(0.99)}
