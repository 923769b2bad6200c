"""`slotstream certify` with a real vLLM: it passes as it is, and tells each fault that is planted in the running connector."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support.descendants import descendants
from support.plants import plant
from support.waiting import wait_until

from slotstream.demo.processes import SMALL_ENGINE, SMALL_ENGINE_ENV, Running
from slotstream.truth.model import Kind

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

LAYERS = 8
PLANTED = Path(__file__).resolve().parents[1] / "support" / "planted_faults"
CONFIGS: Mapping[Kind, Mapping[str, Any]] = {
    "dense": {"model_type": "llama"},
    "swa": {"model_type": "gpt_oss", "layer_types": ["sliding_attention", "full_attention"] * 4},
    "mla": {"model_type": "deepseek_v3", "kv_lora_rank": 512},
}
TRANSFER = {"kv_connector": "SlotStreamConnector", "kv_connector_module_path": "slotstream.connector", "kv_role": "kv_producer"}


@dataclass(frozen=True, slots=True)
class Done:
    code: int
    report: dict[str, Any]
    out: str
    err: str


def command(work: Path, kind: Kind, *options: str, layers: list[int | str], **extra: Any) -> list[str]:
    """Of a user whose model is of that kind. Of the model there is its config.json alone."""
    model = work / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({**CONFIGS[kind], "num_hidden_layers": LAYERS, "hidden_size": 4096}))
    connector = {**TRANSFER, "kv_connector_extra_config": {"server": "storage:50151", "layers": layers, **extra}}
    flags = [*SMALL_ENGINE, "--kv-transfer-config", json.dumps(connector), "--port", "8000", "--tokenizer", "mine"]
    own = ["--report", str(work / "report.json"), "--requests", "24", *options]
    return [sys.executable, "-m", "slotstream.cli.main", "certify", *own, "--", "vllm", "serve", str(model), *flags]


def environment(fault: str = "") -> dict[str, str]:
    env = {**os.environ, **SMALL_ENGINE_ENV, "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
    paths = [str(PLANTED), *filter(None, [env.get("PYTHONPATH")])]
    return {**env, "SLOTSTREAM_TEST_PLANT": fault, "PYTHONPATH": os.pathsep.join(paths)} if fault else env


def certify(
    work: Path,
    kind: Kind,
    *options: str,
    fault: str = "",
    layers: tuple[int | str, ...] = (1, 4, LAYERS, "final"),
    **extra: Any,
) -> Done:
    words = command(work, kind, *options, layers=list(layers), **extra)
    done = subprocess.run(words, env=environment(fault), capture_output=True, text=True, check=False)
    path = work / "report.json"
    assert path.exists(), done.stderr
    return Done(done.returncode, json.loads(path.read_text()), done.stdout, done.stderr)


def _is_right(done: Done) -> None:
    report = done.report
    assert (done.code, report["verdict"]) == (0, "right"), done.out
    assert (report["wrong"], report["lost"], report["problems"]) == (0, 0, [])
    assert report["rows"] > 5000
    assert report["output_rows"] > 500
    assert report["load"]["preemptions"] > 0
    assert report["load"]["prompts longer than a step"] > 5
    assert not [gap for gap in report["not_exercised"] if gap["needed"]]


@pytest.mark.extended
def test_an_engine_as_it_is_passes_and_its_files_too(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    done = certify(tmp_path, "dense", "--keep", str(kept), sender="process", chunk_bytes=16 << 10)
    _is_right(done)
    report = done.report
    assert report["load"]["tokens of prefix hits"] > 0
    assert (report["kind"], report["model_layers"], report["layers"]) == ("dense", LAYERS, ["1", "4", str(LAYERS), "final"])
    assert {"vllm", "torch", "slotstream"} <= report["versions"].keys()
    flags = {one["flag"] for one in report["overridden"]}
    wanted = {"--tokenizer", "--port", "--max-model-len", "--num-gpu-blocks-override", "--served-model-name"}
    assert flags == wanted | {"connector option server"}
    assert "--block-size=32" in report["command"]
    # The files of its server, read as another extractor's.
    words = ["certify", "--files", str(kept / "data"), "--truth", str(kept), "--report", str(tmp_path / "files.json")]
    again = [sys.executable, "-m", "slotstream.cli.main", *words]
    files = subprocess.run(again, capture_output=True, text=True, check=False)
    assert files.returncode == 0, files.stdout
    told = json.loads((tmp_path / "files.json").read_text())
    assert (told["rows"], told["samples"], told["output_rows"]) == (report["rows"], report["samples"], report["output_rows"])
    path = next((kept / "data" / "certify").rglob("long-0-2.safetensors"))
    plant(path.parent, "bit flipped", file=path.name)
    broken = subprocess.run(again, capture_output=True, text=True, check=False)
    assert broken.returncode == 1
    assert "long-0-2.safetensors row 17: token " in broken.stdout


@pytest.mark.extended
@pytest.mark.parametrize("kind", ["swa", "mla"])
def test_other_kinds_pass(kind: Kind, tmp_path: Path) -> None:
    _is_right(certify(tmp_path, kind))


@pytest.mark.extended
@pytest.mark.parametrize(
    ("kind", "fault", "said"),
    [
        ("dense", "layer swapped", "layer 1: this is layer 4 of the same token"),
        ("swa", "layer swapped", "layer 1: this is layer 4 of the same token"),
        ("dense", "row shifted", "this is the row of token "),
        ("swa", "bit flipped", "element 50 is "),
        ("dense", "sample lost", "are not there: "),
    ],
)
def test_a_fault_in_the_running_connector_is_told_with_its_row(kind: Kind, fault: str, said: str, tmp_path: Path) -> None:
    done = certify(tmp_path, kind, fault=fault)
    assert (done.code, done.report["verdict"]) == (1, "wrong")
    problems = done.report["problems"]
    assert problems[0]["row"] is not None
    assert said in problems[0]["message"]
    assert f"{problems[0]['sample']} row {problems[0]['row']}: " in done.out
    if fault in ("bit flipped", "sample lost"):
        assert len(problems) == 1


@pytest.mark.extended
def test_no_preemption_is_no_pass(tmp_path: Path) -> None:
    words = command(tmp_path, "dense", layers=[1])
    done = subprocess.run([*words, "--num-gpu-blocks-override=2000"], env=environment(), text=True, check=False)
    report = json.loads((tmp_path / "report.json").read_text())
    assert (done.returncode, report["verdict"], report["wrong"]) == (1, "not proved", 0)
    assert [gap["what"] for gap in report["not_exercised"] if gap["needed"]] == ["preemption"]


@pytest.mark.extended
def test_what_it_started_ends_with_it(tmp_path: Path) -> None:
    running = Running("certify", command(tmp_path, "dense", layers=[1]), tmp_path / "certify.log", environment())
    running.wait_until(lambda: bool(descendants(running.process.pid, "vllm")), 100.0)
    children = descendants(running.process.pid, "vllm") + descendants(running.process.pid, "slotstream.cli.main serve")
    assert len(children) >= 2
    running.process.send_signal(signal.SIGTERM)
    assert running.process.wait(120) == 128 + signal.SIGTERM
    wait_until(lambda: not any(Path(f"/proc/{child}").exists() for child in children), "its children to end")


@pytest.mark.extended
def test_flags_that_vllm_refuses_are_told_in_its_own_words(tmp_path: Path) -> None:
    words = command(tmp_path, "dense", layers=[1], chunk_bites=1)
    done = subprocess.run(words, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "unknown connector options ['chunk_bites']" in done.stderr
    assert "vLLM's log is in" in done.stderr
