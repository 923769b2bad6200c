"""Text as PostgreSQL can hold it: it has no character NUL, which a model's name or an error's message may have."""

from __future__ import annotations

_MARK = "\x1a"  # Seldom in a text, so that nearly all texts stand in the tables as they are.


def kept(text: str) -> str:
    """`text` without NUL; `told` gives it back."""
    if _MARK in text:
        text = text.replace(_MARK, _MARK + _MARK)
    return text.replace("\0", _MARK + "0") if "\0" in text else text


def told(text: str) -> str:
    """What `kept` was given."""
    if _MARK not in text:
        return text
    return _MARK.join(part.replace(_MARK + "0", "\0") for part in text.split(_MARK + _MARK))
