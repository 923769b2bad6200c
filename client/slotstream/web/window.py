"""Some rows of one sample: as many as a screen shows, and never more than are shown."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import anyio
import anyio.to_thread

from slotstream.client import Client, SampleInfo
from slotstream.web.measuring import Figures, measure
from slotstream.wire.columns import RowFormat
from slotstream.wire.errors import BadTokenRange, TooLarge, TooMany

WINDOW_BYTES_MAX = 16 << 20
WINDOW_ROWS_MAX = 256
WINDOW_CELLS_MAX = 16_384  # Rows times layers: each is drawn.
READS_MAX = 2  # At a time, of all visitors.
WAITING_MAX = 32
WAIT_S = 30.0


@dataclass(frozen=True, slots=True, eq=False)
class Window:
    """Rows [start, stop) of a sample. `row` is the one that was asked for, of the sample, if any."""

    info: SampleInfo
    layer_names: tuple[str, ...]
    start: int
    stop: int
    row: int | None
    token_ids: tuple[int, ...]
    figures: Figures
    nbytes: int  # that were read

    @property
    def num_rows(self) -> int:
        return self.stop - self.start


def rows_at_once(info: SampleInfo) -> int:
    """How many rows of a sample one window has. Raises TooLarge where one row is more than a window may read."""
    row_bytes = RowFormat.of(info.dtype, len(info.layer_ids), info.hidden_size).row_bytes
    if row_bytes > WINDOW_BYTES_MAX:
        raise TooLarge(f"a row has {row_bytes} bytes, and this page reads {WINDOW_BYTES_MAX} at most")
    cells = max(1, WINDOW_CELLS_MAX // max(1, len(info.layer_ids)))
    return min(WINDOW_ROWS_MAX, cells, WINDOW_BYTES_MAX // max(1, row_bytes))


def bounds(info: SampleInfo, start: int | None, row: int | None) -> tuple[int, int]:
    """Rows [start, stop) of the window that begins at `start`, or else holds `row`. Raises BadTokenRange and TooLarge."""
    many = rows_at_once(info)
    if row is not None and row >= info.num_tokens:
        raise BadTokenRange(f"row {row} is past the sample's end: it has {info.num_tokens}")
    if start is None:
        start = 0 if row is None else row - row % many
    if start >= max(1, info.num_tokens):
        raise BadTokenRange(f"row {start} is past the sample's end: it has {info.num_tokens}")
    stop = min(start + many, info.num_tokens)
    if row is not None and not start <= row < stop:
        raise BadTokenRange(f"row {row} is not one of the rows [{start}, {stop}) of this window")
    return start, stop


class WindowReader:
    """Reads windows, two at a time, so that many visitors take a bounded amount of memory, and of the server."""

    def __init__(self) -> None:
        self._turns = asyncio.Semaphore(READS_MAX)
        self._waiting = 0

    async def read(self, client: Client, info: SampleInfo, start: int, stop: int, row: int | None) -> Window:
        """Rows [start, stop) of a committed sample, with the figures of `row`. Raises TooMany where too many wait, and what
        `Client.read` raises. The read counts for no rule.
        """
        if self._waiting >= WAITING_MAX:
            raise TooMany("too many windows are being read: try again")
        self._waiting += 1
        try:
            async with asyncio.timeout(WAIT_S):
                await self._turns.acquire()
        except TimeoutError as error:
            raise TooMany("too many windows are being read: try again") from error
        finally:
            self._waiting -= 1
        try:
            return await anyio.to_thread.run_sync(_read, client, info, start, stop, row)
        finally:
            self._turns.release()


def _read(client: Client, info: SampleInfo, start: int, stop: int, row: int | None) -> Window:
    with client.read(info.sample_id, namespace=info.namespace, start=start, stop=stop, wait_s=0.0, count=False) as reader:
        if reader.nbytes > WINDOW_BYTES_MAX:  # Another sample took the name meanwhile.
            raise TooLarge(f"the sample is another one now, with longer rows: this page reads {WINDOW_BYTES_MAX} bytes at most")
        figures = measure(reader, None if row is None else row - start)
        return Window(
            info=reader.info,
            layer_names=reader.layer_names,
            start=start,
            stop=stop,
            row=row,
            token_ids=tuple(reader.token_ids),
            figures=figures,
            nbytes=reader.nbytes,
        )
