"""The parser of the command line: options are written out, and a mistyped one is answered by its own command."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """argparse's, which counts the names of commands without their indentation: the longest would have a line of its own."""

    def add_arguments(self, actions: Iterable[argparse.Action]) -> None:
        super().add_arguments(actions)
        self._action_max_length += self._indent_increment


class Parser(argparse.ArgumentParser):
    """argparse's, with two differences. Options have no short forms: `--y` is no `--yes`. And what is not known ends here.

    argparse hands what a command does not know to the parser above it, whose usage names no option of the command.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        options = {"formatter_class": _Formatter, **options, "allow_abbrev": False}
        super().__init__(*arguments, **options)

    more = ""  # What to say where a command got more arguments than it takes.

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Never leaves anything over: exits with 2 where it would."""
        self._refuse_unknown_options(args or ())
        parsed, unknown = super().parse_known_args(args, namespace)
        if unknown:
            if self.more and not unknown[0].startswith("-"):
                self.error(self.more)
            self.error(f"unexpected {'argument' if len(unknown) == 1 else 'arguments'}: {' '.join(unknown)}")
        return parsed, unknown

    def _refuse_unknown_options(self, words: Sequence[str]) -> None:
        """Before argparse looks for what is missing: what is mistyped may be what it would miss."""
        for word in words:
            name = word.partition("=")[0]
            if word == "--" or (self._subparsers is not None and not word.startswith("-")):
                return  # From here on they are no options, or the command's.
            if word.startswith("--") and " " not in name and name not in self._option_string_actions:
                self.unknown("option", name, self._option_string_actions)

    def unknown(self, kind: str, word: str, known: Iterable[str]) -> NoReturn:
        """Exits with 2, naming what `word` is probably meant to be."""
        near = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
        self.error(f"unknown {kind} {word!r}" + (f"; did you mean {near[0]}?" if near else ""))
