"""vLLM's flags: which the user gave, which the truth model must have otherwise, and why."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slotstream.wire.errors import ConfigError

MODEL_NAME = "truth"
_CONNECTOR = "SlotStreamConnector"
_TRANSFER, _DRAFTER = "--kv-transfer-config", "--speculative-config"
_SHORT = {
    **{"-tp": "--tensor-parallel-size", "-pp": "--pipeline-parallel-size", "-dp": "--data-parallel-size"},
    **{"-q": "--quantization", "-asc": "--api-server-count", "-sc": _DRAFTER, "-cc": "--compilation-config"},
    **{"-ep": "--enable-expert-parallel", "-ac": "--attention-config"},
}
# Why a flag of the user's goes, and which flags these are; one that ends in "*" is all that begin so.
_GO: dict[str, tuple[str, ...]] = {
    "it is of the real model's files": (
        *("--tokenizer*", "--hf-*", "--config-format", "--revision", "--code-revision", "--load-format", "--download-dir"),
        *("--model-loader-extra-config", "--generation-config", "--override-generation-config", "--skip-tokenizer-init"),
        *("--safetensors-*", "--ignore-patterns", "--pt-load-map-location", "--model-class-overrides"),
    ),
    "the truth model's weights are bfloat16": ("--quantization*", "--allow-deprecated-quantization"),
    "the truth model has no adapters": ("--lora-modules", "--default-mm-loras"),
    "the truth model takes text alone": (
        *("--limit-mm-per-prompt", "--mm-*", "--media-io-kwargs", "--enable-mm-embeds", "--language-model-only"),
        *("--skip-mm-profiling", "--interleave-mm-strings", "--video-pruning-*", "--allowed-local-*", "--allowed-media-*"),
    ),
    "the truth model needs no experts' own flags": (
        *("--enable-expert-parallel", "--enable-eplb", "--eplb-config", "--expert-placement-strategy", "--all2all-backend"),
        *("--moe-backend", "--enable-ep-weight-filter", "--enable-elastic-ep"),
    ),
    "this engine is asked on a port of its own, by this command alone": (
        *("--host", "--port", "--uds", "--api-key", "--ssl-*", "--enable-ssl-refresh", "--root-path", "--middleware"),
        *("--served-model-name", "--headless", "--api-server-count", "--allowed-origins", "--allowed-methods"),
        *("--allowed-headers", "--allow-credentials", "--kv-events-config", "--otlp-traces-endpoint"),
        *("--collect-detailed-traces", "--fd-*", "--grpc", "--grpc-port"),
    ),
    "the truth model is no chat model": (
        *("--chat-template*", "--trust-request-chat-template", "--reasoning-*", "--tool-*", "--enable-auto-tool-choice"),
        *("--response-role", "--default-chat-template-kwargs", "--structured-outputs-config"),
    ),
    "vLLM's own counts are read": ("--disable-log-stats", "--no-enable-metrics"),
}
# vLLM has no --no-... of these: `false` for one in a --config file says nothing.
_SWITCHES = (
    *("--disable-log-stats", "--headless", "--grpc", "--aggregate-engine-logging"),
    "--data-parallel-multi-port-external-lb",
)
# Whose values may hold keys and passwords: the report is passed on, and says only that they were set.
_SECRET = (
    *("--api-key", "--hf-token", "--ssl-*", "--model-loader-extra-config", "--kv-events-config", "--otlp-traces-endpoint"),
    "--middleware",
)


@dataclass(frozen=True, slots=True)
class Flag:
    """One flag with its values, as it was written; `name` in vLLM's own spelling."""

    name: str
    words: tuple[str, ...]

    @property
    def value(self) -> str:
        """Its values; "" for one without."""
        first = self.words[0].partition("=")[2]
        return " ".join([first] * bool(first) + list(self.words[1:]))

    def __str__(self) -> str:
        return " ".join((self.name, self.value)).rstrip()


@dataclass(frozen=True, slots=True)
class Override:
    """A flag that the truth model has otherwise. `yours` and `ours` are values; None where the flag is not there.

    `yours` is "set" where the value may be a secret.
    """

    flag: str
    yours: str | None
    ours: str | None
    why: str


class Flags:
    """What stands behind `vllm serve`: the model, and flags."""

    def __init__(self, words: Sequence[str]) -> None:
        """Raises ConfigError where they name no model, or in a way that is not understood."""
        self.model, self._flags = _read(list(words))
        for one in self._flags:
            if "." in one.name and one.name.partition(".")[0] in (_TRANSFER, _DRAFTER):
                raise ConfigError(f"write {one.name.partition('.')[0]} as one JSON object, not in parts")
        self._flags = _joined(self._flags)
        self.overrides: list[Override] = []

    def words(self) -> list[str]:
        """The flags as a command line has them, without the model."""
        return [word for one in self._flags for word in one.words]

    def has(self, *names: str) -> bool:
        """Whether one of them is there."""
        return any(one.name in names for one in self._flags)

    def value(self, name: str) -> str | None:
        """Of the last one of this name, as vLLM takes it; None without."""
        found = [one.value for one in self._flags if one.name == name]
        return found[-1] if found else None

    def number(self, name: str) -> int | None:
        """As `value`, for a count, also as in 8k or 32K; None without, or where it is "auto". Raises ConfigError."""
        text = self.value(name)
        if text is None or text in ("auto", "-1"):
            return None
        count = _count(text)
        if count is None:
            raise ConfigError(f"{name} {text!r} is not a whole number")
        return count

    def json(self, name: str) -> Any:
        """As `value`, parsed; None without. Raises ConfigError."""
        text = self.value(name)
        if text is None:
            return None
        try:
            return json.loads(text)
        except ValueError as error:
            raise ConfigError(f"{name} is not JSON: {error}") from error

    def set(self, name: str, value: str | None, why: str) -> None:
        """Give the flag this value; None: take it away. Noted as an override where that changes something."""
        yours = self.value(name)
        if yours == value:
            return
        self._flags = [one for one in self._flags if one.name != name]
        if value is not None:
            self._flags.append(Flag(name, (name, value)))
        if yours is not None and any(_matches(name, pattern) for pattern in _SECRET):
            yours = "set"
        before = [one for one in self.overrides if one.flag == name]
        self.overrides = [one for one in self.overrides if one.flag != name]
        self.overrides.append(Override(name, before[0].yours if before else yours, value, why))

    def drop_what_is_of_the_real_model(self) -> None:
        """Take away what no truth model can have."""
        for why, patterns in _GO.items():
            for one in list(self._flags):
                if any(_matches(one.name, pattern) for pattern in patterns):
                    self.set(one.name, None, why)
        if (drafter := self.drafter()) and not drafter[1]:
            for name in (_DRAFTER, "--spec-method", "--spec-model", "--spec-tokens"):
                self.set(name, None, "the drafter is trained for the real model")

    def drafter(self) -> tuple[str, bool] | None:
        """The method of speculative decoding, and whether the truth model can have it: it needs no weights of its own."""
        config = self.json(_DRAFTER)
        if isinstance(config, Mapping):
            method = str(config.get("method") or config.get("model") or "a draft model")
            free = method in ("ngram", "ngram_gpu", "suffix", "extract_hidden_states", "[ngram]")
            return method, free
        if self.has("--spec-method", "--spec-model"):
            method = self.value("--spec-method") or "a draft model"
            return method, method in ("ngram", "ngram_gpu", "suffix") and not self.has("--spec-model")
        return None

    def extracted(self) -> list[int] | None:
        """The layers that vLLM's own `extract_hidden_states` gives; None where it is not used. Raises ConfigError."""
        config = self.json(_DRAFTER)
        if not isinstance(config, Mapping) or config.get("method") != "extract_hidden_states":
            return None
        try:
            ids = config["draft_model_config"]["hf_config"]["eagle_aux_hidden_state_layer_ids"]
            return [int(layer_id) for layer_id in ids]
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"{_DRAFTER} does not say eagle_aux_hidden_state_layer_ids") from error

    def connector(self) -> dict[str, Any]:
        """The options of our connector. Raises ConfigError where the flags have none, or not one."""
        return _own(self._transfer())

    def _transfer(self) -> dict[str, Any]:
        transfer = self.json(_TRANSFER)
        if not isinstance(transfer, dict):
            raise ConfigError(f"the flags have no {_TRANSFER} with slotstream's connector: slotstream flags MODEL prints one")
        return transfer

    def connect_to(self, address: str, spool: str) -> None:
        """Let our connector send to `address` and nowhere else."""
        transfer = copy.deepcopy(self._transfer())
        own = _own(transfer)
        for name, value, why in (
            ("server", address, "a server of this command's own"),
            ("spool_dir", spool if own.get("spool_dir") is not None else None, "a folder of this command's own"),
            *((name, None, "its own server asks for none") for name in ("tls_ca", "tls_cert", "tls_key", "token_file")),
        ):
            yours = own.pop(name, None)
            if value is not None:
                own[name] = value
            if yours != value:
                shown = None if yours is None else str(yours)
                self.overrides.append(Override(f"connector option {name}", shown, value, why))
        self._flags = [one for one in self._flags if one.name != _TRANSFER]
        self._flags.append(Flag(_TRANSFER, (_TRANSFER, json.dumps(transfer))))


def _own(transfer: dict[str, Any]) -> dict[str, Any]:
    """The options of our connector in a --kv-transfer-config, which may hold it in a MultiConnector. May be written to."""
    found = list(_connectors(transfer))
    if len(found) != 1:
        raise ConfigError(f"{_TRANSFER} holds {_CONNECTOR} {len(found)} times, and not once")
    extra = found[0].setdefault("kv_connector_extra_config", {})
    if not isinstance(extra, dict):
        raise ConfigError(f"kv_connector_extra_config must be an object, not {extra!r}")
    return extra


def _connectors(transfer: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Ours, by its name, or a class of the user's own: what is told to be of a module, and is not vLLM's."""
    own = "kv_connector_module_path" in transfer and transfer.get("kv_connector") != "MultiConnector"
    if (own or transfer.get("kv_connector") == _CONNECTOR) and isinstance(transfer, dict):
        yield transfer
    extra = transfer.get("kv_connector_extra_config")
    inner = extra.get("connectors") if isinstance(extra, Mapping) else None
    for one in inner if isinstance(inner, list) else []:
        if isinstance(one, Mapping):
            yield from _connectors(one)


def _read(words: list[str]) -> tuple[str, list[Flag]]:
    if words[:2] == ["vllm", "serve"]:
        words = words[2:]
    model = words.pop(0) if words and not words[0].startswith("-") else None
    flags = _grouped(words)
    files = [one for one in flags if one.name == "--config"]
    if len(files) > 1:
        raise ConfigError("--config names more than one file")
    # What stands on the command line counts before what a file says: the last one does.
    flags = _grouped(_of_file(files[0].value)) + [one for one in flags if one.name != "--config"] if files else flags
    named = [one.value for one in flags if one.name == "--model"]
    flags = [one for one in flags if one.name != "--model"]
    if (model := model or (named[-1] if named else None)) is None:
        raise ConfigError("name the model first, as for vllm serve: slotstream certify -- MODEL FLAGS...")
    return model, flags


def _grouped(words: list[str]) -> list[Flag]:
    """Each flag with the values behind it. Raises ConfigError for a word that is of none."""
    flags = list[Flag]()
    while words:
        first = words.pop(0)
        if not _is_flag(first):
            raise ConfigError(f"{first!r} is no flag of vLLM's: the model's name stands first")
        more = []
        while words and not _is_flag(words[0]):
            more.append(words.pop(0))
        flags.append(Flag(_name(first), (first, *more)))
    return flags


def _joined(flags: list[Flag]) -> list[Flag]:
    """With --FLAG.KEY VALUE as one --FLAG of JSON behind all others, as vLLM has it. Raises ConfigError for one without."""
    found: dict[str, dict[str, Any]] = {}
    for one in flags:
        _, *keys = one.name.removesuffix("+").split(".")
        if not keys:
            continue
        head = one.words[0].partition(".")[0].replace("_", "-")  # A short form counts as another flag: vLLM joins by spelling.
        if not one.value:
            raise ConfigError(f"{one.name} has no value")
        more: Any = one.value.split(",") if one.name.endswith("+") else _parsed(one.value)
        for key in reversed(keys):
            more = {key: more}
        _merge(found.setdefault(head, {}), more)
    joined = [Flag(_name(head), (head, json.dumps(value))) for head, value in found.items()]
    return [one for one in flags if "." not in one.name] + joined


def _merge(into: dict[str, Any], more: Mapping[str, Any]) -> None:
    for key, value in more.items():
        there = into.get(key)
        if isinstance(there, dict) and isinstance(value, dict):
            _merge(there, value)
        elif isinstance(there, list) and isinstance(value, list):
            there += value
        else:
            into[key] = value


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        count = _count(text)
        return text if count is None else count


def _count(text: str) -> int | None:
    """A whole number, also as in 8k or 32K; None for anything else."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([kKmMgGtT]?)", text)
    if match is None:
        return None
    unit = match[2]
    scale = (1000 if unit.islower() else 1024) ** ("kmgt".index(unit.lower()) + 1) if unit else 1
    return int(float(match[1]) * scale)


def _of_file(name: str) -> list[str]:
    """The words of vLLM's own --config file. Raises ConfigError."""
    import yaml  # vLLM needs it, too.

    try:
        said = yaml.safe_load(Path(name).read_text("utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"--config {name}: {error}") from error
    if not isinstance(said, dict):
        raise ConfigError(f"--config {name} does not map flags to values")
    words = list[str]()
    for key, value in said.items():
        if isinstance(value, bool):
            if value:
                words.append(f"--{key}")
            elif (
                "_" not in key and f"--{key}" not in _SWITCHES
            ):  # vLLM finds no --no-... with an underscore, and leaves it out.
                words.append(f"--no-{key}")
        elif isinstance(value, list):
            words += [f"--{key}", *map(str, value)] if value else []
        else:
            words += [f"--{key}", json.dumps(value) if isinstance(value, dict) else str(value)]
    return words


def _is_flag(word: str) -> bool:
    return word.startswith("-") and not re.fullmatch(r"-[0-9.]*", word)


def _name(word: str) -> str:
    """vLLM's own spelling: dashes, no short form."""
    name = word.partition("=")[0]
    head, dot, rest = name.partition(".")
    return (head.replace("_", "-") if head.startswith("--") else _SHORT.get(head, head)) + dot + rest


def _matches(name: str, pattern: str) -> bool:
    return name.startswith(pattern[:-1]) if pattern.endswith("*") else name == pattern
