"""What became of each line: a file of JSON lines that grows while the command runs, and is put in order when it ends."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from slotstream.wire.errors import ConfigError

STORED, FAILED, WAITING = "stored", "failed", "waiting"


@dataclass(frozen=True, slots=True)
class Outcome:
    """id: of the sample; None where it is not known yet. code, message: why a line failed."""

    line: int
    key: str
    id: str | None
    state: str
    code: str | None = None
    message: str | None = None


class Manifest:
    """Of one run of the command. Safe to share by threads."""

    def __init__(self, path: Path) -> None:
        """Reads what an earlier run left. Raises ConfigError where the file is another's."""
        self.path = path
        self._lock = threading.Lock()
        self.ids: dict[str, str] = {}  # key -> id, as earlier runs found it, or this one.
        for outcome in self._load():
            if outcome.id is not None:
                self.ids[outcome.key] = outcome.id
        self._file = path.open("a", encoding="utf-8")

    def _load(self) -> Iterable[Outcome]:
        try:
            held = self.path.read_bytes()
        except FileNotFoundError:
            return
        whole = held.rfind(b"\n") + 1
        if whole < len(held):  # A run that was killed wrote a part of its last line.
            os.truncate(self.path, whole)
        for number, text in enumerate(held[:whole].splitlines(), start=1):
            try:
                yield Outcome(**json.loads(text))
            except (ValueError, TypeError) as error:
                raise ConfigError(f"{self.path}, line {number}, is not of a manifest: {error}") from error

    def add(self, outcome: Outcome) -> None:
        """Notes it at once, so that a killed run is gone on with."""
        with self._lock:
            if outcome.id is not None:
                self.ids[outcome.key] = outcome.id
            self._file.write(_text(outcome))
            self._file.flush()

    def close(self, outcomes: Iterable[Outcome] | None) -> None:
        """All lines of the run, in their order, in place of what was noted. None: what was noted stays."""
        self._file.close()
        if outcomes is None:
            return
        partial = self.path.with_name(f".{self.path.name}.partial")
        with partial.open("w", encoding="utf-8") as file:
            file.writelines(map(_text, sorted(outcomes, key=lambda outcome: outcome.line)))
            file.flush()
            os.fsync(file.fileno())
        partial.replace(self.path)


def _text(outcome: Outcome) -> str:
    return json.dumps(asdict(outcome), separators=(",", ":")) + "\n"
