"""Every expected failure: one class, one stable code, whether a retry can help, and the gRPC status it travels as.

A code never changes its meaning: users, dashboards and other languages match on it.
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
    "Leased",
    "MissingRows",
    "PermissionDenied",
    "ProtocolViolation",
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
    "UnsupportedRequest",
    "error_from_code",
]


# In the trailing metadata of a call that failed: the code, and of SAMPLE_FAILED the code that the sample failed with.
CODE_KEY = "slotstream-code"
REASON_KEY = "slotstream-reason"


class ConfigError(ValueError):
    """The operator's mistake: raised at start, in one sentence that says what to change."""


class SlotStreamError(Exception):
    """An expected failure. `str(error)` is one sentence; `code` is stable; `status` is a gRPC status code's name."""

    code: ClassVar[str] = "INTERNAL"
    retryable: ClassVar[bool] = False
    status: ClassVar[str] = "INTERNAL"


class InternalFault(SlotStreamError):
    """A fault of slotstream's own, caught where it could do no harm."""


class BadSampleId(SlotStreamError):
    code, status = "BAD_SAMPLE_ID", "INVALID_ARGUMENT"


class BadNamespace(SlotStreamError):
    code, status = "BAD_NAMESPACE", "INVALID_ARGUMENT"


class BadTokenRange(SlotStreamError):
    code, status = "BAD_TOKEN_RANGE", "INVALID_ARGUMENT"


class BadLayers(SlotStreamError):
    code, status = "BAD_LAYERS", "INVALID_ARGUMENT"


class BadTags(SlotStreamError):
    code, status = "BAD_TAGS", "INVALID_ARGUMENT"


class BadParams(SlotStreamError):
    """An unknown or malformed key, in a request's `slotstream` params or in an RPC."""

    code, status = "BAD_PARAMS", "INVALID_ARGUMENT"


class BadPage(SlotStreamError):
    code, status = "BAD_PAGE", "INVALID_ARGUMENT"


class UnsupportedRequest(SlotStreamError):
    """A kind of vLLM request whose rows cannot be captured."""

    code, status = "UNSUPPORTED_REQUEST", "UNIMPLEMENTED"


class SlotMismatch(SlotStreamError):
    """The slots that the device wrote are not the ones that the block table names: no row of the sample is trusted."""

    code, status = "SLOT_MISMATCH", "DATA_LOSS"


class RowsNotComputed(SlotStreamError):
    """Rows of tokens that this engine never computed (loaded by another connector, or skipped by the extraction)."""

    code, status = "ROWS_NOT_COMPUTED", "FAILED_PRECONDITION"


class BadRows(SlotStreamError):
    """A row holds only zeros, a NaN or an infinity, and the connector was told to refuse such samples."""

    code, status = "BAD_ROWS", "DATA_LOSS"


class StagingFull(SlotStreamError):
    code, status, retryable = "STAGING_FULL", "RESOURCE_EXHAUSTED", True


class RowPoolFull(SlotStreamError):
    """No page of the row pool was free for rows that a step was about to compute."""

    code, status, retryable = "ROW_POOL_FULL", "RESOURCE_EXHAUSTED", True


class ServerUnavailable(SlotStreamError):
    code, status, retryable = "SERVER_UNAVAILABLE", "UNAVAILABLE", True


class ServerDraining(SlotStreamError):
    code, status, retryable = "SERVER_DRAINING", "UNAVAILABLE", True


class CaptureAborted(SlotStreamError):
    """The request ended before all its rows existed."""

    code, status = "ABORTED", "ABORTED"


class Interrupted(SlotStreamError):
    """The stream or a process went away while the sample was arriving."""

    code, status, retryable = "INTERRUPTED", "UNAVAILABLE", True


class AlreadyExists(SlotStreamError):
    """The id is stored with other content."""

    code, status = "ALREADY_EXISTS", "ALREADY_EXISTS"


class StoreFull(SlotStreamError):
    code, status, retryable = "STORE_FULL", "RESOURCE_EXHAUSTED", True


class StoreGone(SlotStreamError):
    """The data directory that the server opened is not at its path any more: unmounted, moved or replaced."""

    code, status, retryable = "STORE_GONE", "UNAVAILABLE", True


class TooLarge(SlotStreamError):
    """Something a peer sent is past its limit."""

    code, status = "TOO_LARGE", "INVALID_ARGUMENT"


class TooMany(SlotStreamError):
    """More at a time than the server allows: streams, calls, samples of one peer."""

    code, status, retryable = "TOO_MANY", "RESOURCE_EXHAUSTED", True


class TooSlow(SlotStreamError):
    """A peer took longer than it may: to say Hello, to go on with a sample, to take what it asked to read."""

    code, status, retryable = "TOO_SLOW", "DEADLINE_EXCEEDED", True


class Unauthenticated(SlotStreamError):
    """The server wants a bearer token, and got none or one that it does not know."""

    code, status = "UNAUTHENTICATED", "UNAUTHENTICATED"


class PermissionDenied(SlotStreamError):
    """The token is known and lacks the right, or does not cover the namespace. Says nothing of what is stored there."""

    code, status = "PERMISSION_DENIED", "PERMISSION_DENIED"


class BadChunk(SlotStreamError):
    code, status = "BAD_CHUNK", "INVALID_ARGUMENT"


class HashMismatch(SlotStreamError):
    code, status, retryable = "HASH_MISMATCH", "DATA_LOSS", True


class MissingRows(SlotStreamError):
    code, status = "MISSING_ROWS", "FAILED_PRECONDITION"


class ProtocolViolation(SlotStreamError):
    code, status = "PROTOCOL", "FAILED_PRECONDITION"


class StillArriving(SlotStreamError):
    code, status, retryable = "STILL_ARRIVING", "FAILED_PRECONDITION", True


class Leased(SlotStreamError):
    """A reader holds a lease on the sample: it cannot be deleted before the lease ends."""

    code, status, retryable = "LEASED", "FAILED_PRECONDITION", True


class Damaged(SlotStreamError):
    """A stored file is missing, unreadable, of the wrong size, or fails its hashes."""

    code, status = "DAMAGED", "DATA_LOSS"


class SampleNotFound(SlotStreamError):
    code, status = "NOT_FOUND", "NOT_FOUND"


class DeadlineExceeded(SlotStreamError):
    """The wait passed and the sample was still arriving."""

    code, status, retryable = "DEADLINE_EXCEEDED", "DEADLINE_EXCEEDED", True


class SampleFailed(SlotStreamError):
    """The sample failed for good; `reason` is the stable code of why."""

    code, status = "SAMPLE_FAILED", "FAILED_PRECONDITION"

    def __init__(self, message: str, reason: str = "") -> None:
        super().__init__(message)
        self.reason = reason


def _all_subclasses(cls: type[SlotStreamError]) -> list[type[SlotStreamError]]:
    return [s for direct in cls.__subclasses__() for s in (direct, *_all_subclasses(direct))]


_BY_CODE: dict[str, type[SlotStreamError]] = {c.code: c for c in _all_subclasses(SlotStreamError)}


def error_from_code(code: str, message: str) -> SlotStreamError:
    """The exception that a peer's code stands for; an unknown code (a newer peer's) becomes an `InternalFault`."""
    return _BY_CODE.get(code, InternalFault)(message)
