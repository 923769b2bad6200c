"""The seam `Request.from_engine_core_request`: what the table in `vllm_seams` says of it."""

from __future__ import annotations

import functools
import inspect
from typing import Any

from slotstream.connector.reading.vllm_checks import find, missing
from slotstream.transport.logs import connector_logger
from slotstream.wire.errors import ConfigError

logger = connector_logger(__name__)


def keep_caller_ids() -> None:
    """Have each request of this process keep `external_req_id`, its caller's own id, which vLLM drops. May be called twice.

    Only with both ids can a request be told for one of `n` sequences. Without the seam the engine starts all the same.
    """
    try:
        requests = check_requests()
    except ConfigError as error:
        logger.warning(
            "slotstream: %s; requests with output rows whose own ids begin like `1_` cannot choose a sample_id", error
        )
        return
    inner = requests.from_engine_core_request
    if getattr(inner, "slotstream", False):
        return

    @functools.wraps(inner)
    def from_engine_core_request(cls: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        made = inner.__func__(cls, request, *args, **kwargs)
        if getattr(made, "external_req_id", None) is None:
            made.external_req_id = getattr(request, "external_req_id", None)
        return made

    from_engine_core_request.slotstream = True  # type: ignore[attr-defined]
    requests.from_engine_core_request = classmethod(from_engine_core_request)


def check_requests() -> Any:
    """vLLM's Request, once it is as we know it. Raises ConfigError."""
    requests = find("vllm.v1.request", "Request", extraction=False)
    sent = find("vllm.v1.engine", "EngineCoreRequest", extraction=False)
    make = inspect.getattr_static(requests, "from_engine_core_request", None)
    if not isinstance(make, classmethod) or list(inspect.signature(make.__func__).parameters)[1:2] != ["request"]:
        raise missing("Request.from_engine_core_request(request, ...)", extraction=False)
    if "external_req_id" not in getattr(sent, "__struct_fields__", ()) or not hasattr(requests, "__dict__"):
        raise missing("EngineCoreRequest.external_req_id", extraction=False)
    return requests
