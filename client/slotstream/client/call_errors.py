"""What a failed call means here, and whether another server may be asked instead."""

from __future__ import annotations

from collections.abc import Sequence

import grpc

from slotstream.client.diagnosis import diagnose
from slotstream.wire.access import Access
from slotstream.wire.errors import (
    CODE_KEY,
    REASON_KEY,
    BadParams,
    DeadlineExceeded,
    InternalFault,
    Interrupted,
    ProtocolViolation,
    SampleFailed,
    ServerDraining,
    ServerUnavailable,
    SlotStreamError,
    TooLarge,
    error_from_code,
)

# What ends a read that another server may go on with: the server is away, or about to be.
AWAY = (ServerUnavailable, ServerDraining, Interrupted)
_AWAY_CODES = (ServerUnavailable.code, ServerDraining.code)
# CANCELLED: by the server, which ends what is under way when it stops.
_AWAY_STATUSES = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)


class NotServed(ProtocolViolation):
    """The server does not know the call: it is of an earlier version, or no slotstream server at all."""


class NoServerLeft(ServerUnavailable):
    """Each of several servers was asked, and none answers."""


def is_away(error: grpc.RpcError) -> bool:
    """Whether the server that was called is not there, or shuts down: another one may answer."""
    if not isinstance(error, grpc.Call):
        return False
    code = _trailers(error).get(CODE_KEY)
    return code in _AWAY_CODES if code else error.code() in _AWAY_STATUSES


def is_silent(error: grpc.RpcError) -> bool:
    """Whether the call's deadline passed without a word: the next call had better go elsewhere."""
    late = grpc.StatusCode.DEADLINE_EXCEEDED
    return isinstance(error, grpc.Call) and error.code() is late and CODE_KEY not in _trailers(error)


def no_answer(failed: Sequence[tuple[str, grpc.RpcError]], access: Access) -> SlotStreamError:
    """What to raise where none of these servers answered: of one its own error, of several one that names them all."""
    errors = [(address, error_of(error, address, access)) for address, error in failed]
    if len(errors) == 1:
        return errors[0][1]
    said = "; ".join(str(error) if address in str(error) else f"{address}: {error}" for address, error in errors)
    return NoServerLeft(f"none of {len(errors)} servers answers: {said}")


def unavailable(address: str, access: Access, details: str) -> ServerUnavailable:
    """What to raise where there is no connection. `details` are told where a connection of our own finds no reason."""
    found = diagnose(address, access)
    if found is None:
        return ServerUnavailable(f"no server answers at {address}: {details}")
    if found.what == "unreachable":
        return ServerUnavailable(f"no server answers at {address}: {found.sentence}")
    return ServerUnavailable(f"{address}: {found.sentence}")


def error_of(error: grpc.RpcError, address: str, access: Access) -> SlotStreamError:
    """What a failed call means: the server's own code where it sent one, else what gRPC's status stands for."""
    if not isinstance(error, grpc.Call):
        return InternalFault(f"the call to {address} failed: {error}")
    details = error.details() or "no details"
    trailers = _trailers(error)
    if code := trailers.get(CODE_KEY):
        if code == SampleFailed.code:
            return SampleFailed(details, trailers.get(REASON_KEY, ""))
        return error_from_code(code, details)
    status = error.code()
    said = f"{address}: {details}"
    match status:
        case grpc.StatusCode.UNAVAILABLE:
            return unavailable(address, access, details)
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            return DeadlineExceeded(f"no answer in time from {said}")
        case grpc.StatusCode.CANCELLED:
            return Interrupted(f"the call was cancelled, to {said}")
        case grpc.StatusCode.UNIMPLEMENTED:
            return NotServed(f"no slotstream server of this version at {said}")
        case grpc.StatusCode.RESOURCE_EXHAUSTED:
            return TooLarge(f"a limit was passed, calling {said}")
        case grpc.StatusCode.INVALID_ARGUMENT:
            return BadParams(details)
        case _:
            return InternalFault(f"{status.name} from {said}")


def _trailers(error: grpc.Call) -> dict[str, str]:
    return {key: value for key, value in error.trailing_metadata() or () if isinstance(value, str)}
