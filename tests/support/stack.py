"""A storage server and a vLLM that streams to it, as real processes."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slotstream.demo.processes import (
    SMALL_ENGINE,
    Running,
    connector_options,
    extraction_options,
    free_port,
    start_server,
    start_vllm,
)
from support.workload import MODEL_NAME

# The worker in the engine core's process, as vLLM has it on one GPU: on a CPU it takes a third process, which is slow to start.
_ONE_PROCESS = "--distributed-executor-backend=vllm.v1.executor.uniproc_executor.UniProcExecutor"
# Enough for a tiny model: where others want the cores too, threads that wait for each other take ten times as long.
_ONE_THREAD = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}


def support_importable() -> dict[str, str]:
    """The environment of an engine that loads connectors from `support`, and slotstream from where this process has it."""
    ours = os.environ.get("PYTHONPATH")
    tests = str(Path(__file__).resolve().parents[1])
    return {"PYTHONPATH": os.pathsep.join([tests, ours] if ours else [tests])}


@dataclass(slots=True)
class Stack:
    """A storage server and a vLLM that streams to it; each is None while it does not run."""

    work: Path
    server_port: int
    metrics_port: int
    vllm_port: int
    server: Running | None = None
    engine: Running | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.server_port}"

    def serve(self) -> None:
        """Start the storage server, for the first time or again, on the same port and data."""
        self.server = start_server(
            self.work / "data", self.work / "server.log", self.server_port, "--metrics", f"127.0.0.1:{self.metrics_port}"
        )

    def stop_serving(self) -> int:
        """SIGTERM; returns the server's exit status, 0 when there is none."""
        server, self.server = self.server, None
        return server.stop() if server is not None else 0


@contextmanager
def stack(
    work: Path,
    model: Path,
    layer_ids: Sequence[int | str],
    *engine_options: str,
    serve: bool = True,
    env: Mapping[str, str] | None = None,
    extract: bool = False,
    one_process: bool = False,
    **connector: Any,
) -> Iterator[Stack]:
    """A server and an engine, up; stopped on leaving. `connector` are its options (`server`: in place of ours), `env` is added
    to the engine's.

    `layer_ids` are captured directly, or with `extract` by vLLM's `extract_hidden_states`.

    Without `serve` the engine starts with no server there; `Stack.serve` starts it later. `one_process`: with the worker in
    the engine core's process.
    """
    running = Stack(work, free_port(), free_port(), free_port())
    chosen: dict[str, Any] = {} if extract else {"layers": list(layer_ids)}
    options = [
        f"--served-model-name={MODEL_NAME}",
        *(extraction_options([int(layer) for layer in layer_ids]) if extract else ()),
        *connector_options(**{"server": running.address, **chosen, **connector}),
        *([_ONE_PROCESS] if one_process else ()),
    ]
    options = [*SMALL_ENGINE, *engine_options, *options]
    try:
        if serve:
            running.serve()
        environment = {**_ONE_THREAD, **(env or {})}
        with start_vllm(model, work / "vllm.log", running.vllm_port, *options, env=environment) as running.engine:
            yield running
    finally:
        running.stop_serving()
