"""Is the vLLM of this Python as slotstream knows it? Asked before there is a model; nothing of vLLM is changed.

    python -m slotstream.connector.seam_check     prints one line of JSON, what `check` returns

`slotstream doctor` runs it in a process of its own, for an import of vLLM may print, and may end a process.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from slotstream.wire.errors import ConfigError

_KNOWN = ("0.32", "0.33")


def check() -> dict[str, Any]:
    """`version` of vLLM (None: not installed); `known`: it was seen before; `problems`: what is wrong, a sentence each."""
    if importlib.util.find_spec("vllm") is None:
        return {"version": None, "known": False, "problems": []}
    try:
        from slotstream.connector.vllm_config import vllm_version

        version = vllm_version()
    except Exception as error:
        return {"version": None, "known": False, "problems": [f"vLLM cannot be imported: {_sentence(error)}"]}
    problems = list(dict.fromkeys(_problems()))  # One that stands behind several is said once.
    return {"version": version, "known": ".".join(version.split(".")[:2]) in _KNOWN, "problems": problems}


def _problems() -> Iterator[str]:
    for ask in (_connector, _workers, _layers, _runner, _sessions, _caller_ids):
        try:
            ask()
        except ConfigError as error:
            yield str(error)
        except Exception as error:
            yield f"slotstream cannot be used with this vLLM: {_sentence(error)}"


def _connector() -> None:
    from slotstream.connector import SlotStreamConnector

    assert SlotStreamConnector is not None


def _workers() -> None:
    from slotstream.connector.reading.vllm_checks import WORKERS, find, missing

    if not callable(getattr(find(WORKERS, "WorkerWrapperBase", extraction=False), "init_device", None)):
        raise missing("WorkerWrapperBase.init_device", extraction=False)


def _layers() -> None:
    from slotstream.connector.reading.vllm_checks import check_needed

    capturing: Any = SimpleNamespace(residual_layer_ids=(1,))  # All that is looked at of a configuration.
    check_needed(capturing)


def _runner() -> None:
    from slotstream.connector.reading.vllm_checks import find, missing

    runner = find("vllm.v1.worker.gpu_model_runner", "GPUModelRunner")
    for name in ("load_model", "initialize_kv_cache"):
        if not callable(getattr(runner, name, None)):
            raise missing(f"GPUModelRunner.{name}")


def _sessions() -> None:
    from slotstream.connector.reading.vllm_checks import check_sessions

    check_sessions()


def _caller_ids() -> None:
    from slotstream.connector.reading.caller_ids import check_requests

    check_requests()


def _sentence(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:500]


def main() -> int:
    told = check()
    print(json.dumps(told), flush=True)
    return 1 if told["problems"] else 0


if __name__ == "__main__":
    sys.exit(main())
