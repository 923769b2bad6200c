"""The one file format: plain safetensors, `hidden_states` [tokens, layers, hidden] then `token_ids` int64 [tokens].

Rows are written in place before their number is final, so the header is reserved in full at the front of the file and
padded with spaces, which the format allows. Format facts: https://github.com/huggingface/safetensors (README, "Format"):
8 bytes little-endian header length, JSON header, then the tensors' bytes without gaps.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from slotstream.wire.dtypes import ELEMENT_BYTES
from slotstream.wire.errors import Damaged
from slotstream.wire.hashing import HASH_HEX_CHARS, to_hex, xxh3

FILE_SUFFIX = ".safetensors"
HEADER_ALIGN = 4096  # Rows begin on a page.
HEADER_BYTES_MAX = 4 << 20
TOKEN_ID_BYTES = 8
_LENGTH = struct.Struct("<Q")
_compact_json = json.JSONEncoder(separators=(",", ":")).encode


def shard_of(sample_id: str) -> str:
    """Two hex characters that spread a namespace's files over 256 directories."""
    return to_hex(xxh3(sample_id.encode()))[:2]


def file_path(namespace: str, sample_id: str) -> str:
    """Where a committed sample's file is, below the data directory: part of the public contract."""
    return f"{namespace}/{shard_of(sample_id)}/{sample_id}{FILE_SUFFIX}"


@dataclass(frozen=True, slots=True)
class SampleHeader:
    """What a sample file's header says. Offsets and sizes in bytes, from the start of the file."""

    dtype: str
    num_tokens: int
    num_layers: int
    hidden_size: int
    metadata: dict[str, str]
    header_bytes: int

    @property
    def row_bytes(self) -> int:
        return ELEMENT_BYTES[self.dtype] * self.num_layers * self.hidden_size

    @property
    def token_ids_at(self) -> int:
        return self.header_bytes + self.num_tokens * self.row_bytes

    @property
    def file_bytes(self) -> int:
        return self.token_ids_at + self.num_tokens * TOKEN_ID_BYTES


def encode_header(header: SampleHeader) -> bytes:
    """The first `header.header_bytes` bytes of the file. Raises ValueError when they do not hold the header."""
    body = _body(header)
    room = header.header_bytes - _LENGTH.size
    if len(body) > room:
        raise ValueError(f"a header of {len(body)} bytes does not fit the {room} reserved for it")
    return _LENGTH.pack(room) + body.ljust(room)


def header_bytes_for(header: SampleHeader, spare_bytes: int = 0) -> int:
    """Bytes to reserve for `header` (its own `header_bytes` ignored) plus `spare_bytes`, rounded up to whole pages."""
    need = _LENGTH.size + len(_body(header)) + spare_bytes
    return -(-need // HEADER_ALIGN) * HEADER_ALIGN


def _body(header: SampleHeader) -> bytes:
    rows = header.num_tokens * header.row_bytes
    shape = [header.num_tokens, header.num_layers, header.hidden_size]
    return _compact_json(
        {
            "__metadata__": header.metadata,
            "hidden_states": {"dtype": header.dtype, "shape": shape, "data_offsets": [0, rows]},
            "token_ids": {
                "dtype": "I64",
                "shape": [header.num_tokens],
                "data_offsets": [rows, rows + header.num_tokens * TOKEN_ID_BYTES],
            },
        }
    ).encode()


def header_length(first_bytes: bytes) -> int:
    """Whole header's bytes, from the first 8 of a file. Raises Damaged."""
    if len(first_bytes) < _LENGTH.size:
        raise Damaged("the file is too short to be a safetensors file")
    length = _LENGTH.size + int(_LENGTH.unpack(first_bytes[: _LENGTH.size])[0])
    if length > HEADER_BYTES_MAX:
        raise Damaged(f"the file's header claims {length} bytes, more than the {HEADER_BYTES_MAX} allowed")
    return length


def decode_header(raw: bytes) -> SampleHeader:
    """The header of a sample file, from its first `header_length` bytes. Raises Damaged for anything that is not ours."""
    if header_length(raw) != len(raw):
        raise Damaged("the file's header is cut short, or its length is wrong")
    try:
        parsed = json.loads(raw[_LENGTH.size :].decode(), object_pairs_hook=_without_repeats)
        tensor = parsed["hidden_states"]
        tokens, layers, hidden = (_count(n) for n in tensor["shape"])
        header = SampleHeader(
            dtype=tensor["dtype"],
            num_tokens=tokens,
            num_layers=layers,
            hidden_size=hidden,
            metadata=_strings(parsed["__metadata__"]),
            header_bytes=len(raw),
        )
        # Compared as text: to Python 12 == 12.0 and 0 == False, to other readers of the file they are not.
        found, canonical = (json.dumps(body, sort_keys=True) for body in (parsed, json.loads(_body(header))))
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise Damaged("the file's header is not that of a sample") from error
    if found != canonical:
        raise Damaged("the file's header does not describe hidden_states followed by token_ids")
    return header


def _without_repeats(pairs: list[tuple[str, object]]) -> dict[str, object]:
    entries = dict(pairs)
    if len(entries) != len(pairs):
        raise ValueError("a key is there twice")
    return entries


def _count(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 1 << 40:
        raise ValueError(f"{value!r} is not a size")
    return value


def _strings(value: object) -> dict[str, str]:
    if not isinstance(value, Mapping) or not all(isinstance(k, str) and isinstance(v, str) for k, v in value.items()):
        raise ValueError("metadata must map strings to strings")
    "".join((*value.keys(), *value.values())).encode()  # A lone surrogate, which JSON can spell, is no text.
    return dict(value)


def byte_runs(positions: Sequence[int], layer_bytes: int) -> list[tuple[int, int]]:
    """Bytes [begin, end) of a row that hold the layers at `positions`, in their order; neighbours in the row are one run."""
    runs: list[tuple[int, int]] = []
    for position in positions:
        begin = position * layer_bytes
        if runs and begin == runs[-1][1]:
            runs[-1] = (runs[-1][0], begin + layer_bytes)
        else:
            runs.append((begin, begin + layer_bytes))
    return runs


def pick(rows: memoryview, row_bytes: int, runs: Sequence[tuple[int, int]]) -> list[memoryview]:
    """The runs of each of the whole `rows`, row by row."""
    return [rows[at:][begin:end] for at in range(0, rows.nbytes, row_bytes) for begin, end in runs]


def groups_of(start: int, stop: int, hash_rows: int) -> range:
    """The groups that rows [start, stop) lie in."""
    return range(start // hash_rows, -(-stop // hash_rows) if stop > start else 0)


def group_count(num_rows: int, hash_rows: int) -> int:
    """Groups of `hash_rows` rows, each with one hash; the last may be shorter."""
    return -(-num_rows // hash_rows)


def encode_hashes(hashes: list[int]) -> str:
    return "".join(map(to_hex, hashes))


def decode_hashes(text: str, num_rows: int, hash_rows: int) -> list[int]:
    """The hashes of a file's `hashes` entry. Raises Damaged when they are not one per group."""
    if hash_rows < 1 or len(text) != group_count(num_rows, hash_rows) * HASH_HEX_CHARS:
        raise Damaged("the file's list of row hashes does not fit its rows")
    try:
        return [int(text[at : at + HASH_HEX_CHARS], 16) for at in range(0, len(text), HASH_HEX_CHARS)]
    except ValueError as error:
        raise Damaged("the file's list of row hashes is malformed") from error
