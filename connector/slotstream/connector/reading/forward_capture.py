"""The model's forward pass with a capture in it: what it answers is what it always answered, and rows go into their pages.

vLLM's models can give the residual stream after chosen layers beside their answer (`set_aux_hidden_state_layers`). Here it is
taken out of the answer again and written; a drafter that asked for layers of its own gets exactly those.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from slotstream.connector.reading.row_pages import RowPages
from slotstream.connector.reading.row_write import write_rows
from slotstream.connector.vllm_config import logged_refusal
from slotstream.transport.logs import connector_logger
from slotstream.wire.errors import ConfigError

logger = connector_logger(__name__)


class ForwardCapture:
    """Of one model. `asked` are the ids that the model was told, ascending; `ours` those that are stored, then `final`.

    `drafters`: the ids that vLLM's drafter wants, None where vLLM expects a bare tensor. `pages`: None on ranks that store no
    rows.
    """

    def __init__(
        self,
        model_name: str,
        asked: Sequence[int],
        ours: Sequence[int],
        drafters: Sequence[int] | None,
        *,
        final: bool,
        hidden: int,
        dtype: torch.dtype,
        pages: RowPages | None,
    ) -> None:
        self.pages = pages
        self.layer = ""  # Whose slot mapping names the rows; known with the KV cache.
        self.final_norm: str | None = None  # See `describe_last_norm`.
        self.serving = False  # Until then a model that answers otherwise than expected stops the start.
        self.off = False
        self._model_name = model_name
        self._asked = tuple(asked)
        self._ours = [self._asked.index(layer_id) for layer_id in ours]
        self._drafters = None if drafters is None else [self._asked.index(layer_id) for layer_id in drafters]
        self._final = final
        self._expected = (hidden, dtype)
        self.tried = False  # Whether the model has answered at all.
        self._checked = False

    def wrap(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """`forward` with the capture in it. Its signature stays: vLLM reads it."""

        @functools.wraps(forward)
        def captured(*args: Any, **kwargs: Any) -> Any:
            try:
                output = forward(*args, **kwargs)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:
                if self.tried or not self._asked:
                    raise  # Not because of its layers.
                with logged_refusal():
                    raise ConfigError(
                        f"{self._model_name} does not run when it is to give its layers {list(self._asked)} "
                        f"({type(error).__name__}: {str(error).partition(chr(10))[0]}): try other layers, and whether vLLM "
                        "starts without slotstream"
                    ) from error
            self.tried = True
            return self.take(output)

        return captured

    def take(self, output: Any) -> Any:
        """What the model would have answered without us. Once the engine serves, nothing raises here."""
        if hasattr(output, "tensors"):  # IntermediateTensors: this rank of a pipeline hands on to the next.
            return output
        hidden, layers = output if self._asked and isinstance(output, tuple) and len(output) == 2 else (output, [])
        try:
            if not self.off:
                self._check(hidden, layers)
                self._store(hidden, layers)
        except Exception as error:
            if not self.serving:
                raise
            self._give_up(error)
        if self._drafters is None:
            return hidden
        return hidden, [layers[at] for at in self._drafters]

    def _check(self, hidden: Any, layers: Sequence[torch.Tensor]) -> None:
        """Once: whether the model answers as its interface says. Raises ConfigError."""
        if self._checked:
            return
        width, dtype = self._expected
        wrong = [x for x in (hidden, *layers) if x.dtype != dtype or x.ndim != 2 or x.shape[1] != width]
        if len(layers) != len(self._asked) or wrong or any(x.shape[0] != hidden.shape[0] for x in layers):
            shapes = [[str(x.dtype).removeprefix("torch."), *x.shape] for x in (hidden, *layers)]
            only_layers = not any(x is hidden for x in wrong)
            with logged_refusal():
                raise ConfigError(
                    f"{self._model_name} does not give its layers {list(self._asked)} as vLLM says it does: it answers "
                    f"{shapes}, and not {1 + len(self._asked)} tensors [tokens, {width}] of {dtype}; "
                    + ('only "layers": ["final"] can be captured of it' if only_layers else "it cannot be captured directly")
                )
        self._checked = True

    def _store(self, hidden: torch.Tensor, layers: Sequence[torch.Tensor]) -> None:
        pages = self.pages
        if pages is None or not self.layer:
            return
        if not pages.live and not (pages.device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
            return  # Nobody's rows. But a graph that is recorded now runs when somebody's are.
        from vllm.forward_context import get_forward_context

        mapping = get_forward_context().slot_mapping
        if not isinstance(mapping, dict) or self.layer not in mapping:
            return  # A pass that computes no request's tokens: memory is being measured, or kernels are warmed up.
        rows = [layers[at] for at in self._ours]
        if self._final:
            rows.append(hidden)
        write_rows(pages, rows, mapping[self.layer])

    def _give_up(self, error: Exception) -> None:
        """Capture is off until vLLM restarts: samples fail, and say so; the text goes on."""
        self.off = True
        logger.error("slotstream: rows could not be written, and capture is off until vLLM restarts", exc_info=error)
        if self.pages is not None:
            with contextlib.suppress(Exception):  # The device may take no work any more.
                self.pages.switch_off()


captures: weakref.WeakValueDictionary[str, ForwardCapture] = weakref.WeakValueDictionary()
"""The captures in this process, by `ConnectorConfig.instance`. Each is set when its model is loaded, and ends with it."""
