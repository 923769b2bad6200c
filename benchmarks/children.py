"""Child processes of a benchmark: each starts fresh, with the allocator settings that its measurement needs."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self

from slotstream.server.malloc import SETTINGS

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_ANSWER_S = 600.0


class ChildFailed(RuntimeError):
    """A child ended, or did not answer in time."""


def cpu_seconds(pid: int) -> float:
    """User and system time that all threads of a process have used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S


def tree_cpu_seconds(pid: int) -> float:
    """`cpu_seconds` of a process and of all that it started, those that it has waited for included."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    own = sum(map(int, fields[11:15])) / _TICKS_PER_S
    started = (task.read_text().split() for task in Path(f"/proc/{pid}/task").glob("*/children"))
    return own + sum(tree_cpu_seconds(int(child)) for children in started for child in children)


def family(pid: int) -> list[int]:
    """A process and all that it started."""
    found = [pid]
    for task in tasks(pid):
        with suppress(FileNotFoundError, ProcessLookupError):  # It ended meanwhile.
            for child in (task / "children").read_text().split():
                found += family(int(child))
    return found


def tasks(pid: int) -> list[Path]:
    """The threads of a process; none where it ended meanwhile."""
    try:
        return list(Path(f"/proc/{pid}/task").iterdir())
    except (FileNotFoundError, ProcessLookupError):
        return []


@contextmanager
def changed_environment(changes: Mapping[str, str | None]) -> Iterator[None]:
    """The environment with `changes`, for processes started meanwhile."""
    before = {name: os.environ.get(name) for name in changes}
    _set(changes)
    try:
        yield
    finally:
        _set(before)


def _set(variables: Mapping[str, str | None]) -> None:
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


class Child:
    """`main(connection, *arguments)` in a new Python, with the server's malloc settings if `tuned`, and with `environment`."""

    def __init__(
        self, name: str, main: Callable[..., None], *arguments: Any, tuned: bool, environment: Mapping[str, str] | None = None
    ) -> None:
        context = multiprocessing.get_context("spawn")  # Not a fork: a fork would keep this process's allocator.
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=main, args=(theirs, *arguments), name=name, daemon=True)
        with changed_environment({**{key: value if tuned else None for key, value in SETTINGS.items()}, **(environment or {})}):
            self._process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def tell(self, *question: Any) -> None:
        """Send a tuple."""
        self._connection.send(question)

    def ask(self, *question: Any) -> Any:
        """Send a tuple, and wait for the answer."""
        self.tell(*question)
        return self.answer()

    def answer(self) -> Any:
        """The next thing that the child says."""
        try:
            if self._connection.poll(_ANSWER_S):
                return self._connection.recv()
        except EOFError:
            pass
        raise ChildFailed(f"{self._process.name} ended or did not answer within {_ANSWER_S:.0f} s")

    def close(self) -> None:
        self._connection.close()
        self._process.join(10)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def questions(connection: Connection) -> Iterator[tuple[Any, ...]]:
    """In a child: what it is asked, until the parent has heard enough."""
    while True:
        try:
            yield connection.recv()
        except (EOFError, ConnectionResetError):
            return
