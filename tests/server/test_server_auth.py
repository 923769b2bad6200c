"""Who may do what: every call asks for a token, and a token of one namespace learns nothing of another."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
from server.server_kit import COMMITTED, Metadata, Peer, Reader, RunningServer, Sample, status
from support.secure import bearer, entry, health_of, token, write_tokens
from support.waiting import wait_until

from slotstream.store.upkeep.retention import Policy, Rule
from slotstream.v1 import ingest_pb2 as pb
from slotstream.v1 import samples_pb2 as read_pb
from slotstream.wire.access import Access

UNAUTHENTICATED = ("UNAUTHENTICATED", "UNAUTHENTICATED")
DENIED = ("PERMISSION_DENIED", "PERMISSION_DENIED")
ENTRIES = (
    entry("writer-a", ["a"], "ingest"),
    entry("reader-a", ["a"], "read"),
    entry("all-a", ["a"], "ingest", "read", "delete", "admin"),
    entry("all-b", ["b"], "ingest", "read", "delete", "admin"),
    entry("reader-ac", ["c", "a"], "read"),
    entry("root", ["*"], "ingest", "read", "delete", "admin"),
)
CALLS: dict[str, Callable[[Reader, str], Any]] = {
    "Read": lambda reader, space: reader.frames(namespace=space, sample_id="s"),
    "Read many": lambda reader, space: reader.read_many(
        read_pb.ReadManyRequest(reads=[read_pb.ReadRequest(namespace=space, sample_id=i) for i in ("none", "s")])
    ),
    "Stat": lambda reader, space: reader.stat(read_pb.StatRequest(namespace=space, sample_id="s")),
    "List": lambda reader, space: reader.list(read_pb.ListRequest(namespace=space)),
    "Delete": lambda reader, space: reader.delete(read_pb.DeleteRequest(namespace=space, sample_id="s")),
    "Verify one": lambda reader, space: reader.verify(namespace=space, sample_id="s"),
    "Restore one": lambda reader, space: reader.restore(namespace=space, sample_id="s"),
    "Restore all": lambda reader, space: reader.restore(namespace=space),
    "Retention": lambda reader, space: reader.retention(read_pb.RetentionRequest(namespace=space)),
    "Accept": lambda reader, space: reader.retention(read_pb.RetentionRequest(namespace=space, accept=True)),
    "Verify all": lambda reader, space: reader.verify(namespace=space),
}


class House:
    """A server with the tokens of ENTRIES, and callers made by name; `metadata` for odd ones."""

    def __init__(self, directory: Path, stack: ExitStack, **options: Any) -> None:
        self.tokens = write_tokens(directory / "tokens.toml", *ENTRIES)
        self._stack = stack
        self.server = stack.enter_context(RunningServer(directory / "data", tokens_file=self.tokens, **options))

    def peer(self, name: str) -> Peer:
        return self._stack.enter_context(Peer(self.server.address, metadata=bearer(name)))

    def reader(self, name: str = "", metadata: Metadata = ()) -> Reader:
        return self._stack.enter_context(Reader(self.server.address, metadata=metadata or bearer(name)))


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    with ExitStack() as stack:
        yield House(tmp_path, stack)


NO_TOKENS: list[Any] = [
    pytest.param((("x", "y"),), id="none"),
    pytest.param(bearer("nobody"), id="unknown"),
    pytest.param((("authorization", f"Basic {token('root')}"),), id="other scheme"),
    pytest.param((("authorization", token("root")),), id="no scheme"),
    pytest.param((("authorization", "Bearer "),), id="empty"),
    pytest.param((*bearer("root"), *bearer("root")), id="twice"),
    pytest.param((("authorization", f"Bearer {token('root')[:-1]}"),), id="cut"),
    pytest.param((("authorization", f"Bearer {token('root')}x"),), id="longer"),
    pytest.param((("x-authorization", f"Bearer {token('root')}"),), id="other header"),
]


@pytest.mark.parametrize("metadata", NO_TOKENS)
def test_without_a_token_that_is_known_nothing_is_answered_but_health(house: House, metadata: Metadata) -> None:
    house.peer("all-a").put(Sample(namespace="a"), 1)
    reader = house.reader(metadata=metadata)
    for call in CALLS.values():
        for space in ("a", "b", ""):
            assert reader.refused(partial(call, reader, space)) == UNAUTHENTICATED
    with Peer(house.server.address, greet=False, metadata=metadata) as stranger:
        assert stranger.ending() == (grpc.StatusCode.UNAUTHENTICATED, "UNAUTHENTICATED")
    assert health_of(house.server.address, Access()) == 1
    assert house.server.metric("refused_streams_total", code="UNAUTHENTICATED") == 1
    assert house.server.metric("open_samples") == 0


@pytest.mark.parametrize("scheme", ["bearer", "BEARER"])
def test_the_scheme_is_of_any_case(house: House, scheme: str) -> None:
    assert CALLS["List"](house.reader(metadata=(("authorization", f"{scheme} {token('root')}"),)), "") is not None


def test_a_sample_of_a_namespace_that_is_not_the_tokens_fails_alone(house: House) -> None:
    sample = Sample(namespace="b")
    peer = house.peer("all-a")
    peer.say(sample.open(1), sample.chunk(1, 1, 0, 20), sample.commit(1))
    failed = peer.failed()
    assert (failed.sample, failed.code, failed.retryable) == (1, "PERMISSION_DENIED", False)
    peer.put(Sample(namespace="a"), 2)
    denied = house.peer("reader-a")
    denied.say(Sample(namespace="a", sample_id="t").open(1))
    assert denied.failed().code == "PERMISSION_DENIED"
    # Nothing of it is known, also not that it failed.
    root = house.reader("root")
    assert [(info.namespace, info.sample_id) for info in CALLS["List"](root, "").samples] == [("a", "s")]
    assert root.refused(lambda: CALLS["Stat"](root, "b"))[1] == "NOT_FOUND"
    assert not (house.server.config.data_dir / "b").exists()


def test_a_refused_sample_touches_no_sample_of_that_name(house: House) -> None:
    sample = Sample(namespace="b")
    owner = house.peer("all-b")
    owner.say(sample.open(1), sample.chunk(1, 1, 0, 20))
    owner.acks(1)
    intruder = house.peer("all-a")
    intruder.say(sample.open(7), Sample(namespace="b", seed=1).chunk(7, 9, 0, 40), sample.commit(7))
    assert intruder.failed().code == "PERMISSION_DENIED"
    owner.say(sample.chunk(1, 2, 20, 40), sample.commit(1))
    assert owner.committed().duplicate is False
    assert house.reader("all-b").read("s", namespace="b")[1] == sample.data


@pytest.mark.parametrize("stored", [True, False], ids=["stored", "not stored"])
@pytest.mark.parametrize("call", CALLS)
def test_another_namespace_is_denied_alike_whatever_is_there(house: House, call: str, stored: bool) -> None:
    if stored:
        house.peer("all-b").put(Sample(namespace="b"), 1)
    reader = house.reader("all-a")
    with pytest.raises(grpc.RpcError) as caught:
        list(CALLS[call](reader, "b"))
    error: Any = caught.value
    assert status(error) == (grpc.StatusCode.PERMISSION_DENIED, "PERMISSION_DENIED")
    assert error.details() == "this token is not one of namespace 'b'"
    if stored:
        assert house.reader("all-b").state("s", "b") == (COMMITTED, "")


RIGHTS = {
    "Read": "read",
    "Read many": "read",
    "Stat": "read",
    "List": "read",
    "Delete": "delete",
    "Verify one": "read",
    "Retention": "admin",
    "Accept": "admin",
    "Verify all": "admin",
}
RIGHTS |= {"Restore one": "admin", "Restore all": "admin"}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("right", ["ingest", "read", "delete", "admin"])
def test_each_call_needs_its_right(house: House, call: str, right: str) -> None:
    write_tokens(house.tokens, *ENTRIES, entry("one-right", ["a"], right))
    house.peer("all-a").put(Sample(namespace="a"), 1)
    reader = house.reader("one-right")
    if RIGHTS[call] == right:
        result = CALLS[call](reader, "a")
        assert isinstance(result, list) or result is not None
        if call == "Read":
            assert len(list(result)) > 1
        return
    assert reader.refused(lambda: CALLS[call](reader, "a")) == DENIED


def test_leases_of_every_holder_end_for_an_admin_only(house: House) -> None:
    house.peer("all-a").put(Sample(namespace="a"), 1)
    reader, root = house.reader("reader-a"), house.reader("root")
    reader.lease(read_pb.LeaseRequest(namespace="a", sample_id="s", holder="nobody-knows", seconds=600))
    everybodys = read_pb.LeaseRequest(namespace="a", sample_id="s")
    assert reader.refused(lambda: reader.lease(everybodys)) == DENIED
    assert root.refused(lambda: root.delete(read_pb.DeleteRequest(namespace="a", sample_id="s")))[1] == "LEASED"
    assert root.lease(everybodys).leased_until_unix_ns == 0
    root.delete(read_pb.DeleteRequest(namespace="a", sample_id="s"))


def _fill(house: House, *spaces: str, count: int = 7) -> None:
    with Peer(house.server.address, metadata=bearer("root")) as peer:
        for number in range(count):
            for at, space in enumerate(spaces):
                peer.put(Sample(f"s{number}", namespace=space, rows=2), number * len(spaces) + at + 1)


def _pages(reader: Reader, page_size: int, **filters: Any) -> Iterator[read_pb.ListReply]:
    page_token = ""
    while True:
        page = reader.list(read_pb.ListRequest(page_size=page_size, page_token=page_token, **filters))
        yield page
        page_token = page.next_page_token
        if not page_token:
            return


@pytest.mark.parametrize("page_size", [1, 3, 100])
def test_a_listing_shows_what_the_token_covers_and_pages_by_that_alone(house: House, page_size: int) -> None:
    _fill(house, "a", "b", "c")
    for name, spaces in (("reader-a", "a"), ("reader-ac", "ac"), ("root", "abc")):
        pages = list(_pages(house.reader(name), page_size))
        infos = [info for page in pages for info in page.samples]
        assert sorted((i.namespace, i.sample_id) for i in infos) == sorted((s, f"s{n}") for s in spaces for n in range(7))
        assert [i.created_unix_ns for i in infos] == sorted((i.created_unix_ns for i in infos), reverse=True)
        # As many pages as its own samples make: no page is short, or empty, because of others.
        assert [len(page.samples) for page in pages[:-1]] == [page_size] * (len(pages) - 1)
        assert pages[-1].samples


def test_a_page_token_is_good_for_its_own_listing_only_and_says_nothing(house: House) -> None:
    _fill(house, "a", "b", "c", count=3)
    given = next(_pages(house.reader("reader-a"), 1)).next_page_token
    for name in ("reader-ac", "all-b", "root"):
        reader = house.reader(name)
        assert reader.refused(partial(_page_from, reader, given))[1] == "BAD_PAGE"
    raw = base64.urlsafe_b64decode(given)
    reader = house.reader("reader-a")
    for at in range(len(raw)):
        bent = bytearray(raw)
        bent[at] ^= 1
        text = base64.urlsafe_b64encode(bytes(bent)).decode()
        assert reader.refused(partial(_page_from, reader, text))[1] == "BAD_PAGE"
    # Neither the row's number nor its time stands in it in any byte order.
    (info,) = next(_pages(reader, 1)).samples
    for order in ("big", "little"):
        assert info.created_unix_ns.to_bytes(8, order) not in raw
        assert (7).to_bytes(8, order) not in raw


def _page_from(reader: Reader, page_token: str) -> read_pb.ListReply:
    page: read_pb.ListReply = reader.list(read_pb.ListRequest(page_size=1, page_token=page_token))
    return page


def test_a_check_of_everything_is_a_check_of_what_the_token_covers(house: House) -> None:
    _fill(house, "a", "b", count=2)
    for space in "ab":
        (house.server.config.data_dir / space / "stray").write_text("x")
    (house.server.config.data_dir / "stray").write_text("x")
    verdicts = house.reader("all-a").verify()
    assert {(v.namespace, v.sample_id, v.damage) for v in verdicts} == {
        ("a", "s0", ""),
        ("a", "s1", ""),
        ("a", "stray", "FOREIGN"),
    }
    assert {v.namespace for v in house.reader("root").verify()} == {"a", "b", ""}


def test_a_withdrawn_token_ends_its_stream_at_the_next_sample(house: House) -> None:
    peer, reader = house.peer("all-a"), house.reader("all-a")
    peer.put(Sample(namespace="a"), 1)
    write_tokens(house.tokens, entry("other", ["a"], "read"))
    assert reader.refused(lambda: CALLS["Stat"](reader, "a")) == UNAUTHENTICATED
    peer.say(Sample("t", namespace="a").open(2))
    assert peer.ending() == (grpc.StatusCode.UNAUTHENTICATED, "UNAUTHENTICATED")
    wait_until(lambda: house.server.metric("open_samples") == 0)
    write_tokens(house.tokens, *ENTRIES)
    assert CALLS["Stat"](reader, "a").num_tokens == 40
    house.peer("all-a").put(Sample("t", namespace="a"), 1)


def test_a_read_that_waited_is_looked_at_again(house: House) -> None:
    owner = house.peer("all-a")
    owner.say(Sample(namespace="a").open(1), Sample(namespace="a").chunk(1, 1, 0, 40))
    owner.acks(1)
    frames = house.reader("reader-a").frames(namespace="a", sample_id="s", wait_s=60.0)
    wait_until(lambda: house.server.metric("waiting_reads") == 1)
    write_tokens(house.tokens, entry("reader-a", ["b"], "read"), entry("all-a", ["a"], "ingest"))
    owner.say(Sample(namespace="a").commit(1))
    owner.committed()
    with pytest.raises(grpc.RpcError) as caught:
        next(frames)
    assert status(caught.value) == (grpc.StatusCode.PERMISSION_DENIED, "PERMISSION_DENIED")


def test_rights_that_change_count_for_streams_that_are_up(house: House) -> None:
    peer = house.peer("all-a")
    peer.put(Sample(namespace="a"), 1)
    write_tokens(house.tokens, entry("all-a", ["b"], "ingest"))
    peer.say(Sample("t", namespace="a").open(2))
    assert peer.failed().code == "PERMISSION_DENIED"
    peer.put(Sample("t", namespace="b"), 3)


def test_a_share_is_a_tokens_own(tmp_path: Path) -> None:
    with ExitStack() as stack:
        house = House(tmp_path, stack, peer_open_samples_max=2, peer_streams_max=2, streams_max=3)
        streams = [house.peer("all-a"), house.peer("all-a")]
        for number, stream in enumerate(streams):
            stream.say(Sample(f"s{number}", namespace="a").open(1))
            stream.say(Sample(f"s{number}", namespace="a").chunk(1, 1, 0, 20))
            stream.acks(1)
        # On whichever of its streams: the third sample is one too many, and so is the third stream.
        streams[0].say(Sample("s3", namespace="a").open(2))
        failed = streams[0].failed()
        assert (failed.code, failed.retryable) == ("TOO_MANY", True)
        with Peer(house.server.address, greet=False, metadata=bearer("all-a")) as third:
            assert third.ending() == (grpc.StatusCode.RESOURCE_EXHAUSTED, "TOO_MANY")
        # Another token has its own share, up to what the server has in all.
        house.peer("all-b").put(Sample(namespace="b"), 1)
        with Peer(house.server.address, greet=False, metadata=bearer("root")) as fourth:
            assert fourth.ending() == (grpc.StatusCode.RESOURCE_EXHAUSTED, "TOO_MANY")
        streams[1].say(Sample("s1", namespace="a").chunk(1, 2, 20, 40), Sample("s1", namespace="a").commit(1))
        streams[1].committed()
        streams[0].put(Sample("s3", namespace="a"), 3)
        streams[1].say(pb.IngestRequest(abort=pb.AbortSample(sample=1)))


def test_an_ack_that_deletes_needs_the_right_to(tmp_path: Path) -> None:
    """No right includes another: where a rule deletes on an ack, the right to read is not enough."""
    entries = (entry("reader", ["*"], "read"), entry("trainer", ["*"], "read", "delete"), entry("engine", ["*"], "ingest"))
    tokens = write_tokens(tmp_path / "t.toml", *entries)
    policy = Policy(namespaces={"once": Rule(delete_on_ack=True)})
    with RunningServer(tmp_path / "data", tokens_file=tokens, retention=policy) as server:
        with Peer(server.address, metadata=bearer("engine")) as peer:
            peer.put(Sample(namespace="once"), 1)
            peer.put(Sample(), 2)
        with (
            Reader(server.address, metadata=bearer("reader")) as reader,
            Reader(server.address, metadata=bearer("trainer")) as trainer,
        ):
            once = read_pb.AckRequest(namespace="once", sample_id="s")
            assert reader.refused(lambda: reader.ack(once)) == ("PERMISSION_DENIED", "PERMISSION_DENIED")
            assert reader.state("s", "once") == (COMMITTED, "")
            reader.ack(read_pb.AckRequest(sample_id="s"))  # It is noted, and deletes nothing.
            trainer.ack(once)
            wait_until(lambda: server.metric("deleted_samples_total", reason="ack") == 1)
