"""Many samples in one stream: a bad one is an answer, and what breaks goes on with its next row."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from support.fake_samples import info_of, read_header, read_rows, serving
from support.ingest_client import IngestClient
from support.numbered import store
from support.server import ServerProcess
from support.synthetic import SyntheticSample
from support.waiting import wait_until

from slotstream.client import Answer, Client, SampleNotFound, ServerUnavailable, connect, reading
from slotstream.client.local_file import SentFile
from slotstream.v1 import samples_pb2 as pb
from slotstream.wire.errors import BadParams, ProtocolViolation
from slotstream.wire.layout import header_length

LONG = SyntheticSample("long", dtype="F32", layer_ids=(1, 2, 4), hidden_size=512, num_tokens=1500)  # Several groups of rows.


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server whose files may be spoiled, and whose counters count these tests alone."""
    with ServerProcess(tmp_path_factory.mktemp("many"), "--metrics", "127.0.0.1:0") as server:
        yield server


@pytest.fixture(params=["sent", "in place"])
def client(request: pytest.FixtureRequest, own: ServerProcess) -> Iterator[Client]:
    """The client of `own`, which sends rows or has its files at hand."""
    with connect(own.address, data_dir=own.data_dir if request.param == "in place" else None) as connected:
        yield connected


@pytest.fixture
def fill(own: ServerProcess) -> Iterator[IngestClient]:
    with IngestClient(own.address) as sender:
        yield sender


def small(namespace: str, count: int, **options: Any) -> list[SyntheticSample]:
    return [SyntheticSample(f"s{n:02}", namespace=namespace, num_tokens=3 + n, seed=n, **options) for n in range(count)]


def store_with_mask(fill: IngestClient, sample: SyntheticSample) -> None:
    mask = {"loss_mask": bytes(row % 2 for row in range(sample.num_tokens))}
    number = fill.open(sample, mask)
    fill.send_rows(number, sample)
    fill.commit(number, sample, mask)


def outcome(answer: Answer) -> str:
    """The id of a sample that is there, or the code of the error."""
    assert (answer.sample is None) != (answer.error is None)
    return answer.sample.sample_id if answer.sample else str(answer.error and answer.error.code)


def assert_rows(answer: Answer, sample: SyntheticSample, layers: tuple[int, ...] | None = None) -> None:
    assert answer.sample is not None, answer.error
    got = answer.sample
    assert (got.namespace, got.sample_id, answer.sample_id) == (sample.namespace, sample.sample_id, sample.sample_id)
    assert got.token_ids.tolist() == sample.token_ids
    assert got.hidden_states.numpy(force=True).tobytes() == sample.rows(layers=layers)


def test_samples_come_in_the_order_asked(client: Client, fill: IngestClient, namespace: str) -> None:
    samples = small(namespace, 12, dtype="F32")
    long = dataclasses.replace(LONG, namespace=namespace)
    fill.store(*samples, long, rows_per_chunk=512)
    order = [samples[7], long, samples[2], samples[7], samples[0]]
    for layers in (None, (4, 1)):
        answers = list(client.get_many([s.sample_id for s in order], namespace=namespace, layers=layers))
        for answer, sample in zip(answers, order, strict=True):
            assert_rows(answer, sample, layers)
    newest_first = [s.sample_id for s in [long, *samples[::-1]]]
    assert [outcome(answer) for answer in client.get_many(namespace=namespace)] == newest_first
    assert [outcome(answer) for answer in client.get_many(client.list(namespace=namespace, limit=4))] == newest_first[:4]


def test_filters_choose(client: Client, fill: IngestClient, namespace: str) -> None:
    fill.store(*small(namespace, 3), SyntheticSample("tagged", namespace=namespace, tags={"a": "b"}))
    assert [outcome(answer) for answer in client.get_many(namespace=namespace, tags={"a": "b"})] == ["tagged"]
    with pytest.raises(BadParams, match="not both"):
        client.get_many(["tagged"], namespace=namespace, tags={"a": "b"})
    assert list(client.get_many(namespace=f"{namespace}-empty")) == []
    assert list(client.get_many([], namespace=namespace)) == []


def test_a_bad_sample_is_an_answer(own: ServerProcess, client: Client, fill: IngestClient, namespace: str) -> None:
    metadata = {"layer_names": '["1", "2", "final"]'}
    good = [SyntheticSample(f"good{n}", namespace=namespace, dtype="F32", metadata=metadata) for n in range(3)]
    rotten = SyntheticSample(
        "rotten", namespace=namespace, dtype="F32", hidden_size=512, num_tokens=1500, layer_ids=(1, 2, 4), metadata=metadata
    )
    fill.store(*good, rotten, SyntheticSample("other", namespace=namespace, layer_ids=(1, 2)), rows_per_chunk=512)
    fill.fail(SyntheticSample("failed", namespace=namespace))
    arriving = fill.open(SyntheticSample("arriving", namespace=namespace))
    fill.send_rows(arriving, SyntheticSample("arriving", namespace=namespace), 0, 1)
    (path,) = own.data_dir.glob(f"{namespace}/*/rotten.safetensors")
    with path.open("r+b") as file:  # Its last rows: the first ones are sent before anybody knows.
        file.seek(path.stat().st_size - 50_000)
        file.write(b"\xff" * 100)
    ids = ["good0", "nobody", "good1", "rotten", "failed", "..", "arriving", "other", "good2"]
    found = list(client.get_many(ids, namespace=namespace, layers=["final", 1]))
    assert [answer.sample_id for answer in found] == ids
    codes = ["NOT_FOUND", "DAMAGED", "SAMPLE_FAILED", "BAD_SAMPLE_ID", "BAD_LAYERS", "BAD_LAYERS"]
    assert [outcome(answer) for answer in found] == ["good0", codes[0], "good1", *codes[1:], "good2"]
    for at, sample in ((0, good[0]), (2, good[1]), (8, good[2])):
        assert_rows(found[at], sample, (4, 1))
    plain = [outcome(answer) for answer in client.get_many(["good0", "arriving", "failed", "good1"], namespace=namespace)]
    assert plain == ["good0", "STILL_ARRIVING", "SAMPLE_FAILED", "good1"]
    reason = next(answer.error for answer in found if answer.sample_id == "failed")
    assert getattr(reason, "reason", "") == "SLOT_MISMATCH"


@pytest.mark.parametrize("spoil", ["header", "rows", "token ids", "loss mask", "cut", "gone"])
def test_a_small_sample_that_is_damaged_is_an_answer(
    own: ServerProcess, client: Client, fill: IngestClient, namespace: str, spoil: str
) -> None:
    """The server sends small files unchecked: what is wrong with one is found, and told as the server tells it."""
    samples = small(namespace, 5, dtype="F32")
    rotten = samples[2]
    fill.store(samples[0], samples[1], samples[3], samples[4])
    store_with_mask(fill, rotten)
    (path,) = own.data_dir.glob(f"{namespace}/*/s02.safetensors")
    raw = bytearray(path.read_bytes())
    at = header_length(bytes(raw))
    ids_at = at + rotten.num_tokens * rotten.row_bytes
    places = {"header": at // 2, "rows": at + 1, "token ids": ids_at + 1, "loss mask": len(raw) - 1}
    if spoil in places:
        raw[places[spoil]] ^= 1
    if spoil == "gone":
        path.unlink()
    else:
        path.write_bytes(raw[:-1] if spoil == "cut" else raw)
    for verify in (True, False):
        answers = list(client.get_many([f"s{n:02}" for n in range(5)], namespace=namespace, verify=verify))
        if client.data_dir is None or verify:
            assert [outcome(answer) for answer in answers] == ["s00", "s01", "DAMAGED", "s03", "s04"]
        for number in (0, 1, 3, 4):
            assert_rows(answers[number], samples[number])


def test_small_samples_come_as_their_files(own: ServerProcess, fill: IngestClient, namespace: str) -> None:
    """With all that they have: columns that this client knows, and none that it does not ask for."""
    sample = SyntheticSample("s", namespace=namespace, dtype="F32", num_tokens=9, tags={"a": "b"})
    fill.store(*small(namespace, 20, dtype="F16"))
    store_with_mask(fill, sample)
    files: list[Any] = []

    class Counted(SentFile):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            files.append(self)

    with connect(own.address) as client, pytest.MonkeyPatch.context() as patch:
        patch.setattr(reading, "SentFile", Counted)
        (many,) = client.get_many(["s"], namespace=namespace)
        one = client.get("s", namespace=namespace)
        assert len(files) == 1
        assert len(list(client.get_many(namespace=namespace))) == 21
        assert len(files) == 22
    assert many.sample is not None
    assert torch.equal(many.sample.hidden_states, one.hidden_states)
    assert torch.equal(many.sample.columns["loss_mask"], one.columns["loss_mask"])
    assert (many.sample.tags, many.sample.metadata) == (one.tags, one.metadata)
    assert_rows(many, sample)


@pytest.mark.parametrize("how", ["unasked", "a part", "no hash"])
def test_a_file_that_was_not_asked_for_is_refused(how: str) -> None:
    """A reader of rows would take the file's bytes for them."""
    info = info_of(SyntheticSample("s"))
    header = pb.ReadHeader(info=info, layer_ids=info.layer_ids, stop=info.num_tokens, has_file=True, header_xxh3=1)
    if how == "a part":
        header.stop -= 1
    if how == "no hash":
        header.ClearField("header_xxh3")
    reply = pb.ReadReply(header=header, data=b"x" * 5000).SerializeToString()

    def read(request: Any, context: Any) -> Iterator[bytes]:
        yield reply

    with serving(Read=read, ReadMany=read) as address, connect(address) as client:
        ask = client.get if how == "unasked" else lambda name: list(client.get_many([name], retry_s=0))
        with pytest.raises(ProtocolViolation):
            ask(info.sample_id)


def test_it_waits_for_what_is_arriving(client: Client, fill: IngestClient, namespace: str) -> None:
    samples = small(namespace, 3, dtype="F32")
    fill.store(samples[0], samples[2])
    number = fill.open(samples[1])
    fill.send_rows(number, samples[1])
    later = threading.Timer(0.3, fill.commit, (number, samples[1]))
    later.start()
    answers = list(client.get_many([s.sample_id for s in samples], namespace=namespace, wait_s=60))
    later.join()
    for answer, sample in zip(answers, samples, strict=True):
        assert_rows(answer, sample)
    number = fill.open(SyntheticSample("late", namespace=namespace))
    fill.send_rows(number, SyntheticSample("late", namespace=namespace), 0, 1)
    answers = list(client.get_many(["s00", "late", "s02"], namespace=namespace, wait_s=0.1))
    assert [outcome(answer) for answer in answers] == ["s00", "STILL_ARRIVING", "s02"]


def test_it_waits_for_what_failed_with_its_server(client: Client, fill: IngestClient, namespace: str) -> None:
    sample = SyntheticSample("again", namespace=namespace, num_tokens=3, dtype="F32")
    fill.fail(sample, "SERVER_DRAINING")
    for wait_s in (0.0, 0.1):
        (answer,) = client.get_many(["again"], namespace=namespace, wait_s=wait_s)
        assert (outcome(answer), getattr(answer.error, "reason", "")) == ("SAMPLE_FAILED", "SERVER_DRAINING")
    later = threading.Timer(0.3, fill.store, (sample,))
    later.start()
    (answer,) = client.get_many(["again"], namespace=namespace, wait_s=60)
    later.join()
    assert_rows(answer, sample)


def test_each_sample_counts_as_read(client: Client, fill: IngestClient, namespace: str) -> None:
    samples = small(namespace, 5)
    fill.store(*samples)
    names = [s.sample_id for s in samples]
    assert len(list(client.get_many([*names, "s01"], namespace=namespace))) == 6
    wait_until(lambda: [client.stat(name, namespace=namespace).reads for name in names] == [1, 2, 1, 1, 1])


def test_many_calls_are_one_stream(client: Client, fill: IngestClient, namespace: str) -> None:
    name = "n" * 120
    fill.store(
        SyntheticSample(name, namespace=namespace, num_tokens=1), SyntheticSample("s", namespace=namespace, num_tokens=1)
    )
    ids = ([name] * 1800 + ["s"] * 3) * 2  # More bytes, and more reads, than a call takes.
    assert [outcome(answer) for answer in client.get_many(ids, namespace=namespace)] == ids


def test_a_reader_that_leaves_ends_the_call(own: ServerProcess, client: Client, fill: IngestClient, namespace: str) -> None:
    fill.store(*small(namespace, 4))
    answers = client.get_many(["s00", "s01", "s02", "s03"], namespace=namespace)
    assert outcome(next(answers)) == "s00"
    answers.close()  # type: ignore[attr-defined]
    assert outcome(next(client.get_many(["s03"], namespace=namespace))) == "s03"


def test_a_file_that_is_not_there_is_sent(own: ServerProcess, fill: IngestClient, namespace: str, tmp_path: Path) -> None:
    samples = small(namespace, 3, dtype="F32")
    fill.store(*samples)
    with connect(own.address, data_dir=tmp_path) as elsewhere:
        for answer, sample in zip(elsewhere.get_many(["s00", "s01", "s02"], namespace=namespace), samples, strict=True):
            assert_rows(answer, sample)


def _older(samples: dict[str, SyntheticSample]) -> Any:
    """A Read of a server that knows no ReadMany."""

    def read(request: pb.ReadRequest, context: grpc.ServicerContext) -> Iterator[Any]:
        if request.sample_id not in samples:
            context.set_trailing_metadata((("slotstream-code", "NOT_FOUND"),))
            context.abort(grpc.StatusCode.NOT_FOUND, "no such sample")
        sample = samples[request.sample_id]
        yield read_header(sample)
        yield read_rows(sample, 0, sample.num_tokens)

    return read


def test_an_older_server_is_read_one_by_one() -> None:
    samples = {s.sample_id: s for s in small("default", 3, dtype="F32")}
    with serving(Read=_older(samples)) as address, connect(address) as client:
        answers = list(client.get_many(["s01", "nobody", "s00", "s02"]))
        assert [outcome(answer) for answer in answers] == ["s01", "NOT_FOUND", "s00", "s02"]
        assert_rows(answers[0], samples["s01"])
    with serving() as address, connect(address) as client, pytest.raises(ProtocolViolation, match="no slotstream server"):
        list(client.get_many(["s"]))


class _Breaking:
    """A ReadMany of one sample whose first calls break after so many rows, each."""

    def __init__(self, sample: SyntheticSample, *breaks: int, committed: tuple[int, ...] = ()) -> None:
        self._sample = sample
        self._breaks = list(breaks)
        self._committed = list(committed)
        self.starts: list[int] = []

    def __call__(self, request: pb.ReadManyRequest, context: grpc.ServicerContext) -> Iterator[Any]:
        for number, read in enumerate(request.reads):
            if read.sample_id == "bad":
                yield pb.ReadReply(error=pb.ReadError(read=number, code="NOT_FOUND", message="no"))
                continue
            self.starts.append(read.start)
            yield self._header(read.start)
            stop = self._breaks.pop(0) if self._breaks else self._sample.num_tokens
            if stop > read.start:
                yield read_rows(self._sample, read.start, stop)
            if stop < self._sample.num_tokens:
                context.abort(grpc.StatusCode.UNAVAILABLE, "the server went away")

    def _header(self, start: int) -> pb.ReadReply:
        info = info_of(self._sample)
        if self._committed:
            info.committed_unix_ns = self._committed.pop(0)
        return read_header(self._sample, info=info, start=start, token_ids=self._sample.token_ids[start:])


def test_a_read_that_breaks_goes_on_with_its_next_row() -> None:
    sample = SyntheticSample("s", dtype="F32", num_tokens=40)
    server = _Breaking(sample, 15, 15, 33)
    with serving(ReadMany=server) as address, connect(address) as client:
        answers = list(client.get_many(["bad", "s", "bad", "s"]))
    assert [outcome(answer) for answer in answers] == ["NOT_FOUND", "s", "NOT_FOUND", "s"]
    assert server.starts == [0, 15, 15, 33, 0]
    assert_rows(answers[1], sample)
    assert_rows(answers[3], sample)


def test_the_next_call_is_made_before_the_last_answer_is_taken() -> None:
    """So that the server reads on meanwhile; and only once it has ended the present one, so that a stream is one read."""
    sample = SyntheticSample("s", dtype="F32", num_tokens=40)
    calls: list[int] = []
    server = _Breaking(sample)

    def read_many(request: pb.ReadManyRequest, context: grpc.ServicerContext) -> Iterator[Any]:
        calls.append(len(request.reads))
        return server(request, context)

    with serving(ReadMany=read_many) as address, connect(address) as client:
        answers = client.get_many(["s"] * 22)
        for answer in itertools.islice(answers, 5):
            assert_rows(answer, sample)
        assert calls == [1, 4]  # Who wants a few has no others read.
        for answer in itertools.islice(answers, 16):
            assert_rows(answer, sample)
        wait_until(lambda: len(calls) == 4)
        assert calls == [1, 4, 16, 1]
        assert [outcome(answer) for answer in answers] == ["s"]


def test_what_was_asked_for_is_answered_before_an_error_of_the_ids() -> None:
    def ids() -> Iterator[str]:
        yield from ["s"] * 24  # The last three in a call of their own.
        raise RuntimeError("no more ids")

    server = _Breaking(SyntheticSample("s", dtype="F32", num_tokens=40))
    with serving(ReadMany=server) as address, connect(address) as client:
        answers = client.get_many(ids())
        assert [outcome(answer) for answer in itertools.islice(answers, 24)] == ["s"] * 24
        with pytest.raises(RuntimeError, match="no more ids"):
            next(answers)
        assert list(answers) == []


def test_a_sample_that_was_replaced_meanwhile_is_not_mixed_with_the_other() -> None:
    sample = SyntheticSample("s", dtype="F32", num_tokens=40)
    server = _Breaking(sample, 15, committed=(1, 2, 2))
    with serving(ReadMany=server) as address, connect(address) as client:
        first, second = client.get_many(["s", "s"])
    assert isinstance(first.error, SampleNotFound)
    assert "replaced" in str(first.error)
    assert_rows(second, sample)


def test_trying_again_has_an_end() -> None:
    sample = SyntheticSample("s", dtype="F32", num_tokens=40)
    server = _Breaking(sample, *[15] * 1000)
    with serving(ReadMany=server) as address, connect(address) as client:
        with pytest.raises(ServerUnavailable):
            list(client.get_many(["s"], retry_s=0))
        assert server.starts == [0]
        with pytest.raises(ServerUnavailable):
            list(client.get_many(["s"], retry_s=0.5))
    assert len(server.starts) > 2
    with pytest.raises(BadParams, match="retry_s"), connect("127.0.0.1:1", connect_timeout_s=0) as nobody:
        nobody.get_many(["s"], retry_s=-1)


def test_a_restarted_server_costs_nothing(tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(ServerProcess(tmp_path / "data"))
        with IngestClient(server.address) as ingest:
            store(ingest, "n", [50_000] * 12)
        client = stack.enter_context(connect(server.address))
        answers = client.get_many(client.list(namespace="n"))
        found = [next(answers)]
        server.stop()
        starts = threading.Timer(0.5, lambda: stack.enter_context(ServerProcess(tmp_path / "data", address=server.address)))
        starts.start()
        found += answers
        starts.join()
        for answer in found:
            assert answer.sample is not None
            first = int(answer.sample_id[1:])
            assert answer.sample.hidden_states[:, 0, 0].tolist() == list(range(first, first + 50_000))
        assert len(found) == 12
