"""Per-request parameters: `kv_transfer_params={"slotstream": {...}}` of a completion, checked."""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from slotstream.connector.planning.loss_mask import LossMask, parse_loss_mask
from slotstream.wire.errors import BadParams, BadTokenRange, SlotStreamError, UnsupportedRequest
from slotstream.wire.names import (
    READABLE_CHARS_MAX,
    SAMPLE_ID_CHARS_MAX,
    check_namespace,
    check_sample_id,
    check_tags,
    readable_id,
)

if TYPE_CHECKING:
    from vllm.v1.request import Request

_KNOWN = ("capture", "include_output_tokens", "loss_mask", "namespace", "sample_id", "tags", "tokens")
_CHILD = re.compile(r"([0-9]{1,9})_(.*)", re.DOTALL)
_RANDOM_END = re.compile(
    r"-[0-9a-f]{8}\Z"
)  # vLLM's own, of every request, unless VLLM_DISABLE_REQUEST_ID_RANDOMIZATION is set.


@dataclass(frozen=True, slots=True)
class CaptureParams:
    """What one request asked for. `tokens` is [start, stop) in token positions; stop None means to the end."""

    sample_id: str
    namespace: str
    capture: bool
    include_output_tokens: bool
    tokens: tuple[int, int | None]
    tags: Mapping[str, str] = field(default_factory=dict)
    loss_mask: LossMask | None = None


def parse_params(
    kv_transfer_params: Mapping[str, Any] | None,
    *,
    req_id: str,
    sequence: int | None = 0,
    namespace: str,
    capture: bool,
    include_output_tokens: bool,
) -> CaptureParams:
    """Read a request's parameters; `namespace`, `capture` and `include_output_tokens` are the engine's defaults.

    `sequence`: see `sequence_index`. Keys beside `slotstream` belong to other connectors and are ignored, except vLLM's own
    `include_output_tokens`.
    Raises BadParams, BadSampleId, BadNamespace, BadTags, BadTokenRange or UnsupportedRequest, in one sentence.
    """
    if not kv_transfer_params:
        return CaptureParams(default_sample_id(req_id), namespace, capture, include_output_tokens, (0, None))
    outer = kv_transfer_params
    inner = outer.get("slotstream")
    if inner is None:
        inner = {}
    if not isinstance(inner, Mapping):
        raise BadParams(f"kv_transfer_params['slotstream'] must be an object, not a {type(inner).__name__}")
    unknown = sorted(str(key)[:40] for key in inner if key not in _KNOWN)
    if unknown:
        raise BadParams(f"unknown slotstream params {unknown[:8]}; known: {list(_KNOWN)}")
    outputs = inner.get("include_output_tokens", outer.get("include_output_tokens", include_output_tokens))
    return CaptureParams(
        sample_id=_chosen_id(inner["sample_id"], sequence, outputs) if "sample_id" in inner else default_sample_id(req_id),
        namespace=check_namespace(inner.get("namespace", namespace)),
        capture=_flag("capture", inner.get("capture", capture)),
        include_output_tokens=_flag("include_output_tokens", outputs),
        tokens=_window(inner.get("tokens")),
        tags=check_tags(inner.get("tags", {})),
        loss_mask=parse_loss_mask(inner.get("loss_mask")),
    )


def names_of(
    kv_transfer_params: Mapping[str, Any] | None,
    *,
    req_id: str,
    sequence: int | None,
    namespace: str,
    include_output_tokens: bool,
) -> tuple[str, str, Mapping[str, str]]:
    """The namespace, sample id and tags that a refused request asked for, each where it can be one, else the default.

    As in `parse_params`. Raises nothing.
    """
    outer = kv_transfer_params if isinstance(kv_transfer_params, Mapping) else {}
    inner = outer.get("slotstream")
    if not isinstance(inner, Mapping):
        inner = {}
    sample_id = default_sample_id(req_id)
    with contextlib.suppress(SlotStreamError):
        if "sample_id" in inner:
            outputs = inner.get("include_output_tokens", outer.get("include_output_tokens", include_output_tokens))
            sample_id = _chosen_id(inner["sample_id"], sequence or 0, outputs)
    with contextlib.suppress(SlotStreamError):
        namespace = check_namespace(inner.get("namespace", namespace))
    tags: Mapping[str, str] = {}
    with contextlib.suppress(SlotStreamError):
        tags = check_tags(inner.get("tags", {}))
    return namespace, sample_id, tags


def sequence_of(request: Request) -> int | None:
    """`sequence_index` of one of vLLM's requests."""
    return sequence_index(request.request_id, getattr(request, "external_req_id", None))


def sequence_index(req_id: str, caller_id: str | None) -> int | None:
    """Which of its caller's `n` sequences a request is, 0 where there is one; None where that cannot be told.

    `req_id` is vLLM's: the caller's own id, with a random end unless that was switched off, and for each of several sequences
    "<index>_" before it. `caller_id` is None where vLLM does not say it. Then "7_x" may be a sequence, or somebody's own id.
    """
    child = _CHILD.fullmatch(req_id)
    if child is None or req_id == caller_id:
        return 0
    if caller_id is None:
        return None
    index, parent = child.groups()
    return int(index) if caller_id in (parent, _RANDOM_END.sub("", parent)) else 0


def _chosen_id(chosen: object, sequence: int | None, outputs: object) -> str:
    """The id that was asked for. Sequences that differ in their output rows need one each: all but the first add theirs."""
    sample_id = check_sample_id(chosen)
    if outputs is not True:
        return sample_id
    if sequence is None:
        raise UnsupportedRequest(
            "this vLLM does not say whether the request is one of several sequences, which need a sample_id each: leave it out"
        )
    return check_sample_id(f"{sample_id}.{sequence}") if sequence else sample_id


def default_sample_id(req_id: str) -> str:
    """A sample id made of vLLM's request id: the same where it is one, else a readable id that stays unique."""
    cleaned = readable_id(req_id)
    if req_id and cleaned == req_id and len(req_id) <= SAMPLE_ID_CHARS_MAX:
        return req_id
    digest = hashlib.sha256(req_id.encode(errors="replace")).hexdigest()[:16]
    return f"{cleaned[:READABLE_CHARS_MAX] or 'request'}-{digest}"


def _flag(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise BadParams(f"{name} must be true or false, not {str(value)[:40]!r}")
    return value


def _window(value: object) -> tuple[int, int | None]:
    if value is None:
        return 0, None
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise BadTokenRange("tokens must be [start, stop], two token positions")
    start, stop = value
    if not _position(start) or not (stop is None or _position(stop)):
        raise BadTokenRange("tokens must be [start, stop] with whole numbers from 0 up; stop may be null")
    if stop is not None and start >= stop:
        raise BadTokenRange(f"tokens [{start}, {stop}] hold no row: start must be below stop")
    return start, stop


def _position(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 40
