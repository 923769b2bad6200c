"""The tokens file: who may do what in which namespaces. Read at start, and again whenever it changed.

[[tokens]]                                # TOML; or JSON, {"tokens": [{...}, ...]}, in a file that ends in .json
name = "team-a-trainer"                   # for logs; unique
sha256 = "<64 hex digits>"                # of the token; or token = "...", and then the file must be private (0600)
namespaces = ["team-a", "shared"]         # or "*"
rights = ["read", "delete"]               # of ingest, read, delete, admin
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import os
import re
import stat
import tomllib
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slotstream.wire.access import check_token
from slotstream.wire.errors import BadNamespace, ConfigError, PermissionDenied
from slotstream.wire.names import check_namespace

_log = logging.getLogger(__name__)
# ingest: store samples. read: read, stat, list, lease and ack them. delete: remove them, as an ack may where a rule says so.
# admin: what concerns whole namespaces, such as checking every file.
RIGHTS = ("ingest", "read", "delete", "admin")
NAMESPACES_MAX = 64
_TOKENS_MAX = 1000
_FILE_BYTES_MAX = 1 << 20
_PATIENCE_S = 0.2
_KEYS = frozenset({"name", "sha256", "token", "namespaces", "rights"})
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_SHA256 = re.compile(r"[0-9a-fA-F]{64}")


@dataclass(frozen=True, slots=True)
class Principal:
    """Somebody who may do something. `name` is for logs and shares; `namespaces` None: all of them."""

    name: str
    namespaces: frozenset[str] | None = None
    rights: frozenset[str] = frozenset(RIGHTS)

    def check(self, right: str, namespace: str) -> None:
        """Raises PermissionDenied unless it has `right` in `namespace`. The message holds only what the peer named itself."""
        if right not in self.rights:
            raise PermissionDenied(f"this token has no right to {right}")
        if self.namespaces is not None and namespace not in self.namespaces:
            raise PermissionDenied(f"this token is not one of namespace {namespace[:64]!r}")

    def spaces(self, right: str) -> tuple[str, ...] | None:
        """The namespaces in which it has `right`, sorted; None: all. Raises PermissionDenied when it has it nowhere."""
        if right not in self.rights:
            raise PermissionDenied(f"this token has no right to {right}")
        return None if self.namespaces is None else tuple(sorted(self.namespaces))


def digest_of(token: str) -> bytes:
    """What is kept of a token: its SHA-256."""
    return hashlib.sha256(token.encode(errors="replace")).digest()


class TokenFile:
    """The principals of a tokens file, by their tokens' digests. Belongs to one thread, and looks at the file from another.

    A disk that hangs makes the caller wait once, for `_PATIENCE_S`; until it answers, the tokens of before stay in force.
    """

    def __init__(self, path: Path) -> None:
        """Raises ConfigError when the file cannot be used."""
        self._path = path
        self._thread = ThreadPoolExecutor(1, "tokens")
        self._refreshing: Future[None] | None = None
        self._stamp = _stamp(path)
        self._entries = load_tokens(path)
        _log.info("%d tokens from %s", len(self._entries), path)

    def find(self, digest: bytes) -> Principal | None:
        """Whose token has this digest, by the file as it is now. Takes as long for every digest: no entry is left out."""
        is_slow = self._refreshing is not None and not self._refreshing.done()
        if not is_slow:
            self._refreshing = self._thread.submit(self._refresh)
            with suppress(TimeoutError):
                self._refreshing.result(_PATIENCE_S)
        found: Principal | None = None
        for known, principal in self._entries:
            if hmac.compare_digest(known, digest):
                found = principal
        return found

    def _refresh(self) -> None:
        """Reads the file again if it changed. A file that is wrong, or gone, changes nothing but the log."""
        stamp = _stamp(self._path)
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._entries = load_tokens(self._path)
        except ConfigError as error:
            _log.error("the tokens of before stay in force: %s", error)
        else:
            _log.info("%d tokens from %s, which changed", len(self._entries), self._path)


def _stamp(path: Path) -> tuple[int, ...]:
    """Differs when the file was written or replaced, also through a link to another directory, as Kubernetes does it."""
    try:
        found = path.stat()
    except OSError:
        return ()
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def load_tokens(path: Path) -> list[tuple[bytes, Principal]]:
    """(digest, principal) of every entry. Raises ConfigError, in one sentence without any token in it."""
    try:
        # A pipe would have us wait for somebody who writes.
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            mode = os.fstat(file.fileno()).st_mode
            if not stat.S_ISREG(mode):
                raise ConfigError(f"--tokens: {path} is no regular file")
            raw = file.read(_FILE_BYTES_MAX + 1)
    except OSError as error:
        raise ConfigError(f"--tokens: cannot read {path}: {error.strerror or error}") from error
    if len(raw) > _FILE_BYTES_MAX:
        raise ConfigError(f"--tokens: {path} is longer than {_FILE_BYTES_MAX} bytes")
    try:
        entries = _entries(_parsed(path, raw))
        _check_mode(path, mode, plain=any("token" in entry for entry in entries))
        return _principals(entries)
    except (ValueError, RecursionError) as error:  # ConfigError among them.
        raise ConfigError(f"--tokens: {path}: {error}") from error


def _parsed(path: Path, raw: bytes) -> Any:
    try:
        return json.loads(raw) if path.suffix == ".json" else tomllib.loads(raw.decode())
    except UnicodeDecodeError as error:
        raise ConfigError("it is not UTF-8") from error
    except json.JSONDecodeError as error:
        raise ConfigError(f"it is not JSON, from line {error.lineno} on") from error
    except tomllib.TOMLDecodeError as error:
        # The message quotes what it stumbled over, which could be a token: only the place of it is said.
        place = re.search(r"\(at [^()]*\)$", str(error))
        raise ConfigError(f"it is not TOML{' ' + place[0] if place else ''}") from None


def _entries(document: Any) -> list[Mapping[str, Any]]:
    if not isinstance(document, dict) or document.keys() != {"tokens"}:
        raise ConfigError("it must hold one list of tables, tokens, and nothing else")
    entries = document["tokens"]
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise ConfigError("tokens must be a list of tables")
    if len(entries) > _TOKENS_MAX:
        raise ConfigError(f"{len(entries)} tokens are more than the {_TOKENS_MAX} allowed")
    return entries


def _check_mode(path: Path, mode: int, *, plain: bool) -> None:
    if mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ConfigError("others than its owner may write it: chmod go-w it")
    if mode & (stat.S_IRGRP | stat.S_IROTH):
        if plain:
            raise ConfigError("it holds tokens and others than its owner may read it: chmod 600 it, or keep their sha256 only")
        _log.warning("others than its owner may read %s; it holds only digests of tokens", path)


def _principals(entries: list[Mapping[str, Any]]) -> list[tuple[bytes, Principal]]:
    found: dict[bytes, Principal] = {}
    for number, entry in enumerate(entries, 1):
        where = f"token {number}"
        if unknown := sorted(entry.keys() - _KEYS):
            raise ConfigError(f"{where} has unknown keys {unknown}; known: {sorted(_KEYS)}")
        name = entry.get("name")
        if not isinstance(name, str) or not _NAME.fullmatch(name) or name in {p.name for p in found.values()}:
            raise ConfigError(f"{where} needs a name of its own, of up to 64 characters of [A-Za-z0-9._-]")
        digest = _digest(entry, where := f"token {name}")
        if digest in found:
            raise ConfigError(f"{where} is the same token as {found[digest].name}")
        found[digest] = Principal(name, _namespaces(entry, where), _rights(entry, where))
    return list(found.items())


def _digest(entry: Mapping[str, Any], where: str) -> bytes:
    sha256, token = entry.get("sha256"), entry.get("token")
    if (sha256 is None) == (token is None):
        raise ConfigError(f"{where} needs either sha256 or token")
    if sha256 is None:
        return digest_of(check_token(token if isinstance(token, str) else "", where))
    if not isinstance(sha256, str) or not _SHA256.fullmatch(sha256):
        raise ConfigError(f"{where}: sha256 must be 64 hex digits")
    return bytes.fromhex(sha256)


def _namespaces(entry: Mapping[str, Any], where: str) -> frozenset[str] | None:
    value = entry.get("namespaces")
    if value == "*":
        return None
    if not isinstance(value, list) or not 1 <= len(value) <= NAMESPACES_MAX:
        raise ConfigError(f'{where}: namespaces must be "*" or a list of 1 to {NAMESPACES_MAX} names')
    try:
        return frozenset(check_namespace(name) for name in value)
    except BadNamespace as error:
        raise ConfigError(f"{where}: {error}") from error


def _rights(entry: Mapping[str, Any], where: str) -> frozenset[str]:
    value = entry.get("rights")
    if not isinstance(value, list) or not value or not all(right in RIGHTS for right in value):
        raise ConfigError(f"{where}: rights must be a list of some of {', '.join(RIGHTS)}")
    return frozenset(value)


def entry_of(name: str, digest: bytes, namespaces: list[str], rights: list[str]) -> str:
    """The lines of a TOML file for one token. Raises ConfigError for what such a file could not hold."""
    entry = {"name": name, "sha256": digest.hex(), "namespaces": "*" if "*" in namespaces else namespaces, "rights": rights}
    _principals([entry])
    # JSON's strings and lists of strings, of the characters that are allowed here, are TOML's.
    return "\n".join(["[[tokens]]", *(f"{key} = {json.dumps(value)}" for key, value in entry.items())])
