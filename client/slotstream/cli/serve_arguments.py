"""The options of `slotstream serve`, made of the fields of `ServerConfig`, and the configuration that they make."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, fields
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_type_hints

from slotstream.cli import units
from slotstream.server.config import ServerConfig
from slotstream.store.upkeep.retention import Policy
from slotstream.wire.errors import ConfigError


def add_serve_arguments(parser: argparse.ArgumentParser) -> None:
    """Add every option of the server to `parser`."""
    kinds = get_type_hints(ServerConfig)
    for field in fields(ServerConfig):
        if field.metadata:
            _add(parser, field, kinds[field.name])
    parser.add_argument(
        "--no-malloc-tuning",
        action="store_true",
        help="do not restart with the glibc malloc settings that make large messages cheaper",
    )
    parser.add_argument(
        "--check-config",
        action="store_true",
        help="check every option and every file that they name, say what is wrong, and exit",
    )


def _add(parser: argparse.ArgumentParser, field: Field[Any], kind: Any) -> None:
    told, more = field.metadata, dict[str, Any]()
    if field.default is not MISSING:
        more["default"] = None if "more" in told else field.default
    elif field.default_factory is MISSING:
        more["required"] = True
    if kind is bool:
        more["action"] = "store_true"
    elif "choices" in told:
        more["choices"] = told["choices"]
    else:
        more |= {"metavar": told["unit"], "type": _parser(told, kind)}
    if "more" in told:
        more["action"] = "append"
    shown = "" if more.get("required") else f" (default: {_default(field)})"
    parser.add_argument(told["flag"], dest=field.name, help=told["help"] + shown, **more)


def _default(field: Field[Any]) -> str:
    """The default as help and the reference page show it."""
    told, value = field.metadata, field.default
    if "shown" in told:
        return str(told["shown"])
    return "none" if value is None else f"{value:04o}" if "octal" in told else str(value)


def _parser(told: Mapping[str, Any], kind: Any) -> Callable[[str], Any]:
    """What reads a value of type `kind` and of the unit that the field tells, or the file that it is made of."""
    if "octal" in told:
        return _octal
    if told["unit"] in ("BYTES", "SECONDS"):
        return units.size if told["unit"] == "BYTES" else units.seconds
    (kind,) = (one for one in get_args(kind) or (kind,) if one is not NoneType)
    return Path if kind is Policy else kind


def _octal(text: str) -> int:
    try:
        return int(text, 8)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not an octal file mode") from None


def config_from_arguments(arguments: argparse.Namespace) -> ServerConfig:
    """The configuration that the parsed options make. Raises ConfigError."""
    values = {field.name: getattr(arguments, field.name) for field in fields(ServerConfig) if field.metadata}
    listen, *also_listen = values["listen"] or [ServerConfig.__dataclass_fields__["listen"].default]
    rules = values["retention"]
    policy = Policy() if rules is None else Policy.from_toml(rules, free_bytes_min=arguments.free_bytes_min)
    return ServerConfig(**{**values, "listen": listen, "also_listen": tuple(also_listen), "retention": policy})


def check(config: ServerConfig) -> None:
    """Looks into every file that the options name, as a start would. Raises ConfigError. Creates, locks and binds nothing."""
    from slotstream.server.access.tls import Certificates
    from slotstream.server.access.tokens import load_tokens

    if config.tokens_file is not None:
        load_tokens(config.tokens_file)
    if config.tls_cert is not None:
        Certificates(config)
    existing = next(path for path in (config.data_dir.absolute(), *config.data_dir.absolute().parents) if path.exists())
    if not existing.is_dir():
        raise ConfigError(f"--data: {existing} is not a directory")
    if not os.access(existing, os.R_OK | os.W_OK | os.X_OK):
        raise ConfigError(f"--data: {existing} cannot be written by this user")
