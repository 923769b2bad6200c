"""What a log line says of a failure: always its code, and its message only where no peer or user can have written it."""

from __future__ import annotations

_CHARS_MAX = 500


def log_text(code: str, message: str) -> str:
    """`CODE: message`, on one line; `CODE` alone for requests that are wrong (BAD_...), whose messages quote them.

    A tag can be a prompt, and its sender is told; logs go to other people.
    """
    if code.startswith("BAD_"):
        return code
    line = "".join(c if c.isprintable() else "?" for c in message[:_CHARS_MAX])
    return f"{code}: {line}"
