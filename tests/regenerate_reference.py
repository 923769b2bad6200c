"""Writes docs/reference.md out of the code, or with --check says whether the committed page is what it would be.

Needs no vLLM and no torch. What the code holds no sentence for (a request's parameters, an answer's keys, exit codes) has its
sentence here; one that is missing or left over stops this script.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import fields
from pathlib import Path

from slotstream.cli import main as cli
from slotstream.cli.serve_arguments import add_serve_arguments
from slotstream.cli.verify import EXIT_CODES
from slotstream.connector.counters import METRICS
from slotstream.connector.options import ConnectorOptions
from slotstream.connector.planning.request_params import CaptureParams
from slotstream.server.metrics import Metrics
from slotstream.store.samples import SampleStore
from slotstream.wire import errors

PAGE = Path(__file__).resolve().parent.parent / "docs" / "reference.md"

PARAMS = {
    "sample_id": (
        "vLLM's request id",
        "`[A-Za-z0-9][A-Za-z0-9._-]{0,127}`. The same id and content are stored once; other content under that id is refused.",
    ),
    "namespace": ("the connector's `namespace`", "where the sample belongs: up to 64 characters of the same kind"),
    "capture": ("the connector's `capture`", "`false`: capture nothing of this request"),
    "include_output_tokens": (
        "the connector's `include_output_tokens`",
        "also capture the rows of the generated tokens, except the last token's: vLLM never runs it through the model",
    ),
    "tokens": ("all", "`[start, stop]`: capture only the rows of these token positions; `stop` may be `null`"),
    "loss_mask": (
        "none",
        "`[[start, stop], ...]`, up to 512 ascending spans of token positions, counted from the prompt's first token, or "
        '`"output"`: the tokens that a trainer\'s loss counts. The sample gets a column `loss_mask`: element *i* is that of '
        "the token of row *i*, not shifted. What a span names and the text never reaches is left out",
    ),
    "tags": ("none", "up to 32 short strings by name, to find the sample by"),
}
ANSWER = {
    "server": "the storage server that the rows go to; of several, all of them, with commas between",
    "sample_id": "the sample's id",
    "namespace": "its namespace",
    "num_tokens": "its rows; 0 where it failed",
    "layer_ids": "the layers of each row, ascending",
    "layer_names": "what people call them: the ids, and `final` for the output of the last norm",
    "dtype": "`BF16`, `F16` or `F32`",
    "shape": "`[rows, layers, hidden size]`",
    "error": '`{"code": ..., "message": ...}` where the request cannot be captured or its sample failed; else left out',
    "warning": "one sentence where a key of `kv_transfer_params` looks like a misspelt `slotstream`; else left out",
}
EXITS = {
    0: "done",
    cli.EXIT_FAILURE: "failed; one sentence on stderr says why",
    cli.EXIT_USAGE: "the command line or an environment variable is wrong",
    cli.EXIT_INTERRUPTED: "interrupted with Ctrl-C",
    cli.EXIT_BROKEN_PIPE: "the reader of the output went away",
}
DAMAGE = {
    "HASH_MISMATCH": "the header, the rows or the token ids are not the bytes that were committed",
    "TRUNCATED": "the file is shorter than it was committed",
    "MISSING": "a committed sample has no file",
    "UNREADABLE": "the file cannot be read, is too long, or is not the sample's",
    "FOREIGN": "a file that the catalogue does not know",
    "IO_ERROR": "nothing is damaged, but the disk did not give some file; its bytes may be sound",
    "UNSUPPORTED_FORMAT": "nothing is damaged, but some file has columns or elements that this version does not know",
}

_HEAD = """\
# Reference

`python tests/regenerate_reference.py` writes this page out of the code, and a test compares the two. Do not edit it by hand.
"""
_CONNECTOR = """\
## Connector options

They stand in `kv_connector_extra_config`. An unknown or malformed one stops vLLM at start, with one sentence.
"""
_REQUEST = """\
## Request parameters

They stand in a request's `kv_transfer_params`, under the key `slotstream`. Keys beside `slotstream` belong to other connectors.
[requests.md](requests.md) says where they go for each kind of request, and which answers vLLM leaves out.
"""
_ANSWERS = """\
## Answers

They stand in the answer's `kv_transfer_params`, under the key `slotstream`. A request that is refused before its parameters are
understood has only `server` and `error`. With the connector option `response_handle`, an answer whose sample is on its way has
`handle` beside `slotstream`: `"<namespace>/<sample_id>"`.
"""
_SERVER = """\
## Server options

`slotstream serve --help` prints the same. BYTES and SECONDS take units too: `10GiB`, `500MB`; `30s`, `1h30m`. `--retention`
takes a file of rules: [storage.md](storage.md) has its keys. [security.md](security.md) says what each limit protects.

Options may also stand in a TOML file, which `--config FILE` or the variable `SLOTSTREAM_SERVE_CONFIG` names, and in variables.
In the file, `--free-bytes-min` is the key `free_bytes_min`. Its variable is `SLOTSTREAM_SERVE_FREE_BYTES_MIN`. A flag goes
before a variable, and a variable before the file. `--config`, `--check-config` and `--no-malloc-tuning` are no keys.

```toml
data = "/var/lib/slotstream"
listen = ["unix:/run/slotstream/ingest.sock", "0.0.0.0:50151"]  # with commas in the variable
tokens = "tokens.toml"                                           # paths count from the folder of this file
free_bytes_min = "10GiB"                                         # or a number of bytes
drain_s = 30
socket_mode = "0660"                                             # always a string
allow_anonymous = false                                          # a switch: true or false
```

An unknown key, an unknown `SLOTSTREAM_SERVE_...` and an empty value stop the start. `slotstream serve --config FILE
--check-config` checks file and variables, and all files that they name.
"""
_CODES = """\
## Error codes

A code never changes its meaning. *Retry* says whether the same request can succeed later without a change. The last column is
the gRPC status that the code travels as. With `--log-format json`, the server's lines about failures have the code as a field,
and `event`, `namespace`, `sample_id`, `peer`, `engine`, `bytes` and `ms`.
"""
_CONNECTOR_METRICS = """\
## Connector metrics

They appear in vLLM's own `/metrics`, with vLLM's labels, and as one line in its periodic log. The names of counters end in
`_total` there. vLLM collects them with its steps: what happens after the last step shows with the next one.
"""
_SERVER_METRICS = """\
## Server metrics

They appear on the address that `--metrics` names. The names of counters end in `_total` there. The gRPC port also answers the
standard health service, for `""`, `slotstream.v1.Ingest` and `slotstream.v1.Samples`. The address that `--probes` names answers
over plain HTTP, with one word. `/livez` says `ok`, or `hung` with status 503. `/readyz` says `ok` or `full`, or with 503
`starting`, `draining` or `disk`.
"""
_EXITS = """\
## Commands and exit codes

`slotstream COMMAND --help` has each command's options and examples.
"""


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "".join(f"| {' | '.join(cells)} |\n" for cells in (head, ["---"] * len(head), *rows))


def _same(what: str, said: Iterable[object], known: Iterable[object]) -> None:
    """Raises ValueError where this script's sentences are not about what the code knows."""
    if difference := set(said) ^ set(known):
        raise ValueError(
            f"{what}: a sentence is missing or left over in {Path(__file__).name} for {sorted(map(str, difference))}"
        )


def _connector_options() -> str:
    return _table(
        ("option", "default", "meaning"),
        (
            (f"`{f.name}`", f"`{f.default if isinstance(f.default, str) else json.dumps(f.default)}`", f.metadata["help"])
            for f in fields(ConnectorOptions)
        ),
    )


def _request_params() -> str:
    _same("request parameters", PARAMS, (f.name for f in fields(CaptureParams)))
    return _table(("parameter", "default", "meaning"), ((f"`{name}`", *said) for name, said in PARAMS.items()))


def _server_options() -> str:
    parser = argparse.ArgumentParser(add_help=False)
    add_serve_arguments(parser)
    rows = []
    for action in parser._actions:
        flag = action.option_strings[0]
        text = (action.help or "") % {"default": action.default}
        said, _, default = text.rpartition(" (default: ")
        if action.nargs == 0:
            said, default = said or text, "off"
        elif not said:
            said, default = text.removesuffix(" (required)"), "required" if text.endswith(" (required)") else "none"
        value = "" if action.nargs == 0 else f" {action.metavar or '|'.join(action.choices or ())}"
        rows.append((f"`{flag}{value}`".replace("|", "\\|"), default.removesuffix(")"), said))
    return _table(("option", "default", "meaning"), rows)


def error_codes() -> list[type[errors.SlotStreamError]]:
    """Every class with a code of its own, by code. Raises ValueError where one has no sentence."""
    found: list[type[errors.SlotStreamError]] = [errors.InternalFault]
    for kind in vars(errors).values():
        if isinstance(kind, type) and issubclass(kind, errors.SlotStreamError) and "code" in vars(kind):
            found += [kind] * (kind is not errors.SlotStreamError)
    if silent := [kind.__name__ for kind in found if not vars(kind).get("__doc__")]:
        raise ValueError(f"these errors have no docstring that says what their code means: {silent}")
    return sorted(found, key=lambda kind: kind.code)


def _error_codes() -> str:
    return _table(
        ("code", "retry", "meaning", "exception", "gRPC status"),
        (
            (
                f"`{k.code}`",
                "yes" if k.retryable else "no",
                " ".join(str(k.__doc__).split()),
                f"`{k.__name__}`",
                f"`{k.status}`",
            )
            for k in error_codes()
        ),
    )


def _connector_metrics() -> str:
    return _table(
        ("metric", "meaning", "kind"),
        ((f"`slotstream_connector_{m.name}`", m.help, f"{m.kind}{f', by `{m.label}`' if m.label else ''}") for m in METRICS),
    )


def _server_metrics() -> str:
    with tempfile.TemporaryDirectory() as scratch:
        store = SampleStore.open(scratch)
        try:
            families = list(Metrics(store).registry.collect())
        finally:
            store.close()
    return _table(("metric", "meaning", "kind"), ((f"`{f.name}`", f.documentation, f.type) for f in families))


def _exits() -> str:
    known = {value for name, value in vars(cli).items() if name.startswith("EXIT_")}
    _same("exit codes", EXITS, {0, *known})
    _same("damage", DAMAGE, EXIT_CODES)
    codes = EXITS | {code: f"`verify`: `{name}`: {DAMAGE[name]}" for name, code in EXIT_CODES.items()}
    return (
        _table(
            ("command", "what it does"), ((f"`slotstream {name}`", command.summary) for name, command in cli.COMMANDS.items())
        )
        + "\n`slotstream verify` exits by the first damage that it finds.\n\n"
        + _table(("exit code", "meaning"), ((str(code), said) for code, said in sorted(codes.items())))
    )


def reference() -> str:
    """The whole page. Raises ValueError where a sentence is missing or left over."""
    parts = (
        (_HEAD, ""),
        (_CONNECTOR, _connector_options()),
        (_REQUEST, _request_params()),
        (_ANSWERS, _table(("key", "meaning"), ((f"`{key}`", said) for key, said in ANSWER.items()))),
        (_SERVER, _server_options()),
        (_CODES, _error_codes()),
        (_CONNECTOR_METRICS, _connector_metrics()),
        (_SERVER_METRICS, _server_metrics()),
        (_EXITS, _exits()),
    )
    return "\n".join(f"{words}\n{table}" if table else words for words, table in parts)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 when the page would change")
    check, page = parser.parse_args().check, reference()
    if not check:
        PAGE.write_text(page)
        return 0
    if not PAGE.exists() or PAGE.read_text() != page:
        print(f"docs/{PAGE.name} is stale: run `python tests/{Path(__file__).name}` and commit it", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
