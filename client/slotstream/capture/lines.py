"""The lines of a file of prompts, and the id of each one's sample: the same line of the same job has the same id."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from slotstream.wire.errors import ConfigError, SlotStreamError
from slotstream.wire.names import check_sample_id, check_tags

_PROMPTS = ("prompt", "messages", "token_ids")
_KNOWN = (*_PROMPTS, "id", "tags", "max_tokens", "loss_mask")
_ID_HEX = 40


@dataclass(frozen=True, slots=True)
class Job:
    """What decides on the rows of all lines alike."""

    model: str
    revision: str
    layers: tuple[int | str, ...] | str
    loss_mask: str | None = None
    output_rows: bool = False
    max_tokens: int = 1
    temperature: float = 0.0
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class Line:
    """One line. `key`: of its content and the job's; lines with the same key are the same sample."""

    number: int
    key: str
    prompt: str | None = None
    messages: Sequence[Mapping[str, Any]] | None = None
    token_ids: tuple[int, ...] | None = None
    sample_id: str | None = None
    tags: Mapping[str, str] = field(default_factory=dict)
    max_tokens: int | None = None
    loss_mask: Any = None


def read_lines(path: Path, job: Job, shard: tuple[int, int] = (1, 1)) -> Iterator[Line]:
    """The lines of part i of n, `shard`; empty ones are left out. Raises ConfigError, which names the line."""
    known: dict[str, str] = {}  # A line's own id -> its key.
    with path.open(encoding="utf-8") as file:
        for number, text in enumerate(file, start=1):
            if text.strip() and (number - 1) % shard[1] == shard[0] - 1:
                line = _line(text, number, job)
                if line.sample_id is not None and known.setdefault(line.sample_id, line.key) != line.key:
                    raise ConfigError(
                        f"line {number}: an earlier line has the id {line.sample_id!r}, and asks for something else"
                    )
                yield line


def _line(text: str, number: int, job: Job) -> Line:
    try:
        said = json.loads(text)
        if not isinstance(said, dict):
            raise ConfigError("it is not a JSON object")
        if unknown := sorted(set(said) - set(_KNOWN)):
            raise ConfigError(f"unknown keys {unknown[:4]}; known: {list(_KNOWN)}")
        if len(given := [name for name in _PROMPTS if name in said]) != 1:
            raise ConfigError(f"it has {given or 'none'} of {list(_PROMPTS)}, and needs one")
        return Line(
            number,
            _digest({"line": said, "job": asdict(job)}),
            prompt=_checked(said, "prompt", str),
            messages=_checked(said, "messages", list),
            token_ids=_token_ids(said.get("token_ids")),
            sample_id=check_sample_id(said["id"]) if "id" in said else None,
            tags=check_tags(said.get("tags", {})),
            max_tokens=_checked(said, "max_tokens", int),
            loss_mask=said.get("loss_mask"),
        )
    except (ConfigError, SlotStreamError, ValueError) as error:
        raise ConfigError(f"line {number}: {error}") from error


def _checked(said: Mapping[str, Any], name: str, kind: type) -> Any:
    value = said.get(name)
    if name in said and (not isinstance(value, kind) or isinstance(value, bool) or not value):
        raise ConfigError(f"{name} is not a {kind.__name__} with something in it")
    return value


def _token_ids(value: object) -> tuple[int, ...] | None:
    if value is None:
        return None
    if not isinstance(value, list) or not value or not all(type(token) is int and token >= 0 for token in value):
        raise ConfigError("token_ids is not a list of token ids")
    return tuple(value)


def sample_id(line: Line, job: Job, token_ids: Sequence[int], loss_mask: Any) -> str:
    """The line's own id, or the hash of all that decides on the sample's rows."""
    if line.sample_id is not None:
        return line.sample_id
    decides = {
        **asdict(job),
        "tokens": list(token_ids),
        "max_tokens": line.max_tokens or job.max_tokens,
        "loss_mask": loss_mask,
    }
    return _digest(decides)[:_ID_HEX]


def revision_of(model: str, revision: str | None) -> str:
    """Of a model here: its files' names, sizes and times. Of another: the revision that is asked for."""
    folder = Path(model)
    if not folder.is_dir():
        return revision or "main"
    files = ((path, path.stat()) for path in sorted(folder.rglob("*")) if path.is_file())
    return _digest([[path.relative_to(folder).as_posix(), stat.st_size, stat.st_mtime_ns] for path, stat in files])


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
