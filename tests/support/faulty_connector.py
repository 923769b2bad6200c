"""A SlotStreamConnector whose halves raise: loaded by vLLM itself, as `FaultyConnector` of this module.

SLOTSTREAM_TEST_FAULTS holds {"half.method": probability}; every call of such a method raises with that probability, half of
the time before the method ran and half of the time after it.
"""

from __future__ import annotations

import json
import os
import random
from typing import Any

import torch

from slotstream.connector.facade import SlotStreamConnector

FAULTS: dict[str, float] = json.loads(os.environ.get("SLOTSTREAM_TEST_FAULTS", "{}"))
HOOKS = (
    "scheduler.on_alloc",
    "scheduler.plan",
    "scheduler.on_finished",
    "scheduler.on_faults",
    "scheduler.take_stats",
    "worker.bind",
    "worker.remember_slot_mapping",
    "worker.execute",
    "worker.take_releases",
    "worker.take_faults",
    "worker.take_stats",
)


class Injected(Exception):
    """The fault."""


class FaultyConnector(SlotStreamConnector):
    """See the module."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._break(self._scheduler, "scheduler")

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        super().register_kv_caches(kv_caches)
        for side in self._sides.values():
            self._break(side.half, "worker")

    def _break(self, half: Any, name: str) -> None:
        rng = random.Random(name)
        for hook, probability in FAULTS.items():
            owner, _, method = hook.partition(".")
            if half is not None and owner == name:
                setattr(half, method, _faulty(getattr(half, method), probability, rng))


def _faulty(method: Any, probability: float, rng: random.Random) -> Any:
    before_only = method.__name__ in ("take_releases", "take_faults", "take_stats")  # What they return must not be lost.

    def call(*args: Any, **kwargs: Any) -> Any:
        fault = rng.random() < probability
        if fault and (before_only or rng.random() < 0.5):
            raise Injected(method.__name__)
        result = method(*args, **kwargs)
        if fault:
            raise Injected(method.__name__)
        return result

    call.__qualname__ = method.__qualname__
    return call
