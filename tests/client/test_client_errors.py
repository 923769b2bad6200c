"""What failures mean to the client: the server's codes, gRPC's own statuses, and peers that break the protocol."""

from __future__ import annotations

import math
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import grpc
import pytest
from support.fake_samples import failing, info_of, read_header, read_rows, serving
from support.synthetic import SyntheticSample

from slotstream.client import (
    Client,
    ConfigError,
    Damaged,
    DeadlineExceeded,
    SampleFailed,
    SampleNotFound,
    ServerUnavailable,
    SlotStreamError,
    StillArriving,
    connect,
)
from slotstream.client.call_errors import NotServed
from slotstream.client.rpc import WatchedStream
from slotstream.v1 import sample_pb2, samples_pb2
from slotstream.wire import errors
from slotstream.wire.errors import BadParams, InternalFault, Interrupted, ProtocolViolation, TooLarge
from slotstream.wire.hashing import to_hex, xxh3
from slotstream.wire.layout import SampleHeader, encode_header, file_path

SAMPLE = SyntheticSample("a")
Status = grpc.StatusCode


@pytest.mark.parametrize(
    "address", ["", "nohost", "host:", "host:0", "host:70000", "host:1x", "unix:", "unix:relative", "a b:1", "http://h:1"]
)
def test_a_malformed_address_is_one_sentence(address: str) -> None:
    with pytest.raises(ConfigError, match="address") as caught:
        connect(address)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize("option", ["connect_timeout_s", "call_timeout_s", "stall_timeout_s"])
@pytest.mark.parametrize("value", [-1.0, math.inf, math.nan])
def test_a_time_out_must_be_a_number_of_seconds(option: str, value: float) -> None:
    options: dict[str, Any] = {option: value}
    with pytest.raises(ConfigError, match="seconds"):
        connect("127.0.0.1:1", **options)


@pytest.mark.parametrize("connect_timeout_s", [0, 0.2])
def test_a_server_that_is_not_there(connect_timeout_s: float, tmp_path: Any) -> None:
    address = f"unix:{tmp_path}/nobody.sock"
    with (
        pytest.raises(ServerUnavailable, match=r"nobody\.sock") as caught,
        connect(address, connect_timeout_s=connect_timeout_s) as client,
    ):
        client.stat("a")
    assert caught.value.retryable


@pytest.mark.parametrize(
    ("status", "code", "kind"),
    [
        (Status.NOT_FOUND, "NOT_FOUND", SampleNotFound),
        (Status.DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED", DeadlineExceeded),
        (Status.FAILED_PRECONDITION, "STILL_ARRIVING", StillArriving),
        (Status.DATA_LOSS, "DAMAGED", Damaged),
        (Status.INVALID_ARGUMENT, "BAD_TOKEN_RANGE", errors.BadTokenRange),
        (Status.UNAVAILABLE, "SERVER_DRAINING", errors.ServerDraining),
        (Status.UNKNOWN, "OF_A_LATER_VERSION", InternalFault),
    ],
)
def test_the_code_in_the_trailers_decides(status: Status, code: str, kind: type[SlotStreamError]) -> None:
    fail = failing(status, "the sentence", slotstream_code=code)
    with serving(Stat=fail, Read=fail) as address, connect(address) as client:
        for call in (client.stat, client.get):
            with pytest.raises(kind, match=r"^the sentence$") as caught:
                call("a")
            assert type(caught.value) is kind


def test_a_failed_sample_says_the_reason() -> None:
    fail = failing(Status.FAILED_PRECONDITION, "it failed", slotstream_code="SAMPLE_FAILED", slotstream_reason="SLOT_MISMATCH")
    with serving(Read=fail) as address, connect(address) as client, pytest.raises(SampleFailed, match="it failed") as caught:
        client.get("a")
    assert caught.value.reason == "SLOT_MISMATCH"


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (Status.UNAVAILABLE, ServerUnavailable),
        (Status.DEADLINE_EXCEEDED, DeadlineExceeded),
        (Status.CANCELLED, Interrupted),
        (Status.UNIMPLEMENTED, NotServed),
        (Status.RESOURCE_EXHAUSTED, TooLarge),
        (Status.INVALID_ARGUMENT, BadParams),
        (Status.PERMISSION_DENIED, InternalFault),
    ],
)
def test_a_status_without_a_code(status: Status, kind: type[SlotStreamError]) -> None:
    with serving(Stat=failing(status, "why")) as address, connect(address) as client:
        with pytest.raises(kind, match="why") as caught:
            client.stat("a")
        assert type(caught.value) is kind


def test_a_server_of_another_kind() -> None:
    with serving() as address, connect(address) as client, pytest.raises(ProtocolViolation, match="no slotstream server"):
        client.stat("a")


def _silent(released: threading.Event) -> Callable[[Any, grpc.ServicerContext], Any]:
    def handler(request: Any, context: grpc.ServicerContext) -> Any:
        context.add_callback(released.set)
        released.wait()
        return info_of(SAMPLE)

    return handler


def test_a_call_that_is_never_answered_meets_its_deadline() -> None:
    released = threading.Event()
    with serving(Stat=_silent(released)) as address, connect(address, call_timeout_s=0.1) as client:
        with pytest.raises(DeadlineExceeded):
            client.stat("a")
        assert released.wait(30)  # The server was told.


@pytest.mark.parametrize("replies_before", [0, 1, 2])
def test_a_read_that_stalls_meets_its_deadline_and_ends_the_call(replies_before: int) -> None:
    released = threading.Event()

    def read(request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
        context.add_callback(released.set)
        yield from (read_header(SAMPLE), read_rows(SAMPLE, 0, 10))[:replies_before]
        released.wait()

    with serving(Read=read) as address, connect(address, stall_timeout_s=0.1) as client:
        with pytest.raises(DeadlineExceeded, match=r"sent nothing for 0\.1 s"):
            client.get("a", wait_s=0)
        assert released.wait(30)


def test_a_slow_consumer_is_not_a_stalled_server() -> None:
    gate = threading.Event()

    def read(request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
        yield read_header(SAMPLE)
        yield read_rows(SAMPLE, 0, 40)

    with serving(Read=read) as address, connect(address, stall_timeout_s=0.05) as client:
        reader = client.read("a", wait_s=0)
        gate.wait(0.6)  # Far longer than a stall, and than the watch's tick.
        assert [block.rows for block in reader] == [40]


def test_leaving_a_read_early_ends_the_call() -> None:
    ended = threading.Event()

    def read(request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
        context.add_callback(ended.set)
        yield read_header(SAMPLE)
        yield read_rows(SAMPLE, 0, 10)
        ended.wait()

    with serving(Read=read) as address, connect(address) as client:
        with client.read("a") as reader:
            assert reader.nbytes == 40 * SAMPLE.row_bytes
        assert ended.wait(30)
        ended.clear()
        next(client.read("a"))  # Nobody holds this reader any longer.
        assert ended.wait(30)


def test_an_older_server_sends_the_rows_that_were_to_be_taken_in_place(tmp_path: Path) -> None:
    replies = [read_header(SAMPLE), read_rows(SAMPLE, 0, 40)]
    with serving(Read=lambda request, context: iter(replies)) as address, connect(address, data_dir=tmp_path) as client:
        assert client.get("a").token_ids.tolist() == SAMPLE.token_ids


def test_no_peer_can_name_the_file_that_is_read(tmp_path: Path) -> None:
    """A sound file elsewhere, which the peer describes rightly: the names are those that were asked for."""
    metadata = {"hash_rows": "64", "hashes": to_hex(xxh3(SAMPLE.rows()))}
    facts = SampleHeader(SAMPLE.row_format, SAMPLE.num_tokens, metadata, 4096)
    header = encode_header(facts)
    secret = tmp_path / file_path("secret", "a")
    secret.parent.mkdir(parents=True)
    secret.write_bytes(header + SAMPLE.rows() + bytes(8 * SAMPLE.num_tokens))
    (tmp_path / "data").mkdir()
    asked: list[samples_pb2.ReadRequest] = []

    def read(request: samples_pb2.ReadRequest, context: grpc.ServicerContext) -> Iterator[Any]:
        asked.append(request)
        reply = read_header(SAMPLE)
        reply.header.info.namespace = "../secret"
        if request.in_place:
            reply.header.header_xxh3 = xxh3(header)
        yield reply
        if not request.in_place:
            yield read_rows(SAMPLE, 0, 40)

    with serving(Read=read) as address, connect(address, data_dir=tmp_path / "data") as client:
        assert client.get("a").token_ids.tolist() == SAMPLE.token_ids
    assert [request.in_place for request in asked] == [True, False]


@pytest.mark.parametrize(
    "facts",
    [
        pytest.param({"hash_rows": "0", "hashes": ""}, id="no rows a hash"),
        pytest.param({"hash_rows": "64", "hashes": ""}, id="no hash"),
        pytest.param({"hash_rows": "64", "hashes": "x" * 16}, id="not a hash"),
        pytest.param({}, id="nothing"),
    ],
)
def test_a_file_whose_hashes_are_nonsense_is_not_read(tmp_path: Path, facts: dict[str, str]) -> None:
    """Though the server vouches for it."""
    header = encode_header(SampleHeader(SAMPLE.row_format, SAMPLE.num_tokens, facts, 4096))
    file = tmp_path / file_path("default", "a")
    file.parent.mkdir(parents=True)
    file.write_bytes(header + SAMPLE.rows() + bytes(8 * SAMPLE.num_tokens))
    asked: list[bool] = []

    def read(request: samples_pb2.ReadRequest, context: grpc.ServicerContext) -> Iterator[Any]:
        asked.append(request.in_place)
        yield read_header(SAMPLE, header_xxh3=xxh3(header)) if request.in_place else read_header(SAMPLE)
        if not request.in_place:
            yield read_rows(SAMPLE, 0, 40)

    with serving(Read=read) as address, connect(address, data_dir=tmp_path) as client:
        assert client.get("a").token_ids.tolist() == SAMPLE.token_ids
    assert asked == [True, False]


@pytest.mark.parametrize(
    "replies",
    [
        pytest.param([], id="nothing at all"),
        pytest.param([read_rows(SAMPLE, 0, 40)], id="rows before the header"),
        pytest.param([b"\xff\xff\xff"], id="not protobuf"),
        pytest.param([read_header(SyntheticSample("b"))], id="another sample"),
        pytest.param([read_header(SAMPLE, layer_ids=[4, 2, 1])], id="layers in another order"),
        pytest.param([read_header(SAMPLE, start=1)], id="another range"),
        pytest.param([read_header(SAMPLE, token_ids=[1, 2])], id="too few token ids"),
        pytest.param([read_header(SAMPLE, token_ids=[1 << 63] * 40)], id="token ids past int64"),
        pytest.param(
            [read_header(SyntheticSample("a", dtype="F32"), info=info_of(SAMPLE)), read_rows(SAMPLE, 1, 5)], id="a gap"
        ),
        pytest.param([read_header(SAMPLE), read_rows(SAMPLE, 0, 9), read_rows(SAMPLE, 0, 9)], id="rows twice"),
        pytest.param([read_header(SAMPLE), read_rows(SAMPLE, 0, 40), read_rows(SAMPLE, 0, 1, first_row=40)], id="a row more"),
        pytest.param([read_header(SAMPLE), read_rows(SyntheticSample("a", hidden_size=8), 0, 40)], id="too few bytes"),
        pytest.param([read_header(SAMPLE), read_header(SAMPLE)], id="a second header"),
    ],
)
def test_a_peer_that_breaks_the_protocol(replies: list[Any]) -> None:
    with (
        serving(Read=lambda request, context: iter(replies)) as address,
        connect(address) as client,
        pytest.raises(ProtocolViolation),
    ):
        client.get("a")


def test_layers_that_the_sample_does_not_have(tmp_path: Path) -> None:
    replies = [read_header(SAMPLE, layer_ids=[9])]
    with (
        serving(Read=lambda request, context: iter(replies)) as address,
        connect(address, data_dir=tmp_path) as client,
        pytest.raises(ProtocolViolation),
    ):
        client.get("a", layers=[9])


@pytest.mark.parametrize(
    "info",
    [
        pytest.param({"dtype": "F8_E4M3"}, id="unknown dtype"),
        pytest.param({"hidden_size": (1 << 32) - 1, "num_tokens": 1 << 20}, id="too large"),
        pytest.param({"hidden_size": 0}, id="no elements"),
        pytest.param({"state": 9}, id="unknown state"),
    ],
)
def test_facts_that_cannot_be(info: dict[str, Any]) -> None:
    header = read_header(SAMPLE)
    for name, value in info.items():
        setattr(header.header.info, name, value)
    if "num_tokens" in info:
        header.header.stop = info["num_tokens"]
        header.header.token_ids.extend(range(info["num_tokens"] - SAMPLE.num_tokens))
    with (
        serving(Read=lambda request, context: iter([header])) as address,
        connect(address) as client,
        pytest.raises(ProtocolViolation),
    ):
        client.get("a")


def test_a_read_cut_short_is_an_interruption() -> None:
    replies = [read_header(SAMPLE), read_rows(SAMPLE, 0, 9)]
    with (
        serving(Read=lambda request, context: iter(replies)) as address,
        connect(address) as client,
        pytest.raises(Interrupted, match=r"at row 9, before row 40"),
    ):
        client.get("a")


def test_an_error_amid_the_rows() -> None:
    def read(request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
        yield read_header(SAMPLE)
        yield read_rows(SAMPLE, 0, 9)
        context.set_trailing_metadata((("slotstream-code", "DAMAGED"),))
        context.abort(Status.DATA_LOSS, "the file fails its hashes")

    with serving(Read=read) as address, connect(address) as client, pytest.raises(Damaged, match="fails its hashes"):
        client.get("a")


def test_a_request_in_protobuf_layout_is_read_too() -> None:
    rows = samples_pb2.ReadReply(rows=samples_pb2.RowsHeader(first_row=0, rows=40), data=SAMPLE.rows())
    ordinary = (
        samples_pb2.ReadReply(data=rows.data).SerializeToString() + samples_pb2.ReadReply(rows=rows.rows).SerializeToString()
    )
    with serving(Read=lambda request, context: iter([read_header(SAMPLE), ordinary])) as address, connect(address) as client:
        assert b"".join(block.data for block in client.read("a")) == SAMPLE.rows()


@pytest.mark.parametrize(
    ("kind", "call"),
    [
        (errors.BadSampleId, lambda c: c.get("../etc/passwd")),
        (errors.BadSampleId, lambda c: c.get("")),
        (errors.BadSampleId, lambda c: c.get("a" * 129)),
        (errors.BadSampleId, lambda c: c.get(7)),
        (errors.BadNamespace, lambda c: c.get("a", namespace="b/c")),
        (errors.BadNamespace, lambda c: c.stat("a", namespace="")),
        (errors.BadTokenRange, lambda c: c.get("a", start=-1)),
        (errors.BadTokenRange, lambda c: c.get("a", start=4, stop=3)),
        (errors.BadTokenRange, lambda c: c.get("a", stop=1 << 40)),
        (errors.BadTokenRange, lambda c: c.get("a", start=1 << 40)),
        (errors.BadTokenRange, lambda c: c.get("a", start=1.5)),
        (errors.BadLayers, lambda c: c.get("a", layers=[])),
        (errors.BadLayers, lambda c: c.get("a", layers=[1, 1])),
        (errors.BadLayers, lambda c: c.get("a", layers=[-1])),
        (errors.BadLayers, lambda c: c.get("a", layers=[1 << 32])),
        (errors.BadLayers, lambda c: c.get("a", layers="13")),
        (errors.BadLayers, lambda c: c.get("a", layers=3)),
        (errors.BadParams, lambda c: c.get("a", wait_s=-1)),
        (errors.BadParams, lambda c: c.get("a", wait_s=math.nan)),
        (errors.BadParams, lambda c: c.get("a", wait_s=1e9)),
        (errors.BadSampleId, lambda c: c.stat("a/b")),
        (errors.BadSampleId, lambda c: c.delete("a/b")),
        (errors.BadSampleId, lambda c: c.verify("a/b")),
        (errors.BadParams, lambda c: c.list(state="asleep")),
        (errors.BadPage, lambda c: c.list(page_size=0)),
        (errors.BadPage, lambda c: c.list(page_size=1001)),
        (errors.BadPage, lambda c: c.list(limit=-1)),
        (errors.BadTags, lambda c: c.list(tags={str(i): "" for i in range(9)})),
        (errors.BadTags, lambda c: c.list(tags={"a": 1})),
        (errors.BadParams, lambda c: c.list(created_from="yesterday")),
    ],
)
def test_what_is_wrong_is_refused_before_it_is_sent(kind: type[SlotStreamError], call: Callable[[Client], Any]) -> None:
    with connect("127.0.0.1:1", connect_timeout_s=0) as client, pytest.raises(kind):
        call(client)


def test_a_closed_client_says_so() -> None:
    client = connect("127.0.0.1:1", connect_timeout_s=0)
    client.close()
    client.close()
    for call in (client.stat, client.read, client.delete):
        with pytest.raises(ValueError, match="closed"):
            call("a")


def test_closing_ends_a_read_under_way() -> None:
    released = threading.Event()
    reading = threading.Event()

    def read(request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
        context.add_callback(released.set)
        yield read_header(SAMPLE)
        reading.set()
        released.wait()

    caught: list[BaseException] = []

    def consume(client: Client) -> None:
        try:
            client.get("a")
        except SlotStreamError as error:
            caught.append(error)

    with serving(Read=read) as address:
        client = connect(address)
        thread = threading.Thread(target=consume, args=(client,))
        thread.start()
        assert reading.wait(30)
        client.close()
        thread.join(30)
    assert [type(error) for error in caught] == [Interrupted]


def test_without_torch_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with connect("127.0.0.1:1", connect_timeout_s=0) as client, pytest.raises(ImportError, match=r"slotstream\[torch\]"):
        client.get("a")


def test_importing_the_client_does_not_import_torch() -> None:
    script = "import sys, slotstream.client; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


def test_a_call_that_gives_nothing_and_does_not_end_is_left_alone_in_time() -> None:
    """As gRPC's did now and then after a server was killed: `next` did not return, whether the call was cancelled or not."""
    never = threading.Event()

    class Call:
        cancelled = 0

        def __next__(self) -> bytes:
            never.wait()
            raise StopIteration

        def cancel(self) -> None:
            self.cancelled += 1

    call = Call()
    with pytest.raises(DeadlineExceeded, match=r"sent nothing for 0\.1 s"):
        WatchedStream[bytes](call, "host:1").receive(0.1)
    assert call.cancelled
    never.set()


def test_one_reply_is_taken_ahead_of_the_consumer_and_no_more() -> None:
    taken: SimpleQueue[int] = SimpleQueue()

    class Call:
        count = 0

        def __next__(self) -> int:
            if self.count == 3:
                raise StopIteration
            self.count += 1
            taken.put(self.count)
            return self.count

        def cancel(self) -> None:
            pass

    stream = WatchedStream[int](Call(), "host:1")
    for number in (1, 2, 3):
        assert taken.get(timeout=10) == number
        with pytest.raises(Empty):
            taken.get(timeout=0.05)
        assert stream.receive(10.0) == number
    assert stream.receive(10.0) is None


def test_what_a_call_raises_otherwise_reaches_the_caller() -> None:
    class Call:
        def __next__(self) -> bytes:
            raise ValueError("cannot invoke RPC on a closed channel")

        def cancel(self) -> None:
            pass

    with pytest.raises(ValueError, match="closed channel"):
        WatchedStream[bytes](Call(), "host:1").receive(10.0)


def test_a_server_that_knows_no_requests_does_not_answer_with_everything() -> None:
    reply = samples_pb2.ListReply(samples=[sample_pb2.SampleInfo(sample_id="other", state=sample_pb2.SAMPLE_STATE_COMMITTED)])
    with serving(List=lambda request, context: reply) as address, connect(address) as client:
        with pytest.raises(ProtocolViolation, match="of an earlier version"):
            list(client.list(request="cmpl-x"))
        assert [info.sample_id for info in client.list()] == ["other"]
