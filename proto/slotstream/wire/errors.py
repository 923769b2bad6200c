"""Every expected failure: one class, one stable code, whether a retry can help, and the gRPC status it travels as.

A code never changes its meaning: users, dashboards and other languages match on it. The table in docs/reference.md is made of
these classes; the docstring of a class says what its code means.
"""

from __future__ import annotations

from typing import ClassVar

__all__ = [
    "AlreadyExists",
    "BadChunk",
    "BadLayers",
    "BadNamespace",
    "BadPage",
    "BadParams",
    "BadRows",
    "BadSampleId",
    "BadTags",
    "BadTokenRange",
    "CaptureAborted",
    "ConfigError",
    "Damaged",
    "DeadlineExceeded",
    "HashMismatch",
    "InternalFault",
    "Interrupted",
    "IoError",
    "Leased",
    "MissingRows",
    "PermissionDenied",
    "ProtocolViolation",
    "RowPoolFull",
    "RowsNotComputed",
    "SampleFailed",
    "SampleNotFound",
    "ServerDraining",
    "ServerUnavailable",
    "SlotMismatch",
    "SlotStreamError",
    "StagingFull",
    "StillArriving",
    "StoreFull",
    "StoreGone",
    "TooLarge",
    "TooMany",
    "TooSlow",
    "Unauthenticated",
    "UnsupportedFormat",
    "UnsupportedRequest",
    "VerdictUnknown",
    "error_from_code",
]


# In the trailing metadata of a call that failed: the code, and of SAMPLE_FAILED the code that the sample failed with.
CODE_KEY = "slotstream-code"
REASON_KEY = "slotstream-reason"


class ConfigError(ValueError):
    """The operator's mistake: raised at start, in one sentence that says what to change."""


class VerdictUnknown(Exception):
    """Nobody here can say what became of a sample. Its peer is told nothing, its stream ends, and it sends the sample again."""


class SlotStreamError(Exception):
    """An expected failure. `str(error)` is one sentence; `code` is stable; `status` is a gRPC status code's name."""

    code: ClassVar[str] = "INTERNAL"
    retryable: ClassVar[bool] = False
    status: ClassVar[str] = "INTERNAL"
    may_come: bool = False  # Whether a read that met this should wait, if its caller lets it: the sample may be there soon.


class InternalFault(SlotStreamError):
    """A fault of slotstream's own, caught where it does no harm. The log has the traceback."""


class BadSampleId(SlotStreamError):
    """The sample id is not 1 to 128 characters of `[A-Za-z0-9._-]`, or does not begin with a letter or a digit."""

    code, status = "BAD_SAMPLE_ID", "INVALID_ARGUMENT"


class BadNamespace(SlotStreamError):
    """The namespace is not 1 to 64 characters of `[A-Za-z0-9._-]`, or does not begin with a letter or a digit."""

    code, status = "BAD_NAMESPACE", "INVALID_ARGUMENT"


class BadTokenRange(SlotStreamError):
    """The token positions or rows that were asked for are malformed, or hold no row of this request or sample."""

    code, status = "BAD_TOKEN_RANGE", "INVALID_ARGUMENT"


class BadLayers(SlotStreamError):
    """The layer ids are malformed, named twice, too many, or not layers of the sample."""

    code, status = "BAD_LAYERS", "INVALID_ARGUMENT"


class BadTags(SlotStreamError):
    """There are too many tags, or a key or value is malformed or too long."""

    code, status = "BAD_TAGS", "INVALID_ARGUMENT"


class BadParams(SlotStreamError):
    """An unknown or malformed key, in a request's `slotstream` params or in an RPC."""

    code, status = "BAD_PARAMS", "INVALID_ARGUMENT"


class BadPage(SlotStreamError):
    """The page token, page size or limit of a listing cannot be used."""

    code, status = "BAD_PAGE", "INVALID_ARGUMENT"


class UnsupportedRequest(SlotStreamError):
    """Rows of this kind of vLLM request cannot be captured."""

    code, status = "UNSUPPORTED_REQUEST", "UNIMPLEMENTED"


class SlotMismatch(SlotStreamError):
    """The device wrote other cache slots than the block table names, so no row of the sample is trusted."""

    code, status = "SLOT_MISMATCH", "DATA_LOSS"


class RowsNotComputed(SlotStreamError):
    """This engine never computed some of the rows: another connector loaded their tokens, or vLLM skipped the extraction."""

    code, status = "ROWS_NOT_COMPUTED", "FAILED_PRECONDITION"


class BadRows(SlotStreamError):
    """A row holds only zeros, a NaN or an infinity, and the connector option `bad_rows` is `fail`."""

    code, status = "BAD_ROWS", "DATA_LOSS"


class StagingFull(SlotStreamError):
    """The engine's staging memory has no room: the server, the network or the sender takes rows too slowly."""

    code, status, retryable = "STAGING_FULL", "RESOURCE_EXHAUSTED", True


class RowPoolFull(SlotStreamError):
    """No page of the row pool was free for rows that a step was about to compute."""

    code, status, retryable = "ROW_POOL_FULL", "RESOURCE_EXHAUSTED", True


class ServerUnavailable(SlotStreamError):
    """The storage server does not answer, and nothing on this side can hold the rows until it does."""

    code, status, retryable = "SERVER_UNAVAILABLE", "UNAVAILABLE", True


class ServerDraining(SlotStreamError):
    """The server is shutting down and takes nothing new."""

    code, status, retryable = "SERVER_DRAINING", "UNAVAILABLE", True


class CaptureAborted(SlotStreamError):
    """The request ended before all its rows existed."""

    code, status = "ABORTED", "ABORTED"


class Interrupted(SlotStreamError):
    """The stream or a process went away while the sample was arriving."""

    code, status, retryable = "INTERRUPTED", "UNAVAILABLE", True


class AlreadyExists(SlotStreamError):
    """The id is stored already, with other content."""

    code, status = "ALREADY_EXISTS", "ALREADY_EXISTS"


class StoreFull(SlotStreamError):
    """The server's disk has no room, or as many samples or leases are open as the server allows."""

    code, status, retryable = "STORE_FULL", "RESOURCE_EXHAUSTED", True


class StoreGone(SlotStreamError):
    """The data directory that the server opened is not at its path any more: unmounted, moved or replaced."""

    code, status, retryable = "STORE_GONE", "UNAVAILABLE", True


class TooLarge(SlotStreamError):
    """A peer sent more than a limit allows: docs/security.md has the limits."""

    code, status = "TOO_LARGE", "INVALID_ARGUMENT"


class TooMany(SlotStreamError):
    """One peer, or all peers together, have more streams, calls or samples open than the server allows."""

    code, status, retryable = "TOO_MANY", "RESOURCE_EXHAUSTED", True


class TooSlow(SlotStreamError):
    """A peer took too long to say Hello, to go on with a sample, or to take the rows that it asked for."""

    code, status, retryable = "TOO_SLOW", "DEADLINE_EXCEEDED", True


class Unauthenticated(SlotStreamError):
    """The server wants a bearer token, and got none, or one that it does not know."""

    code, status = "UNAUTHENTICATED", "UNAUTHENTICATED"


class PermissionDenied(SlotStreamError):
    """The token lacks the right, or does not cover the namespace. The answer does not depend on what is stored there."""

    code, status = "PERMISSION_DENIED", "PERMISSION_DENIED"


class BadChunk(SlotStreamError):
    """A chunk does not hold the rows that its header names, or these rows cannot belong to the sample."""

    code, status = "BAD_CHUNK", "INVALID_ARGUMENT"


class HashMismatch(SlotStreamError):
    """A chunk's bytes do not match the hash that they were sent with."""

    code, status, retryable = "HASH_MISMATCH", "DATA_LOSS", True


class MissingRows(SlotStreamError):
    """The sample was committed before all of its rows had arrived."""

    code, status = "MISSING_ROWS", "FAILED_PRECONDITION"


class ProtocolViolation(SlotStreamError):
    """A peer broke the protocol. Its stream or call ends."""

    code, status = "PROTOCOL", "FAILED_PRECONDITION"


class StillArriving(SlotStreamError):
    """The sample is still arriving: it cannot be deleted yet."""

    code, status, retryable = "STILL_ARRIVING", "FAILED_PRECONDITION", True
    may_come = True


class Leased(SlotStreamError):
    """A reader holds a lease on the sample: it cannot be deleted before the lease ends."""

    code, status, retryable = "LEASED", "FAILED_PRECONDITION", True


class Damaged(SlotStreamError):
    """A stored file is missing, unreadable or of the wrong size, or its bytes fail their hashes."""

    code, status = "DAMAGED", "DATA_LOSS"


class IoError(SlotStreamError):
    """The disk did not give a stored file's bytes, though it was asked several times, or did not take a sample's.

    What is stored may be sound: ask again. What was sent is not stored, and its sender sends it again.
    """

    code, status, retryable = "IO_ERROR", "UNAVAILABLE", True


class UnsupportedFormat(SlotStreamError):
    """A sample has columns or elements that this server or reader does not know; a newer version does. Nothing is damaged."""

    code, status = "UNSUPPORTED_FORMAT", "UNIMPLEMENTED"


class SampleNotFound(SlotStreamError):
    """There is no sample of this id, and none appeared while the call waited."""

    code, status = "NOT_FOUND", "NOT_FOUND"
    may_come = True


class DeadlineExceeded(SlotStreamError):
    """The sample was still arriving when the wait was over, or the server went silent."""

    code, status, retryable = "DEADLINE_EXCEEDED", "DEADLINE_EXCEEDED", True


class SampleFailed(SlotStreamError):
    """The sample failed. The exception's `reason` is the stable code that says why, and whether it may come again."""

    code, status = "SAMPLE_FAILED", "FAILED_PRECONDITION"

    def __init__(self, message: str, reason: str = "") -> None:
        super().__init__(message)
        self.reason = reason
        # Its sender still has it then, and sends it to another server, or to this one after its restart.
        self.may_come = reason == ServerDraining.code


def _all_subclasses(cls: type[SlotStreamError]) -> list[type[SlotStreamError]]:
    return [s for direct in cls.__subclasses__() for s in (direct, *_all_subclasses(direct))]


_BY_CODE: dict[str, type[SlotStreamError]] = {c.code: c for c in _all_subclasses(SlotStreamError)}


def error_from_code(code: str, message: str) -> SlotStreamError:
    """The exception that a peer's code stands for; an unknown code (a newer peer's) becomes an `InternalFault`."""
    return _BY_CODE.get(code, InternalFault)(message)
