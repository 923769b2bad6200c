"""Many samples at a time: rm by filters, ls -q and tags, ack and lease."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
from support.ingest_client import IngestClient
from support.server import ServerProcess
from support.synthetic import SyntheticSample

from slotstream.cli import main as cli
from slotstream.cli import rm
from slotstream.client import Client, SampleNotFound, connect

RUN = {"run": "7"}


@pytest.fixture
def there(ingest: IngestClient, server: ServerProcess, namespace: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The options that name a namespace of six samples: three of run 7, two others, and a failed one of run 7."""
    monkeypatch.setenv("SLOTSTREAM_SERVER", server.address)
    monkeypatch.setattr(sys, "stdin", None)
    ingest.store(*(SyntheticSample(name, namespace=namespace, tags=RUN) for name in ("a", "b", "c")))
    ingest.store(SyntheticSample("d", namespace=namespace, tags={"run": "8", "set": "geo"}))
    ingest.store(SyntheticSample("e", namespace=namespace))
    ingest.fail(SyntheticSample("f", namespace=namespace, tags=RUN))
    return ["--namespace", namespace]


@pytest.fixture
def client(server: ServerProcess) -> Any:
    with connect(server.address) as connected:
        yield connected


def _left(client: Client, namespace: str) -> str:
    return "".join(sorted(info.sample_id for info in client.list(namespace=namespace)))


@pytest.mark.parametrize(
    ("filters", "found"),
    [
        (["--tag", "run=7"], "abcf"),
        (["--tag", "run=7", "--state", "committed"], "abc"),
        (["--state", "failed"], "f"),
        (["--older-than", "0s"], "abcdef"),
        (["--older-than", "1h"], ""),
        (["--tag", "run=8", "--tag", "set=geo"], "d"),
        (["--tag", "run=9"], ""),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_dry_run_lists_what_rm_then_deletes(
    there: list[str], namespace: str, client: Client, capsys: pytest.CaptureFixture[str], filters: list[str], found: str
) -> None:
    assert cli.main(["rm", *there, *filters, "--dry-run"]) == 0
    captured = capsys.readouterr()
    assert sorted(captured.out.split()) == list(found)
    assert _left(client, namespace) == "abcdef"
    if len(found) > 1:
        assert f"{len(found)} samples of namespace {namespace}" in captured.err
    if not found:
        assert captured.err == "No sample matches.\n"
        return
    assert cli.main(["rm", *there, *filters]) == 2  # Nobody can be asked.
    assert "--yes" in capsys.readouterr().err
    assert _left(client, namespace) == "abcdef"
    assert cli.main(["rm", *there, *filters, "--yes"]) == 0
    captured = capsys.readouterr()
    assert sorted(captured.out.split()[1::2]) == [f"{namespace}/{name}" for name in found]
    assert captured.err.startswith("Deleting ")  # And how many, before the first one goes.
    assert _left(client, namespace) == "".join(sorted(set("abcdef") - set(found)))


def test_what_arrives_meanwhile_stays(
    there: list[str],
    ingest: IngestClient,
    namespace: str,
    client: Client,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Also one that takes the id of a sample that was listed and is gone."""
    delete: Callable[..., int] = rm._delete

    def later(*arguments: Any) -> int:
        ingest.store(SyntheticSample("g", namespace=namespace, tags=RUN))
        client.delete("b", namespace=namespace)
        ingest.store(SyntheticSample("b", namespace=namespace, tags=RUN, num_tokens=7))
        return delete(*arguments)

    monkeypatch.setattr(rm, "_delete", later)
    assert cli.main(["rm", *there, "--tag", "run=7", "--yes"]) == 1
    captured = capsys.readouterr()
    assert captured.err.splitlines()[-1].endswith("(NOT_FOUND)")
    assert _left(client, namespace) == "bdeg"
    assert client.stat("b", namespace=namespace).num_tokens == 7


def test_rm_goes_on_past_what_is_leased(
    there: list[str], namespace: str, client: Client, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["lease", "b", *there, "--for", "10m"]) == 0
    assert capsys.readouterr().out.startswith(f"leased {namespace}/b until 20")
    assert cli.main(["rm", *there, "--tag", "run=7", "--yes"]) == 1
    assert "slotstream rm: b: " in (said := capsys.readouterr().err)
    assert said.endswith("(LEASED)\n")
    assert _left(client, namespace) == "bde"
    assert cli.main(["lease", "b", *there, "--for", "0"]) == 0
    assert capsys.readouterr().out == f"gave back {namespace}/b\n"
    assert cli.main(["rm", "b", *there, "--yes"]) == 0
    assert _left(client, namespace) == "de"


@pytest.mark.parametrize("words", [[], ["a", "--tag", "run=7"], ["a", "--older-than", "1d"]], ids=" ".join)
def test_rm_takes_ids_or_filters(there: list[str], words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["rm", *words, *there, "--yes"])
    assert caught.value.code == 2
    assert "not both" in capsys.readouterr().err


def test_ack_notes_that_a_reader_is_done(
    there: list[str], namespace: str, client: Client, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["ack", "a", "none", "b", *there]) == 1
    captured = capsys.readouterr()
    assert captured.out == f"acked {namespace}/a\nacked {namespace}/b\n"
    assert captured.err.startswith("slotstream ack: none: ")
    assert client.stat("a", namespace=namespace).acked_unix_ns is not None
    assert client.stat("c", namespace=namespace).acked_unix_ns is None


def test_ls_prints_ids_alone_or_with_their_tags(there: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["ls", *there, "-q", "--tag", "run=7"]) == 0
    assert capsys.readouterr().out == "f\nc\nb\na\n"
    assert cli.main(["ls", *there, "--state", "committed"]) == 0
    header, *rows = capsys.readouterr().out.splitlines()
    assert header.split()[-1] == "TAGS"
    assert [row.split("  ")[-1].strip() for row in rows] == ["-", "run=8 set=geo", "run=7", "run=7", "run=7"]


def test_get_of_two_says_export(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["get", "a", "b"])
    assert caught.value.code == 2
    assert capsys.readouterr().err.endswith("error: get fetches one sample; slotstream export writes many\n")


def test_a_sample_that_was_deleted_by_its_time_stays_otherwise(there: list[str], namespace: str, client: Client) -> None:
    info = client.stat("a", namespace=namespace)
    with pytest.raises(SampleNotFound, match="opened then"):
        client.delete("a", namespace=namespace, created_unix_ns=info.created_unix_ns - 1)
    client.delete("a", namespace=namespace, created_unix_ns=info.created_unix_ns)
    assert _left(client, namespace) == "bcdef"


def test_a_sample_as_numpy_and_in_one_line(there: list[str], namespace: str, client: Client) -> None:
    numpy = pytest.importorskip("numpy")
    sample = client.get("a", namespace=namespace, start=5)
    arrays = sample.numpy()
    assert set(arrays) == {"hidden_states", "token_ids"}
    assert arrays["hidden_states"].dtype == numpy.float32
    assert arrays["hidden_states"].shape == (35, 3, 16)
    assert numpy.array_equal(arrays["hidden_states"], sample.hidden_states.float().numpy(), equal_nan=True)
    assert arrays["token_ids"].tolist() == sample.token_ids.tolist()
    assert repr(sample) == f"<Sample {namespace}/a: 35 tokens from row 5, layers 1,2,4, hidden 16, bfloat16>"
