"""`slotstream capture` against an engine of our own and a real server: each line is stored once, however often it is run."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.fake_engine import FakeEngine
from support.ingest_client import IngestClient
from support.server import INTERRUPTIBLE, ServerProcess, run_cli
from support.synthetic import SyntheticSample
from support.waiting import wait_until

from slotstream.capture.engine import Engine, EngineAway
from slotstream.capture.lines import Job, read_lines, revision_of, sample_id
from slotstream.capture.manifest import Manifest, Outcome
from slotstream.cli.capture import _address
from slotstream.client import Client, connect
from slotstream.wire.errors import ConfigError

JOB = Job("m", "r", (2, 4, 8, "final"))


@pytest.fixture
def client(server: ServerProcess) -> Iterator[Client]:
    with connect(server.address) as connected:
        yield connected


@pytest.fixture
def engine(ingest: IngestClient, server: ServerProcess) -> Iterator[FakeEngine]:
    with FakeEngine(ingest, server.address) as running:
        yield running


def write(path: Path, *lines: Mapping[str, Any]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def words(prompts: Path, engine: FakeEngine, server: ServerProcess, namespace: str, *more: str) -> list[str]:
    layers = () if "--layers" in more else ("--layers", "2,4,8,final")
    return ["capture", str(prompts), *layers, "--to", server.address, "--url", engine.url, "--namespace", namespace, *more]


def manifest(prompts: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in prompts.with_name(f"{prompts.name}.manifest.jsonl").read_text().splitlines()]


def test_every_line_is_stored_under_the_engines_tokens(
    client: Client, engine: FakeEngine, server: ServerProcess, namespace: str, tmp_path: Path
) -> None:
    prompts = write(
        tmp_path / "p.jsonl",
        {"prompt": "one", "tags": {"split": "train"}, "max_tokens": 7},
        {"messages": [{"role": "user", "content": "two"}]},
        {"token_ids": [5, 6, 7], "id": "mine"},
    )
    done = run_cli(*words(prompts, engine, server, namespace))
    assert (done.returncode, done.stderr) == (0, "")
    assert "3 stored" in done.stdout
    entries = manifest(prompts)
    assert [(entry["line"], entry["state"]) for entry in entries] == [(1, "stored"), (2, "stored"), (3, "stored")]
    samples = [client.get(entry["id"], namespace=namespace) for entry in entries]
    assert [len(sample.token_ids) for sample in samples] == [3, len("<user>two"), 3]
    assert samples[0].tags == {"split": "train"}
    assert entries[2]["id"] == "mine"
    bodies = {tuple(body["prompt"]): body for body in engine.completions}
    assert bodies[tuple(b"one")]["max_tokens"] == 7
    assert bodies[5, 6, 7]["max_tokens"] == 1
    assert bodies[5, 6, 7]["temperature"] == 0
    assert bodies[5, 6, 7]["kv_transfer_params"]["slotstream"]["include_output_tokens"] is False


def test_a_second_run_asks_the_engine_for_nothing_that_is_stored(
    client: Client, engine: FakeEngine, server: ServerProcess, namespace: str, tmp_path: Path
) -> None:
    prompts = write(tmp_path / "p.jsonl", *({"prompt": f"prompt {i % 4}"} for i in range(9)))
    assert run_cli(*words(prompts, engine, server, namespace)).returncode == 0
    assert len(engine.completions) == 4  # Equal lines are one sample.
    assert len({entry["id"] for entry in manifest(prompts)}) == 4
    asked = len(engine.tokenized)
    with prompts.open("a") as file:
        file.write('{"prompt": "prompt 5"}\n')
    client.delete(manifest(prompts)[2]["id"], namespace=namespace)
    engine._ids.clear()
    assert run_cli(*words(prompts, engine, server, namespace)).returncode == 0
    assert [bytes(body["prompt"]) for body in engine.completions[4:]] in (
        [b"prompt 2", b"prompt 5"],
        [b"prompt 5", b"prompt 2"],
    )
    assert len(engine.tokenized) - asked == 3  # Of the two lines that were deleted, and of the new one.
    prompts.with_name("p.jsonl.manifest.jsonl").unlink()  # Without it the ids are found again, and nothing is sent.
    assert run_cli(*words(prompts, engine, server, namespace)).returncode == 0
    assert len(engine.completions) == 6


def test_a_run_that_was_killed_is_gone_on_with(
    client: Client, ingest: IngestClient, server: ServerProcess, namespace: str, tmp_path: Path
) -> None:
    prompts = write(tmp_path / "p.jsonl", *({"prompt": f"prompt {i}"} for i in range(60)))
    running: list[subprocess.Popen[bytes]] = []
    at = [5, 23, 41]

    def kill(body: Mapping[str, Any]) -> None:
        if at and len(killing.completions) >= at[0]:
            del at[0]
            running[-1].send_signal(signal.SIGKILL)
            running[-1].wait()

    with FakeEngine(ingest, server.address, kill) as killing:
        command = [sys.executable, "-m", "slotstream.cli.main", *words(prompts, killing, server, namespace, "-j", "3")]
        codes = []
        for _ in range(4):
            running.append(subprocess.Popen(command))
            codes.append(running[-1].wait())
            before = {info.sample_id for info in client.list(namespace=namespace, state="COMMITTED")}
            sent = {body["kv_transfer_params"]["slotstream"]["sample_id"] for body in killing.completions}
            # A request that the engine had when the command was killed may be stored after it.
            assert before <= sent
        assert codes == [-signal.SIGKILL] * 3 + [0]
        names = [body["kv_transfer_params"]["slotstream"]["sample_id"] for body in killing.completions]
    assert len(set(names)) == 60
    assert len(names) <= 60 + 3 * 3  # Again: only what was on its way.
    assert {entry["state"] for entry in manifest(prompts)} == {"stored"}
    assert len(list(client.list(namespace=namespace, state="COMMITTED"))) == 60


@pytest.mark.parametrize("refusal", [400, "ROW_POOL_FULL"])
def test_a_line_that_fails_is_named_and_the_others_are_stored(
    ingest: IngestClient, server: ServerProcess, namespace: str, tmp_path: Path, refusal: Any
) -> None:
    prompts = write(tmp_path / "p.jsonl", *({"prompt": text} for text in ("bad", "good", "bad too", "fine")))
    with FakeEngine(
        ingest, server.address, lambda body: refusal if bytes(body["prompt"]).startswith(b"bad") else None
    ) as engine:
        done = run_cli(*words(prompts, engine, server, namespace))
    assert done.returncode == 1
    code = "HTTP_400" if refusal == 400 else refusal
    assert "line 1: " in done.stderr
    assert f"({code})" in done.stderr
    assert "2 failed, 2 stored" in done.stdout
    assert [(entry["state"], entry["code"]) for entry in manifest(prompts)] == [("failed", code), ("stored", None)] * 2


@pytest.mark.parametrize(
    "answer",
    [
        b"<html>busy</html>",
        b"",
        b"\xff\xfe",
        b"[]",
        b"[" * 100_000,
        b'{"kv_transfer_params": [1]}',
        b'{"kv_transfer_params": {"slotstream": {"error": [1]}}}',
    ],
    ids=lambda answer: repr(answer[:20]),
)
def test_an_answer_that_is_none_fails_its_line_alone(
    ingest: IngestClient, server: ServerProcess, namespace: str, tmp_path: Path, answer: bytes
) -> None:
    prompts = write(tmp_path / "p.jsonl", *({"prompt": text} for text in ("bad", "good", "bad too", "fine")))
    with FakeEngine(
        ingest, server.address, lambda body: answer if bytes(body["prompt"]).startswith(b"bad") else None
    ) as engine:
        done = run_cli(*words(prompts, engine, server, namespace))
        assert done.returncode == 1
        assert f"line 1: the engine at {engine.url} gives /v1/completions an answer that is none (" in done.stderr
        assert "Traceback" not in done.stderr
        assert [entry["code"] for entry in manifest(prompts)] == ["BAD_ANSWER", None] * 2
        engine.garbled["/tokenize"] = answer
        prompts = write(tmp_path / "q.jsonl", {"prompt": "more"})
        done = run_cli(*words(prompts, engine, server, namespace))
        assert done.returncode == 1
        assert f"line 1: the engine at {engine.url} gives /tokenize an answer that is none (" in done.stderr
        assert manifest(prompts)[0]["code"] == "BAD_ANSWER"
        engine.garbled["/v1/models"] = answer
        done = run_cli(*words(prompts, engine, server, namespace))
    assert done.returncode == 1
    assert done.stderr.startswith(f"slotstream capture: the engine at {engine.url} gives /v1/models an answer that is none (")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("stuck", ["engine", "server"])
def test_an_interrupted_run_ends_at_once_and_the_next_one_sends_the_rest(
    client: Client,
    ingest: IngestClient,
    server: ServerProcess,
    namespace: str,
    tmp_path: Path,
    number: signal.Signals,
    stuck: str,
) -> None:
    """Though requests are under way that nobody answers, or samples that never come."""
    prompts = write(tmp_path / "p.jsonl", *({"prompt": f"p{i}", "id": f"own{i}"} for i in range(12)))
    reached, release = threading.Event(), threading.Event()

    def stop(body: Mapping[str, Any]) -> None:
        if len(busy.completions) == 5:
            reached.set()
            if stuck == "engine":
                release.wait(120)
        if stuck == "server" and len(busy.completions) >= 5 and not release.is_set():
            busy._ids.add((namespace, body["kv_transfer_params"]["slotstream"]["sample_id"]))  # It stores nothing.

    with FakeEngine(ingest, server.address, stop) as busy:
        command = [sys.executable, "-c", INTERRUPTIBLE, *words(prompts, busy, server, namespace, "-j", "3")]
        running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert reached.wait(60)
        wait_until(lambda: len(list(client.list(namespace=namespace, state="COMMITTED"))) == 4)
        running.send_signal(number)
        stdout, stderr = running.communicate(timeout=60)
        assert running.returncode == (130 if number == signal.SIGINT else 143), stderr
        assert "interrupted; what is left is not stored: run the same command again" in stderr
        assert "Traceback" not in stderr
        entries = manifest(prompts)
        assert [entry["line"] for entry in entries] == list(range(1, 13))
        states = [entry["state"] for entry in entries]
        assert set(states) == {"stored", "waiting"}
        assert 1 <= states.count("stored") <= 4
        assert f"{states.count('stored')} stored, {states.count('waiting')} waiting" in stdout
        release.set()
        # It goes on with what it had, as vLLM may: a line's own id is known for its own.
        wait_until(lambda: len(list(client.list(namespace=namespace, state="COMMITTED"))) >= (5 if stuck == "engine" else 4))
        busy._ids.clear()
        sent = len(busy.completions)
        before = {info.sample_id for info in client.list(namespace=namespace, state="COMMITTED")}
        done = run_cli(*words(prompts, busy, server, namespace))
        assert done.returncode == 0, done.stderr
        again = {body["kv_transfer_params"]["slotstream"]["sample_id"] for body in busy.completions[sent:]}
        assert not again & before


def test_what_is_stored_already_is_stored(ingest: IngestClient, server: ServerProcess, namespace: str, tmp_path: Path) -> None:
    def stored(body: Mapping[str, Any]) -> str:
        storing._store(body["kv_transfer_params"]["slotstream"], body["prompt"])  # By somebody else, meanwhile.
        return "ALREADY_EXISTS"

    prompts = write(tmp_path / "p.jsonl", {"prompt": "x"})
    with FakeEngine(ingest, server.address, stored) as storing:
        assert run_cli(*words(prompts, storing, server, namespace)).returncode == 0


def test_an_id_of_a_lines_own_is_not_taken_for_stored_because_another_sample_has_it(
    ingest: IngestClient, engine: FakeEngine, server: ServerProcess, namespace: str, tmp_path: Path
) -> None:
    ingest.store(SyntheticSample("mine", namespace=namespace))
    done = run_cli(*words(write(tmp_path / "p.jsonl", {"prompt": "x", "id": "mine"}), engine, server, namespace))
    assert done.returncode == 1
    assert "(ALREADY_EXISTS)" in done.stderr

    def refused(body: Mapping[str, Any]) -> str:
        return "ALREADY_EXISTS"

    with FakeEngine(ingest, server.address, refused) as other:
        done = run_cli(*words(write(tmp_path / "q.jsonl", {"prompt": "x", "id": "new"}), other, server, namespace))
    assert done.returncode == 1
    assert "(ALREADY_EXISTS)" in done.stderr


def test_a_failure_of_an_earlier_run_is_not_this_ones(
    ingest: IngestClient, client: Client, server: ServerProcess, namespace: str, tmp_path: Path
) -> None:
    """The engine answers before its sample is opened again: until then the server knows of the old failure alone."""
    ingest.fail(SyntheticSample("mine", namespace=namespace))

    def later(body: Mapping[str, Any]) -> None:
        params = body["kv_transfer_params"]["slotstream"]
        threading.Timer(0.5, slow._store, (params, body["prompt"])).start()
        slow._ids.add((namespace, "mine"))  # It does not store the sample by itself.

    prompts = write(tmp_path / "p.jsonl", {"prompt": "x", "id": "mine"})
    with FakeEngine(ingest, server.address, later) as slow:
        done = run_cli(*words(prompts, slow, server, namespace))
    assert done.returncode == 0, done.stderr
    with FakeEngine(ingest, server.address, lambda body: ingest.fail(SyntheticSample("new", namespace=namespace))) as failing:
        failing._ids.add((namespace, "new"))
        done = run_cli(*words(write(tmp_path / "q.jsonl", {"prompt": "x", "id": "new"}), failing, server, namespace))
    assert done.returncode == 1
    assert "(SLOT_MISMATCH)" in done.stderr


def test_rows_that_go_elsewhere_or_are_of_other_layers_end_the_run_at_the_first_line(
    engine: FakeEngine, ingest: IngestClient, server: ServerProcess, namespace: str, tmp_path: Path
) -> None:
    prompts = write(tmp_path / "p.jsonl", *({"prompt": f"p{i}"} for i in range(5)))
    engine.captures = False
    done = run_cli(*words(prompts, engine, server, namespace))
    assert done.returncode == 1
    assert f"the engine at {engine.url} says nothing of a capture" in done.stderr
    assert len(engine.completions) == 1
    engine.captures = True
    done = run_cli(*words(prompts, engine, server, namespace, "--layers", "2,3"))
    assert done.returncode == 1
    assert "captures layers 2,4,8,final, and --layers says 2,3" in done.stderr
    assert len(engine.completions) == 2
    with ServerProcess(tmp_path / "other", "--appear-grace-s", "1") as other:
        done = run_cli(
            *(other.address if word == server.address else word for word in words(prompts, engine, server, namespace))
        )
    assert done.returncode == 1
    assert f"did not come to {other.address}" in done.stderr
    assert f"the engine sends to {server.address}" in done.stderr
    assert len(engine.completions) == 3


def test_an_engine_that_goes_away_leaves_its_lines_to_the_next_run(
    ingest: IngestClient, server: ServerProcess, namespace: str, tmp_path: Path
) -> None:
    prompts = write(tmp_path / "p.jsonl", *({"prompt": f"p{i}"} for i in range(20)))

    def away(body: Mapping[str, Any]) -> None:
        if len(leaving.completions) == 7:
            leaving._http.socket.close()
            raise ConnectionError

    with FakeEngine(ingest, server.address, away) as leaving:
        done = run_cli(*words(prompts, leaving, server, namespace, "-j", "2"))
    assert done.returncode == 1
    assert f"no engine answers at {leaving.url}" in done.stderr
    assert "run the same command again" in done.stderr
    states = [entry["state"] for entry in manifest(prompts)]
    assert states.count("stored") >= 5
    assert states.count("waiting") >= 10
    with FakeEngine(ingest, server.address) as again:
        assert run_cli(*words(prompts, again, server, namespace)).returncode == 0
        assert len(again.completions) == states.count("waiting")


def test_shards_share_the_lines(
    client: Client, engine: FakeEngine, server: ServerProcess, namespace: str, tmp_path: Path
) -> None:
    prompts = write(tmp_path / "p.jsonl", *({"prompt": f"p{i}"} for i in range(7)))
    for part in (1, 2, 3):
        assert run_cli(*words(prompts, engine, server, namespace, "--shard", f"{part}/3")).returncode == 0
        held = [json.loads(line) for line in (tmp_path / f"p.jsonl.{part}-of-3.manifest.jsonl").read_text().splitlines()]
        assert [entry["line"] for entry in held] == list(range(part, 8, 3))
    assert len(list(client.list(namespace=namespace))) == 7


def test_masks_are_the_lines_own_or_the_jobs(
    client: Client, engine: FakeEngine, server: ServerProcess, namespace: str, tmp_path: Path
) -> None:
    prompts = write(tmp_path / "p.jsonl", {"prompt": "abcdef", "loss_mask": [[1, 3]]}, {"prompt": "abcdef"})
    assert run_cli(*words(prompts, engine, server, namespace)).returncode == 0
    first, second = (client.get(entry["id"], namespace=namespace) for entry in manifest(prompts))
    assert first.loss_mask is not None
    assert first.loss_mask.tolist() == [False, True, True, False, False, False]
    assert second.loss_mask is None
    done = run_cli(*words(prompts, engine, server, namespace, "--loss-mask", "assistant", "--tokenizer", str(tmp_path)))
    assert done.returncode == 2
    assert "no tokenizer can be loaded" in done.stderr or "pip install transformers" in done.stderr


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("{", "line 2: "),
        ("[]", "line 2: it is not a JSON object"),
        ('{"prompt": "x", "promt": 1}', "line 2: unknown keys ['promt']"),
        ('{"prompt": "x", "token_ids": [1]}', "line 2: it has ['prompt', 'token_ids'] of"),
        ("{}", "line 2: it has none of"),
        ('{"prompt": ""}', "line 2: prompt is not a str with something in it"),
        ('{"token_ids": [1, true]}', "line 2: token_ids is not a list of token ids"),
        ('{"prompt": "x", "id": ".."}', "line 2: sample id '..'"),
        ('{"prompt": "x", "id": "a"}\n{"prompt": "y", "id": "a"}', "line 3: an earlier line has the id 'a'"),
        ('{"prompt": "x", "max_tokens": 0}', "line 2: max_tokens is not a int"),
        ('{"prompt": "x", "tags": {"a": 1}}', "line 2: tags must map"),
    ],
)
def test_a_line_that_cannot_be_read_is_named(tmp_path: Path, line: str, sentence: str) -> None:
    (tmp_path / "p.jsonl").write_text('{"prompt": "x"}\n' + line + "\n\n")
    with pytest.raises(ConfigError) as caught:
        list(read_lines(tmp_path / "p.jsonl", JOB))
    assert sentence in str(caught.value)


def test_an_id_is_of_all_that_decides_on_the_rows(tmp_path: Path) -> None:
    write(tmp_path / "p.jsonl", {"prompt": "x"}, {"prompt": "x", "max_tokens": 1}, {"prompt": "x", "tags": {"a": "b"}})
    plain, same, tagged = read_lines(tmp_path / "p.jsonl", JOB)
    first = sample_id(plain, JOB, [1, 2], None)
    assert first == sample_id(same, JOB, [1, 2], None) == sample_id(tagged, JOB, [1, 2], None)
    changes: dict[str, Any] = {
        "model": "n",
        "revision": "s",
        "layers": (2,),
        "output_rows": True,
        "max_tokens": 2,
        "temperature": 0.5,
        "seed": 3,
    }
    others = [
        sample_id(plain, JOB, [1, 3], None),
        sample_id(plain, JOB, [1, 2], "output"),
        *(sample_id(plain, replace(JOB, **{name: value}), [1, 2], None) for name, value in changes.items()),
    ]
    assert len({first, *others}) == 10
    model = tmp_path / "model"
    model.mkdir()
    (model / "weights").write_bytes(b"1")
    before = revision_of(str(model), None)
    assert before == revision_of(str(model), "main")
    (model / "weights").write_bytes(b"12")
    assert revision_of(str(model), None) != before
    assert (revision_of("org/m", None), revision_of("org/m", "abc")) == ("main", "abc")


def test_wrong_options_are_refused(engine: FakeEngine, server: ServerProcess, namespace: str, tmp_path: Path) -> None:
    prompts = write(tmp_path / "p.jsonl", {"prompt": "x"})
    for more, sentence in (
        (("--shard", "0/3"), "is not like 1/4"),
        (("--layers", "2,last"), "are neither like 2,18,final nor eagle3"),
        (("-j", "0"), "--jobs and --max-tokens are 1 or more"),
        (("--", "--enforce-eager"), "with --url, --to is the address"),
    ):
        done = run_cli(*words(prompts, engine, server, namespace, *more))
        assert (done.returncode, sentence in done.stderr) == (2, True), done.stderr
    done = run_cli("capture", str(prompts), "--layers", "2", "--to", str(tmp_path / "d"), "--url", engine.url)
    assert done.returncode == 2
    (tmp_path / "p.jsonl.manifest.jsonl").write_text("not a manifest\n")
    done = run_cli(*words(prompts, engine, server, namespace))
    assert done.returncode == 2
    assert "is not of a manifest" in done.stderr
    assert engine.completions == []


def test_a_run_that_ends_before_it_tells_of_its_lines_keeps_the_manifest(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl.manifest.jsonl"
    first = Manifest(path)
    first.add(Outcome(1, "k", "own", "stored"))
    first.close(None)
    again = Manifest(path)
    assert again.ids == {"k": "own"}
    again.close(None)
    assert Manifest(path).ids == {"k": "own"}


def test_a_connection_whose_handshake_nobody_answers_ends_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        engine = Engine(f"https://127.0.0.1:{silent.getsockname()[1]}")
        ended: list[Exception] = []

        def ask() -> None:
            try:
                engine._ask("GET", "/v1/models")
            except EngineAway as error:
                ended.append(error)

        asking = threading.Thread(target=ask)
        asking.start()
        accepted, _ = silent.accept()
        with accepted:
            assert accepted.recv(1)  # The handshake has begun.
            engine.close()
            asking.join(60)
        assert ended


@pytest.mark.parametrize(
    ("to", "address"),
    [
        ("a:1", "a:1"),
        ("a:1, b:2", "a:1,b:2"),
        ("samples", None),
        ("of monday, and tuesday", None),
    ],
)
def test_to_is_addresses_or_a_folder(to: str, address: str | None) -> None:
    assert _address(to) == address


@pytest.mark.parametrize("to", ["a:1,b", "a:1,a:1", "b,a:1", "unix:relative", "unix:/s,b"])
def test_a_wrong_address_beside_another_is_no_folder(to: str) -> None:
    with pytest.raises(ConfigError):
        _address(to)
