"""What the screens are handed."""

from __future__ import annotations

from dataclasses import dataclass

from slotstream.web.pages import Pages
from slotstream.web.pieces.tokens import Tokenizers
from slotstream.web.settings import WebSettings
from slotstream.web.window import WindowReader


@dataclass(frozen=True, slots=True)
class ScreenParts:
    settings: WebSettings
    pages: Pages
    tokenizers: Tokenizers
    windows: WindowReader


class BadQuery(ValueError):
    """The address holds something that no screen has; one sentence for the visitor."""


def whole_number(text: str | None, what: str) -> int | None:
    """None where it is not given. Raises BadQuery."""
    if not text:
        return None
    if not (text.isascii() and text.isdecimal() and len(text) <= 15):
        raise BadQuery(f"{what} is a whole number, and not what this address says.")
    return int(text)
