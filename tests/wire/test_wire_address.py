"""Addresses are checked where a person typed them: a gRPC target, or one sentence."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slotstream.wire.address import ADDRESSES_MAX, check_address, check_addresses
from slotstream.wire.errors import ConfigError
from slotstream.wire.names import DEFAULT_ADDRESS


@pytest.mark.parametrize(
    "address",
    [
        DEFAULT_ADDRESS,
        "localhost:1",
        "10.0.0.1:65535",
        "storage-0.slotstream.svc.cluster.local:50151",
        "h_1:50151",
        "[::1]:50151",
        "[fe80::1%25]:50151",
        "unix:/run/slotstream/s.sock",
        "unix:/" + "a" * 106,
        "unix:/path with spaces/ü",
    ],
)
def test_addresses_that_are_fine(address: str) -> None:
    assert check_address(address) == address
    assert check_address(address, any_port=True) == address


@pytest.mark.parametrize(
    "address",
    [
        "",
        "50151",
        ":50151",
        "localhost",
        "localhost:",
        "localhost:0",
        "localhost:65536",
        "localhost:-1",
        "localhost:+1",
        "localhost:1 ",
        " localhost:1",
        "localhost:1\n",
        "localhost:١",
        "-host:1",
        "host-:1",
        "::1:50151",
        "[::1]",
        "[]:1",
        "[localhost]:1",
        "http://localhost:50151",
        "dns:///localhost:50151",
        "localhost:50151/path",
        "user@host:1",
        "a,b:1",
        "unix:",
        "unix:relative",
        "unix:///" + "a" * 200,
        "unix:/" + "a" * 107,
        "unix:/" + "ü" * 54,
        "unix:/a\0b",
        "unix:/a\udcff",
        "UNIX:/a",
        None,
        50151,
        b"localhost:1",
        ["localhost:1"],
    ],
)
def test_addresses_that_are_refused(address: object) -> None:
    with pytest.raises(ConfigError, match="address") as caught:
        check_address(address)
    assert str(caught.value).isprintable()


def test_only_a_listener_may_have_any_port() -> None:
    assert check_address("127.0.0.1:0", any_port=True) == "127.0.0.1:0"
    with pytest.raises(ConfigError):
        check_address("127.0.0.1:0")


@given(st.text(max_size=30) | st.text(max_size=30).map("unix:/{}".format) | st.from_regex(r"[a-z\[\]:.%0-9]{1,20}:[0-9]{1,6}"))
def test_any_text_is_an_address_or_refused(address: str) -> None:
    try:
        checked = check_address(address)
    except ConfigError:
        return
    assert checked == address
    assert checked.encode()


@pytest.mark.parametrize(
    ("address", "meant"),
    [
        ("localhost", "localhost:50151"),
        ("storage.example", "storage.example:50151"),
        ("[::1]", "[::1]:50151"),
        ("::1", "[::1]:50151"),
        ("http://localhost:50151", "localhost:50151"),
        ("https://localhost/", "localhost:50151"),
        ("grpc://h:1/path", "h:1"),
        (" localhost:1\n", "localhost:1"),
    ],
)
def test_what_was_probably_meant_is_said(address: str, meant: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_address(address)
    assert str(caught.value) == f"address {address!r} is not host:port; did you mean {meant}?"


@pytest.mark.parametrize("address", ["", "50151", ":50151", "user@host:1", "unix:x", 7, "h:99999"])
def test_where_nothing_was_clearly_meant_the_form_is_said(address: object) -> None:
    with pytest.raises(ConfigError, match=r"is neither host:port|must be unix:"):
        check_address(address)


@pytest.mark.parametrize(
    ("given", "servers"),
    [
        ("a:1", ("a:1",)),
        ("a:1,b:2", ("a:1", "b:2")),
        ("a:1, unix:/s", ("a:1", "unix:/s")),
        (["a:1"], ("a:1",)),
        (("a:1", "unix:/with,comma"), ("a:1", "unix:/with,comma")),
        ([f"h:{i + 1}" for i in range(ADDRESSES_MAX)], tuple(f"h:{i + 1}" for i in range(ADDRESSES_MAX))),
    ],
)
def test_one_address_or_several(given: object, servers: tuple[str, ...]) -> None:
    assert check_addresses(given) == servers


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("", "address '' is neither host:port"),
        ("a:1,", "address '' is neither host:port"),
        (" a:1", "address ' a:1' is not host:port; did you mean a:1?"),
        (["a:1", " b:1"], "address ' b:1' is not host:port; did you mean b:1?"),
        ("a:1,http://b", "address 'http://b' is not host:port; did you mean b:50151?"),
        (["a:1", 7], "address 7 is neither"),
        ([], "the list of server addresses is empty"),
        (["a:1", "b:1", "a:1"], "address 'a:1' is named twice"),
        ([f"h:{i + 1}" for i in range(ADDRESSES_MAX + 1)], "17 server addresses are more than the 16 allowed"),
        (None, "server must be an address or a list of addresses, not None"),
        ({"a:1": 1}, "server must be an address or a list of addresses"),
    ],
)
def test_a_wrong_list_is_refused_naming_the_address(given: object, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_addresses(given)
    assert said in str(caught.value)
    assert str(caught.value).isprintable()
