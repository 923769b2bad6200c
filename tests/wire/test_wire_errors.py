"""The error codes: a list that users match on, so a change to it must be a change to this test."""

from __future__ import annotations

import grpc
import pytest

from slotstream.wire import errors
from slotstream.wire.errors import ConfigError, InternalFault, SampleFailed, SlotStreamError, error_from_code

# Code -> (class, gRPC status, whether the same request can succeed later). Entries are added and never changed.
CODES = {
    "ABORTED": ("CaptureAborted", "ABORTED", False),
    "ALREADY_EXISTS": ("AlreadyExists", "ALREADY_EXISTS", False),
    "BAD_CHUNK": ("BadChunk", "INVALID_ARGUMENT", False),
    "BAD_ROWS": ("BadRows", "DATA_LOSS", False),
    "BAD_LAYERS": ("BadLayers", "INVALID_ARGUMENT", False),
    "BAD_NAMESPACE": ("BadNamespace", "INVALID_ARGUMENT", False),
    "BAD_PAGE": ("BadPage", "INVALID_ARGUMENT", False),
    "BAD_PARAMS": ("BadParams", "INVALID_ARGUMENT", False),
    "BAD_SAMPLE_ID": ("BadSampleId", "INVALID_ARGUMENT", False),
    "BAD_TAGS": ("BadTags", "INVALID_ARGUMENT", False),
    "BAD_TOKEN_RANGE": ("BadTokenRange", "INVALID_ARGUMENT", False),
    "DAMAGED": ("Damaged", "DATA_LOSS", False),
    "DEADLINE_EXCEEDED": ("DeadlineExceeded", "DEADLINE_EXCEEDED", True),
    "HASH_MISMATCH": ("HashMismatch", "DATA_LOSS", True),
    "INTERNAL": ("InternalFault", "INTERNAL", False),
    "INTERRUPTED": ("Interrupted", "UNAVAILABLE", True),
    "IO_ERROR": ("IoError", "UNAVAILABLE", True),
    "LEASED": ("Leased", "FAILED_PRECONDITION", True),
    "MISSING_ROWS": ("MissingRows", "FAILED_PRECONDITION", False),
    "NOT_FOUND": ("SampleNotFound", "NOT_FOUND", False),
    "PERMISSION_DENIED": ("PermissionDenied", "PERMISSION_DENIED", False),
    "PROTOCOL": ("ProtocolViolation", "FAILED_PRECONDITION", False),
    "ROW_POOL_FULL": ("RowPoolFull", "RESOURCE_EXHAUSTED", True),
    "ROWS_NOT_COMPUTED": ("RowsNotComputed", "FAILED_PRECONDITION", False),
    "SAMPLE_FAILED": ("SampleFailed", "FAILED_PRECONDITION", False),
    "SERVER_DRAINING": ("ServerDraining", "UNAVAILABLE", True),
    "SERVER_UNAVAILABLE": ("ServerUnavailable", "UNAVAILABLE", True),
    "SLOT_MISMATCH": ("SlotMismatch", "DATA_LOSS", False),
    "STAGING_FULL": ("StagingFull", "RESOURCE_EXHAUSTED", True),
    "STILL_ARRIVING": ("StillArriving", "FAILED_PRECONDITION", True),
    "STORE_FULL": ("StoreFull", "RESOURCE_EXHAUSTED", True),
    "STORE_GONE": ("StoreGone", "UNAVAILABLE", True),
    "TOO_LARGE": ("TooLarge", "INVALID_ARGUMENT", False),
    "TOO_MANY": ("TooMany", "RESOURCE_EXHAUSTED", True),
    "TOO_SLOW": ("TooSlow", "DEADLINE_EXCEEDED", True),
    "UNAUTHENTICATED": ("Unauthenticated", "UNAUTHENTICATED", False),
    "UNSUPPORTED_FORMAT": ("UnsupportedFormat", "UNIMPLEMENTED", False),
    "UNSUPPORTED_REQUEST": ("UnsupportedRequest", "UNIMPLEMENTED", False),
}

_CLASSES = [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, SlotStreamError)]


def test_the_codes_are_exactly_these() -> None:
    concrete = [c for c in _CLASSES if c is not SlotStreamError]
    assert sorted(c.code for c in concrete) == sorted(CODES), "every class has a code of its own, and the list is complete"
    assert {c.code: (c.__name__, c.status, c.retryable) for c in concrete} == CODES


@pytest.mark.parametrize("error", _CLASSES, ids=lambda error: error.__name__)
def test_each_code_travels(error: type[SlotStreamError]) -> None:
    assert error.code.isascii()
    assert error.code.replace("_", "").isupper()
    assert len(error.code) <= 64
    assert error.status in grpc.StatusCode.__members__
    assert error.status != "OK"
    returned = error_from_code(error.code, "the sentence")
    assert type(returned) is (InternalFault if error is SlotStreamError else error)
    assert str(returned) == "the sentence"


@pytest.mark.parametrize("code", ["", "OF_A_LATER_VERSION", "not found", "OK"])
def test_a_code_of_a_later_version_is_an_internal_fault(code: str) -> None:
    returned = error_from_code(code, "the sentence")
    assert type(returned) is InternalFault
    assert str(returned) == "the sentence"


def test_a_failed_sample_carries_the_reason() -> None:
    assert SampleFailed("it failed", "SLOT_MISMATCH").reason == "SLOT_MISMATCH"
    returned = error_from_code("SAMPLE_FAILED", "it failed")
    assert isinstance(returned, SampleFailed)
    assert returned.reason == ""


def test_an_operators_mistake_is_no_slotstream_error() -> None:
    assert issubclass(ConfigError, ValueError)
    assert not issubclass(ConfigError, SlotStreamError)


def test_every_class_is_exported() -> None:
    assert {c.__name__ for c in _CLASSES} | {"ConfigError", "VerdictUnknown", "error_from_code"} == set(errors.__all__)
