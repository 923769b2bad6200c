"""A sample on its way as a machine: the phases it can be in, and one table of what takes it from one to the next.

The phase of a sample says what may be done with it. A move that is not in the table is a bug of ours. It costs
that sample and nothing else (`Pump` catches it). docs/design.md draws the same table, and a test compares the two.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple


class Phase(Enum):
    """Where a sample is. The value says it in words."""

    WAITING = "Its rows are held here, in staging and in the spool: there is no link, or it is not its turn yet."
    OPEN = "It is open on the stream. Its rows are sent as they come, or again."
    COMMITTING = "All of it is sent, with the commit. The server's verdict is missing."
    ABORTING = "It was given up and the server was told so. Its rows are dropped, the server's answer is missing."
    BACKING_OFF = "The server has no room for it now. Its rows stay here until it is sent again, or their room is needed."
    OVER = "It is stored, or failed. A failure that the server has not heard of is remembered (`failure_reports.py`)."

    @property
    def on_stream(self) -> bool:
        """Whether the server knows it by a number and owes it a verdict."""
        return self in (Phase.OPEN, Phase.COMMITTING, Phase.ABORTING)

    @property
    def needs_rows(self) -> bool:
        """Whether its rows may have to be sent, or sent again."""
        return self not in (Phase.ABORTING, Phase.OVER)

    @property
    def waits_here(self) -> bool:
        """Whether nobody else has its rows: they belong into the spool."""
        return self in (Phase.WAITING, Phase.BACKING_OFF)


class Event(Enum):
    """What can happen to a sample. The value says it in words."""

    SEND = "There is a link, and it is its turn."
    LAST_ROW = "No more rows come, and all are sent."
    GIVEN_UP = "It cannot be stored for a reason on this side."
    STORED = "The server says: it is durable."
    FAILED = "The server says: it will not be stored, or its rows for another try are gone."
    NOT_NOW = "The server says: it cannot be stored now, with one of the codes that `verdicts.py` holds a sample for."
    LINK_DOWN = "The stream broke, or could not be had."
    ROWS_LOST = "It would have to be sent again, and rows of it are gone."


class Move(NamedTuple):
    """The phase that comes next, and what is done on the way."""

    to: Phase
    does: str


MOVES = {
    (Phase.WAITING, Event.SEND): Move(
        Phase.OPEN, "It is opened under a new number. Rows in staging are submitted, those in the spool are read back."
    ),
    (Phase.WAITING, Event.GIVEN_UP): Move(Phase.OVER, "The failure is remembered for the server."),
    (Phase.WAITING, Event.LINK_DOWN): Move(Phase.WAITING, "It goes on waiting."),
    (Phase.WAITING, Event.ROWS_LOST): Move(Phase.OVER, "It fails as the link did. The failure is remembered for the server."),
    (Phase.OPEN, Event.LAST_ROW): Move(Phase.COMMITTING, "The commit is sent."),
    (Phase.OPEN, Event.GIVEN_UP): Move(Phase.ABORTING, "The abort is sent, its rows are dropped."),
    (Phase.OPEN, Event.STORED): Move(Phase.OVER, "Rows and file are dropped: the server has the last word."),
    (Phase.OPEN, Event.FAILED): Move(Phase.OVER, "The engine is told, rows and file are dropped."),
    (Phase.OPEN, Event.NOT_NOW): Move(
        Phase.BACKING_OFF, "Its rows are kept while nobody needs their room, and written to the spool. The next try is set."
    ),
    (Phase.OPEN, Event.LINK_DOWN): Move(Phase.WAITING, "Its rows are leased again, and written to the spool."),
    (Phase.COMMITTING, Event.GIVEN_UP): Move(
        Phase.ABORTING, "A bug of ours. The abort is sent; a server that has committed it says so all the same."
    ),
    (Phase.COMMITTING, Event.STORED): Move(Phase.OVER, "Rows and file are dropped."),
    (Phase.COMMITTING, Event.FAILED): Move(Phase.OVER, "The engine is told, rows and file are dropped."),
    (Phase.COMMITTING, Event.NOT_NOW): Move(Phase.BACKING_OFF, "As from OPEN."),
    (Phase.COMMITTING, Event.LINK_DOWN): Move(
        Phase.WAITING, "As from OPEN. If the server stored it after all, it finds the same content when it is sent again."
    ),
    (Phase.ABORTING, Event.STORED): Move(Phase.OVER, "The server has the last word."),
    (Phase.ABORTING, Event.FAILED): Move(Phase.OVER, "The engine is told."),
    (Phase.ABORTING, Event.NOT_NOW): Move(Phase.OVER, "The failure is remembered for the server, which has not taken it."),
    (Phase.ABORTING, Event.LINK_DOWN): Move(Phase.OVER, "The failure is remembered for the server."),
    (Phase.BACKING_OFF, Event.SEND): Move(Phase.OPEN, "As from WAITING."),
    (Phase.BACKING_OFF, Event.GIVEN_UP): Move(Phase.OVER, "The failure is remembered for the server."),
    (Phase.BACKING_OFF, Event.LINK_DOWN): Move(Phase.WAITING, "Its rows are leased again."),
    (Phase.BACKING_OFF, Event.ROWS_LOST): Move(
        Phase.OVER, "It fails with what the server said. The failure is remembered for the server."
    ),
}
