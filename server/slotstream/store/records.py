"""What the store knows about a sample: frozen data that checks itself, free of disk and database."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import lru_cache
from pathlib import Path

from slotstream.wire.columns import RowFormat
from slotstream.wire.errors import BadLayers, BadParams, SlotStreamError, TooLarge
from slotstream.wire.layout import FILE_SUFFIX, shard_of
from slotstream.wire.names import (
    CHUNK_BYTES_MAX,
    LAYERS_MAX,
    METADATA_BYTES_MAX,
    NAMESPACE_CHARS_MAX,
    ROWS_MAX,
    SAMPLE_BYTES_MAX,
    SAMPLE_ID_CHARS_MAX,
    check_namespace,
    check_sample_id,
    check_tags,
)

MODEL_BYTES_MAX = 1024
# Of a sample that is not stored the catalogue keeps so many bytes of each field: with its indexes a row is at most 2 KiB then.
# The model's name stands in the row and in two indexes.
_SLIM_MODEL_BYTES, _SLIM_MESSAGE_BYTES, _SLIM_LAYERS_BYTES, _SLIM_METADATA_BYTES = 80, 256, 80, 64
# A tag stands in the row and in two indexes, each time with some bytes around it. Short names leave more room for tags.
_SLIM_TAGS_BYTES, _SLIM_TAG_COPIES, _SLIM_TAG_BYTES_AROUND = 216, 3, 42
_ID_COPIES, _NAMESPACE_COPIES = 2, 4
PARTIAL_SUFFIX = ".partial"
# Keys of a file's __metadata__ that the store writes itself; a connector's key of the same name is dropped.
STORE_KEYS = frozenset(
    {
        "format",
        "sample_id",
        "namespace",
        "model",
        "layer_ids",
        "tags",
        "created_unix_ns",
        "committed_unix_ns",
        "hash_rows",
        "hashes",
        "token_ids_xxh3",
    }
)


class State(StrEnum):
    """A sample's state, as the catalogue spells it."""

    ARRIVING = "arriving"
    COMMITTED = "committed"
    FAILED = "failed"
    DELETING = "deleting"  # Its file and row are on their way out; readers see NOT_FOUND.


@dataclass(frozen=True, slots=True)
class SampleKey:
    """Names one sample. Checks nothing: `checked` does, for names that came from outside."""

    namespace: str
    sample_id: str

    @classmethod
    def checked(cls, namespace: str, sample_id: str) -> SampleKey:
        """Raises BadNamespace and BadSampleId."""
        return cls(check_namespace(namespace), check_sample_id(sample_id))

    @property
    def shard(self) -> str:
        """The directory of its namespace that its file is in."""
        return shard_of(self.sample_id)

    def directory(self, data_dir: Path) -> Path:
        return _directory(data_dir, self.namespace, self.shard)

    def path(self, data_dir: Path) -> Path:
        """Where the committed file is (see `layout.file_path`)."""
        return self.directory(data_dir) / (self.sample_id + FILE_SUFFIX)

    def __str__(self) -> str:
        return f"{self.namespace}/{self.sample_id}"


@dataclass(frozen=True, slots=True)
class SampleSpec:
    """What an upload announces. Raises the code of the field that is malformed or past its limit."""

    namespace: str
    sample_id: str
    model: str
    layer_ids: tuple[int, ...]
    row_format: RowFormat
    rows_max: int
    rows_exact: bool = False
    tags: Mapping[str, str] = field(default_factory=dict)
    metadata: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        SampleKey.checked(self.namespace, self.sample_id)
        if len(self.model.encode(errors="replace")) > MODEL_BYTES_MAX:
            raise TooLarge(f"the model's name is longer than {MODEL_BYTES_MAX} bytes")
        if not 1 <= len(self.layer_ids) <= LAYERS_MAX:
            raise BadLayers(f"a sample has 1 to {LAYERS_MAX} layers, not {len(self.layer_ids)}")
        if len(set(self.layer_ids)) != len(self.layer_ids) or min(self.layer_ids) < 0:
            raise BadLayers("layer ids must be distinct and not negative")
        assert len(self.layer_ids) == self.row_format.num_layers, "a format is made for its layers"
        if self.row_format.hidden_size < 1:
            raise BadParams("hidden_size must be at least 1")
        if self.row_bytes > CHUNK_BYTES_MAX:
            raise TooLarge(f"a row of {self.row_bytes} bytes does not fit a chunk of {CHUNK_BYTES_MAX}")
        if self.rows_max < 1:
            raise BadParams("rows_max must be at least 1")
        if self.rows_max > ROWS_MAX or self.row_format.data_bytes(self.rows_max) > SAMPLE_BYTES_MAX:
            raise TooLarge(f"{self.rows_max} rows are more than a sample's {ROWS_MAX} rows or {SAMPLE_BYTES_MAX} bytes")
        self.row_format.check_commit(self.rows_max)
        check_tags(self.tags)
        check_metadata(self.metadata)

    @property
    def row_bytes(self) -> int:
        """Of hidden states."""
        return self.row_format.row_bytes

    @property
    def key(self) -> SampleKey:
        return SampleKey(self.namespace, self.sample_id)


@dataclass(frozen=True, slots=True)
class SampleRecord:
    """One catalogue row. Times in Unix nanoseconds, sizes in bytes; `num_tokens` is the most it can hold while arriving."""

    namespace: str
    sample_id: str
    state: State
    created_unix_ns: int
    model: str = ""
    dtype: str = ""
    layer_ids: tuple[int, ...] = ()
    hidden_size: int = 0
    num_tokens: int = 0
    file_bytes: int = 0
    committed_unix_ns: int = 0
    error_code: str = ""
    error_message: str = ""
    tags: Mapping[str, str] = field(default_factory=dict)
    metadata: Mapping[str, str] = field(default_factory=dict)
    header_xxh3: str = ""  # Of the file's whole header: a file with another header is not the one that was committed.
    attempt: str = ""  # Which object has its bytes; "" where a file has.

    @property
    def key(self) -> SampleKey:
        return SampleKey(self.namespace, self.sample_id)

    @classmethod
    def arriving(cls, spec: SampleSpec, created_unix_ns: int) -> SampleRecord:
        return cls(
            namespace=spec.namespace,
            sample_id=spec.sample_id,
            state=State.ARRIVING,
            created_unix_ns=created_unix_ns,
            model=spec.model,
            dtype=spec.row_format.dtype,
            layer_ids=spec.layer_ids,
            hidden_size=spec.row_format.hidden_size,
            num_tokens=spec.rows_max,
            tags=dict(spec.tags),
            metadata=connector_metadata(spec.metadata),
        )

    def slim(self) -> SampleRecord:
        """What the catalogue keeps of a sample that is not stored: it may cost a peer nothing, so it must be little.

        Names and messages are cut; lists of layers and metadata that are longer than a line are left out, and so are tags that
        have no room.
        """
        return replace(
            self,
            model=kept_model(self.model),
            error_message=_cut(self.error_message, _SLIM_MESSAGE_BYTES),
            layer_ids=self.layer_ids if len(compact_json(self.layer_ids)) <= _SLIM_LAYERS_BYTES else (),
            tags=self._slim_tags(),
            metadata=self.metadata if len(compact_json(dict(self.metadata))) <= _SLIM_METADATA_BYTES else {},
        )

    def _slim_tags(self) -> Mapping[str, str]:
        """The tags that have room, in their order."""
        unused = _ID_COPIES * (SAMPLE_ID_CHARS_MAX - len(self.sample_id))
        unused += _NAMESPACE_COPIES * (NAMESPACE_CHARS_MAX - len(self.namespace))
        left = _SLIM_TAGS_BYTES + unused * 2 // 3  # An index is never quite full.
        kept = {}
        for key, value in self.tags.items():
            cost = _SLIM_TAG_COPIES * (len(compact_json(key)) + len(compact_json(value)) - 4) + _SLIM_TAG_BYTES_AROUND
            if cost <= left:
                kept[key] = value
                left -= cost
        return kept

    def failed(self, code: str, message: str) -> SampleRecord:
        """The same sample, failed, and slim."""
        failed = replace(self, state=State.FAILED, file_bytes=0, committed_unix_ns=0, error_code=code, error_message=message)
        return failed.slim()

    @classmethod
    def refused(cls, key: SampleKey, model: str, created_unix_ns: int) -> SampleRecord:
        """Of a sample that never was open: little more than its name, and no dtype."""
        return cls(key.namespace, key.sample_id, State.ARRIVING, created_unix_ns, model=model)


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a sample failed, as its row and its sender are told. `code` is stable; a peer's own codes are allowed."""

    code: str
    message: str
    retryable: bool = False

    @classmethod
    def of(cls, error: SlotStreamError) -> Failure:
        return cls(error.code, str(error), error.retryable)


def kept_model(model: str) -> str:
    """The model's name, as the catalogue keeps it of a sample that is not stored."""
    return _cut(model, _SLIM_MODEL_BYTES)


def _cut(text: str, bytes_max: int) -> str:
    """`text`, or as much of its beginning as fits so many bytes of UTF-8 with an ellipsis."""
    raw = text.encode(errors="replace")
    return text if len(raw) <= bytes_max else raw[: bytes_max - 3].decode(errors="ignore") + "…"


def check_metadata(metadata: Mapping[str, str]) -> None:
    """Raises TooLarge when keys and values together are longer than METADATA_BYTES_MAX bytes of UTF-8."""
    nbytes = len("".join((*metadata.keys(), *metadata.values())).encode(errors="replace"))
    if nbytes > METADATA_BYTES_MAX:
        raise TooLarge(f"{nbytes} bytes of metadata are more than the {METADATA_BYTES_MAX} allowed")


def connector_metadata(metadata: Mapping[str, str]) -> dict[str, str]:
    """`metadata` without the keys that are the store's own."""
    return {key: value for key, value in metadata.items() if key not in STORE_KEYS}


compact_json = json.JSONEncoder(separators=(",", ":"), sort_keys=True).encode  # `json.dumps` would make one each time.


@lru_cache(maxsize=1 << 12)
def _directory(data_dir: Path, namespace: str, shard: str) -> Path:
    """Kept: every sample asks several times, and joining paths is slow."""
    return data_dir / namespace / shard
