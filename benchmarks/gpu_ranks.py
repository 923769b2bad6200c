"""What each rank of a vLLM engine computes and holds: mixed into vLLM's worker (`worker_extension_cls`), asked over its RPC."""

from __future__ import annotations

from typing import Any

import torch

_TALK = ("nccl", "cross_device", "multimem")  # In the names of kernels that wait for other ranks: NCCL's, vLLM's, torch's.


class Ranks:
    """vLLM's worker has these methods beside its own."""

    rank: int

    def watch_rank(self) -> None:
        """Note from now on how long the device is busy."""
        torch.cuda.reset_peak_memory_stats()
        self._watched = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
        self._watched.start()

    def rank_figures(self) -> dict[str, Any]:
        """Since `watch_rank`, in ms: `computing`, `copying`, `talking` to other ranks (waits for them included).

        And in bytes what torch holds of the device now, and held at most.
        """
        torch.cuda.synchronize()
        self._watched.stop()
        busy = {"computing": 0, "copying": 0, "talking": 0}
        profiler = self._watched.profiler
        assert profiler is not None
        assert profiler.kineto_results is not None
        for event in profiler.kineto_results.events():
            if event.device_type() != torch.profiler.DeviceType.CUDA:
                continue
            name = event.name().lower()
            if name.startswith(("memcpy", "memset")):
                what = "copying"
            else:
                what = "talking" if any(part in name for part in _TALK) else "computing"
            busy[what] += event.duration_ns()
        del self._watched
        return {
            "rank": self.rank,
            **{what: nanoseconds / 1e6 for what, nanoseconds in busy.items()},
            "held_bytes": torch.cuda.memory_allocated(),
            "peak_bytes": torch.cuda.max_memory_allocated(),
        }
