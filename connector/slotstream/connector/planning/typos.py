"""Keys of a request's `kv_transfer_params` that look like ours and are not: what they hold would be ignored without a word."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slotstream.transport.logs import connector_logger

logger = connector_logger(__name__)

_KEY = "slotstream"
_EDITS_MAX = 2
_SAID_MAX = 1024  # There are more such keys, and a peer that sends so many means it.


class Typos:
    """Warns of each key once."""

    def __init__(self) -> None:
        self._said: set[str] = set()

    def look(self, kv_transfer_params: Mapping[str, Any] | None) -> None:
        """Warn of the keys of a request that were not warned of before."""
        for key in misspelt(kv_transfer_params):
            if key not in self._said and len(self._said) < _SAID_MAX:
                self._said.add(key)
                logger.warning("slotstream: %s", _sentence(key))


def warning_of(kv_transfer_params: Mapping[str, Any] | None) -> str | None:
    """What the answer says of a request's keys; None where there is nothing to say."""
    for key in misspelt(kv_transfer_params):
        return _sentence(key)
    return None


def misspelt(kv_transfer_params: Mapping[str, Any] | None) -> list[str]:
    """The keys within two edits (a character more, fewer, or another one) of `slotstream`, which are not it."""
    return [key for key in kv_transfer_params or () if isinstance(key, str) and key != _KEY and _edits(key) <= _EDITS_MAX]


def _sentence(key: str) -> str:
    return f"kv_transfer_params has the key {key!r}, which nobody reads: slotstream is the key of a capture's parameters"


def _edits(key: str) -> int:
    """Levenshtein's distance to `slotstream`; for keys of a very different length some number above two."""
    if abs(len(key) - len(_KEY)) > _EDITS_MAX:
        return _EDITS_MAX + 1
    row = list(range(len(_KEY) + 1))
    for number, character in enumerate(key, 1):
        before, row[0] = row[0], number
        for at, wanted in enumerate(_KEY, 1):
            before, row[at] = row[at], min(row[at] + 1, row[at - 1] + 1, before + (character != wanted))
    return row[-1]
