"""Several engines in one Python process, as offline inference can have them; vLLM's engine cores run in it too.

Run as a script it reads what to do from the file that it is given, and prints one line of JSON.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slotstream.demo.processes import SMALL_ENGINE_ENV
from support.offline import ENGINE, cache_root

_SAID = "SAID "
_UNCAPTURED = {"kv_transfer_params": {"slotstream": {"capture": False}}}


def run(work: Path, model: Path, engines: Sequence[dict[str, Any]], turns: Sequence[dict[str, Any]], **more: Any) -> Any:
    """What vLLM answered in each of `turns`: `{"engine": number, "prompt": [...], "slotstream": {...}}`, or `{"end": number}`.

    Engines are made in the order of `engines`, vLLM's arguments, at the turn that first names them. `more`: see `_main`.
    Returns [tokens, what our connector said or None] a turn, with None for an end; and all that vLLM logged.
    """
    work.mkdir()
    asked = {"engines": [{"model": str(model), **ENGINE, **one} for one in engines], "turns": list(turns), **more}
    (work / "asked.json").write_text(json.dumps(asked))
    tests = str(Path(__file__).resolve().parents[1])
    environment = {
        **os.environ,
        **SMALL_ENGINE_ENV,
        "PYTHONPATH": os.pathsep.join([tests, *filter(None, [os.environ.get("PYTHONPATH")])]),
        "VLLM_CACHE_ROOT": str(cache_root(work)),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    }
    command = [sys.executable, "-m", "support.two_engines", str(work / "asked.json")]
    ended = subprocess.run(command, cwd=work, env=environment, capture_output=True, text=True, timeout=600, check=False)
    log = ended.stdout + ended.stderr
    (work / "vllm.log").write_text(log)
    said = [line for line in ended.stdout.splitlines() if line.startswith(_SAID)]
    return json.loads(said[0][len(_SAID) :]) if said else None, log


def count_layers() -> list[str]:
    """The layers that call the connector from now on, in the order of the calls."""
    from slotstream.connector.facade import SlotStreamConnector

    called: list[str] = []
    inner = SlotStreamConnector.save_kv_layer

    def save_kv_layer(self: SlotStreamConnector, layer_name: str, *args: Any) -> None:
        called.append(layer_name)
        inner(self, layer_name, *args)

    setattr(SlotStreamConnector, "save_kv_layer", save_kv_layer)  # noqa: B010  (mypy: a method is not assigned)
    return called


def _main() -> None:
    """With `first_only`, the check for several slotstreams in one configuration sees the first of them only.

    With `count_layers`, each turn says third how often a layer of the model called the connector.
    """
    asked = json.loads(Path(sys.argv[1]).read_text())
    if asked.get("first_only"):
        from slotstream.connector import plugin

        find = plugin._slotstreams
        plugin._slotstreams = lambda vllm_config: iter(list(find(vllm_config))[:1])
    from vllm import LLM, SamplingParams

    called = count_layers() if asked.get("count_layers") else []
    engines: dict[int, LLM] = {}
    said: list[Any] = []
    for turn in asked["turns"]:
        if (ended := turn.get("end")) is not None:
            engines.pop(ended).llm_engine.engine_core.shutdown()
            said.append(None)
            continue
        number = turn["engine"]
        if number not in engines:
            engines[number] = LLM(**asked["engines"][number])
        llm = engines[number]
        extra = {"kv_transfer_params": {"slotstream": turn["slotstream"]}}
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, extra_args=extra)
        called.clear()
        (answer,) = llm.generate({"prompt_token_ids": turn["prompt"]}, params, use_tqdm=False)
        counted = [len(called)] if asked.get("count_layers") else []
        said.append([list(answer.outputs[0].token_ids), (answer.kv_transfer_params or {}).get("slotstream"), *counted])
        # The last rows of an output are read one step after it ended: an engine core in a process of its own makes that step.
        llm.generate({"prompt_token_ids": [2]}, SamplingParams(max_tokens=1, extra_args=_UNCAPTURED), use_tqdm=False)
    print(_SAID + json.dumps(said), flush=True)
    for llm in engines.values():
        llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    _main()
