"""What a log line says of a failure: always its code, and its message only where no peer or user can have written it."""

from __future__ import annotations

from pathlib import Path

_CHARS_MAX = 500


def log_text(code: str, message: str) -> str:
    """`CODE: message`, on one line; `CODE` alone for requests that are wrong (BAD_...), whose messages quote them.

    A tag can be a prompt, and its sender is told; logs go to other people.
    """
    if code.startswith("BAD_"):
        return code
    line = "".join(c if c.isprintable() else "?" for c in message[:_CHARS_MAX])
    return f"{code}: {line}"


def path_text(path: Path) -> str:
    """A path on one line, as UTF-8 can hold it: a file that lies about may be named by anybody."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in str(path))
