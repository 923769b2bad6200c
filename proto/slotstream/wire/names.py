"""Names and limits: what sample ids, namespaces and tags may look like, and the bounds that both ends check."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping, Sequence

from slotstream.wire.errors import BadNamespace, BadParams, BadSampleId, BadTags

PROTOCOL_VERSION = 1
DEFAULT_NAMESPACE = "default"
DEFAULT_ADDRESS = "127.0.0.1:50151"

MESSAGE_BYTES_MAX = 16 << 20  # One gRPC message: a chunk with its header, or a commit with its token ids.
CHUNK_BYTES_MAX = 8 << 20
CONTROL_BYTES_MAX = 256 << 10  # A request without its rows and token ids: several times the largest that anybody needs.
BATCH_MAX = 256  # Requests in one batch, or replies.
WINDOW_BYTES = 32 << 20
TAGS_MAX = 32
TAG_BYTES_MAX = 256
METADATA_BYTES_MAX = 16 << 10
ROWS_MAX = 1 << 21  # Tokens in one sample.
LAYERS_MAX = 1024
SAMPLE_BYTES_MAX = 1 << 40
FINAL = "final"  # The layer that is the output of the model's last norm, as people name it; its id is the last one's + 1.
LAYER_NAMES_KEY = "layer_names"  # In a sample's metadata, where not every name is its id: a JSON list, in the order of the ids.
READ_WAIT_S_MAX = 3600.0  # How long a read may wait for its sample.
LEASE_S_MAX = 86_400.0
PAGE_SIZE_MAX = 1000  # Samples in a page of a list.
READS_IN_CALL_MAX = 1000  # Samples that one call reads, or counts as read.
TAG_FILTERS_MAX = 8  # Tags that a list filters by.

NAMESPACE_CHARS_MAX = 64
SAMPLE_ID_CHARS_MAX = 128
READABLE_CHARS_MAX = 104
"""So many characters of a request's id stand in a sample id that is made of it and of a digest."""
_NOT_IN_IDS = re.compile(r"[^A-Za-z0-9._-]")
_SAMPLE_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_NAMESPACE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def _shown(value: str) -> str:
    """`value` for an error message: quoted, and cut where it is long."""
    return repr(value if len(value) <= 40 else value[:40] + "…")


def readable_id(request_id: str) -> str:
    """A request's id as default sample ids have it: "-" for each character that no sample id has. May be too long, or empty."""
    return _NOT_IN_IDS.sub("-", request_id).lstrip("._-")


def check_sample_id(value: object) -> str:
    """`value`, if it is a sample id. Raises BadSampleId."""
    if not isinstance(value, str) or not _SAMPLE_ID.fullmatch(value):
        shown = _shown(value) if isinstance(value, str) else f"a {type(value).__name__}"
        raise BadSampleId(f"sample id {shown} is not a letter or digit followed by up to 127 of [A-Za-z0-9._-]")
    return value


def check_namespace(value: object) -> str:
    """`value`, if it is a namespace. Raises BadNamespace. Names that begin with "catalog." belong to the store."""
    if not isinstance(value, str) or not _NAMESPACE.fullmatch(value):
        shown = _shown(value) if isinstance(value, str) else f"a {type(value).__name__}"
        raise BadNamespace(f"namespace {shown} is not a letter or digit followed by up to 63 of [A-Za-z0-9._-]")
    if value.lower().startswith("catalog."):
        raise BadNamespace(f"namespace {value!r} is reserved: names must not begin with 'catalog.'")
    return value


def check_holder(value: object) -> str:
    """`value`, if it can be the holder of a lease: a name like a namespace's. Raises BadParams."""
    if not isinstance(value, str) or not _NAMESPACE.fullmatch(value):
        shown = _shown(value) if isinstance(value, str) else f"a {type(value).__name__}"
        raise BadParams(f"holder {shown} is not a letter or digit followed by up to 63 of [A-Za-z0-9._-]")
    return value


def check_tags(value: object) -> dict[str, str]:
    """`value` as a dict, if it maps short strings to short strings. Raises BadTags."""
    if not isinstance(value, Mapping):
        raise BadTags(f"tags must map strings to strings, not be a {type(value).__name__}")
    if len(value) > TAGS_MAX:
        raise BadTags(f"{len(value)} tags are more than the {TAGS_MAX} allowed")
    for key, text in value.items():
        if not isinstance(key, str) or not isinstance(text, str):
            raise BadTags("tags must map strings to strings")
        if not key or len(key.encode(errors="replace")) > TAG_BYTES_MAX or len(text.encode(errors="replace")) > TAG_BYTES_MAX:
            raise BadTags(f"tag {_shown(key)} is empty or longer than {TAG_BYTES_MAX} bytes, key or value")
        if not (key + text).isprintable():
            raise BadTags(f"tag {_shown(key)} holds characters that cannot be printed")
    return dict(value)


def layer_names(layer_ids: Sequence[int], metadata: Mapping[str, str]) -> tuple[str, ...]:
    """What people call the layers of a sample with this metadata: their ids, but for "final". Other metadata change nothing."""
    return _layer_names(tuple(layer_ids), metadata.get(LAYER_NAMES_KEY, "null"))


@functools.lru_cache(maxsize=256)  # Most samples of a store have the same, and a reader asks of each.
def _layer_names(layer_ids: tuple[int, ...], named: str) -> tuple[str, ...]:
    plain = tuple(str(layer_id) for layer_id in layer_ids)
    try:
        names = json.loads(named)
    except ValueError:
        return plain
    return (*plain[:-1], FINAL) if names == [*plain[:-1], FINAL] else plain
