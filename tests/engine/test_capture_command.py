"""`slotstream capture --model`: it starts vLLM and a server, and stores each prompt once though it is killed on the way."""

from __future__ import annotations

import json
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

from slotstream.client import connect
from slotstream.demo.processes import SMALL_ENGINE, SMALL_ENGINE_ENV, Running
from slotstream.truth.model import LAYERS

pytestmark = [pytest.mark.vllm, pytest.mark.extended, pytest.mark.timeout(900)]

LINES = 150


def test_prompts_are_stored_once_though_the_command_is_killed(
    truth_models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(17)
    prompts = tmp_path / "prompts.jsonl"
    asked_for = [text_tokens(rng, rng.randrange(100, 300)) for _ in range(LINES)]
    prompts.write_text("".join(json.dumps({"token_ids": tokens, "max_tokens": 2}) + "\n" for tokens in asked_for))
    for name, value in {**SMALL_ENGINE_ENV, "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}.items():
        monkeypatch.setenv(name, value)
    command = [sys.executable, "-m", "slotstream.cli.main", "capture", str(prompts), "--to", str(tmp_path / "data"), "-j", "8"]
    command += ["--layers", f"1,{LAYERS},final", "--model", str(truth_models["dense"]), "--", *SMALL_ENGINE]
    journal = tmp_path / "prompts.jsonl.manifest.jsonl"

    def stored() -> list[str]:
        held = [json.loads(line) for line in journal.read_text().splitlines()[:-1]] if journal.exists() else []
        return sorted({entry["id"] for entry in held if entry["state"] == "stored"})

    running = Running("slotstream capture", command, tmp_path / "capture.log")
    running.wait_until(lambda: len(stored()) >= 20, 400.0)
    process = running.process
    children = descendants(process.pid, "slotstream.cli.main serve") + descendants(process.pid, "vllm")
    assert len(children) >= 2
    process.send_signal(signal.SIGKILL)
    process.wait()
    wait_until(lambda: not any(Path(f"/proc/{child}").exists() for child in children), "its children to end")
    before, log = stored(), tmp_path / "prompts.jsonl.manifest.jsonl.vllm.log"
    asked = log.read_text().count("POST /v1/completions")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert f"{LINES} stored" in done.stdout
    assert log.read_text().count("POST /v1/completions") - asked <= LINES - len(before)
    with ServerProcess(tmp_path / "data") as server, connect(server.address) as client:
        infos = list(client.list(state="COMMITTED"))
        assert len(infos) == LINES
        assert {*before} <= {info.sample_id for info in infos}
        found = {tuple(answer.sample.token_ids.tolist()): answer.sample for answer in client.get_many(infos) if answer.sample}
    for tokens in asked_for:
        assert_rows_are_true(found[tuple(tokens)], layer_ids=[1, LAYERS, FINAL_ID])
