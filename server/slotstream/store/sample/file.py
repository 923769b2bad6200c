"""A sample's file: what its header says, written and read back. A file describes and verifies itself by its header alone."""

from __future__ import annotations

import json
import sys
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from slotstream.store.disk.files import Files
from slotstream.store.disk.retrying import retried
from slotstream.store.records import STORE_KEYS, SampleKey, SampleRecord, SampleSpec, State, compact_json, connector_metadata
from slotstream.store.sample.row_hash import GroupHasher, hash_rows_for
from slotstream.wire.errors import BadNamespace, BadParams, BadSampleId, BadTags, Damaged, TooLarge
from slotstream.wire.hashing import HASH_HEX_CHARS, Buffer, to_hex, xxh3
from slotstream.wire.layout import (
    HEADER_ALIGN,
    HEADER_BYTES_MAX,
    SampleHeader,
    decode_hashes,
    decode_header,
    encode_hashes,
    encode_header,
    group_count,
    header_bytes_for,
    header_length,
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

    dtype: str
    shape: tuple[int, int, int]
    layer_ids: tuple[int, ...]
    hash_rows: int
    hashes: tuple[int, ...]
    token_ids_xxh3: str


def rehash(content: Content, row_bytes: int, hash_rows: int, read_rows: Callable[[int, int], bytes]) -> Content:
    """`content` with its rows, which `read_rows(start, stop)` reads, hashed in groups of `hash_rows`."""
    if hash_rows == content.hash_rows:
        return content
    hashes = GroupHasher(row_bytes, hash_rows).finish(content.shape[0], read_rows)
    return replace(content, hash_rows=hash_rows, hashes=tuple(hashes))


def _metadata(
    spec: SampleSpec, metadata: Mapping[str, str], times: tuple[int, int], hash_rows: int, hashes: str, ids_xxh3: str
) -> dict[str, str]:
    return {
        **connector_metadata(metadata),
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
        "token_ids_xxh3": ids_xxh3,
    }


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
        _ZERO_HASH,
    )
    draft = SampleHeader(spec.dtype, spec.rows_max, len(spec.layer_ids), spec.hidden_size, longest, 0)
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
    rows, layers, hidden = content.shape
    entries = _metadata(spec, metadata, times, content.hash_rows, encode_hashes(list(content.hashes)), content.token_ids_xxh3)
    header = SampleHeader(content.dtype, rows, layers, hidden, entries, header_bytes)
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
    token_ids_xxh3: str
    header_xxh3: str

    @cached_property
    def content(self) -> Content:
        header = self.header
        shape = (header.num_tokens, header.num_layers, header.hidden_size)
        return Content(header.dtype, shape, self.layer_ids, self.hash_rows, self.hashes, self.token_ids_xxh3)

    def record(self) -> SampleRecord:
        """The catalogue row that this file stands for. Raises Damaged when its times or tags are malformed."""
        entries = self.header.metadata
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
            namespace=self.key.namespace,
            sample_id=self.key.sample_id,
            state=State.COMMITTED,
            created_unix_ns=created,
            model=entries.get("model", ""),
            dtype=self.header.dtype,
            layer_ids=self.layer_ids,
            hidden_size=self.header.hidden_size,
            num_tokens=self.header.num_tokens,
            file_bytes=self.header.file_bytes,
            committed_unix_ns=committed,
            tags=tags,
            metadata={k: v for k, v in entries.items() if k not in STORE_KEYS},
            header_xxh3=self.header_xxh3,
        )


def read_sample_file(files: Files, fd: int) -> SampleFile:
    """The checked header of an open file. Raises Damaged (also for a wrong size) and OSError."""
    size = files.size(fd)
    first = retried(lambda: files.pread(fd, 8, 0))
    length = header_length(first)
    raw = retried(lambda: files.pread(fd, length, 0))
    if len(raw) < length:
        raise Damaged(f"the file is {size} bytes long, less than its header of {length}")
    header = decode_header(raw)
    if size != header.file_bytes:
        raise Damaged(f"the file is {size} bytes long and not the {header.file_bytes} its header describes")
    entries = header.metadata
    try:
        key = SampleKey.checked(entries["namespace"], entries["sample_id"])
        layer_ids = tuple(_layer(n) for n in json.loads(entries["layer_ids"]))
        hash_rows, hashes, ids_xxh3 = int(entries["hash_rows"]), entries["hashes"], entries["token_ids_xxh3"]
    except (KeyError, ValueError, TypeError, RecursionError, BadNamespace, BadSampleId) as error:
        raise Damaged("the file's header lacks what slotstream writes into it") from error
    if len(layer_ids) != header.num_layers or len(set(layer_ids)) != len(layer_ids):
        raise Damaged("the file's header names another number of layers than its rows have")
    if header.hidden_size > _UINT32_MAX:
        raise Damaged("the file's header describes rows that are longer than any sample's")
    decoded = tuple(decode_hashes(hashes, header.num_tokens, hash_rows))
    return SampleFile(header, key, layer_ids, hash_rows, decoded, ids_xxh3, to_hex(xxh3(raw)))


def sample_file_at(files: Files, path: Path) -> SampleFile:
    """The checked header of the file at `path`. Raises Damaged, FileNotFoundError and OSError."""
    fd = retried(lambda: files.open_read(path))
    try:
        return read_sample_file(files, fd)
    finally:
        files.close(fd)


def _layer(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= _UINT32_MAX:
        raise ValueError("a layer id is not an integer from 0 to 2**32 - 1")
    return value
