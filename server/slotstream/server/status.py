"""How an expected failure travels over gRPC: status code, sentence, and the stable code in the trailing metadata."""

from __future__ import annotations

from typing import Any, NoReturn

import grpc
import grpc.aio

from slotstream.wire.errors import CODE_KEY, REASON_KEY, SampleFailed, SlotStreamError


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: SlotStreamError) -> NoReturn:
    """End the call with `error`."""
    trailing = [(CODE_KEY, error.code)]
    if isinstance(error, SampleFailed) and error.reason:
        trailing.append((REASON_KEY, error.reason))
    await context.abort(grpc.StatusCode[error.status], str(error), tuple(trailing))
