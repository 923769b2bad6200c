"""The one file format: plain safetensors, `hidden_states` [tokens, layers, hidden], `token_ids` int64 [tokens], further ones.

Rows are written in place before their number is final, so the header is reserved in full at the front of the file and
padded with spaces, which the format allows. Format facts: https://github.com/huggingface/safetensors (README, "Format"):
8 bytes little-endian header length, JSON header, then the tensors' bytes without gaps.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from slotstream.wire.columns import COLUMNS, HIDDEN_STATES, LAYERS, TOKEN_IDS, Column, Place, RowFormat, further_columns
from slotstream.wire.dtypes import ELEMENT_BYTES, SAFETENSORS_BYTES
from slotstream.wire.errors import BadParams, Damaged, UnsupportedFormat
from slotstream.wire.hashing import HASH_HEX_CHARS, Buffer, to_hex, xxh3

FILE_SUFFIX = ".safetensors"
HEADER_ALIGN = 4096  # Rows begin on a page.
HEADER_BYTES_MAX = 4 << 20
TOKEN_ID_BYTES = 8
COLUMNS_KEY = "columns"  # In the metadata of a file with further columns: a JSON object, column -> xxh3-64 of its bytes.
_METADATA = "__metadata__"
_COUNT_END, _SIZE_END = 1 << 40, 1 << 63
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

    row_format: RowFormat
    num_tokens: int
    metadata: dict[str, str]
    header_bytes: int

    @property
    def row_bytes(self) -> int:
        """Of hidden states."""
        return self.row_format.row_bytes

    @property
    def rows_end(self) -> int:
        """Where hidden states end."""
        return self.header_bytes + self.num_tokens * self.row_bytes

    def place_of(self, name: str) -> Place:
        """Where a column of the file lies, from the start of the file."""
        place = next(p for p in self.row_format.file_layout(self.num_tokens) if p.column.name == name)
        return Place(place.column, self.header_bytes + place.begin, self.header_bytes + place.end)

    @property
    def file_bytes(self) -> int:
        return self.header_bytes + self.row_format.data_bytes(self.num_tokens)


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
    return _compact_json({_METADATA: header.metadata, **_tensors(header.row_format, header.num_tokens)}).encode()


def _tensors(row_format: RowFormat, num_tokens: int) -> dict[str, dict[str, object]]:
    """What a header says of its tensors."""
    return {
        place.column.name: {
            "dtype": place.column.dtype,
            "shape": place.column.shape(num_tokens),
            "data_offsets": [place.begin, place.end],
        }
        for place in row_format.file_layout(num_tokens)
    }


def header_length(first_bytes: bytes) -> int:
    """Whole header's bytes, from the first 8 of a file. Raises Damaged."""
    if len(first_bytes) < _LENGTH.size:
        raise Damaged("the file is too short to be a safetensors file")
    length = _LENGTH.size + int(_LENGTH.unpack(first_bytes[: _LENGTH.size])[0])
    if length > HEADER_BYTES_MAX:
        raise Damaged(f"the file's header claims {length} bytes, more than the {HEADER_BYTES_MAX} allowed")
    return length


def decode_header(raw: bytes) -> SampleHeader:
    """The header of a sample file, from its first `header_length` bytes.

    Raises Damaged for anything that is not ours, and UnsupportedFormat for what a later version may have written.
    """
    return parse_header(raw).known()


@dataclass(frozen=True, slots=True)
class Tensor:
    """What a header says of one tensor; `begin` and `end` behind the header."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class FileHeader:
    """The header of a safetensors file that has hidden states, and maybe more."""

    tensors: Mapping[str, Tensor]
    metadata: dict[str, str]
    header_bytes: int

    @property
    def hidden_states(self) -> Tensor:
        """Of shape [tokens, layers, hidden]."""
        return self.tensors[HIDDEN_STATES]

    @property
    def file_bytes(self) -> int:
        return self.header_bytes + max(tensor.end for tensor in self.tensors.values())

    def known(self) -> SampleHeader:
        """The same of a format that this version knows. Raises UnsupportedFormat."""
        hidden = self.hidden_states
        tokens, num_layers, hidden_size = hidden.shape
        if unknown := sorted(self.tensors.keys() - COLUMNS.keys()):
            raise UnsupportedFormat(f"the file has column {unknown[0][:64]!r}; this version knows {sorted(further_columns())}")
        if hidden.dtype not in ELEMENT_BYTES:
            raise UnsupportedFormat(f"the file's rows are {hidden.dtype[:64]!r}, which this version does not know")
        further = [name for name in self.tensors if name not in (HIDDEN_STATES, TOKEN_IDS)]
        row_format = RowFormat.of(hidden.dtype, num_layers, hidden_size, further)
        expected = {
            place.column.name: Tensor(place.column.dtype, tuple(place.column.shape(tokens)), place.begin, place.end)
            for place in row_format.file_layout(tokens)
        }
        if self.tensors != expected:
            raise UnsupportedFormat("the file's columns have other elements, shapes or an order than this version knows")
        return SampleHeader(row_format, tokens, self.metadata, self.header_bytes)


def parse_header(raw: bytes) -> FileHeader:
    """The header of a file, from its first `header_length` bytes. Raises Damaged unless it is one of plain safetensors whose
    tensors lie without gaps, with hidden states first.
    """
    if header_length(raw) != len(raw):
        raise Damaged("the file's header is cut short, or its length is wrong")
    try:
        parsed = _STRICT_JSON.decode(_without_padding(raw[_LENGTH.size :]).decode())
        metadata = _strings(parsed.pop(_METADATA))
        tensors = {name: _tensor(entry) for name, entry in parsed.items()}
        hidden = tensors[HIDDEN_STATES]
        _, _, _ = map(_count, hidden.shape)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise Damaged("the file's header is not that of a sample") from error
    end = 0
    for tensor in sorted(tensors.values(), key=lambda tensor: (tensor.begin, tensor.end)):
        if tensor.begin != end:
            raise Damaged("the file's header describes tensors that overlap, or with gaps between them")
        end = tensor.end
    if hidden.begin or len(tensors) == 1:
        raise Damaged("the file's header does not describe hidden_states followed by token_ids")
    return FileHeader(tensors, metadata, len(raw))


def committed_header(raw: bytes) -> SampleHeader | None:
    """The header of a file that has, by its hash, the header that was committed: what only damage changes is not looked at
    again. None where `parse_header` has to say what it is.
    """
    try:
        parsed = json.loads(raw[_LENGTH.size : raw.rindex(b"}") + 1])
        metadata = _strings(parsed.pop(_METADATA))
        num_tokens, num_layers, hidden_size = parsed[HIDDEN_STATES]["shape"]
        further = [name for name in parsed if name not in (HIDDEN_STATES, TOKEN_IDS)]
        row_format = RowFormat.of(parsed[HIDDEN_STATES]["dtype"], num_layers, hidden_size, further)
        is_known = parsed == _tensors(row_format, num_tokens)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError, BadParams, UnsupportedFormat):
        return None
    return SampleHeader(row_format, num_tokens, metadata, len(raw)) if is_known else None


def _without_padding(text: bytes) -> bytes:
    """Without the spaces at its end, of which there are thousands: `json` and `rstrip` look at them one by one."""
    end = text.rfind(b"}") + 1
    return text[:end] if text[end:] == b" " * (len(text) - end) else text


def _tensor(entry: object) -> Tensor:
    """Raises ValueError unless this describes a tensor, whose bytes are as many as its elements take."""
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise ValueError("this does not describe a tensor")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    sizes = [*shape, *offsets] if isinstance(shape, list) and isinstance(offsets, list) and len(offsets) == 2 else [-1]
    # To Python 12 == 12.0 and 0 == False, to other readers of the file they are not.
    if not isinstance(dtype, str) or not all(type(size) is int and 0 <= size < _SIZE_END for size in sizes):
        raise ValueError("this does not describe a tensor")
    begin, end = offsets
    if begin > end:
        raise ValueError("a tensor ends before it begins")
    wanted = math.prod(shape) * SAFETENSORS_BYTES[dtype] if dtype in SAFETENSORS_BYTES else end - begin
    if end - begin != wanted:
        raise ValueError("a tensor's bytes are not those of its elements")
    return Tensor(dtype, tuple(shape), begin, end)


def _without_repeats(pairs: list[tuple[str, object]]) -> dict[str, object]:
    entries = dict(pairs)
    if len(entries) != len(pairs):
        raise ValueError("a key is there twice")
    return entries


_STRICT_JSON = json.JSONDecoder(object_pairs_hook=_without_repeats)


def _count(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < _COUNT_END:
        raise ValueError(f"{value!r} is not a size")
    return value


def _strings(value: object) -> dict[str, str]:
    if not isinstance(value, Mapping) or not {str}.issuperset(map(type, (*value, *value.values()))):
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


def column_rows(column: Column, raw: Buffer, start: int, stop: int, positions: Sequence[int] | None) -> memoryview:
    """Rows [start, stop) of a column whose bytes are `raw`; of the layers at `positions` (None: all) where it has some."""
    rows = memoryview(raw)[start * column.row_bytes : stop * column.row_bytes]
    if positions is None or COLUMNS[column.name].row_shape[:1] != (LAYERS,):
        return rows
    runs = byte_runs(positions, column.row_bytes // column.shape(0)[1])
    return memoryview(b"".join(pick(rows, column.row_bytes, runs)))


def groups_of(start: int, stop: int, hash_rows: int) -> range:
    """The groups that rows [start, stop) lie in."""
    return range(start // hash_rows, -(-stop // hash_rows) if stop > start else 0)


def encode_columns(hashes: Mapping[str, str]) -> str:
    """What a file's `columns` entry says of its further columns: column -> hash."""
    return _compact_json(dict(hashes))


def decode_columns(text: str, row_format: RowFormat) -> dict[str, str]:
    """Column -> hash, in the file's order. Raises Damaged unless these are the file's further columns."""
    try:
        hashes = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Damaged("the file's list of columns is malformed") from error
    if not isinstance(hashes, dict) or list(hashes) != row_format.names or not all(map(_is_hash, hashes.values())):
        raise Damaged("the file's list of columns is not that of its columns")
    return hashes


def _is_hash(value: object) -> bool:
    return isinstance(value, str) and len(value) == HASH_HEX_CHARS


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
