"""What a sample says of the media in its prompt."""

from __future__ import annotations

import json
from dataclasses import dataclass

from slotstream.connector.planning.multimodal import describe


@dataclass
class _Position:
    offset: int
    length: int


@dataclass
class _Feature:
    """As much of vLLM's MultiModalFeatureSpec as is read."""

    modality: str
    identifier: str
    mm_position: _Position
    mm_hash: str | None = None


def test_nothing_is_said_of_a_prompt_of_text() -> None:
    assert describe([]) == {}


def test_items_are_counted_by_kind_and_listed_in_the_order_of_the_prompt() -> None:
    said = describe(
        [
            _Feature("video", "lora:v", _Position(90, 200), "v"),
            _Feature("image", "second", _Position(40, 8)),
            _Feature("image", "x" * 500, _Position(2, 8)),
        ]
    )
    assert said["multimodal"] == "image:2,video:1"
    assert json.loads(said["multimodal_items"]) == [
        ["image", 2, 8, "x" * 64],
        ["image", 40, 8, "second"],
        ["video", 90, 200, "v"],
    ]


def test_a_list_too_long_for_the_metadata_is_left_out() -> None:
    said = describe([_Feature("image", f"{i:064}", _Position(8 * i, 8)) for i in range(500)])
    assert said == {"multimodal": "image:500"}
