"""`slotstream capture --model`: it starts vLLM and a server, and stores each prompt once though it is killed on the way."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.descendants import descendants
from support.server import ServerProcess
from support.waiting import wait_until
from support.workload import FINAL_ID, assert_rows_are_true, text_tokens

from slotstream.client import SampleInfo, connect
from slotstream.demo.processes import SMALL_ENGINE, SMALL_ENGINE_ENV, Running
from slotstream.truth.model import LAYERS

pytestmark = [pytest.mark.vllm, pytest.mark.extended]

LINES = int(os.environ.get("SLOTSTREAM_CAPTURE_LINES", "150"))
VLLM, SERVER = "vllm", "slotstream.cli.main serve"


class _Runs:
    """Runs of one command, one after another, and what they leave behind."""

    def __init__(self, work: Path, model: Path, prompts: Path) -> None:
        self.data, self._work, self._prompts = work / "data", work, prompts
        self._command = [
            sys.executable,
            "-m",
            "slotstream.cli.main",
            "capture",
            str(prompts),
            "--to",
            str(self.data),
            "-j",
            "8",
        ]
        self._command += ["--layers", f"1,{LAYERS},final", "--model", str(model), "--", *SMALL_ENGINE]

    def killed(self, what: str, after: int) -> int:
        """One that loses itself ("") or a child after so many lines more are stored; its exit status."""
        before = len(self.stored())
        running = Running("slotstream capture", self._command, self._work / "capture.log")
        running.wait_until(lambda: len(self.stored()) >= before + after, 600.0)
        process = running.process
        children = descendants(process.pid, SERVER) + descendants(process.pid, VLLM)
        assert len(children) >= 2
        if what:
            os.kill(descendants(process.pid, what)[0], signal.SIGKILL)
        else:
            process.send_signal(signal.SIGKILL)
        code = process.wait(120.0)
        wait_until(lambda: not any(Path(f"/proc/{child}").exists() for child in children), "its children to end")
        return code

    def stored(self) -> set[str]:
        """The ids that the manifest calls stored."""
        journal = self._prompts.with_name("prompts.jsonl.manifest.jsonl")
        held = journal.read_text().split("\n")[:-1] if journal.exists() else []
        return {entry["id"] for entry in map(json.loads, held) if entry["state"] == "stored"}

    def requests(self) -> int:
        """How many the engine has had, by its log."""
        return self._prompts.with_name("prompts.jsonl.manifest.jsonl.vllm.log").read_text().count("POST /v1/completions")

    def to_the_end(self) -> None:
        done = subprocess.run(self._command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert f"{LINES} stored" in done.stdout

    def committed(self) -> list[SampleInfo]:
        with ServerProcess(self.data) as server, connect(server.address) as client:
            return list(client.list(state="COMMITTED"))


@pytest.mark.timeout(3600)
def test_prompts_are_stored_once_though_the_command_its_engine_and_its_server_are_killed(
    truth_models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(17)
    prompts = tmp_path / "prompts.jsonl"
    asked_for = [text_tokens(rng, rng.randrange(30, 120)) for _ in range(LINES)]
    prompts.write_text("".join(json.dumps({"token_ids": tokens, "max_tokens": 2}) + "\n" for tokens in asked_for))
    for name, value in {**SMALL_ENGINE_ENV, "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}.items():
        monkeypatch.setenv(name, value)
    runs = _Runs(tmp_path, truth_models["dense"], prompts)
    assert runs.killed("", LINES // 5) == -signal.SIGKILL
    for child in (VLLM, SERVER):
        assert runs.killed(child, LINES // 5) == 1
    told, before, asked = runs.stored(), {info.sample_id for info in runs.committed()}, runs.requests()
    assert told <= before
    runs.to_the_end()
    # One for each line that was missing: so none for what was there.
    assert runs.requests() - asked == LINES - len(before)
    infos = runs.committed()
    assert len(infos) == LINES
    with ServerProcess(runs.data) as server, connect(server.address) as client:
        found = {tuple(answer.sample.token_ids.tolist()): answer.sample for answer in client.get_many(infos) if answer.sample}
    for tokens in asked_for:
        assert_rows_are_true(found[tuple(tokens)], layer_ids=[1, LAYERS, FINAL_ID])
