"""The tokens file: what it may say, who may touch it, and that a bad new one changes nothing."""

from __future__ import annotations

import json
import logging
import os
import threading
from pathlib import Path

import pytest
from support.secure import entry, token, write_tokens
from support.waiting import wait_until

from slotstream.server.access import tokens as module
from slotstream.server.access.tokens import Principal, TokenFile, digest_of, load_tokens
from slotstream.wire.errors import ConfigError, PermissionDenied

DIGEST = "ab" * 32


def _names(path: Path) -> list[str]:
    return [principal.name for _, principal in load_tokens(path)]


def test_toml_and_json_say_the_same(tmp_path: Path) -> None:
    toml = write_tokens(tmp_path / "t.toml", entry("a", ["one", "two"], "read"), entry("b", ["*"], "ingest", "admin"))
    document = {
        "tokens": [
            {"name": "a", "token": token("a"), "namespaces": ["one", "two"], "rights": ["read"]},
            {"name": "b", "sha256": digest_of(token("b")).hex().upper(), "namespaces": "*", "rights": ["ingest", "admin"]},
        ]
    }
    plain = write_tokens(tmp_path / "t.json", json.dumps(document))
    assert (
        load_tokens(toml)
        == load_tokens(plain)
        == [
            (digest_of(token("a")), Principal("a", frozenset({"one", "two"}), frozenset({"read"}))),
            (digest_of(token("b")), Principal("b", None, frozenset({"ingest", "admin"}))),
        ]
    )


SOUND = f'[[tokens]]\nname = "a"\nsha256 = "{DIGEST}"\n'
SECRET = "s3cret-s3cret-s3cret-s3cret"
WRONG = [
    pytest.param("", "one list of tables", id="empty"),
    pytest.param("tokens = 3", "list of tables", id="no list"),
    pytest.param("other = []", "one list of tables", id="other key"),
    pytest.param(f'[[tokens]]\nname = "a"\ntoken = "{SECRET}" x', "it is not TOML", id="not toml"),
    pytest.param(f'[[tokens]]\ntoken = "{SECRET}"\nnamespaces = "*"\nrights = ["read"]', "needs a name", id="no name"),
    pytest.param(f'[[tokens]]\nname = "a b"\ntoken = "{SECRET}"', "needs a name", id="bad name"),
    pytest.param('[[tokens]]\nname = "a"\nnamespaces = "*"\nrights = ["read"]', "either sha256 or token", id="no token"),
    pytest.param(f'[[tokens]]\nname = "a"\ntoken = "{SECRET}"\nsha256 = "{DIGEST}"', "either sha256 or token", id="both"),
    pytest.param('[[tokens]]\nname = "a"\nsha256 = "abc"', "64 hex digits", id="short digest"),
    pytest.param('[[tokens]]\nname = "a"\ntoken = "short"', "16 to 512 characters", id="short token"),
    pytest.param(
        f'[[tokens]]\nname = "a"\nsha256 = "{DIGEST}"\nnamespaces = "one"\nrights = ["read"]', '"*" or a list', id="ns"
    ),
    pytest.param(
        f'[[tokens]]\nname = "a"\nsha256 = "{DIGEST}"\nnamespaces = []\nrights = ["read"]', '"*" or a list', id="no ns"
    ),
    pytest.param(
        f'[[tokens]]\nname = "a"\nsha256 = "{DIGEST}"\nnamespaces = ["../x"]\nrights = ["read"]', "namespace", id="path"
    ),
    pytest.param(
        f'[[tokens]]\nname = "a"\nsha256 = "{DIGEST}"\nnamespaces = "*"\nrights = ["root"]', "rights must", id="right"
    ),
    pytest.param(f'[[tokens]]\nname = "a"\nsha256 = "{DIGEST}"\nnamespaces = "*"\nrights = []', "rights must", id="no right"),
    pytest.param(f'[[tokens]]\nname = "a"\nsha256 = "{DIGEST}"\nright = ["read"]', "unknown keys", id="typo"),
    pytest.param("\n".join([entry("a", ["x"], "read")] * 2), "name of its own", id="name twice"),
    pytest.param(
        entry("a", ["x"], "read") + "\n" + entry("a", ["x"], "read").replace('"a"', '"b"', 1), "same token", id="twice"
    ),
]


@pytest.mark.parametrize(("text", "sentence"), WRONG)
def test_what_is_wrong_is_one_sentence_without_the_token(tmp_path: Path, text: str, sentence: str) -> None:
    path = write_tokens(tmp_path / "tokens.toml", text)
    with pytest.raises(ConfigError) as caught:
        load_tokens(path)
    assert str(caught.value).startswith(f"--tokens: {path}: ")
    assert sentence in str(caught.value)
    assert SECRET not in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("raw", [b"\xff\xfe", b'{"tokens": [', b"[" * 100_000], ids=["not text", "cut", "deep"])
@pytest.mark.parametrize("name", ["tokens.toml", "tokens.json"])
def test_what_is_no_file_of_tokens_at_all_is_refused(tmp_path: Path, raw: bytes, name: str) -> None:
    (tmp_path / name).write_bytes(raw)
    with pytest.raises(ConfigError, match="--tokens"):
        load_tokens(tmp_path / name)


def test_a_file_that_is_not_there_or_too_long_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        TokenFile(tmp_path / "none.toml")
    with pytest.raises(ConfigError, match="longer than"):
        load_tokens(write_tokens(tmp_path / "long.toml", "#" * (1 << 20)))


@pytest.mark.parametrize(
    ("mode", "plain", "outcome"),
    [
        (0o600, True, "taken"),
        (0o640, True, "may read"),
        (0o604, True, "may read"),
        (0o644, False, "warned"),
        (0o660, False, "may write"),
        (0o602, False, "may write"),
    ],
)
def test_who_else_may_touch_it(tmp_path: Path, caplog: pytest.LogCaptureFixture, mode: int, plain: bool, outcome: str) -> None:
    text = (
        f'[[tokens]]\nname = "a"\ntoken = "{SECRET}"\nnamespaces = "*"\nrights = ["read"]'
        if plain
        else entry("a", ["*"], "read")
    )
    path = write_tokens(tmp_path / "tokens.toml", text)
    path.chmod(mode)
    if outcome.startswith("may"):
        with pytest.raises(ConfigError, match=outcome):
            load_tokens(path)
        return
    assert _names(path) == ["a"]
    assert ("only digests" in caplog.text) == (outcome == "warned")


def test_a_changed_file_counts_at_once_and_a_broken_one_does_not(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    path = write_tokens(tmp_path / "tokens.toml", entry("a", ["x"], "read"))
    tokens = TokenFile(path)
    assert tokens.find(digest_of(token("a"))) == Principal("a", frozenset({"x"}), frozenset({"read"}))
    assert tokens.find(digest_of(token("b"))) is None
    write_tokens(path, entry("b", ["x"], "read"))
    assert tokens.find(digest_of(token("a"))) is None
    assert tokens.find(digest_of(token("b"))) is not None
    for broken in ("tokens = [", None):
        caplog.clear()
        if broken is None:
            path.unlink()
        else:
            write_tokens(path, broken)
        for _ in range(3):
            assert tokens.find(digest_of(token("b"))) is not None
        (said,) = [record for record in caplog.records if record.levelno == logging.ERROR]
        assert "the tokens of before stay in force" in said.message
    write_tokens(path, entry("c", ["x"], "read"))
    assert tokens.find(digest_of(token("b"))) is None
    assert tokens.find(digest_of(token("c"))) is not None


def test_a_pipe_in_its_place_is_refused_at_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write_tokens(tmp_path / "t.toml", entry("a", ["one"], "read"))
    tokens = TokenFile(path)
    path.unlink()
    os.mkfifo(path, 0o600)
    with pytest.raises(ConfigError, match="is no regular file"):
        load_tokens(path)
    with caplog.at_level(logging.ERROR):
        assert tokens.find(digest_of(token("a"))) is not None
    assert "is no regular file" in caplog.text


def test_a_disk_that_hangs_holds_a_caller_up_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_tokens(tmp_path / "t.toml", entry("a", ["one"], "read"))
    tokens = TokenFile(path)
    goes_on, looks = threading.Event(), list[Path]()

    def hangs(path: Path) -> tuple[int, ...]:
        looks.append(path)
        assert goes_on.wait(60)
        return ()

    monkeypatch.setattr(module, "_stamp", hangs)
    for _ in range(3):
        assert tokens.find(digest_of(token("a"))) is not None
    assert len(looks) == 1  # Nobody else waits for it.
    goes_on.set()
    wait_until(lambda: tokens.find(digest_of(token("a"))) is not None and len(looks) > 1)


def test_a_link_that_is_moved_to_another_directory_is_a_change(tmp_path: Path) -> None:
    """As Kubernetes replaces a mounted secret: the file is a link through `..data`, which moves."""
    for version, name in (("v1", "a"), ("v2", "b")):
        (tmp_path / version).mkdir()
        write_tokens(tmp_path / version / "tokens.toml", entry(name, ["x"], "read"))
    (tmp_path / "..data").symlink_to("v1")
    (tmp_path / "tokens.toml").symlink_to("..data/tokens.toml")
    tokens = TokenFile(tmp_path / "tokens.toml")
    assert tokens.find(digest_of(token("a"))) is not None
    (tmp_path / "..new").symlink_to("v2")
    (tmp_path / "..new").rename(tmp_path / "..data")
    assert tokens.find(digest_of(token("a"))) is None
    assert tokens.find(digest_of(token("b"))) is not None


def test_a_principal_may_what_it_was_given_and_no_more() -> None:
    some = Principal("p", frozenset({"b", "a"}), frozenset({"read"}))
    some.check("read", "a")
    assert some.spaces("read") == ("a", "b")
    for right, namespace in (("read", "c"), ("delete", "a"), ("read", ""), ("read", "*"), ("read", "A")):
        with pytest.raises(PermissionDenied):
            some.check(right, namespace)
    with pytest.raises(PermissionDenied):
        some.spaces("admin")
    with pytest.raises(PermissionDenied) as caught:
        some.check("read", "x" * 100_000)
    assert len(str(caught.value)) < 200
    Principal("all").check("delete", "anything")
    assert Principal("all").spaces("read") is None
