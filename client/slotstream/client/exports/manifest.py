"""The folder of an export: `manifest.jsonl` says which samples it is of, each with its file, before the first is written.

What is written is told by the files themselves, each of which is whole or not there. So a run of the same options goes on with
one that was killed: it writes what is missing, and nothing else.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slotstream.client.exports.files import whole
from slotstream.wire.errors import ConfigError

MANIFEST = "manifest.jsonl"
_VERSION = 1


@dataclass(frozen=True, slots=True)
class Entry:
    """A sample of an export, by its number there: the line of the manifest behind the first."""

    file: str | None  # Below the folder; None where the rows stay in the store.
    namespace: str
    sample_id: str
    model: str
    rows: int
    layers: tuple[int, ...]  # Ids, in the order of the file.
    committed_unix_ns: int

    @property
    def name(self) -> str:
        return f"{self.namespace}/{self.sample_id}"


@dataclass(frozen=True, slots=True)
class Manifest:
    """options: what decides on the files, as JSON values. as_of: the moment whose samples these are, in Unix ns."""

    options: dict[str, Any]
    as_of: int
    layers: tuple[str, ...]  # The layers of each file, by name, where all have the same; the last one's stands last.
    entries: tuple[Entry, ...]


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """No other export writes here meanwhile. Raises ConfigError where one does."""
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"another export is writing to {folder}") from None
        yield
    finally:
        os.close(descriptor)


def load(folder: Path, options: dict[str, Any] | None = None) -> Manifest | None:
    """The manifest of a folder; None where it has none.

    Raises ConfigError where it cannot be read, or is of other options than these: the message names the first that differs.
    """
    path = folder / MANIFEST
    try:
        first, *others = path.read_text().splitlines()
    except FileNotFoundError:
        if any(not path.name.startswith(".") for path in folder.iterdir()):
            raise ConfigError(f"{folder} holds other files, and no export: name a folder that is empty or new") from None
        return None
    except ValueError as error:
        raise ConfigError(f"{path} is not the manifest of an export: {error}") from error
    try:
        said = json.loads(first)
        entries = tuple(_entry(json.loads(line)) for line in others)
        found = Manifest(said["options"], said["as_of"], tuple(said["layers"]), entries)
        if said["version"] != _VERSION:
            raise ConfigError(f"{path} is of version {said['version']}, and this is version {_VERSION}")
    except (ValueError, KeyError, TypeError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{path} is not the manifest of an export: {error}") from error
    for key, value in sorted((options or {}).items()):
        if found.options.get(key) != value:
            raise ConfigError(
                f"{folder} holds an export with {key} {found.options.get(key)!r}, and this one has {value!r}: "
                "name another folder"
            )
    return found


def _entry(line: dict[str, Any]) -> Entry:
    return Entry(**{**line, "layers": tuple(line["layers"])})


def save(folder: Path, manifest: Manifest) -> None:
    said = {"version": _VERSION, "options": manifest.options, "as_of": manifest.as_of, "layers": manifest.layers}
    with whole(folder / MANIFEST) as file:
        for line in [said, *map(dataclasses.asdict, manifest.entries)]:
            file.write(json.dumps(line, separators=(",", ":")).encode() + b"\n")


def missing(folder: Path, entries: Sequence[Entry]) -> list[Entry]:
    """Those whose file is not there yet."""
    return [entry for entry in entries if entry.file is not None and not (folder / entry.file).exists()]
