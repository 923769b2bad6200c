"""Every example of every `--help`, run as it is printed: by bash, in a folder of its own, against a real server.

What starts vLLM is only parsed here; a test of tests/engine runs such a command.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import save_file
from support.as_printed import Shell
from support.fake_engine import FakeEngine
from support.ingest_client import IngestClient
from support.ports import free_port
from support.postgres import catalogue_url, cluster
from support.seaweedfs import object_store
from support.secure import Authority, entry, token, write_tokens
from support.server import ServerProcess
from support.synthetic import SyntheticSample

from slotstream.cli import main as cli
from slotstream.client import connect
from slotstream.truth import model as truth_model

TESTS = Path(__file__).parents[1]
# The examples that start vLLM, by their first words -> the test that runs such a command.
STARTS_VLLM = {
    "slotstream demo --keep": "engine/test_demo_stay.py",
    "slotstream demo --stay": "engine/test_demo_stay.py",
    "slotstream capture prompts.jsonl --layers 2,18,33,final --to samples --model": "engine/test_capture_command.py",
    "slotstream certify -- ": "engine/test_certify.py",
    "slotstream certify --report": "engine/test_certify.py",
}
# What an example must print, by its first words. The longest that fits counts.
PRINTS = {
    "slotstream status": r"^server  +0\.",
    "slotstream status --json": r"^$",
    "slotstream doctor": r"(?m)^port      ok  ",
    "slotstream doctor --server": r"^$" if shutil.which("jq") else r"\"ok\"",
    "slotstream ls --since 15m --state failed": r"broken +default +failed",
    "slotstream ls --since 15m --state committed": r"my-sample +default +committed",
    "slotstream ls --request": r"cmpl-8a52d3-0-0123abcd +default +committed",
    "slotstream ls --tag": r"tagged",
    "slotstream stat my-sample": r'"prompt_tokens": ?"20"',
    "slotstream stat --namespace": r"train +2 ",
    "slotstream stat": r"(?s)default +.*train +",
    "slotstream get": r": rows \[0, 5[12][02]\) of layers 2,18",
    "python -c": r"^torch.Size\(\[512, 3, 16\]\)$",
    "slotstream capture": r"prompts.jsonl: 2 stored; ",
    "slotstream export": r"(?:train: 2 of 2|data: 7 of 7) samples",
    "slotstream rm my-sample": r"deleted default/my-sample",
    "slotstream rm --state": r"No sample matches",
    "slotstream rm --tag": r"deleted default/run-7",
    "slotstream ack": r"acked train/my-sample\nacked train/other-sample",
    "slotstream lease my-sample --for 1h30m": r"leased default/my-sample until",
    "slotstream lease my-sample --for 0": r"gave back default/my-sample",
    "slotstream verify": r"samples checked, .*: all sound",
    "slotstream restore": r"restored +default/other-sample",
    "slotstream restore my-sample": r"restored +train/my-sample",
    "slotstream flags": r"vllm serve .*--kv-transfer-config",
    "slotstream flags ./model --check": r"\[99\] must be layer ids from 0 to 36",
    "slotstream certify --make": r"36 prompts, as token ids",
    "slotstream certify --files": r"verdict    right",
    "slotstream retention": r"samples_max",
    "slotstream retention --accept": r"The rules are accepted",
    "slotstream migrate": r"0001_samples.sql",
    "slotstream copy": r"samples were copied .*, 0 did not go",
    "slotstream rebuild": r"0 samples are the same",
    "slotstream token": r"^$|sha256",
    "slotstream serve": r"listening on",
    "slotstream web": r"^http://127.0.0.1:\d+",
    "slotstream web --listen": r"^https://0.0.0.0:\d+",
    "slotstream serve --data samples --retention rules.toml --check-config": r"The configuration is right",
}
EXITS = {"slotstream flags ./model --check": 2, "slotstream status --watch": 130}  # The others: 0.

# As a connector with `layers` sends it of a model of 36 layers; the last id is that of `final`.
_LAYERS = (2, 18, 33, 36, 37)
_SAID = {"num_hidden_layers": "36", "layer_names": json.dumps(["2", "18", "33", "36", "final"]), "prompt_tokens": "20"}


def _sample(sample_id: str, **more: Any) -> SyntheticSample:
    return SyntheticSample(sample_id, **{"layer_ids": _LAYERS, "metadata": _SAID, **more})


_TAGS = {"run": "eagle3", "split": "train"}
_SAMPLES = (
    _sample("my-sample", num_tokens=520, tags=_TAGS),
    _sample("other-sample"),
    _sample("cmpl-8a52d3-0-0123abcd"),
    _sample("tagged", tags=_TAGS),
    _sample("run-7", tags={"run": "7"}),
    _sample("my-sample", namespace="train"),
    _sample("other-sample", namespace="train"),
)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path_factory.mktemp("served")) as server:
        yield server


@pytest.fixture
def stack(served: ServerProcess) -> Iterator[ExitStack]:
    """Until its end the server has all of the samples, each with a mask, and one that failed."""
    with connect(served.address) as client, IngestClient(served.address) as sender:
        there = {(info.namespace, info.sample_id) for info in client.list()}
        for namespace, sample_id in there - {(one.namespace, one.sample_id) for one in _SAMPLES} - {("default", "broken")}:
            client.delete(sample_id, namespace=namespace)
        for one in _SAMPLES:
            if (one.namespace, one.sample_id) not in there:
                number = sender.open(one, columns=["loss_mask"])
                sender.send_rows(number, one)
                sender.commit(number, one, columns={"loss_mask": bytes(one.num_tokens)})
        if ("default", "broken") not in there:
            sender.fail(_sample("broken"))
    with ExitStack() as entered:
        yield entered


def examples(command: str, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """The lines of `slotstream COMMAND --help` below `example:` or `examples:`."""
    with pytest.raises(SystemExit):
        cli.main([command, "--help"] if command else ["--help"])
    (section,) = re.findall(r"^examples?:\n((?:  .*\n)+)", capsys.readouterr().out, re.M)
    return [line.strip() for line in section.splitlines()]


def _longest(table: dict[str, Any], line: str) -> str | None:
    return max((words for words in table if line.startswith(words)), key=len, default=None)


# What the examples of a command name, beyond samples: it is put into the folder, or has another name there.


def _for_serve(folder: Path, served: ServerProcess, stack: ExitStack) -> dict[str, str]:
    pair = Authority(folder).issue("server")
    shutil.copy(pair.cert, folder / "cert.pem")
    shutil.copy(pair.key, folder / "key.pem")
    write_tokens(folder / "tokens.toml", entry("a", ["*"], "admin"))
    (folder / "rules.toml").write_text("[default]\nsamples_max = 2\n")
    (folder / "serve.toml").write_text('data = "samples"\nlisten = ["127.0.0.1:0"]\n')
    sockets = stack.enter_context(tempfile.TemporaryDirectory(prefix="slotstream-"))  # A socket's path is short.
    ports = {name: f"{name.partition(':')[0]}:{free_port()}" for name in ("0.0.0.0:50151", "127.0.0.1:50151")}
    return {
        **ports,
        "/var/lib/slotstream": f"samples --listen 127.0.0.1:{free_port()}",
        "--metrics 127.0.0.1:9464 --": f"--metrics 127.0.0.1:{free_port()} --listen 127.0.0.1:{free_port()} --",
        "127.0.0.1:9465": f"127.0.0.1:{free_port()}",
        "/etc/slotstream/": "",
        "/run/slotstream.sock": f"{sockets}/s",
    }


def _for_doctor(folder: Path, served: ServerProcess, stack: ExitStack) -> dict[str, str]:
    authority = Authority(folder)
    pair = authority.issue("server")
    tls = ["--tls-cert", str(pair.cert), "--tls-key", str(pair.key)]
    address = f"127.0.0.1:{free_port()}"
    stack.enter_context(ServerProcess(folder / "tls", *tls, address=address, tls_ca=str(authority.path)))
    (folder / "vllm.token").write_text(token("a") + "\n")
    tokens = write_tokens(folder / "tokens.toml", entry("a", ["train"], "ingest"))
    guarded = stack.enter_context(ServerProcess(folder / "guarded", "--tokens", str(tokens), token=token("a")))
    return {"storage:50151": address, "--token-file": f"--server {guarded.address} --token-file"}


def _for_status(folder: Path, served: ServerProcess, stack: ExitStack) -> dict[str, str]:
    """A server where nothing has failed: what fails is a problem, and the exit code says so."""
    quiet = stack.enter_context(ServerProcess(folder / "quiet"))
    return {"slotstream status": f"slotstream status --server {quiet.address}"}


def _for_capture(folder: Path, served: ServerProcess, stack: ExitStack) -> dict[str, str]:
    engine = stack.enter_context(FakeEngine(stack.enter_context(IngestClient(served.address)), served.address))
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": f"line {number}"}) + "\n" for number in range(5)))
    # This engine captures what it captures.
    layers = {"--layers eagle3": "--layers 2,4,8,final"}
    return {**layers, "127.0.0.1:50151": served.address, "http://127.0.0.1:8000": engine.url}


def _for_flags(folder: Path, served: ServerProcess, stack: ExitStack) -> dict[str, str]:
    config = {"model_type": "qwen3", "num_hidden_layers": 36, "hidden_size": 4096, "torch_dtype": "bfloat16"}
    draft = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 5, 9]}}
    cached = folder / "hub" / "hub" / "models--Qwen--Qwen3-8B"
    for path, held in (
        (folder / "model", config),
        (folder / "eagle3-draft", draft),
        (cached / "snapshots" / ("0" * 40), config),
    ):
        path.mkdir(parents=True)
        (path / "config.json").write_text(json.dumps(held))
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("0" * 40)
    return {}


def _for_retention(folder: Path, served: ServerProcess, stack: ExitStack) -> dict[str, str]:
    (folder / "rules.toml").write_text("[default]\nsamples_max = 2\n")
    return {"/var/lib/slotstream": str(served.data_dir)}


def _for_verify(folder: Path, served: ServerProcess, stack: ExitStack) -> dict[str, str]:
    return {"/var/lib/slotstream": str(served.data_dir)}


def _for_all(folder: Path, served: ServerProcess, stack: ExitStack) -> dict[str, str]:
    return {"/var/lib/slotstream": "data", "127.0.0.1:50151": f"127.0.0.1:{free_port()}"}


def _for_web(folder: Path, served: ServerProcess, stack: ExitStack) -> dict[str, str]:
    pair = Authority(folder).issue("server")
    shutil.copy(pair.cert, folder / "cert.pem")
    shutil.copy(pair.key, folder / "key.pem")
    (folder / "model").mkdir()
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.models.WordLevel({"word": 0}, "word")
    tokenizers.Tokenizer(words).save(str(folder / "model" / "tokenizer.json"))
    return {
        "slotstream web": f"slotstream web --listen 127.0.0.1:{free_port()}",  # A later --listen counts.
        "127.0.0.1:50151": served.address,
        "/models/Qwen3-8B": str(folder / "model"),
        "0.0.0.0:8443": f"0.0.0.0:{free_port()}",
    }


def _for_migrate(folder: Path, served: ServerProcess, stack: ExitStack) -> dict[str, str]:
    return {"postgresql://slotstream@db.example/slotstream": cluster().database()}


def _for_rebuild(folder: Path, served: ServerProcess, stack: ExitStack) -> dict[str, str]:
    stack.enter_context(patch.dict(os.environ, object_store().environment()))
    return {
        "s3://bucket/samples": object_store().bucket(),
        "postgresql://slotstream@db.example/slotstream": catalogue_url(),
    }


def _for_copy(folder: Path, served: ServerProcess, stack: ExitStack) -> dict[str, str]:
    return {**_for_rebuild(folder, served, stack), "/var/lib/slotstream": str(served.data_dir)}


_NEEDS: dict[str, Callable[[Path, ServerProcess, ExitStack], dict[str, str]]] = {
    "": _for_all,
    "serve": _for_serve,
    "doctor": _for_doctor,
    "capture": _for_capture,
    "flags": _for_flags,
    "copy": _for_copy,
    "migrate": _for_migrate,
    "rebuild": _for_rebuild,
    "retention": _for_retention,
    "status": _for_status,
    "verify": _for_verify,
    "web": _for_web,
}


# What is done before an example, by its first words.


def _put_aside(folder: Path, served: ServerProcess) -> None:
    """Two files get into the quarantine, and are sound again."""
    for namespace, sample_id in (("default", "other-sample"), ("train", "my-sample")):
        (path,) = (served.data_dir / namespace).rglob(f"{sample_id}.safetensors")
        sound = path.read_bytes()
        path.write_bytes(sound[:-1] + bytes([sound[-1] ^ 1]))
        with connect(served.address) as client:
            assert [verdict.quarantined for verdict in client.verify(sample_id, namespace=namespace, quarantine=True)] == [True]
        (aside,) = (served.data_dir / ".quarantine" / namespace).iterdir()
        aside.write_bytes(sound)


def _capture_elsewhere(folder: Path, served: ServerProcess) -> None:
    """What an extractor that is right makes of the prompts of `certify --make truth --kind swa`."""
    (folder / "captured").mkdir()
    for number, line in enumerate((folder / "truth" / "prompts.jsonl").read_text().splitlines()):
        ids = torch.tensor(json.loads(line)["token_ids"])
        rows = truth_model.expected(ids, [1, 3, truth_model.LAYERS, truth_model.LAYERS + 1], kind="swa")
        save_file({"hidden_states": rows, "token_ids": ids}, folder / "captured" / f"{number}.safetensors")


_BEFORE = {"slotstream restore": _put_aside, "slotstream certify --files": _capture_elsewhere}


_PAIR = (pytest.mark.postgres, pytest.mark.objects)
_MARKS: dict[str, tuple[pytest.MarkDecorator, ...]] = {
    "certify": (pytest.mark.extended,),
    "migrate": (pytest.mark.postgres,),
    "rebuild": _PAIR,
    "copy": _PAIR,
}


@pytest.mark.parametrize(
    "command",
    # What certify compares is also tried within tests/certify, without a process for each example.
    [pytest.param(name, marks=_MARKS.get(name, ())) for name in ("", *cli.COMMANDS)],
    ids=lambda name: name or "slotstream",
)
def test_each_example_does_what_it_says(
    command: str, served: ServerProcess, stack: ExitStack, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = _NEEDS[command](tmp_path, served, stack) if command in _NEEDS else {}
    shell = Shell(tmp_path, names, {"SLOTSTREAM_SERVER": served.address, "HF_HOME": str(tmp_path / "hub")})
    for line in examples(command, capsys):
        words = shlex.split(line, comments=True)
        if starts := _longest(STARTS_VLLM, line):
            assert (TESTS / STARTS_VLLM[starts]).exists()
            _is_parsed(words)
            continue
        if before := _longest(_BEFORE, line):
            _BEFORE[before](tmp_path, served)
        if "serve" in words and "--check-config" not in words:
            code, said = shell.run_until(line, "listening on", signal.SIGTERM)
        elif words[1] == "web":
            code, said = shell.run_until(line, "shows", signal.SIGTERM)
        elif "--watch" in words:
            code, said = shell.run_until(line, "retention ", signal.SIGINT)
        else:
            code, said = shell.run(line)
        prints, exits = _longest(PRINTS, line.partition("FORMAT=json ")[2] or line), _longest(EXITS, line)
        assert prints is not None, f"what does this print? {line}"
        assert code == (EXITS[exits] if exits else 0), f"{line}\n{said}"
        assert re.search(PRINTS[prints], said), f"{line}\n{said}"


def _is_parsed(words: list[str]) -> None:
    """By the command's own parser, to the end."""
    assert words[0] == "slotstream"
    seen: list[Any] = []

    def run(arguments: Any) -> int:
        seen.append(arguments)
        return 0

    module = f"slotstream.cli.{cli.COMMANDS[words[1]].module}"
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(f"{module}.run_{words[1]}", run)
        assert cli.main(words[1:]) == 0
    assert len(seen) == 1
