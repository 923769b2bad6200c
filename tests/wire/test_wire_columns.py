"""Columns: their order and places in a file, what a commit can carry, and formats that this version does not know."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import safetensors
import torch

from slotstream.wire import columns
from slotstream.wire.columns import COLUMNS, Column, LateColumns, RowFormat, further_columns, taken_columns
from slotstream.wire.errors import BadParams, Damaged, TooLarge, UnsupportedFormat
from slotstream.wire.frames import decode_request
from slotstream.wire.layout import SampleHeader, decode_columns, decode_header, encode_columns, encode_header, header_bytes_for
from slotstream.wire.names import MESSAGE_BYTES_MAX

ALL = RowFormat.of("BF16", 4, 8, ["loss_mask", "scales", "positions"])


def test_columns_stand_by_element_size_whatever_order_they_are_named_in() -> None:
    assert [column.name for column in ALL.columns] == ["hidden_states", "token_ids", "positions", "scales", "loss_mask"]
    assert RowFormat.of("BF16", 4, 8, ["positions", "loss_mask", "scales"]) == ALL
    assert [(column.dtype, column.shape(3)) for column in ALL.columns] == [
        ("BF16", [3, 4, 8]),
        ("I64", [3]),
        ("I64", [3]),
        ("F32", [3, 4]),
        ("U8", [3]),
    ]
    assert (ALL.row_bytes, ALL.layer_bytes, ALL.dtype, ALL.num_layers, ALL.hidden_size) == (64, 16, "BF16", 4, 8)
    assert ALL.data_bytes(3) == 3 * (64 + 8 + 8 + 16 + 1)


def test_every_column_is_aligned_and_there_are_no_gaps() -> None:
    end = 0
    for place in ALL.file_layout(5):
        assert place.begin == end
        assert place.begin % place.column.element_bytes == 0
        end = place.end
    assert end == ALL.data_bytes(5)


def test_a_column_of_another_size_finds_its_place_in_the_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(columns.COLUMNS, "short", Column("short", "I16", (2,), late=True))
    named = RowFormat.of("BF16", 1, 4, ["loss_mask", "short", "scales"])
    assert [column.name for column in named.columns] == ["hidden_states", "token_ids", "scales", "short", "loss_mask"]


def test_what_is_taken_comes_with_the_commit() -> None:
    assert set(further_columns()) == {"positions", "scales", "loss_mask"}
    assert set(taken_columns()) == {"positions", "loss_mask"}
    assert [name for name, column in COLUMNS.items() if column.optional] == ["loss_mask"]
    with pytest.raises(UnsupportedFormat, match="'scales' arrives with the rows"):
        ALL.check_commit(1)
    RowFormat.of("BF16", 4, 8, taken_columns()).check_commit(1)


def test_a_name_that_is_not_in_the_table_is_an_unsupported_format() -> None:
    with pytest.raises(UnsupportedFormat, match="'weights' is not one of"):
        RowFormat.of("BF16", 1, 1, ["weights"])
    for twice in (["loss_mask", "loss_mask"], ["token_ids"]):
        with pytest.raises(BadParams, match="named twice"):
            RowFormat.of("BF16", 1, 1, twice)


def test_a_commit_longer_than_a_message_is_known_at_the_open() -> None:
    named = RowFormat.of("BF16", 1, 1, ["positions"])
    named.check_commit(1_000_000)
    with pytest.raises(TooLarge, match="longer than 16777216 bytes"):
        named.check_commit(1_300_000)
    RowFormat.of("BF16", 1, 1, ["loss_mask"]).check_commit(1 << 21)
    RowFormat.of("BF16", 1, 1).check_commit(1 << 21)


def test_late_columns_are_those_that_the_sample_was_opened_with() -> None:
    named = RowFormat.of("BF16", 1, 1, ["loss_mask"])
    LateColumns({"loss_mask": b"\1\0\1"}).check(named, 3)
    for wrong in ({}, {"loss_mask": b"\1\0"}, {"loss_mask": b"\1\0\1", "positions": bytes(24)}, {"positions": bytes(24)}):
        with pytest.raises(BadParams):
            LateColumns(wrong).check(named, 3)


def test_a_commit_that_names_a_column_twice_is_refused() -> None:
    from slotstream.v1 import ingest_pb2

    commit = ingest_pb2.CommitSample(columns=LateColumns({"loss_mask": b"\1"}).to_wire() * 2)
    with pytest.raises(BadParams, match="twice"):
        LateColumns.from_wire(commit.columns)


def test_columns_may_be_as_long_as_a_message() -> None:
    from slotstream.v1 import ingest_pb2

    request = ingest_pb2.IngestRequest(commit=ingest_pb2.CommitSample(sample=1, row_count=1))
    request.commit.columns.add(name="positions", data=bytes(MESSAGE_BYTES_MAX // 2))
    found, _ = decode_request(request.SerializeToString())
    assert found == request


def _file(row_format: RowFormat, rows: int) -> bytes:
    header = SampleHeader(row_format, rows, {"a": "b"}, 0)
    header = SampleHeader(row_format, rows, {"a": "b"}, header_bytes_for(header))
    raw = encode_header(header)
    assert decode_header(raw) == header
    assert header.file_bytes == len(raw) + row_format.data_bytes(rows)
    return raw + bytes(range(256)) * (row_format.data_bytes(rows) // 256 + 1)


def test_safetensors_opens_a_file_with_every_column(tmp_path: Path) -> None:
    raw = _file(ALL, 6)
    path = tmp_path / "s.safetensors"
    path.write_bytes(raw[: decode_header(raw[:4096]).file_bytes])
    with safetensors.safe_open(path, "pt") as file:
        assert set(file.keys()) == {"hidden_states", "token_ids", "positions", "scales", "loss_mask"}
        assert file.get_tensor("loss_mask").tolist() == list(raw[path.stat().st_size - 6 : path.stat().st_size])
        assert (file.get_tensor("scales").dtype, file.get_tensor("scales").shape) == (torch.float32, (6, 4))
        assert (file.get_tensor("positions").dtype, file.get_tensor("positions").shape) == (torch.int64, (6,))


def _raw(**changes: object) -> bytes:
    body = {
        "__metadata__": {"a": "b"},
        "hidden_states": {"dtype": "BF16", "shape": [2, 1, 4], "data_offsets": [0, 16]},
        "token_ids": {"dtype": "I64", "shape": [2], "data_offsets": [16, 32]},
        **changes,
    }
    encoded = json.dumps({name: value for name, value in body.items() if value is not None}).encode()
    return struct.pack("<Q", len(encoded)) + encoded


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"weights": {"dtype": "F32", "shape": [2], "data_offsets": [32, 40]}}, "column 'weights'"),
        ({"hidden_states": {"dtype": "F8_E4M3", "shape": [2, 1, 8], "data_offsets": [0, 16]}}, "rows are 'F8_E4M3'"),
        ({"hidden_states": {"dtype": "F7", "shape": [2, 1, 9], "data_offsets": [0, 16]}}, "rows are 'F7'"),
        ({"loss_mask": {"dtype": "F32", "shape": [2], "data_offsets": [32, 40]}}, "other elements"),
        ({"token_ids": {"dtype": "U64", "shape": [2], "data_offsets": [16, 32]}}, "other elements"),
    ],
    ids=["a column", "fp8 rows", "an element type", "a column's elements", "the ids' elements"],
)
def test_a_sound_file_of_another_format_is_no_damage(changes: dict[str, object], why: str) -> None:
    with pytest.raises(UnsupportedFormat, match=why):
        decode_header(_raw(**changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"weights": {"dtype": "F32", "shape": [2], "data_offsets": [31, 39]}},
        {"weights": {"dtype": "F32", "shape": [2], "data_offsets": [40, 48]}},
        {"weights": {"dtype": "F32", "shape": [2], "data_offsets": [32, 41]}},
        {"weights": {"dtype": "F99", "shape": [2], "data_offsets": [32, 24]}},
        {"weights": 7},
        {"hidden_states": None, "rows": {"dtype": "BF16", "shape": [2, 1, 4], "data_offsets": [0, 16]}},
        {"token_ids": None},
    ],
    ids=["overlaps", "a gap", "too long", "backwards", "no tensor", "no hidden states", "one tensor"],
)
def test_what_cannot_be_a_file_of_any_format_is_damage(changes: dict[str, object]) -> None:
    with pytest.raises(Damaged):
        decode_header(_raw(**changes))


def test_the_list_of_columns_is_that_of_the_file() -> None:
    named = RowFormat.of("BF16", 1, 1, ["loss_mask", "positions"])
    hashes = {"positions": "0" * 16, "loss_mask": "f" * 16}
    assert decode_columns(encode_columns(hashes), named) == hashes
    for wrong in ("", "[", "[]", "7", "{}", '{"loss_mask": "ffffffffffffffff"}', encode_columns({**hashes, "loss_mask": "f"})):
        with pytest.raises(Damaged):
            decode_columns(wrong, named)
