"""The capture in a model's forward pass: what the engine gets is what it would have got, and nothing raises once it serves."""

from __future__ import annotations

import inspect
import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from slotstream.connector.reading import forward_capture
from slotstream.connector.reading.forward_capture import ForwardCapture
from slotstream.wire.errors import ConfigError

HIDDEN = 8


def make(asked: tuple[int, ...] = (1, 3), ours: tuple[int, ...] = (1, 3), **more: Any) -> ForwardCapture:
    options: dict[str, Any] = {"drafters": None, "final": False, "pages": None, **more}
    drafters = options.pop("drafters")
    return ForwardCapture("TinyModel", asked, ours, drafters, hidden=HIDDEN, dtype=torch.float32, **options)


def answer(layers: int = 2, tokens: int = 5) -> tuple[torch.Tensor, list[torch.Tensor]]:
    return torch.full((tokens, HIDDEN), 9.0), [torch.full((tokens, HIDDEN), float(at)) for at in range(layers)]


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[list[float]]:
    """The first element of each layer of each write, in the order of the pool."""
    seen: list[list[float]] = []
    monkeypatch.setattr(forward_capture, "write_rows", lambda pages, rows, slots: seen.append([float(r[0, 0]) for r in rows]))

    class Context:
        slot_mapping = {"attn": torch.arange(5)}  # noqa: RUF012

    import sys
    import types

    module = types.ModuleType("vllm.forward_context")
    module.get_forward_context = lambda: Context  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm.forward_context", module)
    return seen


def at_work(capture: ForwardCapture, live: int = 1) -> ForwardCapture:
    pages = SimpleNamespace(live=live, device=torch.device("cpu"), switch_off=lambda: None)
    capture.pages, capture.layer, capture.serving = pages, "attn", True  # type: ignore[assignment]
    return capture


def test_the_layers_are_taken_out_of_the_answer(written: list[list[float]]) -> None:
    capture = at_work(make())
    hidden, layers = answer()
    assert capture.take((hidden, layers)) is hidden
    assert written == [[0.0, 1.0]]


def test_no_row_is_written_while_nobody_has_a_page_unless_a_graph_is_recorded(
    written: list[list[float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    capture = at_work(make(), live=0)
    hidden, layers = answer()
    assert capture.take((hidden, layers)) is hidden
    assert written == []
    capture.pages.device = torch.device("cuda")  # type: ignore[union-attr]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    capture.take(answer())
    assert written == [[0.0, 1.0]]


def test_final_is_the_answer_itself_and_comes_last(written: list[list[float]]) -> None:
    capture = at_work(make(final=True))
    capture.take(answer())
    assert written == [[0.0, 1.0, 9.0]]
    alone = at_work(make((), (), final=True))
    hidden, _ = answer()
    assert alone.take(hidden) is hidden
    assert written[1:] == [[9.0]]


def test_a_drafter_gets_exactly_its_layers(written: list[list[float]]) -> None:
    """The model gives 1, 2, 3, 5; we store 1 and 3; the drafter asked for 2, 3 and 5."""
    capture = at_work(make((1, 2, 3, 5), (1, 3), drafters=(2, 3, 5)))
    hidden, layers = answer(4)
    given = capture.take((hidden, layers))
    assert given[0] is hidden
    assert [x is y for x, y in zip(given[1], layers[1:], strict=True)] == [True] * 3
    assert isinstance(given[1], list)
    assert written == [[0.0, 2.0]]


def test_a_rank_that_hands_on_is_left_alone(written: list[list[float]]) -> None:
    class Intermediate:
        tensors: dict[str, torch.Tensor] = {}  # noqa: RUF012

    onwards = Intermediate()
    assert at_work(make()).take(onwards) is onwards
    assert written == []


def test_the_signature_of_the_forward_pass_stays() -> None:
    def forward(input_ids: torch.Tensor, positions: torch.Tensor, intermediate_tensors: Any = None) -> Any:
        return answer()

    assert inspect.signature(make().wrap(forward)) == inspect.signature(forward)


@pytest.mark.parametrize(
    ("layers", "why"),
    [
        pytest.param([torch.zeros(5, HIDDEN)], "not 3 tensors", id="too few"),
        pytest.param([torch.zeros(5, HIDDEN), torch.zeros(5, 4)], "not 3 tensors", id="another width"),
        pytest.param([torch.zeros(5, HIDDEN), torch.zeros(3, HIDDEN)], "not 3 tensors", id="fewer tokens"),
        pytest.param(
            [torch.zeros(5, HIDDEN), torch.zeros(5, HIDDEN, dtype=torch.float64)], "not 3 tensors", id="another dtype"
        ),
    ],
)
def test_a_model_that_answers_otherwise_stops_the_start(layers: list[torch.Tensor], why: str) -> None:
    with pytest.raises(ConfigError, match=f"TinyModel does not give its layers .*{why}") as caught:
        make().take((torch.zeros(5, HIDDEN), layers))
    assert "\n" not in str(caught.value)
    assert str(caught.value).endswith('only "layers": ["final"] can be captured of it')
    with pytest.raises(ConfigError, match=r"it cannot be captured directly$"):
        make().take((torch.zeros(5, HIDDEN + 1), layers))


def test_a_model_that_cannot_run_with_its_layers_stops_the_start_and_later_faults_are_its_own() -> None:
    def forward(broken: bool) -> Any:
        if broken:
            raise TypeError("unsupported operand\nand more")
        return answer()

    captured = make().wrap(forward)
    with pytest.raises(
        ConfigError, match=r"TinyModel does not run when it is to give its layers \[1, 3\] \(TypeError"
    ) as caught:
        captured(broken=True)
    assert "\n" not in str(caught.value)
    assert str(caught.value).endswith("try other layers, and whether vLLM starts without slotstream")
    captured(broken=False)
    with pytest.raises(TypeError, match="unsupported operand"):
        captured(broken=True)


def test_once_the_engine_serves_a_fault_switches_capture_off_and_is_said_once(
    written: list[list[float]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    capture = at_work(make(drafters=(1, 3)))

    def broken(*args: object) -> None:
        raise RuntimeError("the kernel is gone")

    monkeypatch.setattr(forward_capture, "write_rows", broken)
    logger = logging.getLogger("vllm.slotstream")
    logger.propagate = True
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            hidden, layers = answer()
            given = capture.take((hidden, layers))
            assert given[0] is hidden
            assert len(given[1]) == 2
    assert capture.off
    assert [r.getMessage() for r in caplog.records].count(
        "slotstream: rows could not be written, and capture is off until vLLM restarts"
    ) == 1
