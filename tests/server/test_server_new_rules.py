"""A server whose rules changed shows what they would delete, waits, and empties no namespace unasked."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from server.server_kit import Peer, Reader, RunningServer, Sample
from support.secure import bearer, entry, token, write_tokens
from support.waiting import wait_until

from slotstream.cli import main as cli
from slotstream.client import Client, connect
from slotstream.store.samples import SampleStore
from slotstream.store.upkeep.retention import Policy, Rule
from slotstream.v1 import samples_pb2 as read_pb
from slotstream.wire.errors import BadParams, PermissionDenied

SOON = Policy(default=Rule(age_s_max=5))
COUNT = 41


@pytest.fixture
def full(tmp_path: Path) -> Path:
    """A directory of 41 samples in `a` and 1 in `b`, served without rules until a moment ago."""
    with RunningServer(tmp_path / "data") as server, Peer(server.address) as peer:
        for number in range(COUNT):
            peer.put(Sample(f"s{number}", rows=1, namespace="a"), number + 1)
        peer.put(Sample("s", rows=1, namespace="b"), COUNT + 1)
    return tmp_path / "data"


@contextmanager
def later(directory: Path, **options: Any) -> Iterator[RunningServer]:
    """A server ten minutes later."""
    store = SampleStore.open(directory, wall=lambda: time.time_ns() + 600 * 10**9)
    with RunningServer(directory, store=store, **options) as server:
        yield server


def _stored(client: Client) -> int:
    return sum(1 for _ in client.list())


def test_a_new_age_on_a_full_store_deletes_nothing_unasked(
    full: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    with later(full, retention=SOON, retention_grace_s=0.2) as server, connect(server.address) as client:
        wait_until(lambda: server.metric("rules_held_namespaces") == 2)
        usage = client.usage()
        assert (usage.rules_held, usage.rules_wait_s) == (("a", "b"), 0)
        assert "in a by age_s_max: 41 samples, of 41" in caplog.text
        assert cli.main(["stat", "--server", server.address]) == 0
        assert (
            "delete more than half of a, b: nothing is deleted there (slotstream retention --accept)" in capsys.readouterr().out
        )
        server.server._housekeeping._sweep(True)
        assert _stored(client) == COUNT + 1
        assert client.accept_retention(namespace="b") == ["b"]
        wait_until(lambda: _stored(client) == COUNT)
    with later(full, retention=SOON) as server, connect(server.address) as client:
        wait_until(lambda: server.metric("rules_held_namespaces") == 1)  # A restart accepts nothing.
        assert cli.main(["retention", "--accept", "--server", server.address]) == 0
        assert capsys.readouterr().out == "a\n"
        wait_until(lambda: _stored(client) == 0)
        assert cli.main(["retention", "--accept", "--server", server.address]) == 0
        assert capsys.readouterr().out == ""


def test_rules_that_changed_wait(full: Path, capsys: pytest.CaptureFixture[str]) -> None:
    policy = Policy(namespaces={"a": Rule(samples_max=40)})
    with later(full, retention=policy) as server, connect(server.address) as client:
        wait_until(lambda: server.metric("rules_wait_seconds") > 0)
        server.server._housekeeping._sweep(True)
        assert _stored(client) == COUNT + 1
        assert 0 < client.usage().rules_wait_s <= 60
        assert cli.main(["stat", "--server", server.address]) == 0
        assert "they changed, and delete nothing for another" in capsys.readouterr().out
        assert client.accept_retention() == []  # Held they were nowhere; now they need not wait either.
        wait_until(lambda: _stored(client) == COUNT)
        assert client.usage().rules_wait_s == 0


def test_the_command_shows_what_rules_would_delete(full: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rules = tmp_path / "rules.toml"
    rules.write_text("[namespaces.a]\nsamples_max = 40\n[namespaces.b]\nage_s_max = 60")
    with later(full) as server:
        for where in (["--server", server.address], ["--data", str(full)]):
            assert cli.main(["retention", *where, "--file", str(rules)]) == 0
            lines = [line.split() for line in capsys.readouterr().out.splitlines()]
            assert lines[0] == ["NAMESPACE", "RULE", "SAMPLES", "SIZE"]
            assert lines[1][:5] == ["a", "samples_max", "1", "of", "41"]
            old = [["b", "age_s_max", "1", "of", "1"]] if where[0] == "--server" else []  # By its own clock it is young.
            assert [line[:5] for line in lines[2:]] == old
        in_a = ["--server", server.address, "--file", str(rules), "--namespace", "a", "--json"]
        assert cli.main(["retention", *in_a]) == 0
        (told,) = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        assert (told["namespace"], told["key"], told["samples"], told["stored"]) == ("a", "samples_max", 1, 41)
        assert cli.main(["retention", "--server", server.address]) == 0
        assert tuple(capsys.readouterr()) == ("", "These rules would delete nothing now.\n")
        rules.write_text("[default]\nage_s = 5")
        for where, code in ((["--server", server.address], 1), (["--data", str(full)], 2)):
            assert cli.main(["retention", *where, "--file", str(rules)]) == code
            assert "unknown keys ['age_s']" in capsys.readouterr().err
        for words in (["--data", str(full)], ["--accept", "--file", str(rules)], ["--data", "none", "--file", str(rules)]):
            assert cli.main(["retention", *words]) == 2
        with connect(server.address) as client:
            assert _stored(client) == COUNT + 1


def test_it_is_for_those_who_are_admin(tmp_path: Path) -> None:
    tokens = write_tokens(
        tmp_path / "tokens.toml",
        entry("reader", ["*"], "read", "delete", "ingest"),
        entry("of-a", ["a"], "admin"),
        entry("root", ["*"], "admin", "ingest"),
    )
    with RunningServer(tmp_path / "data", tokens_file=tokens) as server:
        with Peer(server.address, metadata=bearer("root")) as peer:
            for number, namespace in enumerate("ab"):
                peer.put(Sample("s", namespace=namespace), number + 1)
        every = "[default]\nsamples_max = 0"
        with connect(server.address, token=token("reader")) as client:
            for refused in (lambda: list(client.retention(every)), client.accept_retention):
                with pytest.raises(PermissionDenied):
                    refused()
        with connect(server.address, token=token("of-a")) as client:
            assert [one.namespace for one in client.retention(every)] == ["a"]
            with pytest.raises(PermissionDenied):
                client.accept_retention(namespace="b")
        with connect(server.address, token=token("root")) as client:
            assert [one.namespace for one in client.retention(every)] == ["a", "b"]
            with pytest.raises(BadParams, match="is not TOML"):
                list(client.retention("nonsense"))
        with Reader(server.address, metadata=bearer("root")) as reader:
            request = read_pb.RetentionRequest(rules="", accept=True)
            assert reader.refused(lambda: reader.retention(request)) == ("INVALID_ARGUMENT", "BAD_PARAMS")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ([], ""),
        (["--retention", "rules.toml"], "unknown keys ['nonsense']"),
        (["--tokens", "rules.toml"], "it must hold one list of tables, tokens"),
        (["--tokens", "none"], "cannot read"),
        (["--tls-cert", "rules.toml", "--tls-key", "rules.toml"], "tls"),
        (["--listen", "0.0.0.0:1"], "can be reached from other machines"),
        (["--data", "rules.toml/data"], "is not a directory"),
        (["--streams-max", "0"], "--streams-max"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_configuration_can_be_checked_without_a_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], options: list[str], sentence: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rules.toml").write_text("[default]\nnonsense = 5\n")
    assert cli.main(["serve", "--check-config", "--data", "data", *options]) == (2 if sentence else 0)
    captured = capsys.readouterr()
    assert sentence in captured.err
    assert captured.err.count("\n") == bool(sentence)
    assert [path.name for path in tmp_path.iterdir()] == ["rules.toml"]
