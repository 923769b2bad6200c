"""Streaming input sessions: requests whose prompt grows while they run (vLLM's `StreamingInput`, 0.32 and 0.33).

vLLM makes one request of all the chunks, with the id and the `kv_transfer_params` of the first. None of it is captured.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.v1.request import Request

_REMEMBERED = 4096


class Sessions:
    """Which requests are sessions, or what is left of one.

    The front end ends a session with a request of its id and one token, which is no session to look at. Where the session
    is gone by then (all requests were aborted), vLLM runs that one as a request of its own: it must not get the sample's name.
    """

    def __init__(self) -> None:
        self._ids: OrderedDict[str, None] = OrderedDict()

    def has(self, request: Request) -> bool:
        """Whether a request is a session, or has the id of one of the last few thousand."""
        if getattr(request, "resumable", False):
            self._ids[request.request_id] = None
            if len(self._ids) > _REMEMBERED:
                self._ids.popitem(last=False)
        return request.request_id in self._ids


def asked_of(request: Request) -> Mapping[str, Any] | None:
    """The `kv_transfer_params` of a request; of a session, those of its newest chunk, which may be the first to ask."""
    if getattr(request, "resumable", False) and request.sampling_params is not None:
        newest: Any = (request.sampling_params.extra_args or {}).get("kv_transfer_params")
        return newest if isinstance(newest, Mapping) else request.kv_transfer_params
    asked: Mapping[str, Any] | None = request.kv_transfer_params
    return asked
