"""Targets of what an operator or a caller writes: connector options, request parameters, the server's command line."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path
from typing import Any

from fuzz_harness import Source, Target, sentence

from slotstream.cli.serve_arguments import add_serve_arguments, config_from_arguments, server_options
from slotstream.cli.serve_settings import from_toml
from slotstream.connector.options import ConnectorOptions
from slotstream.connector.planning.request_params import CaptureParams, parse_params
from slotstream.server.config import ServerConfig
from slotstream.v1 import ingest_pb2
from slotstream.wire.errors import BadNamespace, BadParams, BadSampleId, BadTags, BadTokenRange, ConfigError

_TEXTS = ("", "a", "default", "wait", "fail", "127.0.0.1:1", "unix:/x", "\ud800", "\0", "é", "../..", "x" * 300, "1e9", "nan")
_NUMBERS = (0, 1, -1, 0.5, 4096, 1 << 20, 1 << 29, 1 << 40, 1 << 63, 1 << 64, 10**400, 1e308, float("inf"), float("nan"))


def _value(source: Source, depth: int = 0) -> Any:
    match source.below(9 if depth < 3 else 6):
        case 0:
            return source.pick(_TEXTS)
        case 1:
            return source.pick(_NUMBERS)
        case 2:
            return source.pick((True, False, None))
        case 3:
            return source.text(20)
        case 4:
            return source.below(1 << 32)
        case 5:
            return source.take(8).decode("utf-8", "surrogateescape")
        case 6:
            return [_value(source, depth + 1) for _ in range(source.below(4))]
        case 7:
            return {source.pick(_TEXTS): _value(source, depth + 1) for _ in range(source.below(4))}
        case _:
            return [source.below(10), source.below(10)]


def _mapping(data: bytes, keys: tuple[str, ...]) -> Any:
    """Raw JSON where the input is JSON, else an object made of known keys and values of every kind."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        source = Source(data)
        return {source.pick(keys) if source.below(8) else source.text(9): _value(source) for _ in range(source.below(8))}


_OPTIONS = tuple(ConnectorOptions.__dataclass_fields__)


def check_options(data: bytes) -> None:
    extra = _mapping(data, _OPTIONS)
    if not isinstance(extra, dict):
        return
    try:
        options = ConnectorOptions.from_extra(extra)
    except ConfigError as error:
        sentence(error)
        return
    assert options.staging_bytes is None or options.chunk_bytes * 4 <= options.staging_bytes <= 1 << 40
    assert 0 <= options.wait_s_max <= 600
    assert ConnectorOptions.from_extra({name: getattr(options, name) for name in _OPTIONS}) == options


_KEYS = ("sample_id", "namespace", "include_output_tokens", "tokens", "capture", "tags")


def check_params(data: bytes) -> None:
    """What a request asks for is understood, or refused with a documented code; what is understood fits a message."""
    source = Source(data)
    req_id = source.text(40)
    shape = source.below(4)
    inner = _mapping(source.rest(), _KEYS)
    outer = (
        inner if shape == 3 else {"slotstream": inner, "include_output_tokens": True} if shape == 2 else {"slotstream": inner}
    )
    if not isinstance(outer, dict):
        return
    try:
        params = parse_params(outer, req_id=req_id, namespace="default", capture=True, include_output_tokens=False)
    except (BadParams, BadSampleId, BadNamespace, BadTags, BadTokenRange) as error:
        sentence(error)
        return
    _fits_a_message(params)


def _fits_a_message(params: CaptureParams) -> None:
    start, stop = params.tokens
    assert start >= 0
    assert stop is None or start < stop
    assert (type(params.capture), type(params.include_output_tokens)) == (bool, bool)
    ingest_pb2.OpenSample(namespace=params.namespace, sample_id=params.sample_id, tags=params.tags).SerializeToString()


class _Parser(argparse.ArgumentParser):
    """Whose exit after a usage error is an exception that is told apart."""

    def error(self, message: str) -> Any:
        raise argparse.ArgumentError(None, message)

    def exit(self, status: int = 0, message: str | None = None) -> Any:
        raise argparse.ArgumentError(None, "exit")


_PARSER = _Parser()
add_serve_arguments(_PARSER)
_FLAGS = tuple(action.option_strings[-1] for action in _PARSER._actions if action.dest != "help")
_WORDS = (
    "0",
    "1",
    "-1",
    "8388608",
    "1e3",
    "nan",
    "inf",
    "1" * 30,
    "9" * 400,
    "9" * 5000,
    "text",
    "json",
    "",
    "127.0.0.1:0",
    "[::]:0",
)


def check_arguments(data: bytes) -> None:
    """Every command line makes a configuration that the server can work with, or is refused in a sentence."""
    source = Source(data)
    words = ["--data", "/nowhere"]
    while source.left:
        words.append(source.pick(_FLAGS) if source.below(8) else source.text(12).replace("\0", ""))
        words.append(source.pick(_WORDS) if source.below(4) else source.text(24).replace("\0", ""))
    try:
        with redirect_stderr(StringIO()):
            config = config_from_arguments(_PARSER.parse_args(words))
    except argparse.ArgumentError:
        return
    except ConfigError as error:
        sentence(error)
        return
    _is_usable(config)


def check_serve_file(data: bytes) -> None:
    """Every content of a server's file sets options to values of their kinds, or is refused in a sentence."""
    options = {option.name: option for option in server_options()}
    try:
        found = from_toml([*options.values()], data, Path("/nowhere/serve.toml"))
    except ConfigError as error:
        sentence(error)
        return
    for name, setting in found.items():
        kind = bool if options[name].switch else list if options[name].many else str | int | float | Path
        assert isinstance(setting.value, kind)
        assert setting.place is not None


def _is_usable(config: ServerConfig) -> None:
    ingest_pb2.Welcome(window_bytes=config.window_bytes)
    assert config.log_level_number >= 0
    assert config.drain_s >= 0
    assert config.appear_grace_s >= 0


def _json_seeds(*values: Any) -> Callable[[], Iterator[bytes]]:
    return lambda: (json.dumps(value).encode() for value in values)


TARGETS = (
    Target(
        "options",
        check_options,
        8,
        256,
        _json_seeds(
            {},
            {"server": ["a:1", "unix:/x"]},
            {"server": "unix:/x", "on_full": "wait", "staging_bytes": 4194304, "chunk_bytes": 4096},
            {"wait_s_max": 1.5},
        ),
    ),
    Target(
        "params",
        check_params,
        8,
        256,
        lambda: (
            b"\x03abc\x00" + body
            for body in _json_seeds({"sample_id": "a", "tokens": [1, None], "tags": {"a": "b"}}, {"capture": False}, {})()
        ),
    ),
    Target(
        "arguments",
        check_arguments,
        3,
        128,
        lambda: (bytes((1, at % len(_FLAGS), 1, at % len(_WORDS))) for at in range(16)),
    ),
    Target(
        "serve_file",
        check_serve_file,
        8,
        256,
        lambda: (
            b'data = "d"\nlisten = ["127.0.0.1:0", "unix:/s"]\nworkers = 2\n',
            b'free-bytes-min = "10GiB"\ndrain_s = 1.5\nallow_anonymous = true\nsocket_mode = "0660"\n',
        ),
    ),
)
