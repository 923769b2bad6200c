"""Where an option of `slotstream serve` may stand beside the command line: in the environment, and in a TOML file.

A flag goes before a variable, and a variable before the file. What neither of the latter two knows is refused.
"""

from __future__ import annotations

import argparse
import difflib
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slotstream.wire.errors import ConfigError

PREFIX = "SLOTSTREAM_SERVE_"
FILE_VARIABLE = PREFIX + "CONFIG"
_FILE_BYTES_MAX = 1 << 20
_SHOWN_MAX = 80  # Characters of a value that a message repeats.
_SWITCH = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One option. `name`: its field in ServerConfig. `read` raises ArgumentTypeError or ValueError for a wrong value.

    `switch`: it is on or off. `many`: it may be repeated. `number`: the file may say a bare number. `file`: it is a path.
    """

    name: str
    flag: str
    read: Callable[[str], Any]
    switch: bool
    many: bool
    number: bool
    file: bool

    @property
    def key(self) -> str:
        """Its name in the file."""
        return self.flag.removeprefix("--").replace("-", "_")

    @property
    def variable(self) -> str:
        """Its name in the environment."""
        return PREFIX + self.key.upper()


@dataclass(frozen=True, slots=True)
class Setting:
    """The value of an option, and where it stands; None: on the command line."""

    value: Any
    place: str | None


def gather(options: Sequence[Option], arguments: argparse.Namespace, environ: Mapping[str, str]) -> dict[str, Setting]:
    """All that is set, by the option's `name`. `arguments` hold what the command line has. Raises ConfigError."""
    variables = _from_environment(options, environ)
    named = environ.get(FILE_VARIABLE) if arguments.config is None else arguments.config
    file = None if named is None else Path(named)
    return {
        **({} if file is None else from_toml(options, _content(file), file)),
        **variables,
        **{o.name: Setting(getattr(arguments, o.name), None) for o in options if hasattr(arguments, o.name)},
    }


def places(sentence: str, options: Sequence[Option], settings: Mapping[str, Setting]) -> str:
    """` (--flag: PLACE)` for the flags in an error's sentence that stand elsewhere than on the command line."""
    flags = set(re.findall(r"--[a-z-]+", sentence))
    found = [(o.flag, s.place) for o in options if o.flag in flags and (s := settings.get(o.name)) and s.place is not None]
    return f" ({', '.join(f'{flag}: {place}' for flag, place in found)})" if found else ""


def _from_environment(options: Sequence[Option], environ: Mapping[str, str]) -> dict[str, Setting]:
    given = {name: text for name, text in environ.items() if name.startswith(PREFIX)}
    if given.pop(FILE_VARIABLE, None) == "":
        raise ConfigError(f"{FILE_VARIABLE} is empty: name a file, or unset it")
    known = {option.variable: option for option in options}
    if unknown := sorted(given.keys() - known.keys()):
        keys = {variable.removeprefix(PREFIX): variable for variable in (*known, FILE_VARIABLE)}
        raise ConfigError(_unknown("variable", ((name, name.removeprefix(PREFIX).upper(), keys) for name in unknown)))
    found = {}
    for name, text in given.items():
        option = known[name]
        try:
            found[option.name] = Setting(_value_of_variable(option, text), name)
        except (argparse.ArgumentTypeError, ValueError) as error:
            raise ConfigError(f"{name}: {_sentence(error, text)}") from error
    return found


def _value_of_variable(option: Option, text: str) -> Any:
    if not text:
        raise argparse.ArgumentTypeError("it is empty: give it a value, or unset it")
    if option.switch:
        if text.lower() not in _SWITCH:
            raise argparse.ArgumentTypeError(f"{_shown(text)} is neither true nor false")
        return _SWITCH[text.lower()]
    return [_read(option, one.strip()) for one in text.split(",")] if option.many else _read(option, text)


def from_toml(options: Sequence[Option], content: bytes, path: Path) -> dict[str, Setting]:
    """All that the content of a file sets. `path`: where the file is. Raises ConfigError, naming the file and the key."""
    try:
        document = tomllib.loads(content.decode())
    except (ValueError, RecursionError) as error:  # No TOML, no UTF-8, or a number of thousands of digits.
        raise ConfigError(f"--config: {path} is not TOML: {error}") from error
    known = {option.key: option for option in options}
    keys = {key.replace("-", "_"): key for key in document}
    if len(keys) < len(document):
        (twice, *_) = (key for key in document if keys[key.replace("-", "_")] != key)
        raise ConfigError(f"--config: {path}: {_shown(twice)} is there twice, with - and with _")
    if unknown := sorted(keys.keys() - known.keys()):
        near = {key: key for key in known}
        raise ConfigError(f"--config: {path}: " + _unknown("key", ((keys[key], key, near) for key in unknown)))
    found = {}
    for key, written in keys.items():
        option, value = known[key], document[written]
        try:
            found[option.name] = Setting(_value_in_file(option, value, path.parent), f"{written} in {path}")
        except (argparse.ArgumentTypeError, ValueError) as error:
            raise ConfigError(f"--config: {path}: {written}: {_sentence(error, value)}") from error
    return found


def _content(path: Path) -> bytes:
    try:
        with path.open("rb") as opened:
            content = opened.read(_FILE_BYTES_MAX + 1)
    except OSError as error:
        raise ConfigError(f"--config: cannot read {path}: {error.strerror or error}") from error
    if len(content) > _FILE_BYTES_MAX:
        raise ConfigError(f"--config: {path} is longer than {_FILE_BYTES_MAX} bytes")
    return content


def _value_in_file(option: Option, value: Any, folder: Path) -> Any:
    """A path counts from the file's folder. Raises ArgumentTypeError or ValueError."""
    if option.switch:
        if not isinstance(value, bool):
            raise argparse.ArgumentTypeError("it must be true or false")
        return value
    if option.many and isinstance(value, list):
        if not value:
            raise argparse.ArgumentTypeError("it is empty: give it a value, or leave it out")
        return [_read(option, _text(option, one)) for one in value]
    read = _read(option, _text(option, value))
    return [read] if option.many else folder / read if option.file else read


def _text(option: Option, value: Any) -> str:
    if isinstance(value, str) or (option.number and isinstance(value, int | float) and not isinstance(value, bool)):
        return str(value)
    raise argparse.ArgumentTypeError(f"it must be a {'number or a string' if option.number else 'string'}")


def _read(option: Option, text: str) -> Any:
    if not text:
        raise argparse.ArgumentTypeError("it is empty: give it a value, or leave it out")
    if "\0" in text:
        raise argparse.ArgumentTypeError("it has a zero byte in it")
    return option.read(text)


def _sentence(error: Exception, value: object) -> str:
    """What the reader of a value says of it; int() says it in no plain words."""
    return str(error) if isinstance(error, argparse.ArgumentTypeError) else f"{_shown(value)} is no whole number"


def _unknown(kind: str, found: Iterable[tuple[str, str, Mapping[str, str]]]) -> str:
    """`found`: each as it is written, as it is compared, and what there is to compare it with."""
    sentences = []
    for written, word, known in found:
        near = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
        sentences.append(f"unknown {kind} {_shown(written)}" + (f"; did you mean {known[near[0]]}?" if near else ""))
    return "; ".join(sentences)


def _shown(value: object) -> str:
    try:
        text = repr(value)
    except ValueError:  # An integer of thousands of digits.
        return "this integer"
    return text if len(text) <= _SHOWN_MAX else f"{text[:_SHOWN_MAX]}..."
