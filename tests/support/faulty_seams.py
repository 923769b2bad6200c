"""A SlotStreamConnector that breaks behind the hooks, in the places that `layers` has beside vLLM's own interface.

Loaded by vLLM itself, as `FaultySeams` of this module, in each of its processes. The file that SLOTSTREAM_TEST_SEAM names
holds the seam that breaks from now on, or nothing.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slotstream.connector.facade import SlotStreamConnector
from slotstream.connector.plan import RowPlan
from slotstream.connector.planning.page_allocator import PageAllocator
from slotstream.connector.planning.scheduler import SchedulerHalf
from slotstream.connector.reading.forward_capture import ForwardCapture
from slotstream.connector.reading.located import Located
from slotstream.connector.reading.row_pages import RowPages
from slotstream.wire.errors import SlotMismatch

_SEAM = Path(os.environ.get("SLOTSTREAM_TEST_SEAM", os.devnull))


class Injected(Exception):
    """The fault."""


def _broken(seam: str) -> bool:
    return _SEAM.read_text() == seam


def _breaks(owner: Any, name: str, seam: str) -> None:
    inner = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        if _broken(seam):
            raise Injected(seam)
        return inner(*args, **kwargs)

    call.__qualname__ = f"{getattr(owner, '__qualname__', owner.__name__)}.{name}"
    setattr(owner, name, call)


def _answers_otherwise(take: Any) -> Any:
    """The model answers with fewer layers than it did, in the middle of its work."""

    def call(self: ForwardCapture, output: Any) -> Any:
        return take(self, (output[0], output[1][:1]) if _broken("the model's answer") else output)

    return call


def _finds_nothing(locate: Any) -> Any:
    """No plan can be right."""

    def call(self: RowPages, plans: Sequence[RowPlan], rows_per_slot: int) -> Located:
        located: Located = locate(self, plans, rows_per_slot)
        if not _broken("told nobody"):
            return located
        return Located((), (), [(plan.req_id, SlotMismatch("told nobody")) for plan in plans])

    return call


class FaultySeams(SlotStreamConnector):
    """See the module."""


_breaks(RowPages, "begin_step", "table update")
setattr(RowPages, "locate", _finds_nothing(RowPages.locate))  # noqa: B010  (mypy: a method is no variable)
_breaks(SchedulerHalf, "on_faults", "told nobody")
_breaks(RowPages, "read", "gather")
_breaks(PageAllocator, "cover", "pages")
setattr(ForwardCapture, "take", _answers_otherwise(ForwardCapture.take))  # noqa: B010  (mypy: a method is no variable)
