"""A record as the columns of its row, and back; and the checksum that a row has over them. The same in every database.

The checksum is xxh3-64 of the values as JSON, without its last bit (databases' integers are signed).
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence

from slotstream.store.records import SampleKey, SampleRecord, State, compact_json
from slotstream.wire.errors import BadNamespace, BadSampleId
from slotstream.wire.hashing import xxh3

COLUMNS = (
    "namespace, sample_id, state, model, dtype, layer_ids, hidden_size, num_tokens, file_bytes, created_unix_ns, "
    "committed_unix_ns, error_code, error_message, tags, metadata, header_xxh3"
)
SUMMED = f"{COLUMNS}, reads, acked_unix_ns"
STORED = f"{SUMMED}, row_xxh3"
LEASE = "namespace, sample_id, holder, until_unix_ns"
_encode = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False).encode


def row_sum(values: Sequence[object]) -> int:
    """The checksum of a row. Raises TypeError and ValueError for values that no row of ours has."""
    return xxh3(_encode(values).encode()) >> 1


def values_of(record: SampleRecord) -> tuple[object, ...]:
    """The values of `COLUMNS`."""
    return (
        record.namespace,
        record.sample_id,
        str(record.state),
        record.model,
        record.dtype,
        compact_json(list(record.layer_ids)),
        record.hidden_size,
        record.num_tokens,
        record.file_bytes,
        record.created_unix_ns,
        record.committed_unix_ns,
        record.error_code,
        record.error_message,
        compact_json(dict(record.tags)),
        compact_json(dict(record.metadata)),
        record.header_xxh3,
    )


def record_of(values: Sequence[object]) -> SampleRecord:
    """The record of a row that begins with the values of `COLUMNS`. Raises ValueError when it cannot be one of ours."""
    try:
        # Paths are made of it: an edited row must not lead out of the directory.
        key = SampleKey.checked(values[0], values[1])  # type: ignore[arg-type]  # It checks.
        return SampleRecord(
            namespace=key.namespace,
            sample_id=key.sample_id,
            state=State(str(values[2])),
            model=str(values[3]),
            dtype=str(values[4]),
            layer_ids=_layer_ids(values[5]),
            hidden_size=_number(values[6], 32),
            num_tokens=_number(values[7], 63),
            file_bytes=_number(values[8], 63),
            created_unix_ns=_number(values[9], 63),
            committed_unix_ns=_number(values[10], 63),
            error_code=str(values[11]),
            error_message=str(values[12]),
            tags=_strings(values[13]),
            metadata=_strings(values[14]),
            header_xxh3=str(values[15]),
        )
    except (ValueError, TypeError, RecursionError, BadNamespace, BadSampleId) as error:
        raise ValueError("a row of the catalogue is malformed") from error


@functools.lru_cache(maxsize=256)  # Most samples of a store have the same.
def _layer_ids(text: str) -> tuple[int, ...]:
    return tuple(_number(layer, 32) for layer in json.loads(text))


def _number(value: object, bits: int) -> int:
    """What a message can carry. Raises ValueError."""
    if type(value) is not int or not 0 <= value < 1 << bits:
        raise ValueError(f"{value!r} is not a number of {bits} bits")
    return value


def _strings(text: object) -> dict[str, str]:
    """Raises ValueError, also for a lone surrogate, which JSON can spell and no message can carry; and TypeError."""
    if text == "{}":
        return {}
    value = json.loads(text)  # type: ignore[arg-type]
    if not isinstance(value, dict) or not {str}.issuperset(map(type, value.values())):
        raise ValueError("not an object of strings")
    "".join((*value, *value.values())).encode()
    return value
