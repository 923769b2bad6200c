"""What becomes of a sample that the server did not store, by the code that it gave: one table.

A code that is not in it is a newer server's. Its sample is held: rows that were kept too long can still be dropped.
"""

from __future__ import annotations

from enum import Enum

from slotstream.wire import errors

_TRIES_MAX = 4  # Of a sample whose bytes the server did not get as they were sent: more often, and they are wrong here.


class Verdict(Enum):
    """The value says it in words."""

    HELD = "The server cannot store it now. Its rows are kept, and it is sent again."
    AGAIN = f"It did not arrive as it was sent. It is sent again, up to {_TRIES_MAX} times in all."
    FINAL = "The same rows would fail again, or nobody has them. It failed."


_FINAL = (
    # What it asks for, or is called, can never be.
    errors.BadSampleId,
    errors.BadNamespace,
    errors.BadTokenRange,
    errors.BadLayers,
    errors.BadTags,
    errors.BadParams,
    errors.BadPage,
    errors.UnsupportedRequest,
    errors.UnsupportedFormat,
    errors.TooLarge,
    errors.AlreadyExists,
    errors.PermissionDenied,
    errors.BadChunk,
    errors.MissingRows,
    errors.ProtocolViolation,
    # This side gave it up, and the server repeats why.
    errors.SlotMismatch,
    errors.RowsNotComputed,
    errors.BadRows,
    errors.StagingFull,
    errors.RowPoolFull,
    errors.CaptureAborted,
    # The server has looked at what it holds, or failed in a way that nobody foresaw.
    errors.Damaged,
    errors.SampleNotFound,
    errors.SampleFailed,
    errors.InternalFault,
)
_AGAIN = (errors.HashMismatch,)
_HELD = (
    errors.StoreFull,
    errors.StoreGone,
    errors.IoError,
    errors.TooMany,
    errors.TooSlow,
    errors.ServerDraining,
    errors.ServerUnavailable,
    errors.Interrupted,
    errors.Unauthenticated,
    errors.DeadlineExceeded,
    errors.StillArriving,
    errors.Leased,
)
VERDICTS = {
    **{kind.code: Verdict.FINAL for kind in _FINAL},
    **{kind.code: Verdict.AGAIN for kind in _AGAIN},
    **{kind.code: Verdict.HELD for kind in _HELD},
}


def is_final(code: str, refusals: int = 0) -> bool:
    """Whether a sample that the server failed with `code`, after `refusals` before, is not to be sent again."""
    verdict = VERDICTS.get(code, Verdict.HELD)
    return verdict is Verdict.FINAL or (verdict is Verdict.AGAIN and refusals + 1 >= _TRIES_MAX)
