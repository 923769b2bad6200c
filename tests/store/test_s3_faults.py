"""What networks and object stores do: answers that are lost, errors that are none, successes that are none."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest
from store.test_blobs_conformance import MIB, begun, content, read, stored
from support.ports import free_port
from support.s3_proxy import LOST, Answer, S3Proxy
from support.seaweedfs import object_store

from slotstream.store.blobs.s3 import requests
from slotstream.store.blobs.s3.address import Address
from slotstream.store.blobs.s3.bucket import S3Blobs
from slotstream.store.blobs.s3.put import PARTS_MAX, S3Put, part_bytes_for
from slotstream.wire.errors import ConfigError, IoError, StoreFull
from slotstream.wire.names import SAMPLE_BYTES_MAX

pytestmark = pytest.mark.objects
Opens = Callable[..., S3Blobs]


@pytest.fixture
def opens(monkeypatch: pytest.MonkeyPatch) -> Iterator[Opens]:
    opened = []

    def make(user: str = "all", endpoint: str = "", url: str = "") -> S3Blobs:
        for name, value in object_store().environment(user, endpoint).items():
            monkeypatch.setenv(name, value)
        opened.append(S3Blobs(url or object_store().bucket()))
        return opened[-1]

    monkeypatch.setattr(requests, "_PAUSES_S", (0.01, 0.01))
    yield make
    for one in opened:
        one.close()


@pytest.fixture
def proxy() -> Iterator[S3Proxy]:
    with S3Proxy(object_store().endpoint) as between:
        yield between


@pytest.mark.parametrize(
    ("answer", "reaches"),
    [
        (LOST, False),
        (LOST, True),
        (Answer(503, "SlowDown"), False),
        (Answer(500, "InternalError"), True),
        (Answer(200, "InternalError"), False),
    ],
)
def test_a_body_is_sent_again(opens: Opens, proxy: S3Proxy, answer: Answer, reaches: bool) -> None:
    blobs = opens(endpoint=proxy.endpoint)
    data = content(17 * MIB)
    proxy.plan("PUT", "/small", answer, answer, reaches=reaches)
    proxy.plan("PUT", "partNumber=2", answer, reaches=reaches)
    begun(blobs, "small", data[:1000]).finish(1000)
    put = begun(blobs, "large", data)
    put.send(1)
    put.finish(len(data))
    assert read(blobs, "small") == data[:1000]
    assert read(blobs, "large") == data


@pytest.mark.parametrize("answers", [(LOST,), (LOST, Answer(404, "NoSuchUpload")), (Answer(404, "NoSuchUpload"),)])
def test_parts_that_were_put_together_are_an_object_whatever_was_said(
    opens: Opens, proxy: S3Proxy, answers: tuple[Answer, ...]
) -> None:
    blobs = opens(endpoint=proxy.endpoint)
    data = content(17 * MIB)
    proxy.plan("POST", "uploadId=", *answers, reaches=True)
    begun(blobs, "large", data).finish(len(data))
    assert read(blobs, "large") == data


def test_parts_that_nobody_put_together_are_none(opens: Opens, proxy: S3Proxy) -> None:
    blobs = opens(endpoint=proxy.endpoint)
    data = content(17 * MIB)
    proxy.plan("POST", "uploadId=", Answer(404, "NoSuchUpload"))
    put = begun(blobs, "large", data)
    with pytest.raises(IoError, match="dropped an upload that was not finished"):
        put.finish(len(data))
    put.abort()
    assert list(blobs.list()) == []


def test_an_object_without_one_of_its_parts_is_found_out(opens: Opens) -> None:
    """The store puts together what it is told, and says 200."""
    blobs = opens()
    data = content(17 * MIB)
    put = begun(blobs, "large", data)
    assert isinstance(put, S3Put)
    for number in (0, 1):
        put.send(number)
    with pytest.raises(IoError, match=f"made an object of {16 * MIB} bytes out of parts of {len(data)}"):
        put._complete(2, len(data))
    put.abort()
    assert list(blobs.list()) == []


def test_who_gives_up_after_a_lost_answer_leaves_nothing(opens: Opens, proxy: S3Proxy) -> None:
    blobs = opens(endpoint=proxy.endpoint)
    data = content(17 * MIB)
    proxy.plan("POST", "uploadId=", *[LOST] * 9, reaches=True)
    put = begun(blobs, "large", data)
    with pytest.raises(IoError, match="does not answer"):
        put.finish(len(data))
    assert blobs.open("large") is not None
    put.abort()
    assert list(blobs.list()) == []


def test_a_range_that_was_cut_short_is_read_again(opens: Opens, proxy: S3Proxy) -> None:
    blobs = opens(endpoint=proxy.endpoint)
    data = stored(blobs, "a", 2 * MIB)
    opened = blobs.open("a")
    assert opened is not None
    proxy.plan("GET", "/a", LOST, Answer(206))
    assert opened.read(MIB, MIB) == data[MIB:]
    proxy.plan("GET", "/a", Answer(503, "SlowDown"))
    assert opened.read(MIB, MIB) == data[MIB:]


def test_a_store_that_is_away_is_trouble_that_may_pass(opens: Opens) -> None:
    """At once; and nothing of a signature is in what is said."""
    blobs = opens(endpoint=f"http://127.0.0.1:{free_port()}")
    begun_at = time.monotonic()
    for ask in (
        lambda: begun(blobs, "a", b"x").finish(1),
        lambda: blobs.open("a"),
        lambda: blobs.checksum("a"),
        lambda: list(blobs.list()),
        blobs.check,
    ):
        with pytest.raises(IoError, match=r"^the object store s3://\S+ does not answer: Connection refused$"):
            ask()
    assert time.monotonic() - begun_at < 60


def test_a_store_without_room_is_full(opens: Opens, proxy: S3Proxy) -> None:
    blobs = opens(endpoint=proxy.endpoint)
    proxy.plan("PUT", "/a", Answer(507, "InsufficientStorage"))
    with pytest.raises(StoreFull, match="no room"):
        begun(blobs, "a", b"x").finish(1)


def test_a_bucket_that_is_gone_is_not_an_object_that_is(opens: Opens, proxy: S3Proxy) -> None:
    blobs = opens(endpoint=proxy.endpoint)
    proxy.plan("GET", "/a", Answer(404, "NoSuchBucket"))
    with pytest.raises(IoError, match="404 NoSuchBucket"):
        blobs.open("a")


# What a start is told.


@pytest.mark.parametrize(
    ("user", "missing"),
    [("no-write", "s3:PutObject"), ("no-read", "s3:GetObject"), ("no-list", "s3:ListBucket"), ("nobody", "InvalidAccessKeyId")],
)
def test_the_right_that_lacks_is_named(opens: Opens, user: str, missing: str) -> None:
    url = object_store().bucket()
    stored(opens(url=url), "a")
    with pytest.raises(ConfigError, match=missing) as refused:
        opens(user, url=url).check()
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("method", "has", "answer", "said"),
    [
        ("PUT", "/", Answer(404, "NoSuchBucket"), "there is no bucket"),
        ("GET", "uploads", Answer(403, "AccessDenied"), "s3:ListBucketMultipartUploads"),
        ("DELETE", "uploadId", Answer(403, "AccessDenied"), "s3:AbortMultipartUpload"),
        ("DELETE", "/", Answer(403, "AccessDenied"), "s3:DeleteObject"),
        ("PUT", "-swap", Answer(501, "NotImplemented"), r"in place of one that is named \(If-Match, If-None-Match\)"),
        ("PUT", "-swap", Answer(200), r"in place of one that is named \(If-Match, If-None-Match\)"),
        ("POST", "uploads", Answer(501, "NotImplemented"), "cannot take an object in parts: it answered 501 NotImplemented"),
    ],
)
def test_the_feature_that_lacks_is_named(
    opens: Opens, proxy: S3Proxy, method: str, has: str, answer: Answer, said: str
) -> None:
    blobs = opens(endpoint=proxy.endpoint)
    proxy.plan(method, has, *[answer] * 9)
    with pytest.raises(ConfigError, match=said):
        blobs.check()


def test_a_store_that_does_not_know_crc64nvme_checks_md5(opens: Opens, proxy: S3Proxy) -> None:
    blobs = opens(endpoint=proxy.endpoint)
    proxy.plan("PUT", "x-amz-checksum-crc64nvme", Answer(501, "NotImplemented"))
    blobs.check()
    data = stored(blobs, "a", 9 * MIB)
    assert read(blobs, "a") == data
    assert sum("content-md5" in line.lower() for line in proxy.seen) > 4


def test_a_store_that_checks_nothing_is_refused(opens: Opens, proxy: S3Proxy) -> None:
    blobs = opens(endpoint=proxy.endpoint)
    original = requests.Requests.wrong_digest
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(requests.Requests, "wrong_digest", lambda self, body: self._digest(body))
        with pytest.raises(ConfigError, match="refuse a body that does not match"):
            blobs.check()
    assert requests.Requests.wrong_digest is original


@pytest.mark.parametrize(
    "url",
    [
        "s3:/bucket",
        "s3://",
        "s3://B/x",
        "s3://key:secret@bucket/x",
        "s3://bucket/x?key=secret",
        "s3://bucket/../x",
        "s3://bucket/a b",
    ],
)
def test_a_wrong_url_is_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(ConfigError, match="object store's URL") as refused:
        Address.parsed(url)
    assert "secret" not in str(refused.value)


def test_an_address_is_told_as_it_was_given() -> None:
    assert str(Address.parsed("s3://bucket")) == "s3://bucket"
    assert str(Address.parsed("s3://bucket/a/b/")) == "s3://bucket/a/b"


def test_parts_grow_with_their_sample() -> None:
    assert part_bytes_for(1) == part_bytes_for(PARTS_MAX * 8 * MIB) == 8 * MIB
    assert part_bytes_for(PARTS_MAX * 8 * MIB + 1) == 9 * MIB
    assert -(-SAMPLE_BYTES_MAX // part_bytes_for(SAMPLE_BYTES_MAX)) <= PARTS_MAX
