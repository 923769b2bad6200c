"""A sample's file: what its header says, written and read back. A file describes and verifies itself by its header alone."""

from __future__ import annotations

import functools
import json
import sys
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from slotstream.store.disk.files import Files
from slotstream.store.disk.retrying import retried
from slotstream.store.records import STORE_KEYS, SampleKey, SampleRecord, SampleSpec, State, compact_json, connector_metadata
from slotstream.store.sample.row_hash import GroupHasher, hash_rows_for
from slotstream.wire.columns import TOKEN_IDS, LateColumns, RowFormat
from slotstream.wire.errors import BadNamespace, BadParams, BadSampleId, BadTags, Damaged, TooLarge, UnsupportedFormat
from slotstream.wire.hashing import HASH_HEX_CHARS, Buffer, to_hex, xxh3
from slotstream.wire.layout import (
    COLUMNS_KEY,
    HEADER_ALIGN,
    HEADER_BYTES_MAX,
    FileHeader,
    SampleHeader,
    committed_header,
    decode_columns,
    decode_hashes,
    encode_columns,
    encode_hashes,
    encode_header,
    group_count,
    header_bytes_for,
    header_length,
    parse_header,
)
from slotstream.wire.names import METADATA_BYTES_MAX, check_tags

_ZERO_HASH = "0" * HASH_HEX_CHARS
_LATEST_NS = (1 << 63) - 1
_UINT32_MAX = (1 << 32) - 1  # Layer ids and hidden sizes travel as uint32.
# Room for the metadata of the commit: its bytes are bounded, its JSON quotes and escapes are not known yet.
_METADATA_SPARE_BYTES = METADATA_BYTES_MAX + 2048


def pack_token_ids(token_ids: Sequence[int]) -> bytes:
    """int64, little-endian, as the file holds them. Raises BadParams for an id outside int64."""
    try:
        packed = array("q", token_ids)
    except (OverflowError, TypeError) as error:
        raise BadParams("token ids must be integers below 2**63") from error
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_token_ids(raw: Buffer) -> array[int]:
    ids: array[int] = array("q")
    ids.frombytes(raw)
    if sys.byteorder == "big":
        ids.byteswap()
    return ids


@dataclass(frozen=True, slots=True)
class Content:
    """What makes two samples the same: everything but names, times, tags and metadata."""

    row_format: RowFormat
    num_tokens: int
    layer_ids: tuple[int, ...]
    hash_rows: int
    hashes: tuple[int, ...]  # Of hidden states.
    column_xxh3: Mapping[str, str]  # Every other column -> hash of its bytes.


def column_hashes(late: Mapping[str, Buffer]) -> dict[str, str]:
    """Column -> hash of its bytes."""
    return {name: to_hex(xxh3(data)) for name, data in late.items()}


def pack_late(token_ids: Sequence[int], columns: LateColumns) -> dict[str, bytes]:
    """What comes with a commit, as the file holds it: column -> bytes. Raises BadParams for an id outside int64."""
    return {TOKEN_IDS: pack_token_ids(token_ids), **columns.values}


def rehash(content: Content, hash_rows: int, read_rows: Callable[[int, int], bytes]) -> Content:
    """`content` with its rows, which `read_rows(start, stop)` reads, hashed in groups of `hash_rows`."""
    if hash_rows == content.hash_rows:
        return content
    hashes = GroupHasher(content.row_format.row_bytes, hash_rows).finish(content.num_tokens, read_rows)
    return replace(content, hash_rows=hash_rows, hashes=tuple(hashes))


def _metadata(
    spec: SampleSpec,
    metadata: Mapping[str, str],
    times: tuple[int, int],
    hash_rows: int,
    hashes: str,
    column_xxh3: Mapping[str, str],
) -> dict[str, str]:
    return {
        **file_metadata(metadata, spec.row_format, column_xxh3),
        "format": "pt",
        "sample_id": spec.sample_id,
        "namespace": spec.namespace,
        "model": spec.model,
        "layer_ids": compact_json(list(spec.layer_ids)),
        "tags": compact_json(dict(spec.tags)),
        "created_unix_ns": str(times[0]),
        "committed_unix_ns": str(times[1]),
        "hash_rows": str(hash_rows),
        "hashes": hashes,
        "token_ids_xxh3": column_xxh3[TOKEN_IDS],
    }


def file_metadata(metadata: Mapping[str, str], row_format: RowFormat, column_xxh3: Mapping[str, str]) -> dict[str, str]:
    """What a file says that is not the store's own: the connector's metadata, and which further columns there are."""
    known = connector_metadata(metadata)
    if names := row_format.names:
        known[COLUMNS_KEY] = encode_columns({name: column_xxh3[name] for name in names})
    return known


def reserve_header(spec: SampleSpec) -> tuple[int, int]:
    """(header bytes to reserve in front of the rows, rows per hash group). Raises TooLarge.

    Enough for `rows_max` rows and for as much metadata as the commit may still add.
    """
    hash_rows = hash_rows_for(spec.row_bytes, spec.rows_max)
    longest = _metadata(
        spec,
        {},
        (_LATEST_NS, _LATEST_NS),
        hash_rows,
        _ZERO_HASH * group_count(spec.rows_max, hash_rows),
        {column.name: _ZERO_HASH for column in spec.row_format.columns},
    )
    draft = SampleHeader(spec.row_format, spec.rows_max, longest, 0)
    # Escapes in the metadata that is known already are exact; what the commit adds gets the spare.
    known = len(compact_json(connector_metadata(spec.metadata)))
    reserved = header_bytes_for(draft, max(known, _METADATA_SPARE_BYTES) + HEADER_ALIGN // 2)
    if reserved > HEADER_BYTES_MAX:
        raise TooLarge(f"the file's header would be {reserved} bytes, more than the {HEADER_BYTES_MAX} allowed")
    return reserved, hash_rows


def final_header(
    spec: SampleSpec,
    content: Content,
    metadata: Mapping[str, str],
    times: tuple[int, int],
    header_bytes: int,
) -> tuple[SampleHeader, bytes]:
    """The header of the finished sample and its bytes. `times`: created and committed, Unix ns. Raises TooLarge."""
    entries = _metadata(spec, metadata, times, content.hash_rows, encode_hashes(list(content.hashes)), content.column_xxh3)
    header = SampleHeader(content.row_format, content.num_tokens, entries, header_bytes)
    try:
        return header, encode_header(header)
    except ValueError as error:
        raise TooLarge("the metadata, written as JSON, does not fit the room reserved for it") from error


@dataclass(frozen=True)
class SampleFile:
    """A sample file's header, checked: it is a sample, its size is right and it describes every hash it needs."""

    header: SampleHeader
    key: SampleKey
    layer_ids: tuple[int, ...]
    hash_rows: int
    hashes: tuple[int, ...]
    column_xxh3: Mapping[str, str]  # Every column but hidden states -> hash of its bytes.
    header_xxh3: str

    @functools.cached_property
    def content(self) -> Content:
        header = self.header
        return Content(header.row_format, header.num_tokens, self.layer_ids, self.hash_rows, self.hashes, self.column_xxh3)

    def record(self) -> SampleRecord:
        """The catalogue row that this file stands for. Raises Damaged when its times or tags are malformed."""
        header, row_format = self.header, self.header.row_format
        shape = (header.num_tokens, row_format.num_layers, row_format.hidden_size)
        return _record(self.key, self.layer_ids, row_format.dtype, shape, header.metadata, header.file_bytes, self.header_xxh3)


def _record(
    key: SampleKey,
    layer_ids: tuple[int, ...],
    dtype: str,
    shape: tuple[int, ...],
    entries: Mapping[str, str],
    file_bytes: int,
    header_xxh3: str,
) -> SampleRecord:
    """Raises Damaged when the header's times or tags are malformed."""
    try:
        tags = json.loads(entries["tags"])
        created, committed = int(entries["created_unix_ns"]), int(entries["committed_unix_ns"])
    except (KeyError, ValueError, RecursionError) as error:
        raise Damaged("the file's header lacks its tags or its times") from error
    try:
        check_tags(tags)
    except BadTags as error:
        raise Damaged(f"the file's header holds tags that cannot be: {error}") from error
    if not (0 <= created <= _LATEST_NS and 0 <= committed <= _LATEST_NS):
        raise Damaged("the file's header holds a time that cannot be")
    return SampleRecord(
        namespace=key.namespace,
        sample_id=key.sample_id,
        state=State.COMMITTED,
        created_unix_ns=created,
        model=entries.get("model", ""),
        dtype=dtype,
        layer_ids=layer_ids,
        hidden_size=shape[2],
        num_tokens=shape[0],
        file_bytes=file_bytes,
        committed_unix_ns=committed,
        tags=tags,
        metadata={k: v for k, v in entries.items() if k not in STORE_KEYS},
        header_xxh3=header_xxh3,
    )


def read_sample_file(files: Files, fd: int, committed_xxh3: str = "") -> SampleFile:
    """The checked header of an open file. `committed_xxh3`: the hash of the header that was committed, where that is known.

    Raises OSError; Damaged, also for a wrong size; UnsupportedFormat where the file is what was committed, as far as can be
    seen, and has columns or elements that this version does not know.
    """
    size, raw = _raw_header(files, fd)
    header_xxh3 = to_hex(xxh3(raw))
    is_committed = committed_xxh3 == header_xxh3
    if is_committed and (file := _committed_file(raw, size, header_xxh3)) is not None:
        return file
    try:
        parsed = parse_header(raw)
    except Damaged as error:
        raise _later_format(error) if is_committed else error from None
    _check_size(parsed, size)
    try:
        key, layer_ids = _identity(parsed.metadata, *parsed.hidden_states.shape[1:])
        return _known_file(parsed.known(), key, layer_ids, header_xxh3)
    except Damaged as error:
        raise _later_format(error) if is_committed else error from None
    except UnsupportedFormat as error:
        if committed_xxh3 and not is_committed:
            raise Damaged(f"the file's header is not the one that was committed ({error})") from error
        raise


def _later_format(error: Damaged) -> UnsupportedFormat:
    """What is said of a header that cannot be read, and is the one that was committed."""
    return UnsupportedFormat(f"the file is what was committed, and this version cannot read it: {error}")


def _check_size(parsed: FileHeader, size: int) -> None:
    """Raises Damaged."""
    if size != parsed.file_bytes:
        raise Damaged(f"the file is {size} bytes long and not the {parsed.file_bytes} its header describes")


def unsupported_record_at(files: Files, path: Path) -> SampleRecord:
    """The catalogue row of a file whose format this version does not know: enough to list it and to delete it.

    Raises Damaged, FileNotFoundError and OSError.
    """
    fd = retried(lambda: files.open_read(path))
    try:
        size, raw = _raw_header(files, fd)
    finally:
        files.close(fd)
    parsed = parse_header(raw)
    _check_size(parsed, size)
    key, layer_ids = _identity(parsed.metadata, *parsed.hidden_states.shape[1:])
    hidden = parsed.hidden_states
    return _record(key, layer_ids, hidden.dtype, hidden.shape, parsed.metadata, size, to_hex(xxh3(raw)))


def _raw_header(files: Files, fd: int) -> tuple[int, bytes]:
    """The file's size, and its header's bytes. Raises Damaged and OSError."""
    size = files.size(fd)
    first = retried(lambda: files.pread(fd, 8, 0))
    length = header_length(first)
    raw = retried(lambda: files.pread(fd, length, 0))
    if len(raw) < length:
        raise Damaged(f"the file is {size} bytes long, less than its header of {length}")
    return size, raw


def _identity(entries: Mapping[str, str], num_layers: int, hidden_size: int) -> tuple[SampleKey, tuple[int, ...]]:
    """Of which sample the file is, and of which layers. Raises Damaged."""
    try:
        key = SampleKey.checked(entries["namespace"], entries["sample_id"])
        layer_ids = _layers(entries["layer_ids"])
    except (KeyError, ValueError, TypeError, RecursionError, BadNamespace, BadSampleId) as error:
        raise Damaged("the file's header lacks what slotstream writes into it") from error
    if len(layer_ids) != num_layers or len(set(layer_ids)) != len(layer_ids):
        raise Damaged("the file's header names another number of layers than its rows have")
    if hidden_size > _UINT32_MAX:
        raise Damaged("the file's header describes rows that are longer than any sample's")
    return key, layer_ids


def _committed_file(raw: bytes, size: int, header_xxh3: str) -> SampleFile | None:
    """Of a header that is the one that was committed. None where something is not as usual: then `parse_header` says what."""
    header = committed_header(raw)
    if header is None or header.file_bytes != size:
        return None
    try:
        key, layer_ids = _identity(header.metadata, header.row_format.num_layers, header.row_format.hidden_size)
        return _known_file(header, key, layer_ids, header_xxh3)
    except Damaged:
        return None


def _known_file(header: SampleHeader, key: SampleKey, layer_ids: tuple[int, ...], header_xxh3: str) -> SampleFile:
    """Raises Damaged."""
    entries = header.metadata
    try:
        hash_rows, hashes, ids_xxh3 = int(entries["hash_rows"]), entries["hashes"], entries["token_ids_xxh3"]
    except (KeyError, ValueError) as error:
        raise Damaged("the file's header lacks what slotstream writes into it") from error
    further = decode_columns(entries.get(COLUMNS_KEY, ""), header.row_format) if header.row_format.further else {}
    decoded = tuple(decode_hashes(hashes, header.num_tokens, hash_rows))
    return SampleFile(header, key, layer_ids, hash_rows, decoded, {TOKEN_IDS: ids_xxh3, **further}, header_xxh3)


def sample_file_at(files: Files, path: Path, committed_xxh3: str = "") -> SampleFile:
    """The checked header of the file at `path`; see `read_sample_file`. Raises FileNotFoundError, too."""
    fd = retried(lambda: files.open_read(path))
    try:
        return read_sample_file(files, fd, committed_xxh3)
    finally:
        files.close(fd)


@functools.lru_cache(maxsize=256)  # Most samples of a store have the same.
def _layers(text: str) -> tuple[int, ...]:
    return tuple(map(_layer, json.loads(text)))


def _layer(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= _UINT32_MAX:
        raise ValueError("a layer id is not an integer from 0 to 2**32 - 1")
    return value
