"""A namespace that was mistyped is said, with those that there are: an empty answer looks like good news."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from slotstream.cli.common import shown
from slotstream.wire.errors import PermissionDenied, SampleNotFound, SlotStreamError

if TYPE_CHECKING:
    from slotstream.client import Client

_NAMES_MAX = 20


@contextmanager
def naming_others(client: Client, namespace: str | None) -> Iterator[None]:
    """Where this token may not see `namespace`, the refusal also names the namespaces that it may read."""
    try:
        yield
    except PermissionDenied as error:
        try:
            readable = [space.namespace for space in client.usage().namespaces]
        except SlotStreamError:
            readable = []
        if namespace is None or not readable or namespace in readable:
            raise
        raise PermissionDenied(f"{error}; it may read {listed(readable)}") from error


def check_known(client: Client, namespace: str | None) -> None:
    """Raises SampleNotFound, naming others, where `namespace` holds nothing that this token may read. None is all of them."""
    if namespace is None or next(client.list(namespace=namespace, limit=1), None) is not None:
        return
    holding = [space.namespace for space in client.usage().namespaces if space.samples or space.failed]
    raise unknown(namespace, holding, "that this token may read")


def unknown(namespace: str, holding: Sequence[str], which: str) -> SampleNotFound:
    """What to raise of a namespace that holds nothing, where these do."""
    others = f"of those {which}, these do: {listed(holding)}" if holding else f"nor does any {which}"
    return SampleNotFound(f"namespace {namespace!r} holds no sample; {others}")


def listed(names: Sequence[str]) -> str:
    """The first twenty of them, and how many more there are."""
    more = len(names) - _NAMES_MAX
    return shown(", ".join(names[:_NAMES_MAX])) + (f" and {more} more" if more > 0 else "")
