"""`slotstream doctor` with the vLLM that is installed: all is well, and each seam that is missing is named."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from support.server import ServerProcess, run_cli

from slotstream.connector.reading import vllm_checks
from slotstream.wire import nixl

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]
_WITHOUT_SEAMS = Path(__file__).parents[1] / "support" / "without_seams"
_ORDER = ["port", "tls", "token", "versions", "clock", "disk", "nixl", "vllm"]


def _asked(server: ServerProcess, **environment: str) -> tuple[int, list[dict[str, Any]]]:
    done = run_cli("doctor", "--server", server.address, "--json", environment=environment)
    assert "Traceback" not in done.stderr
    return done.returncode, [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.skipif(not nixl.is_installed(), reason="NIXL is not installed")
def test_all_is_well(server: ServerProcess) -> None:
    code, findings = _asked(server)
    assert [(one["check"], one["result"]) for one in findings] == [(name, "ok") for name in _ORDER]
    assert code == 0


_SEAMS = [
    "vllm.v1.worker.worker_base:WorkerWrapperBase.init_device",
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner.initialize_kv_cache",
    "vllm.v1.request:Request.from_engine_core_request",
    "vllm.model_executor.models.interfaces:EagleModelMixin._maybe_add_hidden_state",
    "{}:{}".format(*vllm_checks.NEEDED[0]),
]


@pytest.mark.parametrize("seam", [_SEAMS[0], *(pytest.param(seam, marks=pytest.mark.extended) for seam in _SEAMS[1:])])
def test_a_seam_that_is_missing_is_named_alone(server: ServerProcess, seam: str) -> None:
    paths = ":".join((str(_WITHOUT_SEAMS), *filter(None, sys.path)))
    code, findings = _asked(server, SLOTSTREAM_TEST_MISSING=seam, PYTHONPATH=paths)
    assert code == 1
    (found,) = [one for one in findings if one["result"] == "fail"]
    assert found["check"] == "vllm"
    assert seam.rpartition(".")[2].rpartition(":")[2] in found["message"]
    assert "use vLLM 0.32 or 0.33" in found["todo"]
