"""The command line, `slotstream <command>`. Here: which commands there are, and what becomes of their failures.

A command's module is imported only when the command is used, and grpc, torch and rich only when they are needed, so that
`slotstream --help` is instant and a server without torch starts. Each module has, per command X, `add_X_arguments(parser)`
and `run_X(arguments) -> int`.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

from slotstream.cli.common import note
from slotstream.cli.parser import Parser

EXIT_FAILURE = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141
DEBUG_VARIABLE = "SLOTSTREAM_DEBUG"


class Command(NamedTuple):
    module: str
    summary: str
    takes_rest: bool = False  # What stands behind `--` is not its own.


COMMANDS = {
    "serve": Command("serve", "run the storage server"),
    "status": Command("status", "show how the server is: engines, rates, failures, disk, and what is wrong"),
    "doctor": Command("doctor", "ask what must be right here and at the server, and say what to change"),
    "ls": Command("samples", "list samples, newest first"),
    "stat": Command("samples", "show all that is known about samples"),
    "get": Command("get", "fetch a sample's rows into a safetensors file"),
    "capture": Command("capture", "send a file of prompts to vLLM, and store their samples", takes_rest=True),
    "export": Command("export", "write samples as the files that trainers read"),
    "rm": Command("rm", "delete samples"),
    "ack": Command("hold", "say that a reader is done with samples"),
    "lease": Command("hold", "keep samples from being deleted for a time"),
    "verify": Command("verify", "check stored samples against their hashes"),
    "restore": Command("restore", "take samples out of the quarantine that verify again"),
    "flags": Command("flags", "print the flags that vllm serve needs for a model, or check them"),
    "certify": Command("certify", "prove that an engine with your flags captures every row right", takes_rest=True),
    "retention": Command("retention", "show what retention rules would delete, and accept them"),
    "migrate": Command("migrate", "make the tables of a catalogue in PostgreSQL, or bring them up to this version"),
    "copy": Command("copy", "copy the samples of a data directory into a bucket and its catalogue"),
    "rebuild": Command("rebuild", "bring a catalogue in PostgreSQL up to what the bucket holds"),
    "web": Command("web", "show samples and the server's state to a browser"),
    "token": Command("token", "make a bearer token, and its entry for the server's tokens file"),
    "demo": Command("serve", "capture hidden states with a tiny model, end to end"),
}

_EPILOG = """\
examples:
  slotstream serve --listen 127.0.0.1:50151 --data /var/lib/slotstream
  slotstream ls --since 15m --state committed
  slotstream get my-sample -o my-sample.safetensors --layers 2,18
  slotstream verify

exit codes:
  0    done
  1    failed; one sentence on stderr says why
  2    the command line or an environment variable is wrong
  130  interrupted with Ctrl-C
  141  the reader of the output went away
  slotstream verify has codes of its own, one a class of damage: see its --help
  slotstream status exits with 1 where it found a problem

environment:
  SLOTSTREAM_SERVER  the server that the commands talk to where --server is not given (default: 127.0.0.1:50151)
  SLOTSTREAM_TOKEN, SLOTSTREAM_TOKEN_FILE                       the bearer token for it, or a file with the token
  SLOTSTREAM_TLS_CA, SLOTSTREAM_TLS_CERT, SLOTSTREAM_TLS_KEY    PEM files, where it wants TLS (see docs/security.md)
  SLOTSTREAM_SERVE_...  the options of slotstream serve: see its --help
  SLOTSTREAM_DEBUG   when set, unexpected faults show their traceback
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command line, `sys.argv` by default; the process's exit code. argparse itself raises SystemExit."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    # No option of `slotstream` itself takes a value, so the first word is the command.
    name = next((word for word in arguments if not word.startswith("-")), "")
    return guarded(name, lambda: _run(name, arguments))


def _run(name: str, arguments: list[str]) -> int:
    parser = Parser(
        prog="slotstream",
        description="Stream a model's hidden states out of vLLM into a storage server, and read them back.",
        epilog=_EPILOG,
    )
    parser.add_argument("--version", action=_VersionAction, nargs=0, help="print the version and exit")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True, title="commands")
    for each, command in COMMANDS.items():
        subparser = commands.add_parser(
            each,
            help=command.summary,
            description=command.summary[0].upper() + command.summary[1:] + ".",
        )
        if each == name:
            module = importlib.import_module(f"slotstream.cli.{command.module}")
            getattr(module, f"add_{name}_arguments")(subparser)
    if name and name not in COMMANDS:
        parser.unknown("command", name, COMMANDS)
    rest: list[str] = []
    if name in COMMANDS and COMMANDS[name].takes_rest and "--" in arguments:
        at = arguments.index("--")
        arguments, rest = arguments[:at], arguments[at + 1 :]
    parsed = parser.parse_args(arguments)
    parsed.rest = rest
    parsed.words = arguments[arguments.index(name) + 1 :]
    run: Callable[[argparse.Namespace], int] = getattr(module, f"run_{name}")
    code = run(parsed)
    sys.stdout.flush()  # Here, where a reader that went away is still handled.
    return code


def guarded(name: str, run: Callable[[], int]) -> int:
    """What `run` returns; a failure becomes one sentence on stderr and an exit code."""
    from slotstream.cli.common import CommandFailed
    from slotstream.wire.errors import ConfigError, SlotStreamError

    try:
        return run()
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The interpreter flushes stdout once more when it exits, and would complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE
    except ConfigError as error:
        return _complain(name, str(error), EXIT_USAGE)
    except SlotStreamError as error:
        return _complain(name, f"{error} ({error.code})", EXIT_FAILURE)
    except (CommandFailed, MemoryError) as error:
        return _complain(name, str(error) or type(error).__name__, EXIT_FAILURE)
    except OSError as error:
        where = f"{error.filename}: " if error.filename is not None else ""
        return _complain(name, f"{where}{error.strerror or error}", EXIT_FAILURE)
    except Exception as error:
        if os.environ.get(DEBUG_VARIABLE):
            raise
        fault = " ".join(f"{type(error).__name__}: {error}".split())
        return _complain(name, f"unexpected fault, {fault} ({DEBUG_VARIABLE}=1 shows where)", EXIT_FAILURE)


def _complain(name: str, sentence: str, code: int) -> int:
    note(f"slotstream {name}: {sentence}")
    return code


class _VersionAction(argparse.Action):
    """Looks the version up only when it is asked for."""

    def __call__(self, parser: argparse.ArgumentParser, *unused: object) -> None:
        from importlib.metadata import version

        print(f"slotstream {version('slotstream')}")
        parser.exit()


if __name__ == "__main__":
    sys.exit(main())
