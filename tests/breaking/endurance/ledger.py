"""What a sender promised and what it heard, line by line in a file that outlives it; and what a sample's rows must be."""

from __future__ import annotations

import json
import os
import random
import time
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

LAYER_IDS = (1, 2, 5)
HIDDEN = 16
ROW_BYTES = len(LAYER_IDS) * HIDDEN * 2
NAMESPACE = "endurance"


def row_data(sample_id: str, rows: int) -> bytes:
    """The rows of a sample, bf16 [rows, layers, hidden]: random, never alike, never NaN or infinite."""
    words = array("H", random.Random(sample_id).randbytes(rows * ROW_BYTES))
    return array("H", (word & 0xBFFF for word in words)).tobytes()


def token_ids(sample_id: str, rows: int) -> list[int]:
    first = random.Random(sample_id).randrange(1 << 16)
    return [first + row for row in range(rows)]


@dataclass
class Promise:
    """One sample that a sender began. `outcome`: "" when its sender never said; `sender_end`: how that one ended."""

    sample_id: str
    rows: int
    outcome: str = ""
    code: str = ""
    sender_end: str = ""  # "", "killed" or "closed"


@dataclass
class Try:
    """A sample as it was opened on one stream, by any sender. `said`: the server's word, "" where none was heard."""

    at_ns: int
    said: str = ""  # "", "committed", "duplicate", or the code of a failure
    gave_up: str = ""  # The code that the sender itself gave the sample up with.


class Ledger:
    """Appends to one sender's file. Each line is handed to the operating system at once: a kill -9 takes none of them."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def write(self, event: str, **more: object) -> None:
        os.write(self._fd, json.dumps({"event": event, "at_ns": time.monotonic_ns(), **more}).encode() + b"\n")


def promises(path: Path) -> Iterator[Promise]:
    """Every promise of one sender's file, in order. A sender that started and never closed was killed."""
    found: dict[str, Promise] = {}
    running: list[Promise] = []
    for line in path.read_text().splitlines() if path.exists() else ():
        entry = json.loads(line)
        match entry["event"]:
            case "started":
                for promise in running:
                    promise.sender_end = "killed"
                running = []
            case "promised":
                promise = found[entry["id"]] = Promise(entry["id"], entry["rows"])
                running.append(promise)
            case "ended":
                found[entry["id"]].outcome = entry["outcome"]
                found[entry["id"]].code = entry.get("code", "")
            case "closed":
                for promise in running:
                    promise.sender_end = "closed"
                running = []
    for promise in running:
        promise.sender_end = "killed"
    yield from found.values()


def tries(paths: Iterable[Path]) -> dict[str, list[Try]]:
    """What was tried with each sample, by id, in the order in which it was opened, by the sinks of all senders."""
    found: dict[str, list[Try]] = {}
    for path in paths:
        open_tries: dict[int, Try] = {}  # by their numbers, of the sender that runs
        for line in path.read_text().splitlines():
            entry = json.loads(line)
            match entry["event"]:
                case "started":
                    open_tries = {}
                case "opened":
                    opened = open_tries[entry["number"]] = Try(entry["at_ns"])
                    found.setdefault(entry["id"], []).append(opened)
                case "gave_up":
                    open_tries[entry["number"]].gave_up = entry["code"]
                case "said":
                    open_tries[entry["number"]].said = entry["what"]
    return {sample_id: sorted(made, key=lambda one: one.at_ns) for sample_id, made in found.items()}
