"""The sidecar's pod as the chart makes it, with a real vLLM on the CPU; and two versions, as an upgrade has them."""

from __future__ import annotations

import itertools
import json
import random
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from support.kubelet import Node, Pod
from support.manifests import helm, one
from support.secure import entry, token
from support.server import ServerProcess
from support.stack import stack
from support.waiting import wait_until
from support.workload import (
    LAYER_IDS,
    MODEL_NAME,
    Answer,
    Ask,
    assert_rows_are_true,
    check_exact,
    random_prompts,
    send,
    text_tokens,
)

from slotstream.client import Client, connect
from slotstream.demo.processes import (
    SMALL_ENGINE,
    SMALL_ENGINE_ENV,
    Running,
    connector_options,
    free_port,
    listening,
    start_vllm,
)

pytestmark = [pytest.mark.vllm, pytest.mark.extended, pytest.mark.timeout(1800)]

ROOT = Path(__file__).resolve().parents[2]
FIRST = "a3e9c63"
KILLS = 20
_PRE_STOP_S = 5  # The chart's engine.preStopSeconds.
# The image's `vllm`: on the CPU its module does the same.
_VLLM = (
    f'#!/bin/sh\nshift\nmodel=$1\nshift\nexec {sys.executable} -m vllm.entrypoints.openai.api_server --model "$model" "$@"\n'
)


@pytest.fixture
def node() -> Iterator[Node]:
    with tempfile.TemporaryDirectory(prefix="node-") as directory:
        path = Path(directory)
        (path / "bin").mkdir()
        (path / "bin" / "vllm").write_text(_VLLM)
        (path / "bin" / "vllm").chmod(0o755)
        tokens = entry("engine", ["default"], "ingest") + "\n" + entry("reader", ["default"], "read")
        yield Node(
            path,
            {"slotstream": [sys.executable, "-m", "slotstream.cli.main"], "vllm": ["/usr/bin/env"]},
            {"slotstream-tokens": {"tokens.toml": tokens}, "vllm-capture-token": {"token": token("engine")}},
            env={**SMALL_ENGINE_ENV, "PATH": f"{path}/bin:/usr/bin:/bin"},
        )


def _workload(model: Path, **connector: Any) -> Any:
    values = {
        "mode": "sidecar",
        "server": {"freeBytesMin": 4 << 20},
        "engine": {
            "model": str(model),
            "extraArgs": [*SMALL_ENGINE, f"--served-model-name={MODEL_NAME}"],
            "connector": {"layers": list(LAYER_IDS), **connector},
        },
    }
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(values, file)
        file.flush()
        return one(helm("--values", file.name), "StatefulSet")


def _reader(pod: Pod) -> Client:
    return connect(f"{pod.ip}:{pod.node.port(50151)}", token=token("reader"))


def _handled(pod: Pod) -> int:
    with _reader(pod) as client:
        return sum(1 for _ in client.list())


def _ask(pod: Pod, names: list[str], max_tokens: int = 4) -> list[Answer]:
    asks = [Ask(text_tokens(random.Random(name), 40), {"sample_id": name}, max_tokens) for name in names]
    return send(pod.node.port(8000), asks)


def _all_are_true(client: Client, names: list[str]) -> None:
    for name in names:
        sample = client.get(name)
        assert sample.token_ids.tolist() == text_tokens(random.Random(name), 40)
        assert_rows_are_true(sample)


def _promised(names: list[str], answers: list[Answer]) -> list[str]:
    said = [(name, answer.said) for name, answer in zip(names, answers, strict=True)]
    return [name for name, handle in said if handle is not None and "error" not in handle]


def test_the_sidecar_and_its_engine(truth_models: dict[str, Path], node: Node) -> None:
    """Started in order, every row equal, the server killed 20 times, the pod deleted under load: the claim has all."""
    with Pod(_workload(truth_models["dense"]), node) as pod:
        assert pod.events == [("slotstream", "spawned"), ("slotstream", "started"), ("vllm", "spawned"), ("vllm", "started")]
        engine, server = pod.containers["vllm"], pod.containers["slotstream"]
        first = engine.process
        names = [f"calm-{i}" for i in range(20)]
        assert _promised(names, _ask(pod, names)) == names
        with _reader(pod) as client:
            _all_are_true(client, names)

        kept, over = list(names), threading.Event()

        def go_on(name: str, max_tokens: int = 4) -> list[str]:
            """What was promised, until it is over or the engine is gone."""
            promised: list[str] = []
            for number in itertools.takewhile(lambda _: not over.is_set(), itertools.count()):
                batch = [f"{name}-{number}-{i}" for i in range(4)]
                try:
                    promised += _promised(batch, _ask(pod, batch, max_tokens))
                except OSError:
                    assert pod.ending.is_set()
                    break
            return promised

        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(go_on, "storm")
            try:
                for kill in range(KILLS):
                    assert server.process is not None
                    server.process.kill()
                    wait_until(lambda n=kill: pod.events.count(("slotstream", "started")) == n + 2, f"restart {kill}")  # type: ignore[misc]
            finally:
                over.set()
            kept += running.result()
        assert len(kept) > len(names)
        assert engine.process is first  # It served on.
        with _reader(pod) as client:
            _all_are_true(client, kept)

        over.clear()
        with ThreadPoolExecutor(1) as pool:
            # Texts of a second or more, so that some run when SIGTERM comes.
            running = pool.submit(go_on, "last", 200)
            wait_until(lambda: _handled(pod) > len(kept) + 4, "a sample more than one batch has")
            # A service sends an ending pod nothing new once preStop is over. vLLM (0.32, without any connector too) never
            # answers a request that comes after its engine has ended, and waits for it.
            threading.Timer(_PRE_STOP_S - 1, over.set).start()
            pod.delete()
            last = running.result()
        assert last
        ended = [event for event in pod.events if event[1].startswith("ended")]
        assert [name for name, _ in ended[-2:]] == ["vllm", "slotstream"]
        assert ended[-1] == ("slotstream", "ended with 0")
        assert "killed: its grace period was over" not in {event for _, event in pod.events}
        kept += last
    claim = node.directory / "claims" / "data-slotstream-0"
    with ServerProcess(claim) as alone, connect(alone.address) as client:
        _all_are_true(client, kept)


def _first_version(directory: Path) -> dict[str, str]:
    """The environment of a process that has the code of the first manifests' commit, out of git's history."""
    archive = subprocess.run(
        ["git", "archive", FIRST, "connector", "server", "proto"], cwd=ROOT, capture_output=True, check=True
    )
    subprocess.run(["tar", "x", "-C", str(directory)], input=archive.stdout, check=True)
    return {"PYTHONPATH": ":".join(str(directory / part) for part in ("connector", "server", "proto"))}


def test_the_first_connector_and_this_server(truth_models: dict[str, Path], tmp_path: Path) -> None:
    (old := tmp_path / "old").mkdir()
    with stack(tmp_path, truth_models["dense"], LAYER_IDS, env=_first_version(old), extract=True) as running:
        with connect(running.address) as client:
            check_exact(client, running.vllm_port, "upgrade", random_prompts(random.Random(1), 30))
            assert {info.metadata["slotstream_version"] for info in client.list(namespace="upgrade")}
        assert running.engine is not None
        assert str(old) in _loaded_from(running.engine)


def _loaded_from(engine: Running) -> str:
    """PYTHONPATH of the process, as it was started."""
    return Path(f"/proc/{engine.process.pid}/environ").read_text()


def test_this_connector_and_the_first_server(truth_models: dict[str, Path], tmp_path: Path) -> None:
    (old := tmp_path / "old").mkdir()
    env, port, vllm_port = _first_version(old), free_port(), free_port()
    command = [sys.executable, "-c", "import sys; from slotstream.server.cli import main; sys.exit(main())"]
    options = ["serve", "--listen", f"127.0.0.1:{port}", "--data", str(tmp_path / "data")]
    with Running("the first server", [*command, *options], tmp_path / "server.log", env) as server:
        server.wait_until(lambda: listening(port), 60.0)
        connector = connector_options(server=f"127.0.0.1:{port}", layers=list(LAYER_IDS))
        chosen = [*SMALL_ENGINE, f"--served-model-name={MODEL_NAME}", *connector]
        with (
            start_vllm(truth_models["dense"], tmp_path / "vllm.log", vllm_port, *chosen),
            connect(f"127.0.0.1:{port}") as client,
        ):
            check_exact(client, vllm_port, "upgrade", random_prompts(random.Random(2), 30))
