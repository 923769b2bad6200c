"""Which layers are meant by a list, by "eagle3", or by a draft model: told from configs, before any model is loaded.

Layer id i is the residual stream after i of the model's L layers. L itself is what the last norm gets, and "final" is what it
gives. Those who train on the wrong one are not told, so this is decided in one place.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from slotstream.wire.errors import ConfigError
from slotstream.wire.names import FINAL

EAGLE3 = "eagle3"
DRAFT = "draft"
_CONFIG = "config.json"
_CONFIG_BYTES_MAX = 16 << 20


def resolve_layers(asked: object, num_layers: int, draft: Mapping[str, Any] | None = None) -> tuple[int | str, ...]:
    """The layers that are asked for of a model of so many layers: ids, ascending, and "final" after them.

    asked: a list of ids and "final"; "eagle3": what vLLM's models give an EAGLE-3 draft whose config names no layers, and L;
    {"draft": PATH or id}: what that draft's config asks for, and L. draft: that config; None: it is read.
    Raises ConfigError, in a sentence that says what to change.
    """
    if asked == EAGLE3:
        return _checked([*eagle3_layers(num_layers), num_layers], num_layers, '"eagle3"')
    if isinstance(asked, Mapping):
        if set(asked) != {DRAFT} or not isinstance(asked[DRAFT], str) or not asked[DRAFT]:
            raise ConfigError(f'layers of a draft are {{"{DRAFT}": "PATH or id"}}, not {dict(asked)!r}')
        name = asked[DRAFT]
        config = read_config(name) if draft is None else draft
        return _checked([*draft_layers(config, num_layers, name), num_layers], num_layers, f"draft {name!r}")
    if isinstance(asked, str) or not isinstance(asked, Sequence):
        raise ConfigError(
            f'layers are a list of layer ids and "{FINAL}", "{EAGLE3}", or {{"{DRAFT}": "PATH or id"}}, not {asked!r}'
        )
    return _checked(asked, num_layers, f"layers {list(asked)}")


def eagle3_layers(num_layers: int) -> tuple[int, ...]:
    """What vLLM's models give an EAGLE-3 draft whose config names no layers, ascending."""
    return tuple(sorted({2, num_layers // 2, max(0, num_layers - 3)}))


def draft_layers(config: Mapping[str, Any], num_layers: int, name: str) -> tuple[int, ...]:
    """The layers of its target that a draft of this config gets, as our ids. Raises ConfigError where it does not say."""
    for owner, key, plus in _PLACES:
        held = config.get(owner) if owner else config
        ids = held.get(key) if isinstance(held, Mapping) else None
        if ids:
            if not isinstance(ids, Sequence) or not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
                raise ConfigError(f"{key} of draft {name!r} is not a list of layer ids: {ids!r}")
            if key == "dspark_target_layer_ids" and config.get("model_type") == "deepseek_v41":
                plus = 0  # It gets what goes into these layers.
            return tuple(i + plus for i in ids)
    kinds = (config.get(key) for key in ("speculators_model_type", "model_type", "architectures"))
    if any("eagle3" in str(kind).lower() for kind in kinds):
        return eagle3_layers(num_layers)
    raise ConfigError(f"the config of draft {name!r} does not say which layers it gets: name them, as a list")


# Where drafts' configs name layers: (the object that holds the key, or none; the key; what to add). The first that is there
# counts, as in vLLM. The targets of DFlash and DSpark are counted from the first layer's output on, which is our 1.
_PLACES = (
    ("", "eagle_aux_hidden_state_layer_ids", 0),
    ("eagle_config", "eagle_aux_hidden_state_layer_ids", 0),
    ("", "aux_hidden_state_layer_ids", 0),
    ("dflash_config", "target_layer_ids", 1),
    ("", "dspark_target_layer_ids", 1),
    ("", "target_layer_ids", 1),
    ("dflash_config", "layer_ids", 0),
    ("eagle_config", "layer_ids", 0),
)


def read_config(path_or_id: str) -> Mapping[str, Any]:
    """The config of a model here, or of the Hugging Face hub where huggingface_hub is installed. Raises ConfigError."""
    path = Path(path_or_id)
    file = path / _CONFIG if path.is_dir() else path
    try:
        if not file.is_file():
            from huggingface_hub import hf_hub_download

            file = Path(hf_hub_download(path_or_id, _CONFIG))
        with file.open("rb") as opened:
            config = json.loads(opened.read(_CONFIG_BYTES_MAX))
    except Exception as error:  # Of the file, of JSON, of the hub: its errors have no common class.
        raise ConfigError(f"the config of draft {path_or_id!r} cannot be read: {type(error).__name__}: {error}") from error
    if not isinstance(config, Mapping):
        raise ConfigError(f"the config of draft {path_or_id!r} is not a JSON object")
    return config


def _checked(asked: Sequence[object], num_layers: int, what: str) -> tuple[int | str, ...]:
    ids = {layer for layer in asked if layer != FINAL}
    wrong = [i for i in ids if isinstance(i, bool) or not isinstance(i, int) or not 0 <= i <= num_layers]
    if wrong or not asked:
        raise ConfigError(
            f"{what}: {wrong or 'no layer'} must be layer ids from 0 to {num_layers}, the number of this model's layers, "
            f'and "{FINAL}"'
        )
    numbers = sorted(i for i in ids if isinstance(i, int))
    return (*numbers, FINAL) if FINAL in asked else tuple(numbers)
