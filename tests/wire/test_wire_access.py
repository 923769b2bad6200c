"""Tokens and certificate files, as both ends take them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from support.secure import Authority

from slotstream.wire.access import Access, bearer_token, check_token, read_pair
from slotstream.wire.errors import ConfigError


@pytest.mark.parametrize(
    "text", ["", "short", "x" * 513, "has a space in the middle", "nul\0nul\0nul\0nul\0nul", "üüüüüüüüüüüüüüüüüüüü"]
)
def test_what_is_no_token_is_refused_unseen(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_token(text, "here")
    assert str(caught.value).startswith("here holds no token")
    assert not text or text not in str(caught.value)


def test_a_token_may_have_white_space_around_it() -> None:
    assert check_token(" abcdefghijklmnop\r\n", "here") == "abcdefghijklmnop"


@pytest.mark.parametrize(
    ("value", "token"),
    [("Bearer abc", "abc"), ("bearer  abc ", "abc"), ("Basic abc", None), ("abc", None), ("", None), ("Bearer", "")],
)
def test_the_header(value: str, token: str | None) -> None:
    assert bearer_token(value) == token


def test_a_key_with_a_passphrase_is_refused_and_nobody_is_asked(tmp_path: Path) -> None:
    from cryptography.hazmat.primitives import serialization

    pair = Authority(tmp_path).issue("mine")
    key = serialization.load_pem_private_key(pair.key.read_bytes(), None)
    locked = serialization.BestAvailableEncryption(b"passphrase")
    pair.key.write_bytes(key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, locked))
    with pytest.raises(ConfigError, match="--cert and --key"):
        read_pair(pair.cert, pair.key, "--cert", "--key")


def test_an_access_never_shows_its_token() -> None:
    access = Access(token="abcdefghijklmnop", token_file=os.devnull)
    assert "abcdefghijklmnop" not in repr(access)
    with pytest.raises(ConfigError, match="token and token_file"):
        access.check("127.0.0.1:1")
    assert Access().check("unix:/s").call_metadata() == ()
