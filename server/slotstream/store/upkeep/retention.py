"""Which samples may go, and when: rules read once from a file, and pure decisions over frozen data. No disk, no clock.

Without a rule a stored sample stays, and one that failed is known for 30 days. No rule deletes a sample that somebody
reads or holds a lease on.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from pathlib import Path
from typing import Any, Self

from slotstream.common.checks import check_number
from slotstream.store.catalogue.queries import Candidate, Usage
from slotstream.wire.errors import BadNamespace, ConfigError, Damaged
from slotstream.wire.names import check_namespace

_NS = 1_000_000_000
_NAMESPACES_MAX = 10_000
UNLIMITED = math.inf
FAILED_AGE_S_MAX = 30 * 86400.0  # Where no rule says how long failed samples are known.


class Reason(StrEnum):
    """Why a sample was deleted."""

    REQUEST = "request"  # Somebody asked, by name.
    AGE = "age"
    BYTES = "bytes"
    SAMPLES = "samples"
    READS = "reads"
    ACK = "ack"
    FREE_SPACE = "free_space"
    FAILED_AGE = "failed_age"


WHEN_FULL = ("delete_when_full", "delete_read_when_full")  # The keys that want a free_bytes_target.


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """What may happen to the samples of one namespace. Raises ConfigError for a value that cannot work."""

    bytes_max: float = UNLIMITED  # Of committed files: past it, the oldest go.
    samples_max: float = UNLIMITED  # Committed: past it, the oldest go.
    age_s_max: float = UNLIMITED  # Seconds since the commit.
    # Seconds after which a failed sample is forgotten. None: FAILED_AGE_S_MAX, and never for one that was stored and damaged.
    failed_age_s_max: float | None = None
    delete_after_reads: float = UNLIMITED  # Reads of every row, answered to the end.
    delete_on_ack: bool = False
    delete_when_full: bool = False  # Oldest first, while less than free_bytes_target is free.
    delete_read_when_full: bool = False  # Likewise, of those alone that were acked, or read to the end.

    def __post_init__(self) -> None:
        try:
            for name in ("bytes_max", "samples_max", "age_s_max", "failed_age_s_max"):
                if getattr(self, name) is not None:
                    check_number(name, getattr(self, name), 0)
            check_number("delete_after_reads", self.delete_after_reads, 1)
        except ValueError as error:
            raise ConfigError(str(error)) from error
        for name in ("delete_on_ack", *WHEN_FULL):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} must be true or false, not {getattr(self, name)!r}")

    def expires_unix_ns(self, committed_unix_ns: int) -> int:
        """When a sample committed then is deleted for its age; 0: never."""
        return 0 if self.age_s_max == UNLIMITED else committed_unix_ns + round(self.age_s_max * _NS)

    def limits(self) -> dict[str, float | bool]:
        """What this rule says that no rule would not, by the names of the file's keys."""
        return {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """The rules of a server. Made by `from_toml`; the default one deletes nothing."""

    default: Rule = field(default_factory=Rule)
    namespaces: Mapping[str, Rule] = field(default_factory=dict)
    free_bytes_target: int = 0  # Bytes that rules with a key of WHEN_FULL keep free: of the disk, or of bucket_bytes_max.
    bucket_bytes_max: int = 0  # What a bucket may hold; it does not say itself. 0: samples are files.

    def rule_for(self, namespace: str) -> Rule:
        return self.namespaces.get(namespace, self.default)

    @property
    def has_rules(self) -> bool:
        """Whether any namespace has a rule."""
        return any(rule.limits() for rule in (self.default, *self.namespaces.values()))

    @property
    def deletes_when_full(self) -> bool:
        return bool(self._when_full)

    @property
    def _when_full(self) -> list[str]:
        rules = (self.default, *self.namespaces.values())
        return [key for key in WHEN_FULL if any(getattr(rule, key) for rule in rules)]

    @classmethod
    def from_toml(cls, path: Path, *, free_bytes_min: int = 0) -> Self:
        """The policy that a file describes. Raises ConfigError, naming the file and the key.

        A namespace's table adds to [default] and overrides it key by key; `inf` takes a limit away.
        """
        try:
            text = path.read_text("utf-8")
        except OSError as error:
            raise ConfigError(f"--retention: cannot read {path}: {error.strerror or error}") from error
        except UnicodeDecodeError as error:
            raise ConfigError(f"--retention: {path} is not TOML: {error}") from error
        try:
            return cls.from_text(text, str(path), free_bytes_min=free_bytes_min)
        except ConfigError as error:
            raise ConfigError(f"--retention: {error}") from error

    @classmethod
    def from_text(cls, text: str, name: str, *, free_bytes_min: int = 0) -> Self:
        """The policy that the text of a file describes; `name` is for messages. Raises ConfigError."""
        try:
            document = tomllib.loads(text)
        except (tomllib.TOMLDecodeError, RecursionError) as error:
            raise ConfigError(f"{name} is not TOML: {error}") from error
        try:
            return cls._from_document(document, free_bytes_min)
        except ConfigError as error:
            raise ConfigError(f"{name}: {error}") from error

    @classmethod
    def _from_document(cls, document: Mapping[str, Any], free_bytes_min: int) -> Self:
        known = {"default", "namespaces", "free_bytes_target", "bucket_bytes_max"}
        if unknown := sorted(document.keys() - known):
            raise ConfigError(f"unknown keys {unknown}; known: {sorted(known)}")
        base = _table("default", document.get("default", {}))
        spaces = _table("namespaces", document.get("namespaces", {}), known=None)
        if len(spaces) > _NAMESPACES_MAX:
            raise ConfigError(f"{len(spaces)} namespaces are more than the {_NAMESPACES_MAX} allowed")
        rules = {}
        for name, values in spaces.items():
            try:
                check_namespace(name)
            except BadNamespace as error:
                raise ConfigError(f"namespaces: {error}") from error
            rules[name] = _rule(f"namespaces.{name}", {**base, **_table(f"namespaces.{name}", values)})
        target, most = document.get("free_bytes_target", 0), document.get("bucket_bytes_max", 0)
        try:
            check_number("free_bytes_target", target, 0, whole=True)
            check_number("bucket_bytes_max", most, 0, whole=True)
        except ValueError as error:
            raise ConfigError(str(error)) from error
        policy = cls(default=_rule("default", base), namespaces=rules, free_bytes_target=target, bucket_bytes_max=most)
        if most:  # What uploads leave free is of scratch then.
            policy._check_bucket()
        elif policy.deletes_when_full and target <= free_bytes_min:
            key = policy._when_full[0]
            raise ConfigError(
                f"{key} needs a free_bytes_target above the {free_bytes_min} bytes of --free-bytes-min, not {target}"
            )
        if target and not policy.deletes_when_full:
            raise ConfigError(f"free_bytes_target does nothing unless a rule says {' or '.join(WHEN_FULL)} = true")
        return policy

    def _check_bucket(self) -> None:
        if not self.free_bytes_target:
            raise ConfigError("bucket_bytes_max does nothing without a free_bytes_target")
        if self.free_bytes_target >= self.bucket_bytes_max:
            raise ConfigError(
                f"free_bytes_target, {self.free_bytes_target}, must be below the {self.bucket_bytes_max} of bucket_bytes_max"
            )


_KEYS = frozenset(f.name for f in fields(Rule))


def _table(name: str, value: object, known: frozenset[str] | None = _KEYS) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise ConfigError(f"{name} must be a table, not {value!r}")
    if known is not None and (unknown := sorted(value.keys() - known)):
        raise ConfigError(f"{name}: unknown keys {unknown}; known: {sorted(known)}")
    return value


def _rule(name: str, values: Mapping[str, Any]) -> Rule:
    try:
        return Rule(**values)
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from error


# Decisions.


def over_limit(rule: Rule, usage: Usage, oldest: Sequence[Candidate], now_unix_ns: int) -> list[tuple[Candidate, Reason]]:
    """The first few of `oldest`, a namespace's oldest committed samples in order: those past the rule's limits."""
    due: list[tuple[Candidate, Reason]] = []
    samples, nbytes = usage.samples, usage.bytes
    for candidate in oldest:
        expires = rule.expires_unix_ns(candidate.stamp_unix_ns)
        if expires and expires <= now_unix_ns:
            reason = Reason.AGE
        elif nbytes > rule.bytes_max:
            reason = Reason.BYTES
        elif samples > rule.samples_max:
            reason = Reason.SAMPLES
        else:
            break
        due.append((candidate, reason))
        samples -= 1
        nbytes -= candidate.file_bytes
    return due


def forgotten(rule: Rule, failed: Sequence[Candidate], now_unix_ns: int) -> list[Candidate]:
    """Which of `failed`, oldest first, are old enough to be forgotten."""
    age_s_max = FAILED_AGE_S_MAX if rule.failed_age_s_max is None else rule.failed_age_s_max
    if age_s_max == UNLIMITED:
        return []
    until = now_unix_ns - round(age_s_max * _NS)
    return [candidate for candidate in failed if candidate.stamp_unix_ns <= until]


def stays(rule: Rule, failed: Candidate) -> bool:
    """Whether a failed sample is known until somebody deletes it: nobody else says where its damaged file went."""
    return rule.failed_age_s_max is None and failed.error_code == Damaged.code


def to_free(nbytes: int, oldest: Iterable[Candidate]) -> list[Candidate]:
    """The first of `oldest` whose files together have `nbytes`, or all of them."""
    chosen: list[Candidate] = []
    for candidate in oldest:
        if nbytes <= 0:
            break
        chosen.append(candidate)
        nbytes -= candidate.file_bytes
    return chosen
