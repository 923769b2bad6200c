"""`slotstream flags`: the flags that `vllm serve` needs for a model, told and checked from its config.json before a start."""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

from slotstream.cli.common import add_json_argument, print_json, size_text
from slotstream.wire.errors import ConfigError
from slotstream.wire.names import DEFAULT_ADDRESS, FINAL

if TYPE_CHECKING:
    from slotstream.connector.options import ConnectorOptions

_CONFIG = "config.json"
_CONFIG_BYTES_MAX = 16 << 20
_DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}


class _Model(NamedTuple):
    """What its config.json says. `dtype`: that of its rows in vLLM, in safetensors' spelling."""

    name: str
    layers: int
    hidden: int
    dtype: str


def add_flags_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a model's folder, or its id where the hub's cache has it")
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--layers", metavar="LAYERS", type=_layers, default="eagle3", help="eagle3, or such as 2,18,33,final (default: eagle3)"
    )
    which.add_argument(
        "--draft", metavar="PATH", help="the layers that this draft model's config asks for: a folder or an id (default: none)"
    )
    which.add_argument(
        "--check",
        metavar="JSON",
        type=_json_object,
        help="say whether the connector takes this --kv-transfer-config, or these options of its own (default: print flags)",
    )
    parser.add_argument(
        "--connect", metavar="ADDR", default=DEFAULT_ADDRESS, help="the storage server to send to (default: %(default)s)"
    )
    parser.add_argument(
        "--dtype", choices=("auto", *_DTYPES), default="auto", help="vLLM's --dtype (default: auto, as in config.json)"
    )
    parser.add_argument(
        "--max-num-batched-tokens", metavar="N", type=int, default=8192, help="vLLM's flag, for sizes (default: %(default)s)"
    )
    parser.add_argument(
        "--max-num-seqs", metavar="N", type=int, default=1024, help="vLLM's flag, for sizes (default: %(default)s)"
    )
    add_json_argument(parser)
    parser.epilog = """\
Reads config.json alone: no weights, no GPU, and nothing is downloaded.

examples:
  slotstream flags Qwen/Qwen3-8B
  slotstream flags ./model --layers 2,18,33,final --connect unix:/run/slotstream.sock
  slotstream flags ./model --draft ./eagle3-draft
  slotstream flags ./model --check '{"layers": [2, 99]}'
"""


def run_flags(arguments: argparse.Namespace) -> int:
    from slotstream.connector.options import ConnectorOptions

    model = _model(arguments.model, arguments.dtype)
    if arguments.check is not None:
        options = ConnectorOptions.from_extra(_own_options(arguments.check))
        if options.layers is None and options.named_layers is None:
            raise ConfigError('name the layers to capture: add "layers" to kv_connector_extra_config')
        told = _told(model, options, arguments)
        print(f"The connector takes these options for {model.name}: layers {_words(told['layer_names'])}.")
        return 0
    asked: Any = arguments.layers if arguments.draft is None else {"draft": _absolute(arguments.draft)}
    extra = {"server": arguments.connect, "layers": list(asked) if isinstance(asked, tuple) else asked}
    told = _told(model, ConnectorOptions.from_extra(extra), arguments)
    transfer = {
        "kv_connector": "SlotStreamConnector",
        "kv_connector_module_path": "slotstream.connector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": extra,
    }
    if arguments.json:
        print_json({"model": model.name, "kv_transfer_config": transfer, **told})
        return 0
    print(f"vllm serve {shlex.quote(arguments.model)} --kv-transfer-config {shlex.quote(json.dumps(transfer))}\n")
    print("\n".join(_facts(model, told, asked, arguments)))
    return 0


def _told(model: _Model, options: ConnectorOptions, arguments: argparse.Namespace) -> dict[str, Any]:
    """The connector's own answers for this model, by its own functions. Raises ConfigError where it would."""
    from slotstream.connector.reading.staging_plan import StagingPlan, step_tokens_max
    from slotstream.connector.row_pool import pool_rows
    from slotstream.wire.columns import RowFormat
    from slotstream.wire.layers import resolve_layers

    asked: Any = options.named_layers if options.named_layers is not None else options.layers
    draft = read_config(asked["draft"], "draft") if isinstance(asked, Mapping) else None
    names = resolve_layers(asked, model.layers, draft)
    row_bytes = RowFormat.of(model.dtype, len(names), model.hidden).row_bytes
    # Of vLLM's configuration and the connector's they ask for no more than this.
    vllm: Any = SimpleNamespace(
        scheduler_config=SimpleNamespace(
            max_num_batched_tokens=arguments.max_num_batched_tokens, max_num_seqs=arguments.max_num_seqs
        )
    )
    layer_ids = [model.layers + 1 if name == FINAL else name for name in names]
    connector: Any = SimpleNamespace(options=options, row_bytes=row_bytes, layer_ids=layer_ids, direct=True)
    return {
        "layer_names": [str(name) for name in names],
        "layer_ids": layer_ids,
        "bytes_per_token": row_bytes,
        "row_pool_bytes": pool_rows(connector, vllm) * row_bytes,
        "staging_bytes": StagingPlan.of(connector, step_tokens_max(vllm)).shape.nbytes,
    }


def _facts(model: _Model, told: dict[str, Any], asked: Any, arguments: argparse.Namespace) -> list[str]:
    steps = f"for --max-num-batched-tokens {arguments.max_num_batched_tokens} --max-num-seqs {arguments.max_num_seqs}"
    lines = [
        f"model    {model.layers} layers, {model.hidden} elements a row and layer, {model.dtype}",
        f"layers   {_words(told['layer_names'])}",
        f"bytes    {told['bytes_per_token']} a token",
        f"pool     {size_text(told['row_pool_bytes'])} of GPU memory, {steps}",
        f"staging  {size_text(told['staging_bytes'])} of host memory",
    ]
    if asked == "eagle3":
        *low, last = told["layer_names"]
        lines.append(
            f"why      an EAGLE-3 draft reads its target after {', '.join(low)} of {model.layers} layers: near the start, in "
            f"the middle, near the end. Layer {last} is what the last norm gets, which the draft learns to continue."
        )
    return lines


def _words(names: list[str]) -> str:
    return ", ".join(names)


def _own_options(given: Mapping[str, Any]) -> Mapping[str, Any]:
    """The connector's options in a --kv-transfer-config, or `given` itself. Raises ConfigError for what vLLM would not run."""
    if "kv_connector" not in given:
        return given
    if given["kv_connector"] == "MultiConnector":
        extra = given.get("kv_connector_extra_config")
        inner = extra.get("connectors") if isinstance(extra, Mapping) else None
        ours = [one for one in inner or () if isinstance(one, Mapping) and one.get("kv_connector") == "SlotStreamConnector"]
        if len(ours) != 1:
            raise ConfigError(f"the connectors of this MultiConnector hold SlotStreamConnector {len(ours)} times, and not once")
        return _own_options(ours[0])
    if given["kv_connector"] != "SlotStreamConnector":
        raise ConfigError(f'kv_connector is {given["kv_connector"]!r}, and not "SlotStreamConnector"')
    if given.get("kv_connector_module_path") != "slotstream.connector":
        raise ConfigError('set "kv_connector_module_path": "slotstream.connector"')
    if given.get("kv_role") != "kv_producer":
        raise ConfigError(f'slotstream only sends: set "kv_role": "kv_producer", not {given.get("kv_role")!r}')
    extra = given.get("kv_connector_extra_config", {})
    if not isinstance(extra, Mapping):
        raise ConfigError(f"kv_connector_extra_config must be an object, not {extra!r}")
    return extra


def _model(name: str, dtype: str) -> _Model:
    """Raises ConfigError."""
    config = read_config(name, "model")
    inner = config.get("text_config")
    text = inner if isinstance(inner, Mapping) else config
    layers, hidden = text.get("num_hidden_layers"), text.get("hidden_size")
    if type(layers) is not int or type(hidden) is not int or layers < 1 or hidden < 1:
        raise ConfigError(f"the {_CONFIG} of {name} does not say num_hidden_layers and hidden_size")
    if dtype == "auto":
        told = [holder.get(key) for holder in (text, config) for key in ("dtype", "torch_dtype")]
        dtype = next((str(one).removeprefix("torch.") for one in told if one), "bfloat16")
        dtype = "bfloat16" if dtype not in _DTYPES or dtype == "float32" else dtype  # As vLLM does it.
    return _Model(name, layers, hidden, _DTYPES[dtype])


def read_config(name: str, what: str) -> Mapping[str, Any]:
    """The config of a model here, or in the hub's cache. Raises ConfigError."""
    path = Path(name)
    file = path / _CONFIG if path.is_dir() else path
    if not file.is_file():
        file = _cached(name, what)
    try:
        with file.open("rb") as opened:
            config = json.loads(opened.read(_CONFIG_BYTES_MAX))
    except (OSError, ValueError) as error:
        raise ConfigError(f"the config of {what} {name!r} cannot be read: {error}") from error
    if not isinstance(config, Mapping):
        raise ConfigError(f"the config of {what} {name!r} is not a JSON object")
    return config


def _cached(name: str, what: str) -> Path:
    try:
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(name, _CONFIG)
    except (ImportError, ValueError):  # The latter: what can be no id.
        found = None
    if not isinstance(found, str):
        raise ConfigError(f"there is no {what} {name!r}: neither a folder with a {_CONFIG}, nor in the hub's cache")
    return Path(found)


def _absolute(name: str) -> str:
    return str(Path(name).resolve()) if Path(name).exists() else name


def _layers(text: str) -> str | tuple[int | str, ...]:
    if text == "eagle3":
        return text
    try:
        return tuple(word if word == FINAL else int(word) for word in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither eagle3 nor a list of layers such as 2,18,33,final") from None


def _json_object(text: str) -> Mapping[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise argparse.ArgumentTypeError(f"this is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError("this is no JSON object")
    return value
