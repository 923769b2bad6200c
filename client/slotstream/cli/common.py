"""What the commands share: the server option, times and sizes as people write them, and output that fits its reader."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import sys
import time
import unicodedata
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from slotstream.cli import units
from slotstream.wire.errors import SlotStreamError
from slotstream.wire.names import DEFAULT_ADDRESS, DEFAULT_NAMESPACE

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import Console
    from rich.progress import Progress, ProgressColumn
    from rich.text import Text

    from slotstream.client import Client

_AGO = re.compile(r"((?:[0-9]{1,9}[smhdw])+)(?: ago)?")
# RFC 3339, section 5.6; fromisoformat alone would also take forms that it leaves out.
_MOMENT = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}[Tt ][0-9]{2}:[0-9]{2}:[0-9]{2}(\.[0-9]+)?([Zz]|[+-][0-9]{2}:[0-9]{2})")


class CommandFailed(Exception):
    """A command cannot go on; the message is one sentence for the person at the terminal."""


def add_server_argument(parser: Any) -> None:
    """`--server`, to a parser or a group of exclusive options."""
    parser.add_argument(
        "--server",
        metavar="ADDR",
        help=f"the server, host:port or unix:/path; of several with the same samples a:1,b:1 "
        f"(default: $SLOTSTREAM_SERVER, else {DEFAULT_ADDRESS})",
    )


def add_access_arguments(parser: argparse.ArgumentParser) -> None:
    """How to show the server who is asking. No option takes the token itself: it would show in `ps`."""
    parser.add_argument(
        "--token-file",
        metavar="FILE",
        help="file with the bearer token (default: $SLOTSTREAM_TOKEN, else the file $SLOTSTREAM_TOKEN_FILE)",
    )
    add_tls_arguments(parser)


def add_tls_arguments(parser: argparse.ArgumentParser) -> None:
    for flag, what in (
        ("--tls-ca", "PEM authorities of the server's certificate; turns TLS on (default: $SLOTSTREAM_TLS_CA)"),
        ("--tls-cert", "PEM certificate to show the server (default: $SLOTSTREAM_TLS_CERT)"),
        ("--tls-key", "its PEM private key (default: $SLOTSTREAM_TLS_KEY)"),
    ):
        parser.add_argument(flag, metavar="FILE", help=what)


def add_namespace_argument(
    parser: argparse.ArgumentParser, *, any_by_default: bool = False, may_name_one: bool = False
) -> None:
    """`may_name_one`: the command also takes an id, which is then one of the default namespace."""
    usual = (f"any; with an ID: {DEFAULT_NAMESPACE}" if may_name_one else "any") if any_by_default else DEFAULT_NAMESPACE
    parser.add_argument(
        "--namespace",
        metavar="NAME",
        default=None if any_by_default else DEFAULT_NAMESPACE,
        help=f"the samples' namespace (default: {usual})",
    )


def add_filter_arguments(parser: argparse.ArgumentParser) -> None:
    """Which samples, as `Client.list` chooses them; the states that a command looks at are its own business."""
    add_namespace_argument(parser, any_by_default=True)
    parser.add_argument("--model", metavar="NAME", help="only samples of this model, as vLLM serves it (default: any)")
    parser.add_argument(
        "--since", metavar="WHEN", type=moment, help="opened then or later: 15m, 2h, 3d (ago) or RFC 3339 (default: no bound)"
    )
    parser.add_argument("--until", metavar="WHEN", type=moment, help="opened before then (default: no bound)")
    parser.add_argument(
        "--tag",
        metavar="KEY=VALUE",
        type=tag,
        action="append",
        default=[],
        help="only with this tag; repeatable (default: any)",
    )


def add_json_argument(parser: Any) -> None:
    """`--json`, to a parser or a group of exclusive options."""
    parser.add_argument("--json", action="store_true", help="print one JSON object a line (default: text for people)")


def servers_named(arguments: argparse.Namespace) -> tuple[str, ...]:
    """The addresses that `--server` or the environment names. Raises ConfigError."""
    from slotstream.client.client import SERVER_VARIABLE
    from slotstream.wire.address import check_addresses

    return check_addresses(arguments.server or os.environ.get(SERVER_VARIABLE) or DEFAULT_ADDRESS)


def open_client(arguments: argparse.Namespace, data_dir: Path | None = None, server: str | None = None) -> Client:
    """A client of the servers that `--server` names, or of `server` alone. One that is away is told at once, not waited for."""
    from slotstream.client import connect

    return connect(
        arguments.server if server is None else [server],
        token_file=arguments.token_file,
        tls_ca=arguments.tls_ca,
        tls_cert=arguments.tls_cert,
        tls_key=arguments.tls_key,
        data_dir=data_dir,
        connect_timeout_s=0,
    )


def moment(text: str) -> int:
    """An argument such as 15m, 3d or 2026-01-31T12:00:00Z as nanoseconds since 1970 UTC."""
    if ago := _AGO.fullmatch(text.strip()):
        return max(0, time.time_ns() - round(units.seconds(ago[1])) * 1_000_000_000)
    if _MOMENT.fullmatch(text.strip()):
        try:
            when = datetime.datetime.fromisoformat(text.strip().upper())
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{text!r} is not a moment: {error}") from None
        return round(when.timestamp() * 1e6) * 1000
    raise argparse.ArgumentTypeError(
        f"{text!r} is neither like 30s, 15m, 1h30m, 3d, 1w nor like 2026-01-31T12:00:00Z (RFC 3339)"
    )


def tag(text: str) -> tuple[str, str]:
    """An argument `key=value`."""
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form key=value")
    return key, value


def shown(text: str) -> str:
    """`text` safe for a terminal: what cannot be printed, a peer's escape sequences for one, appears escaped."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in text)


def size_text(nbytes: int) -> str:
    """Bytes in binary units, three digits or so: 517 B, 1.2 MiB, 340 GiB."""
    size, unit = float(nbytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{size:.0f} {unit}" if unit == "B" or size >= 100 else f"{size:.1f} {unit}"


def age_text(unix_ns: int, now_ns: int) -> str:
    """How long ago: see `time_text`."""
    return time_text((now_ns - unix_ns) // 1_000_000_000)


def time_text(seconds: float) -> str:
    """A time in the largest unit that counts at least two: 90s, 15m, 30h, 3d."""
    for unit in ("d", "h", "m"):
        if seconds >= 2 * units.SECONDS[unit]:
            return f"{seconds // units.SECONDS[unit]:.0f}{unit}"
    return f"{max(0.0, seconds):.0f}s"


def layers_text(layers: Sequence[str], *, at_most: int = 4) -> str:
    """Layer names, the middle left out where there are many: `1,2…36 (12)` for 12 of them."""
    if len(layers) <= at_most:
        return ",".join(layers)
    return f"{layers[0]},{layers[1]}…{layers[-1]} ({len(layers)})"


# Marks that turn the direction of the text behind them.
_BIDI = frozenset("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")


def print_json(value: dict[str, Any]) -> None:
    """On one line. Controls, and marks that turn the direction of text, are escaped as JSON can; other text stays."""
    text = json.dumps(value, ensure_ascii=False)
    print("".join(f"\\u{ord(c):04x}" if unicodedata.category(c) == "Cc" or c in _BIDI else c for c in text), flush=True)


def note(text: str) -> None:
    """A remark beside the output, on stderr. It may hold what a peer said."""
    print("\n".join(map(shown, text.split("\n"))), file=sys.stderr)


def complain_about(command: str, what: str, error: SlotStreamError) -> None:
    """One of several things failed, and the command goes on."""
    note(f"slotstream {command}: {shown(what)}: {error} ({error.code})")


def table_console() -> Console:
    """Lays tables out as wide as they are: what does not fit a terminal wraps there, so that ids are never cut or folded."""
    from rich.console import Console

    return Console(markup=False, highlight=False, width=1 << 14)


def print_table(names: Sequence[str], rows: Iterable[Sequence[str | Text]], *, right: Sequence[str] = ()) -> None:
    """A table on stdout with these columns, those named in `right` aligned so."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for name in names:
        table.add_column(name, justify="right" if name in right else "left")
    for row in rows:
        table.add_row(*row)
    console = table_console()
    # Printed by us, not by rich: no padding at the ends of lines, and a closed pipe is handled in one place.
    with console.capture() as laid_out:
        console.print(table)
    print("\n".join(line.rstrip() for line in laid_out.get().splitlines()))


def progress_bar(*columns: ProgressColumn | str) -> Progress:
    """A progress display on stderr; none at all where stderr is not a terminal."""
    from rich.console import Console
    from rich.progress import Progress

    return Progress(
        *columns,
        console=Console(stderr=True, highlight=False),
        transient=True,
        disable=not sys.stderr.isatty(),
        # Lines printed meanwhile go above the bar, but a redirected stdout must not end up on the terminal.
        redirect_stdout=sys.stdout.isatty(),
    )
