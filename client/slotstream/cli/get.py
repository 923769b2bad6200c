"""`slotstream get`: writes a sample's rows, or some of them, into a safetensors file. Needs no torch."""

from __future__ import annotations

import argparse
import contextlib
import os
import secrets
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from slotstream.cli import units
from slotstream.cli.common import (
    CommandFailed,
    add_access_arguments,
    add_namespace_argument,
    add_server_argument,
    layers_text,
    note,
    open_client,
    progress_bar,
    size_text,
)
from slotstream.cli.namespaces import listed
from slotstream.cli.parser import Parser
from slotstream.cli.samples import facts, samples_of_request
from slotstream.wire.names import check_sample_id

if TYPE_CHECKING:
    from rich.progress import ProgressColumn

    from slotstream.client import Client, RowReader


STDOUT = Path("-")


def add_get_arguments(parser: argparse.ArgumentParser) -> None:
    if isinstance(parser, Parser):
        parser.more = "get fetches one sample; slotstream export writes many"
    parser.add_argument("sample_id", metavar="ID", help="the sample's id, or the id that vLLM answered its request with")
    parser.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        type=Path,
        help="the file to write; -: stdout, with remarks on stderr (default: none, only show what would be fetched)",
    )
    parser.add_argument("--start", metavar="N", type=int, default=0, help="first row (default: %(default)s)")
    parser.add_argument("--stop", metavar="N", type=int, help="one past the last row (default: the sample's end)")
    parser.add_argument(
        "--layers", metavar="IDS", type=layers_argument, help="layers in the order wanted, such as 1,3,final (default: all)"
    )
    parser.add_argument(
        "--wait",
        metavar="SECONDS",
        type=units.seconds,
        default=30.0,
        help="wait for a sample still arriving (default: %(default)s)",
    )
    parser.add_argument(
        "--no-verify",
        dest="verify",
        action="store_false",
        help="have fewer than half of the layers read alone, not checked against their hashes (default: all rows are checked)",
    )
    parser.add_argument(
        "--data",
        metavar="DIR",
        type=Path,
        help="the server's data directory, to take rows out of its files, which is faster (default: the server sends them)",
    )
    parser.add_argument("--force", action="store_true", help="replace FILE when it exists (default: refuse)")
    add_server_argument(parser)
    add_access_arguments(parser)
    add_namespace_argument(parser)
    parser.epilog = """\
The file holds `hidden_states` [rows, layers, hidden], `token_ids` int64 [rows] and what else the sample has, such as
`loss_mask`, as plain safetensors.

examples:
  slotstream get my-sample -o my-sample.safetensors --start 0 --stop 512 --layers 2,18,33
  slotstream get my-sample -o - | ssh host 'cat > my-sample.safetensors'
  python -c 'import safetensors.torch as s; print(s.load_file("my-sample.safetensors")["hidden_states"].shape)'
"""


def run_get(arguments: argparse.Namespace) -> int:
    output: Path | None = arguments.output
    if output is not None:
        _refuse(output, arguments.force)
    with (
        open_client(arguments, arguments.data) as client,
        client.read(
            _id_of(client, arguments),
            namespace=arguments.namespace,
            start=arguments.start,
            stop=arguments.stop,
            layers=arguments.layers,
            wait_s=arguments.wait,
            verify=arguments.verify,
        ) as reader,
    ):
        shape = f"{reader.num_rows} rows x {len(reader.layer_ids)} layers x {reader.info.hidden_size} of {reader.info.dtype}"
        layers = layers_text(reader.layer_names)
        rows = f"[{reader.start}, {reader.stop}) of layers {layers}: {shape}, {size_text(reader.nbytes)}"
        if output is None:
            print("\n".join([*facts(reader.info), f"rows {rows}"]))
            return 0
        if output == STDOUT:
            _export(reader, sys.stdout.buffer)
            note(f"stdout: rows {rows}")
            return 0
        with _replacing(output, force=arguments.force) as file:
            _export(reader, file)
    print(f"{output}: rows {rows}")
    return 0


def _id_of(client: Client, arguments: argparse.Namespace) -> str:
    """The sample's id, where the name may be that of its request. Raises CommandFailed where that has several samples."""
    name = check_sample_id(arguments.sample_id)
    found = samples_of_request(client, name, arguments.namespace)
    if len(found) > 1:
        ids = listed(sorted(info.sample_id for info in found))
        raise CommandFailed(f"{len(found)} samples are of request {name}, and get fetches one: {ids}")
    return found[0].sample_id if found else name  # Of one that is not there yet, what is waited for.


def _export(reader: RowReader, file: BinaryIO) -> None:
    """Writes the rows as they arrive: memory use does not depend on the sample's size."""
    from slotstream.client.exports.files import header_of
    from slotstream.client.reading import little_endian
    from slotstream.wire.columns import TOKEN_IDS
    from slotstream.wire.layout import encode_header

    with progress_bar(*_progress_columns()) as progress:
        task = progress.add_task(reader.info.sample_id, total=reader.nbytes)
        header = header_of(reader.info, reader.row_format, reader.num_rows, reader.layer_ids, reader.layer_names, reader.start)
        file.write(encode_header(header))
        for block in reader:
            file.write(block.data)
            progress.advance(task, block.data.nbytes)
        for column in reader.row_format.columns[1:]:
            file.write(little_endian(reader.token_ids) if column.name == TOKEN_IDS else reader.columns[column.name])


def _progress_columns() -> list[ProgressColumn | str]:
    from rich.progress import BarColumn, DownloadColumn, TimeRemainingColumn, TransferSpeedColumn

    return ["{task.description}", BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn(), TimeRemainingColumn()]


def _refuse(output: Path, force: bool) -> None:
    """Raises CommandFailed before anything is fetched, where the file could not be put in its place in the end."""
    if output == STDOUT:
        if sys.stdout.isatty():
            raise CommandFailed("stdout is a terminal, and the file is no text: send it to a file or a pipe")
        return
    if output.is_dir():
        raise CommandFailed(f"{output} is a directory")
    if not force and os.path.lexists(output):
        raise CommandFailed(f"{output} exists; --force replaces it")


@contextlib.contextmanager
def _replacing(output: Path, *, force: bool) -> Iterator[BinaryIO]:
    """A file that takes the name `output` when the block ends well, and leaves no trace when it does not."""
    partial = output.with_name(f".{output.name[:200]}.{secrets.token_hex(4)}.partial")
    try:
        opened = partial.open("xb")
    except OSError as error:  # About a name that nobody asked for.
        raise OSError(error.errno, error.strerror, os.fspath(output)) from error
    try:
        with opened as file:
            yield file
            file.flush()
            os.fsync(file.fileno())  # Else a crash could leave the name with nothing behind it.
        if force:
            partial.replace(output)
        else:
            _link(partial, output)
    finally:
        partial.unlink(missing_ok=True)


def _link(partial: Path, output: Path) -> None:
    """Gives the file its name, unless another one took it meanwhile: a rename would overwrite that one."""
    try:
        output.hardlink_to(partial)
    except FileExistsError:
        raise CommandFailed(f"{output} exists; --force replaces it") from None
    except OSError:  # A file system without hard links.
        _refuse(output, force=False)
        partial.replace(output)


def layers_argument(text: str) -> list[int | str]:
    """An argument such as 1,3,final."""
    from slotstream.wire.names import FINAL

    try:
        return [word if word == FINAL else int(word) for word in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of layers such as 1,3,final") from None
