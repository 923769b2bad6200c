"""The row pool is part of what vLLM sees when it measures how much memory is left for the KV cache."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.worker_rig import row_kind

from slotstream.connector.reading import vllm_seams
from slotstream.connector.reading.row_pages import RowPages

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]


def test_a_gpus_profiling_counts_what_the_pool_was_billed_as() -> None:
    """Where vLLM on a GPU asks for the size of the weights, it gets the pool's too."""
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner as V2
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner as V1
    from vllm.v1.worker.gpu_worker import Worker

    pages = RowPages(64, row_kind(2), 4, torch.bfloat16, torch.device("cpu"))
    runner: Any = SimpleNamespace(model_memory_usage=1000)
    vllm_config: Any = SimpleNamespace(cache_config=SimpleNamespace(kv_cache_memory_bytes=None))
    vllm_seams.bill(runner, vllm_config, pages)
    assert runner.model_memory_usage == 1000 + pages.nbytes
    assert pages.nbytes >= 64 * 2 * 4 * 2
    assert "self.model_memory_usage = " in inspect.getsource(V1.load_model)
    assert "self.model_memory_usage = " in inspect.getsource(V2.load_model)
    assert "weights_memory=int(self.model_runner.model_memory_usage)" in inspect.getsource(Worker.determine_available_memory)
