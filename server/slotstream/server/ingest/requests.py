"""From what a peer asks on an ingest stream to what a sample writer does: messages measured and put into the store's terms."""

from __future__ import annotations

import re
import time

from slotstream.store.records import MODEL_BYTES_MAX, Failure, SampleKey, SampleRecord, SampleSpec, State
from slotstream.v1 import ingest_pb2 as pb
from slotstream.wire.columns import RowFormat
from slotstream.wire.errors import InternalFault, TooLarge, error_from_code
from slotstream.wire.layout import TOKEN_ID_BYTES
from slotstream.wire.names import LAYERS_MAX, METADATA_BYTES_MAX, ROWS_MAX

_CODE = re.compile(r"[A-Z][A-Z0-9_]{0,63}")
_MESSAGE_CHARS_MAX = 1024


def commit_bytes(commit: pb.CommitSample) -> int:
    """Bytes that the parsed message takes: eight times its own length where ids are small. Raises TooLarge, to drop it."""
    if len(commit.token_ids) > ROWS_MAX or len(commit.metadata) > METADATA_BYTES_MAX:
        raise TooLarge(f"a commit has more than {ROWS_MAX} token ids, or more metadata than {METADATA_BYTES_MAX} bytes")
    return TOKEN_ID_BYTES * len(commit.token_ids) + sum(len(column.data) for column in commit.columns)


def spec_of(request: pb.OpenSample) -> SampleSpec:
    """Raises the code of a field that is malformed, past its limit, or of a format that this server does not know."""
    layer_ids = tuple(request.layer_ids[: LAYERS_MAX + 1])
    return SampleSpec(
        namespace=request.namespace,
        sample_id=request.sample_id,
        model=request.model,
        layer_ids=layer_ids,
        row_format=RowFormat.of(request.dtype, len(layer_ids), request.hidden_size, request.columns),
        rows_max=request.rows_max,
        rows_exact=request.rows_exact,
        tags=dict(request.tags),
        metadata=dict(request.metadata),
    )


def refused_record(key: SampleKey | None, request: pb.OpenSample) -> SampleRecord | None:
    """What can safely be said about a sample that was refused: its name, and its model if that is no longer than allowed."""
    if key is None:
        return None
    model = request.model if len(request.model.encode()) <= MODEL_BYTES_MAX else ""
    return SampleRecord(key.namespace, key.sample_id, State.ARRIVING, time.time_ns(), model=model)


def peers_failure(request: pb.AbortSample) -> Failure:
    code = request.code if _CODE.fullmatch(request.code) else "ABORTED"
    message = request.message[:_MESSAGE_CHARS_MAX] or "the sender gave the sample up"
    known = error_from_code(code, message)
    return Failure(code, message, known.retryable and not isinstance(known, InternalFault))
