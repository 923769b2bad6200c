"""What a request may say of a loss mask, and the byte that each row of its sample gets."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.worker_rig import config

from slotstream.connector.planning.captured_request import CapturedRequest
from slotstream.connector.planning.loss_mask import LossMask, parse_loss_mask
from slotstream.connector.planning.request_params import CaptureParams, parse_params
from slotstream.connector.planning.scheduler import SchedulerHalf
from slotstream.wire.errors import BadParams, BadTokenRange, SlotStreamError


def _params(loss_mask: object, **more: object) -> CaptureParams:
    inner = {"loss_mask": loss_mask, "sample_id": "s", **more}
    return parse_params({"slotstream": inner}, req_id="r", namespace="n", capture=True, include_output_tokens=False)


def test_a_mask_is_spans_or_the_output() -> None:
    assert _params([[0, 3], [3, 4], (9, 12)]).loss_mask == LossMask(((0, 3), (3, 4), (9, 12)))
    assert _params([]).loss_mask == LossMask(())
    assert _params("output").loss_mask == LossMask(None)
    assert _params(None).loss_mask is None
    assert _params([[2 * i, 2 * i + 1] for i in range(512)]).loss_mask is not None


@pytest.mark.parametrize(
    ("asked", "kind", "sentence"),
    [
        ("all", BadParams, 'loss_mask must be [[start, stop], ...], at most 512 spans of token positions, or "output"'),
        (True, BadParams, "at most 512 spans"),
        ({"0": 3}, BadParams, "at most 512 spans"),
        ([0, 3], BadParams, "at most 512 spans"),
        ([[0, 3, 4]], BadParams, "at most 512 spans"),
        ([[0, None]], BadParams, "at most 512 spans"),
        ([[0, True]], BadParams, "at most 512 spans"),
        ([[0, 2.0]], BadParams, "at most 512 spans"),
        ([[-1, 2]], BadParams, "at most 512 spans"),
        ([[0, 1 << 41]], BadParams, "at most 512 spans"),
        ([[2 * i, 2 * i + 1] for i in range(513)], BadParams, "at most 512 spans"),
        ([[3, 3]], BadTokenRange, "loss_mask [3, 3] holds no token"),
        ([[5, 7], [6, 9]], BadTokenRange, "one begins at 6, before the last one ends at 7"),
        ([[5, 7], [1, 2]], BadTokenRange, "loss_mask spans must ascend"),
    ],
)
def test_another_mask_is_refused_in_a_sentence(asked: object, kind: type[SlotStreamError], sentence: str) -> None:
    with pytest.raises(kind) as caught:
        _params(asked)
    assert sentence in str(caught.value)


_spans = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 9)), max_size=9)


@given(_spans, st.integers(0, 30), st.integers(1, 30), st.integers(1, 40))
def test_each_row_has_the_byte_of_its_token(pairs: list[tuple[int, int]], start: int, rows: int, prompt: int) -> None:
    counted: set[int] = set()
    spans, at = [], 0
    for gap, length in pairs:
        spans.append((at + gap, at + gap + length))
        counted.update(range(*spans[-1]))
        at = spans[-1][1]
    window = range(start, start + rows)
    mask = parse_loss_mask(spans)
    assert mask is not None
    assert mask.rows(start, start + rows, prompt) == bytes(p in counted for p in window)
    assert LossMask(None).rows(start, start + rows, prompt) == bytes(p >= prompt for p in window)


def _request(params: CaptureParams, prompt: int, output: int) -> Any:
    return SimpleNamespace(
        request_id="r",
        num_prompt_tokens=prompt,
        all_token_ids=list(range(100, 100 + prompt + output)),
        mm_features=[],
        sampling_params=None,
        is_finished=lambda: True,
        get_finished_reason=lambda: "stop",
    )


def test_the_sample_is_opened_with_the_column_and_ends_with_its_rows() -> None:
    params = _params([[1, 3], [6, 50]], tokens=[2, None], include_output_tokens=True)
    capture = CapturedRequest(_request(params, prompt=5, output=4), params, start=2, stop=20, next=2)
    assert capture.sample_open().columns == ("loss_mask",)
    finish = capture.sample_finish(8)  # The text ended early: what the mask names behind it is left out.
    assert finish.columns.values == {"loss_mask": bytes([1, 0, 0, 0, 1, 1])}
    assert len(finish.token_ids) == 6
    outputs = _params("output", include_output_tokens=True)
    capture = CapturedRequest(_request(outputs, prompt=5, output=4), outputs, start=0, stop=20, next=0)
    assert capture.sample_finish(8).columns.values == {"loss_mask": bytes([0, 0, 0, 0, 0, 1, 1, 1])}


def test_a_sample_without_a_mask_has_no_column() -> None:
    params = _params(None)
    capture = CapturedRequest(_request(params, prompt=5, output=4), params, start=0, stop=5, next=0)
    assert capture.sample_open().columns == ()
    assert capture.sample_finish(5).columns.values == {}


@pytest.mark.parametrize(("spans", "code"), [([[0, 8]], None), ([[0, 3], [4, 9]], "BAD_TOKEN_RANGE")])
def test_a_span_past_prompt_and_output_is_refused(spans: object, code: str | None) -> None:
    half = SchedulerHalf(config(), 0, 4, 1000, lambda longer_than_s: None)
    request: Any = SimpleNamespace(
        request_id="r",
        kv_transfer_params={"slotstream": {"loss_mask": spans}},
        prompt_token_ids=[1, 2, 3],
        num_prompt_tokens=3,
        max_tokens=5,
    )
    blocks: Any = SimpleNamespace(blocks=([SimpleNamespace(block_id=1)],))
    half.on_alloc(request, blocks)
    assert ("r" in half._live) == (code is None)
    if code is not None:
        _, answer = half.on_finished(request, [1])
        assert answer is not None
        assert answer["slotstream"]["error"] == {
            "code": code,
            "message": "loss_mask [4, 9] ends past the 8 tokens that prompt and output can have",
        }
