"""The body of a form, as browsers send it."""

from __future__ import annotations

import asyncio
from urllib.parse import parse_qsl

from starlette.requests import ClientDisconnect, Request

_BODY_BYTES_MAX = 8 << 10
_BODY_S = 10.0


async def form_of(request: Request) -> dict[str, str] | None:
    """Its fields; None where it is no form, too long, or too slow."""
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/x-www-form-urlencoded":
        return None
    body = b""
    try:
        async with asyncio.timeout(_BODY_S):
            async for piece in request.stream():
                body += piece
                if len(body) > _BODY_BYTES_MAX:
                    return None
    except (TimeoutError, ClientDisconnect):
        return None
    try:
        return dict(parse_qsl(body.decode("ascii"), keep_blank_values=True, max_num_fields=16))
    except ValueError:
        return None
