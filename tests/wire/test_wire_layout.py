"""The file header: plain safetensors, exactly recovered, and nothing but Damaged for anything else that lies on a disk."""

from __future__ import annotations

import dataclasses
import json
import struct
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from safetensors.torch import load_file
from support.synthetic import SyntheticSample

from slotstream.wire.columns import RowFormat
from slotstream.wire.errors import Damaged, UnsupportedFormat
from slotstream.wire.layout import (
    HEADER_ALIGN,
    HEADER_BYTES_MAX,
    SampleHeader,
    committed_header,
    decode_header,
    encode_header,
    header_bytes_for,
    header_length,
)

_TORCH = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
_HEADERS = st.builds(
    lambda dtype, tokens, layers, hidden, metadata, spare: _reserved(
        SampleHeader(RowFormat.of(dtype, layers, hidden), tokens, metadata, 0), spare
    ),
    st.sampled_from(sorted(_TORCH)),
    st.integers(1, 1 << 21),
    st.integers(1, 1024),
    st.integers(1, 1 << 20),
    st.dictionaries(_TEXT, _TEXT, max_size=4),
    st.integers(0, 10_000),
)


def _reserved(header: SampleHeader, spare_bytes: int = 0) -> SampleHeader:
    return dataclasses.replace(header, header_bytes=header_bytes_for(header, spare_bytes))


@given(_HEADERS)
def test_a_header_comes_back_as_it_was(header: SampleHeader) -> None:
    raw = encode_header(header)
    assert len(raw) == header.header_bytes
    assert len(raw) % HEADER_ALIGN == 0
    assert header_length(raw[:8]) == len(raw)
    assert decode_header(raw) == committed_header(raw) == header


@pytest.mark.parametrize("dtype", sorted(_TORCH))
def test_safetensors_reads_the_file(dtype: str, tmp_path: Path) -> None:
    sample = SyntheticSample("s", dtype=dtype)
    shape = (sample.num_tokens, len(sample.layer_ids), sample.hidden_size)
    header = _reserved(SampleHeader(sample.row_format, sample.num_tokens, metadata={"a": "ä\n\0"}, header_bytes=0))
    ids = struct.pack(f"<{sample.num_tokens}q", *sample.token_ids)
    path = tmp_path / "s.safetensors"
    path.write_bytes(encode_header(header) + sample.rows() + ids)

    assert path.stat().st_size == header.file_bytes
    assert path.read_bytes()[header.rows_end :] == ids
    tensors = load_file(path)
    assert set(tensors) == {"hidden_states", "token_ids"}
    assert tensors["hidden_states"].dtype == _TORCH[dtype]
    assert tensors["hidden_states"].shape == shape
    rows, layers, elements = torch.meshgrid(
        torch.arange(shape[0]), torch.tensor(sample.layer_ids), torch.arange(shape[2]), indexing="ij"
    )
    expected = (31 * rows + 7 * layers + elements + sample.seed) % 251
    assert torch.equal(tensors["hidden_states"].to(torch.int64), expected)
    assert tensors["token_ids"].tolist() == sample.token_ids
    with safetensors.safe_open(path, "pt") as opened:
        assert opened.metadata() == {"a": "ä\n\0"}


def test_a_header_that_does_not_fit_is_our_bug() -> None:
    header = SampleHeader(RowFormat.of("BF16", 1, 1), 1, {"long": "x" * HEADER_ALIGN}, HEADER_ALIGN)
    with pytest.raises(ValueError, match=f"does not fit the {HEADER_ALIGN - 8} reserved"):
        encode_header(header)


def test_the_longest_header_allowed_is_read() -> None:
    header = SampleHeader(RowFormat.of("BF16", 1, 1), 1, {"a": "b"}, HEADER_BYTES_MAX)
    raw = encode_header(header)
    assert header_length(raw[:8]) == HEADER_BYTES_MAX
    assert decode_header(raw) == header


@pytest.mark.parametrize("first", [b"", b"\0" * 7, struct.pack("<Q", HEADER_BYTES_MAX - 7), b"\xff" * 8, b"\0\0\0\0\0\0\0\x80"])
def test_a_length_that_cannot_be_is_damage(first: bytes) -> None:
    with pytest.raises(Damaged):
        header_length(first)


def _body(**changes: Any) -> dict[str, Any]:
    """A sound header of 2 tokens, 1 layer of 3 BF16 elements, with changes."""
    return {
        "__metadata__": {"a": "b"},
        "hidden_states": {"dtype": "BF16", "shape": [2, 1, 3], "data_offsets": [0, 12]},
        "token_ids": {"dtype": "I64", "shape": [2], "data_offsets": [12, 28]},
        **changes,
    }


def _raw(body: bytes) -> bytes:
    return struct.pack("<Q", len(body)) + body


def _tensor(dtype: Any = "BF16", shape: Any = (2, 1, 3), data_offsets: Any = (0, 12)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": data_offsets}


_DEEP = 100_000
_SOUND = json.dumps(_body()).encode()


def test_the_sound_header_of_the_following_tests_is_sound() -> None:
    assert decode_header(_raw(_SOUND)) == SampleHeader(RowFormat.of("BF16", 1, 3), 2, {"a": "b"}, len(_SOUND) + 8)


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b"{}", id="no tensors"),
        pytest.param(b"[]", id="a list"),
        pytest.param(b"7", id="a number"),
        pytest.param(b"null", id="null"),
        pytest.param(b"\xff\xfe{\0}\0", id="UTF-16"),
        pytest.param(_SOUND.decode().encode("utf-16"), id="sound, but in UTF-16"),
        pytest.param(b"\xef\xbb\xbf" + _SOUND, id="sound, behind a byte order mark"),
        pytest.param(_SOUND[:-1], id="cut short"),
        pytest.param(_SOUND + b"x", id="trailing text"),
        pytest.param(b"\0" * 100, id="zeros"),
        pytest.param(b"[" * _DEEP, id="deep nesting, unclosed"),
        pytest.param(b"[" * _DEEP + b"]" * _DEEP, id="deep nesting"),
        pytest.param(b'{"hidden_states":' * _DEEP + b"1" + b"}" * _DEEP, id="deep objects"),
        pytest.param(_SOUND[:-1] + b',"x":' + b"[" * 500 + b"]" * 500 + b"}", id="sound but for a deep entry"),
        pytest.param(_SOUND.replace(b"[2, 1, 3]", b"[" + b"9" * 5000 + b", 1, 3]"), id="a number of 5000 digits"),
        pytest.param(_SOUND.replace(b"[2, 1, 3]", b"[1e400, 1, 3]"), id="infinity"),
        pytest.param(_SOUND.replace(b"[2, 1, 3]", b"[NaN, 1, 3]"), id="NaN in the shape"),
        pytest.param(_SOUND.replace(b"[0, 12]", b"[NaN, 12]"), id="NaN in the offsets"),
        pytest.param(_SOUND.replace(b"[0, 12]", b"[0.0, 12.0]"), id="offsets that are not whole numbers"),
        pytest.param(_SOUND.replace(b"[0, 12]", b"[false, 12]"), id="offsets that are truth values"),
        pytest.param(_SOUND.replace(b'"shape": [2]', b'"shape": [2.0]'), id="ids with a shape that is no whole number"),
        pytest.param(_SOUND.replace(b'{"a": "b"}', b'{"a": "\\ud800"}'), id="half a surrogate pair"),
        pytest.param(_SOUND.replace(b'{"a": "b"}', b'{"a": "b", "a": "b"}'), id="a key twice"),
    ],
)
def test_a_body_that_is_not_ours_is_damage(body: bytes) -> None:
    with pytest.raises(Damaged):
        decode_header(_raw(body))
    committed_header(_raw(body))  # It may take it, for it is asked of what was committed; but raises nothing.


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_states": _tensor(shape=[2, 3])},
        {"hidden_states": _tensor(shape=[2, 1, 3, 1])},
        {"hidden_states": _tensor(shape=[0, 1, 3])},
        {"hidden_states": _tensor(shape=[-2, 1, 3])},
        {"hidden_states": _tensor(shape=[True, 1, 3])},
        {"hidden_states": _tensor(shape=[1 << 80, 1 << 80, 1 << 80])},
        {"hidden_states": _tensor(shape=["2", "1", "3"])},
        {"hidden_states": _tensor(shape="213")},
        {"hidden_states": _tensor(shape={"2": 1, "1": 1, "3": 1})},
        {"hidden_states": _tensor(shape=None)},
        {"hidden_states": _tensor(dtype="F64")},
        {"hidden_states": _tensor(dtype=["BF16"])},
        {"hidden_states": _tensor(dtype={})},
        {"hidden_states": _tensor(dtype=None)},
        {"hidden_states": _tensor(data_offsets=[0, 13])},
        {"hidden_states": _tensor(data_offsets=[1, 12])},
        {"hidden_states": {**_tensor(), "extra": 1}},
        {"hidden_states": []},
        {"hidden_states": "BF16"},
        {"token_ids": _tensor("I32", [2], [12, 28])},
        {"token_ids": _tensor("I64", [3], [12, 28])},
        {"token_ids": _tensor("I64", [2], [12, 20])},
        {"token_ids": _tensor("I64", [2], [0, 16])},
        {"token_ids": None},
        {"__metadata__": None},
        {"__metadata__": []},
        {"__metadata__": {"a": 1}},
        {"__metadata__": {"a": None}},
        {"another": _tensor()},
    ],
    ids=json.dumps,
)
def test_fields_that_cannot_be_are_damage(changes: dict[str, Any]) -> None:
    with pytest.raises(Damaged):
        decode_header(_raw(json.dumps(_body(**changes)).encode()))


def _accepted_means_readable(raw: bytes) -> None:
    """What `decode_header` accepts is a file that plain safetensors reads, as large as the header says."""
    committed = committed_header(raw)  # Raises nothing.
    try:
        header = decode_header(raw)
    except (Damaged, UnsupportedFormat):
        return
    assert committed == header
    if header.file_bytes < 1 << 20:
        assert safetensors.deserialize(raw + bytes(header.file_bytes - len(raw)))  # type: ignore[no-untyped-call]


@given(st.binary(max_size=100))
def test_arbitrary_bytes_are_damage(body: bytes) -> None:
    _accepted_means_readable(_raw(body))


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.sampled_from([0, 2, 12, "BF16", "I64"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=8,
)


@given(st.data())
def test_other_values_in_a_sound_header_are_damage_or_readable(data: st.DataObject) -> None:
    body: Any = _body()
    path = data.draw(
        st.sampled_from(
            [(), *((key,) for key in body)]
            + [(key, field) for key in ("hidden_states", "token_ids") for field in ("dtype", "shape", "data_offsets")]
            + [(key, field, 0) for key in ("hidden_states", "token_ids") for field in ("shape", "data_offsets")]
        )
    )
    value = data.draw(_JSON)
    at: Any = {"root": body}
    steps = ["root", *path]
    for step in steps[:-1]:
        at = at[step]
    at[steps[-1]] = value
    if steps == ["root"]:
        body = value
    _accepted_means_readable(_raw(json.dumps(body).encode()))


@given(st.lists(st.tuples(st.integers(0, len(_SOUND)), st.integers(0, 3), st.binary(max_size=3)), min_size=1, max_size=3))
@example([(0, 1, b" {")])
def test_mutated_headers_are_damage_or_readable(edits: list[tuple[int, int, bytes]]) -> None:
    body = bytearray(_SOUND)
    for at, removed, added in edits:
        body[at : at + removed] = added
    _accepted_means_readable(_raw(bytes(body)))


@pytest.mark.parametrize("at", [0, 1, 7])
def test_a_length_other_than_the_header_is_damage(at: int) -> None:
    raw = bytearray(_raw(_SOUND))
    raw[at] ^= 1
    with pytest.raises(Damaged):
        decode_header(bytes(raw))
