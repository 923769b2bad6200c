"""`slotstream flags`: what vLLM is started with, told and checked from config.json alone."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from support.server import run_cli

from slotstream.cli import main as cli

TRANSFER = {"kv_connector": "SlotStreamConnector", "kv_connector_module_path": "slotstream.connector", "kv_role": "kv_producer"}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """The config of a model of 36 layers."""
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text(
        json.dumps({"model_type": "qwen3", "num_hidden_layers": 36, "hidden_size": 4096, "torch_dtype": "bfloat16"})
    )
    return path


def _printed(capsys: pytest.CaptureFixture[str]) -> tuple[dict[str, Any], str]:
    """The --kv-transfer-config of the printed command line, and the rest of what was printed."""
    line, _, rest = capsys.readouterr().out.partition("\n")
    words = shlex.split(line)
    assert (words[:2], words[3]) == (["vllm", "serve"], "--kv-transfer-config")
    return json.loads(words[4]), rest


def test_eagle3_is_the_default_and_says_why(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["flags", str(model)]) == 0
    transfer, rest = _printed(capsys)
    assert transfer == {**TRANSFER, "kv_connector_extra_config": {"server": "127.0.0.1:50151", "layers": "eagle3"}}
    for line in (
        "model    36 layers, 4096 elements a row and layer, BF16",
        "layers   2, 18, 33, 36",
        "bytes    32768 a token",
        "pool     2.0 GiB of GPU memory, for --max-num-batched-tokens 8192 --max-num-seqs 1024",
        "staging  1.0 GiB of host memory",
        "why      an EAGLE-3 draft reads its target after 2, 18, 33 of 36 layers",
    ):
        assert line in rest


def test_named_layers_and_a_drafts(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["flags", str(model), "--layers", "final,18", "--connect", "unix:/s", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["layer_names"], told["layer_ids"], told["bytes_per_token"]) == (["18", "final"], [18, 37], 16384)
    assert told["kv_transfer_config"]["kv_connector_extra_config"] == {"server": "unix:/s", "layers": ["final", 18]}
    draft = tmp_path / "draft"
    draft.mkdir()
    (draft / "config.json").write_text(json.dumps({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 5, 9]}}))
    assert cli.main(["flags", str(model), "--draft", str(draft)]) == 0
    transfer, rest = _printed(capsys)
    assert transfer["kv_connector_extra_config"]["layers"] == {"draft": str(draft)}
    assert "layers   1, 5, 9, 36\n" in rest
    assert "why" not in rest


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"layers": [2, "final"]}, ""),
        ({"layers": "eagle3"}, ""),
        ({**TRANSFER, "kv_connector_extra_config": {"layers": [2]}}, ""),
        (
            {
                "kv_connector": "MultiConnector",
                "kv_connector_extra_config": {
                    "connectors": [{"kv_connector": "X"}, {**TRANSFER, "kv_connector_extra_config": {"layers": [2]}}]
                },
            },
            "",
        ),
        ({"layers": [2, 99]}, "[99] must be layer ids from 0 to 36"),
        ({"layer": [2]}, "unknown connector options ['layer']"),
        ({}, 'name the layers to capture: add "layers"'),
        ({"layers": [2], "staging_bytes": 1 << 20, "chunk_bytes": 1 << 18}, "staging_bytes must be at least"),
        ({"layers": [2], "row_pool_bytes": 1 << 16}, "row_pool_bytes must be at least"),
        ({"layers": list(range(37)), "chunk_bytes": 4096}, ""),
        ({"layers": [2], "server": "localhost"}, "did you mean localhost:50151?"),
        ({**TRANSFER, "kv_role": "kv_both", "kv_connector_extra_config": {"layers": [2]}}, 'set "kv_role": "kv_producer"'),
        ({"kv_connector": "Other"}, "kv_connector is 'Other'"),
        ({"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": []}}, "0 times, and not once"),
        ({"kv_connector": "SlotStreamConnector"}, "kv_connector_module_path"),
    ],
    ids=lambda value: json.dumps(value)[:60] if isinstance(value, dict) else "",
)
def test_options_are_checked_before_a_start(
    model: Path, given: dict[str, Any], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["flags", str(model), "--check", json.dumps(given)]) == (2 if sentence else 0)
    captured = capsys.readouterr()
    assert sentence in captured.err
    assert captured.err.count("\n") == bool(sentence)
    assert bool(captured.out) == (not sentence)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["none"], "there is no model 'none'"),
        (["MODEL", "--draft", "none"], "there is no draft 'none'"),
        (["MODEL", "--layers", "1,37"], "[37] must be layer ids from 0 to 36"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_be_is_one_sentence(
    model: Path, words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["flags", *(str(model) if word == "MODEL" else word for word in words)]) == 2
    said = capsys.readouterr().err
    assert sentence in said
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (
            {"text_config": {"num_hidden_layers": 4, "hidden_size": 8, "dtype": "float16"}},
            "4 layers, 8 elements a row and layer, F16",
        ),
        ({"num_hidden_layers": 4, "hidden_size": 8, "torch_dtype": "float32"}, "BF16"),
        ({"num_hidden_layers": 4, "hidden_size": 8}, "BF16"),
    ],
    ids=["nested", "float32", "none"],
)
def test_configs_of_other_kinds(tmp_path: Path, config: dict[str, Any], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert cli.main(["flags", str(tmp_path), "--layers", "1"]) == 0
    assert text in capsys.readouterr().out


def test_it_needs_neither_vllm_nor_torch(model: Path) -> None:
    done = run_cli("flags", str(model), environment={"PYTHONPROFILEIMPORTTIME": "1"})
    assert done.returncode == 0
    imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in done.stderr.splitlines() if "|" in line}
    assert not imported & {"vllm", "torch", "transformers", "grpc"}
