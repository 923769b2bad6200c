"""The options of `slotstream serve`, made of the fields of `ServerConfig`, and the configuration that they make.

`serve_settings` says where they may stand beside the command line.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping
from dataclasses import Field, fields
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_type_hints

from slotstream.cli import serve_settings, units
from slotstream.server import shared_store
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
        "--config",
        metavar="FILE",
        help=f"TOML file of these options; a flag and a variable {serve_settings.PREFIX}... go before it",
    )
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
    told = field.metadata
    more: dict[str, Any] = {"default": argparse.SUPPRESS}  # What no flag says may stand elsewhere.
    if kind is bool:
        more["action"] = "store_true"
    elif "choices" in told:
        more["choices"] = told["choices"]
    else:
        more |= {"metavar": told["unit"], "type": _parser(told, kind)}
    if "more" in told:
        more["action"] = "append"
    parser.add_argument(told["flag"], dest=field.name, help=f"{told['help']} (default: {_default(field)})", **more)


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


def server_options() -> list[serve_settings.Option]:
    """Those that a variable and the file may set: the fields of ServerConfig."""
    kinds = get_type_hints(ServerConfig)
    return [
        serve_settings.Option(
            name=field.name,
            flag=told["flag"],
            read=_parser(told, kinds[field.name]),
            switch=kinds[field.name] is bool,
            many="more" in told,
            number=told["unit"] in ("BYTES", "SECONDS", "N"),
            file=told["unit"] in ("DIR", "FILE"),
        )
        for field in fields(ServerConfig)
        if (told := field.metadata)
    ]


def config_from_arguments(arguments: argparse.Namespace, environ: Mapping[str, str] | None = None) -> ServerConfig:
    """The configuration that flags, variables and the file make. Raises ConfigError.

    `environ`: the variables, by default this process's.
    """
    options = server_options()
    settings = serve_settings.gather(options, arguments, os.environ if environ is None else environ)
    if "catalogue" in settings and settings["catalogue"].place is None:
        shared_store.check_command_line(settings["catalogue"].value)
    values = {name: setting.value for name, setting in settings.items()}
    if "listen" in values:
        values["listen"], *also_listen = values["listen"]
        values["also_listen"] = tuple(also_listen)
    try:
        if "retention" in values:
            room = values.get("free_bytes_min", ServerConfig.__dataclass_fields__["free_bytes_min"].default)
            values["retention"] = Policy.from_toml(values["retention"], free_bytes_min=room)
        return ServerConfig(**values)
    except ConfigError as error:
        raise ConfigError(f"{error}{serve_settings.places(str(error), options, settings)}") from error


def check(config: ServerConfig) -> None:
    """Looks into every file that the options name, as a start would. Raises ConfigError. Creates, locks and binds nothing,
    but for small objects in the bucket of --store, which it removes again.
    """
    from slotstream.server.access.tls import Certificates
    from slotstream.server.access.tokens import load_tokens

    if config.tokens_file is not None:
        load_tokens(config.tokens_file)
    if config.tls_cert is not None:
        Certificates(config)
    option, directory = ("--scratch", config.scratch) if config.scratch is not None else ("--data", config.data_dir)
    existing = next(path for path in (directory.absolute(), *directory.absolute().parents) if path.exists())
    if not existing.is_dir():
        raise ConfigError(f"{option}: {existing} is not a directory")
    if not os.access(existing, os.R_OK | os.W_OK | os.X_OK):
        raise ConfigError(f"{option}: {existing} cannot be written by this user")
    if config.store is not None:
        shared_store.check_shared_store(config)
