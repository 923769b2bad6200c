"""The option `layers` by name: what it may be, and that a model which means other layers stops the start."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from slotstream.connector.options import ConnectorOptions
from slotstream.connector.reading.vllm_seams import check_eagle3
from slotstream.wire.errors import ConfigError


@pytest.mark.parametrize(
    ("layers", "named"),
    [("eagle3", "eagle3"), ({"draft": "some/draft"}, {"draft": "some/draft"}), ([1, "final"], None), (None, None)],
    ids=str,
)
def test_layers_are_named_or_listed(layers: Any, named: Any) -> None:
    options = ConnectorOptions.from_extra({"layers": layers})
    assert options.named_layers == named
    assert hash(options.layers) is not None


@pytest.mark.parametrize(
    "layers",
    ["eagle", ["eagle3"], ["draft", "x"], {"draft": ""}, {"draft": 7}, {"drafts": "x"}, {"draft": "x", "y": "z"}, [], 7, ""],
    ids=str,
)
def test_other_names_are_refused(layers: Any) -> None:
    with pytest.raises(ConfigError, match=r'connector option layers must be a list .* or "eagle3", or'):
        ConnectorOptions.from_extra({"layers": layers})


class _Model(torch.nn.Module):
    def __init__(self, *named: int) -> None:
        super().__init__()
        self._named = named

    def get_eagle3_default_aux_hidden_state_layers(self) -> tuple[int, ...]:
        return self._named


def test_a_model_that_names_other_layers_stops_the_start() -> None:
    check_eagle3(_Model(2, 18, 33), (2, 18, 33, 36))
    check_eagle3(torch.nn.Module(), (2, 18, 33, 36))  # Another check refuses it.
    with pytest.raises(ConfigError, match=r'write "layers": \[3, 17, 30, 36\]'):
        check_eagle3(_Model(3, 17, 30), (2, 18, 33, 36))
