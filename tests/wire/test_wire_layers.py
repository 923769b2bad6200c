"""Layers by list, by "eagle3" and by a draft's config."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from slotstream.wire.errors import ConfigError
from slotstream.wire.layers import resolve_layers


@pytest.mark.parametrize(
    ("asked", "layers"),
    [
        ([18, 2, "final", 33], (2, 18, 33, "final")),
        (["final"], ("final",)),
        ([0, 36], (0, 36)),
        ((36, 0), (0, 36)),
        ("eagle3", (2, 18, 33, 36)),
    ],
    ids=str,
)
def test_layers_of_a_model_of_36(asked: Any, layers: tuple[int | str, ...]) -> None:
    assert resolve_layers(asked, 36) == layers


def test_eagle3_of_a_small_model_names_no_layer_twice() -> None:
    assert resolve_layers("eagle3", 4) == (1, 2, 4)
    assert resolve_layers("eagle3", 2) == (0, 1, 2)


@pytest.mark.parametrize(
    ("config", "layers"),
    [
        ({"eagle_aux_hidden_state_layer_ids": [33, 2, 18]}, (2, 18, 33, 36)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 9]}}, (1, 9, 36)),
        ({"dflash_config": {"target_layer_ids": [1, 17, 35]}}, (2, 18, 36)),
        ({"target_layer_ids": [0, 3]}, (1, 4, 36)),
        ({"dspark_target_layer_ids": [3]}, (4, 36)),
        ({"dspark_target_layer_ids": [3], "model_type": "deepseek_v41"}, (3, 36)),
        ({"architectures": ["LlamaForCausalLMEagle3"]}, (2, 18, 33, 36)),
        ({"speculators_model_type": "eagle3"}, (2, 18, 33, 36)),
        ({"eagle_aux_hidden_state_layer_ids": None, "architectures": ["Eagle3Qwen3ForCausalLM"]}, (2, 18, 33, 36)),
    ],
    ids=str,
)
def test_a_draft_asks_for_its_layers(tmp_path: Path, config: dict[str, Any], layers: tuple[int, ...]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    for path in (tmp_path, tmp_path / "config.json"):
        assert resolve_layers({"draft": str(path)}, 36) == layers
    assert resolve_layers({"draft": "some/draft"}, 36, config) == layers


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ([37], "from 0 to 36"),
        ([-1], "from 0 to 36"),
        ([True], "from 0 to 36"),
        (["last"], "from 0 to 36"),
        ([], "no layer"),
        ("eagle", "eagle3"),
        (7, "eagle3"),
        ({"draft": 7}, "draft"),
        ({"drafts": "a"}, "draft"),
        ({"draft": "a", "more": 1}, "draft"),
        ({"draft": "/nowhere/at/all"}, "cannot be read"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused(asked: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        resolve_layers(asked, 36)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "cannot be read"),
        ("[]", "not a JSON object"),
        ("{}", "does not say which layers"),
        ('{"architectures": 5}', "does not say which layers"),
        ('{"eagle_aux_hidden_state_layer_ids": "2,3"}', "not a list"),
        ('{"eagle_aux_hidden_state_layer_ids": [40]}', "from 0 to 36"),
    ],
)
def test_a_draft_that_does_not_say_is_refused(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=says):
        resolve_layers({"draft": str(tmp_path)}, 36)
