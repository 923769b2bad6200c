"""What a request may ask, what it is told when it asks wrongly, and the ids it gets by itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slotstream.connector.options import ConnectorOptions
from slotstream.connector.planning.request_params import CaptureParams, default_sample_id, parse_params, sequence_index
from slotstream.wire.errors import BadSampleId, ConfigError, SlotStreamError, UnsupportedRequest
from slotstream.wire.names import check_sample_id


def _parse(params: object, *, req_id: str = "cmpl-1", sequence: int | None = 0, **outer: object) -> CaptureParams:
    return _of_engine({"slotstream": params, **outer}, req_id=req_id, sequence=sequence)


def _of_engine(params: Mapping[str, Any] | None, *, req_id: str = "cmpl-1", **defaults: object) -> CaptureParams:
    chosen: dict[str, Any] = {"namespace": "default", "capture": True, "include_output_tokens": False, **defaults}
    return parse_params(params, req_id=req_id, **chosen)


def test_without_params_the_defaults_hold() -> None:
    for nothing in (None, {}, {"other": {"x": 1}}, {"slotstream": None}):
        assert _of_engine(nothing, namespace="n") == CaptureParams("cmpl-1", "n", True, False, (0, None))
    assert not _of_engine(None, capture=False).capture
    assert _of_engine(None, include_output_tokens=True).include_output_tokens
    assert not _of_engine({"include_output_tokens": False}, include_output_tokens=True).include_output_tokens


def test_every_param_is_read() -> None:
    asked = _parse({"sample_id": "s", "namespace": "m", "tokens": [3, 9], "tags": {"k": "v"}, "include_output_tokens": True})
    assert asked == CaptureParams("s", "m", True, True, (3, 9), {"k": "v"})
    assert _parse({"tokens": [3, None]}).tokens == (3, None)


def test_vllms_own_spelling_of_output_tokens_is_honoured_and_ours_goes_first() -> None:
    assert _parse({}, include_output_tokens=True).include_output_tokens
    assert not _parse({"include_output_tokens": False}, include_output_tokens=True).include_output_tokens


_leaves = st.none() | st.booleans() | st.integers() | st.text()


@given(st.recursive(_leaves, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)))
def test_any_params_are_read_or_answered_with_one_sentence(params: object) -> None:
    said: SlotStreamError | None = None
    try:
        check_sample_id(_parse(params).sample_id)
    except SlotStreamError as error:
        said = error
    if said is not None:
        assert said.code.startswith("BAD_")
        assert 0 < len(str(said)) < 1000
        assert "\n" not in str(said)


@pytest.mark.parametrize(
    ("req_id", "caller_id", "index"),
    [
        pytest.param("cmpl-x-0-0123abcd", "cmpl-x-0", 0, id="one sequence"),
        pytest.param("cmpl-x-0", "cmpl-x-0", 0, id="one sequence, no random end"),
        pytest.param("0_cmpl-x-0-0123abcd", "cmpl-x-0", 0, id="the first"),
        pytest.param("2_cmpl-x-0-0123abcd", "cmpl-x-0", 2, id="the third"),
        pytest.param("2_cmpl-x-0", "cmpl-x-0", 2, id="the third, no random end"),
        pytest.param("12_x\n-0123abcd", "x\n", 12, id="the thirteenth"),
        pytest.param("12_7-0123abcd", "12_7", 0, id="a caller's own id"),
        pytest.param("12_7", "12_7", 0, id="a caller's own id, no random end"),
        pytest.param("1_12_7-0123abcd", "12_7", 1, id="a sequence of a caller's own id"),
        pytest.param("1_12_7", "12_7", 1, id="a sequence of a caller's own id, no random end"),
        pytest.param("1_x-0123abcd-4567cdef", "x-0123abcd", 1, id="an id that ends like a random end"),
        pytest.param("1_x-0123abcd", "x-0123abcd", 1, id="an id that ends like a random end, no random end"),
        pytest.param("1_x-0123abcd", "1_x-0123abcd", 0, id="one whose caller's id looks like a sequence's"),
        pytest.param("1_x", "y", 0, id="none that vLLM makes"),
        pytest.param("1_x-0123abcd", None, None, id="who knows"),
        pytest.param("1_x", None, None, id="who knows, no random end"),
        pytest.param("cmpl-x-0", None, 0, id="no sequence, whatever the caller called it"),
    ],
)
def test_a_sequence_is_told_by_both_ids(req_id: str, caller_id: str | None, index: int | None) -> None:
    assert sequence_index(req_id, caller_id) == index


def test_sequences_of_one_request_share_its_sample_unless_their_output_is_captured() -> None:
    assert _parse({"sample_id": "s"}, sequence=1).sample_id == "s"
    assert _parse({"sample_id": "s"}, sequence=None).sample_id == "s"
    outputs = {"sample_id": "s", "include_output_tokens": True}
    assert _parse(outputs, sequence=0).sample_id == "s"
    assert _parse(outputs, sequence=1).sample_id == "s.1"
    assert _parse(outputs, sequence=12).sample_id == "s.12"
    with pytest.raises(BadSampleId):
        _parse({**outputs, "sample_id": "s" * 127}, sequence=1)


def test_where_a_sequence_cannot_be_told_only_the_default_ids_have_output_rows() -> None:
    with pytest.raises(UnsupportedRequest, match="leave it out"):
        _parse({"sample_id": "s", "include_output_tokens": True}, sequence=None)
    assert _parse({"include_output_tokens": True}, req_id="1_x", sequence=None).sample_id == "1_x"


@given(st.text())
def test_every_request_id_gives_a_valid_sample_id(req_id: str) -> None:
    check_sample_id(default_sample_id(req_id))


def test_request_ids_that_only_differ_in_what_is_replaced_stay_apart() -> None:
    assert default_sample_id("a b") != default_sample_id("a/b")
    assert default_sample_id("x" * 200) != default_sample_id("x" * 201)
    assert default_sample_id("cmpl-7.a_b") == "cmpl-7.a_b"


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"servre": "x"}, "unknown connector options ['servre']; known: ['ack_timeout_s', 'bad_rows', 'capture'"),
        ({"server": "nowhere"}, "address 'nowhere' is not host:port; did you mean nowhere:50151?"),
        ({"server": 7}, "server must be an address or a list of addresses, not 7"),
        ({"server": []}, "the list of server addresses is empty"),
        ({"server": ["a:1", "nowhere"]}, "address 'nowhere' is not host:port; did you mean nowhere:50151?"),
        ({"server": ["a:1", ["b:1"]]}, "address ['b:1'] is neither host:port"),
        ({"server": "a:1,a:1"}, "address 'a:1' is named twice"),
        ({"server": "unix:relative"}, "must be unix: and an absolute, printable path"),
        ({"namespace": "../x"}, "connector option namespace"),
        ({"staging_bytes": "1G"}, "connector option staging_bytes must be a whole number from"),
        ({"staging_bytes": True}, "connector option staging_bytes must be a whole number from"),
        ({"wait_s_max": -1}, "connector option wait_s_max must be a number from"),
        ({"on_full": "drop"}, "connector option on_full must be one of ['wait', 'fail_sample']"),
        ({"bad_rows": "drop"}, "connector option bad_rows must be one of ['mark', 'fail']"),
        ({"outage_s_max": -1}, "connector option outage_s_max must be a number from"),
        ({"spool_dir": "spool"}, "connector option spool_dir must be an absolute path or null"),
        ({"spool_dir": True}, "connector option spool_dir must be an absolute path or null"),
        ({"spool_bytes_max": 0}, "connector option spool_bytes_max must be a whole number from"),
        ({"capture": "yes"}, "connector option capture must be true or false"),
        ({"include_output_tokens": 1}, "connector option include_output_tokens must be true or false"),
        ({"chunk_bytes": 1 << 20, "staging_bytes": 7 << 20}, "staging_bytes must be at least eight times chunk_bytes"),
        ({"staging": "host"}, "unknown connector options ['staging']"),
        (
            {"layers": 3},
            'layers must be a list of whole numbers from 0 on and "final", or "eagle3", or {"draft": "PATH or id"}, not 3',
        ),
        (
            {"layers": []},
            'layers must be a list of whole numbers from 0 on and "final", or "eagle3", or {"draft": "PATH or id"}, not []',
        ),
        (
            {"layers": [1, "last"]},
            '"eagle3", or {"draft": "PATH or id"}, not [1, \'last\']',
        ),
        ({"layers": [True]}, "layers must be a list of whole numbers from 0 on"),
        ({"layers": [-1]}, "layers must be a list of whole numbers from 0 on"),
        ({"layers": [2, 2]}, "layers must not name a layer twice: [2, 2]"),
        ({"layers": list(range(1025))}, "layers names 1025 layers, more than the 1024 allowed"),
        ({"layers": [1], "row_pool_bytes": 10}, "row_pool_bytes must be a whole number from"),
        ({"row_pool_bytes": 1 << 30}, "row_pool_bytes needs layers"),
        ({"sender": "both"}, "sender must be one of ['auto', 'thread', 'process']"),
    ],
)
def test_a_wrong_option_is_named(options: dict[str, object], sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ConnectorOptions.from_extra(options)
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)
