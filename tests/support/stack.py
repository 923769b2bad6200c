"""A storage server and a vLLM that streams to it, as real processes."""

from __future__ import annotations

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


@dataclass(slots=True)
class Stack:
    """A storage server and a vLLM that streams to it."""

    work: Path
    server: Running
    engine: Running
    server_port: int
    metrics_port: int
    vllm_port: int

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.server_port}"

    def restart_server(self) -> None:
        """Start the storage server again, on the same port and data."""
        self.server = _serve(self.work, self.server_port, self.metrics_port)


def _serve(work: Path, port: int, metrics_port: int) -> Running:
    return start_server(work / "data", work / "server.log", port, "--metrics", f"127.0.0.1:{metrics_port}")


@contextmanager
def stack(
    work: Path,
    model: Path,
    layer_ids: Sequence[int],
    *engine_options: str,
    env: Mapping[str, str] | None = None,
    **connector: Any,
) -> Iterator[Stack]:
    """Server and engine, up; stopped on leaving. `connector` are its options, `env` is added to the engine's."""
    server_port, metrics_port, vllm_port = free_port(), free_port(), free_port()
    server = _serve(work, server_port, metrics_port)
    try:
        options = [
            f"--served-model-name={MODEL_NAME}",
            *extraction_options(layer_ids),
            *connector_options(server=f"127.0.0.1:{server_port}", **connector),
        ]
        with start_vllm(model, work / "vllm.log", vllm_port, *SMALL_ENGINE, *engine_options, *options, env=env) as engine:
            running = Stack(work, server, engine, server_port, metrics_port, vllm_port)
            try:
                yield running
            finally:
                server = running.server  # A test may have started it again.
    finally:
        server.stop()
