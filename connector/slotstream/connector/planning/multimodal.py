"""What a sample says of the images and other items of its prompt: its token ids show placeholders only."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.multimodal.inputs import MultiModalFeatureSpec

_ITEMS_BYTES_MAX = 4096  # Of the 16 KiB that all metadata of a sample may take.
_HASH_CHARS_MAX = 64


def describe(features: Sequence[MultiModalFeatureSpec]) -> dict[str, str]:
    """Metadata of a request's multimodal items, nothing when it has none.

    `multimodal` counts them, as in "image:2". `multimodal_items` is a JSON list of [modality, first position, positions,
    hash] in the order of the prompt; left out where it would be longer than 4 KiB. The hash is vLLM's own of the item, or the
    id that the request gave it: it tells prompts apart whose token ids are the same.
    """
    if not features:
        return {}
    counts = Counter(str(feature.modality) for feature in features)
    items = sorted(
        (f.mm_position.offset, f.mm_position.length, str(f.modality), str(f.mm_hash or f.identifier)[:_HASH_CHARS_MAX])
        for f in features
    )
    said = {"multimodal": ",".join(f"{modality}:{count}" for modality, count in sorted(counts.items()))}
    listed = json.dumps([[modality, offset, length, item] for offset, length, modality, item in items])
    if len(listed) <= _ITEMS_BYTES_MAX:
        said["multimodal_items"] = listed
    return said
