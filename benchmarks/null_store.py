"""A store that checks what arrives and keeps nothing: what a transport costs without a disk."""

from __future__ import annotations

import asyncio
import tempfile
from collections import deque
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from children import questions

from slotstream.server.app import Server
from slotstream.server.config import ServerConfig
from slotstream.store.records import Failure
from slotstream.store.samples import SampleStore
from slotstream.wire.columns import NO_COLUMNS, LateColumns
from slotstream.wire.errors import HashMismatch, MissingRows
from slotstream.wire.hashing import Buffer, xxh3


class NullUpload:
    """What ingest asks of an `Upload`: every chunk is checked against its hash, and dropped."""

    def __init__(self) -> None:
        self._rows = 0

    def write_chunk(self, first_row: int, rows: int, data: Buffer, digest: int, found: int | None = None) -> None:
        if (xxh3(data) if found is None else found) != digest:
            raise HashMismatch(f"rows [{first_row}, {first_row + rows}) do not match the hash they were sent with")
        self._rows += rows

    def commit(
        self,
        row_count: int,
        token_ids: Sequence[int],
        metadata: Mapping[str, str] | None = None,
        columns: LateColumns = NO_COLUMNS,
    ) -> bool:
        if self._rows != row_count:
            raise MissingRows(f"{self._rows} of {row_count} rows arrived")
        return False

    def abort(self, failure: Failure) -> bool:
        return True


class NullStore(SampleStore):
    """A real store, in an empty directory that stays so."""

    def of(self, peer: str) -> Any:
        return self

    def open_upload(self, *arguments: Any, **options: Any) -> Any:
        return NullUpload()


def serve_nothing(connection: Connection, listen: str, transport: str) -> None:
    """Main function of a process that is a server with a NullStore; says its address."""
    asyncio.run(_serve(connection, listen, transport))


async def _serve(connection: Connection, listen: str, transport: str) -> None:
    with tempfile.TemporaryDirectory(prefix="slotstream-") as nothing:
        config = ServerConfig(data_dir=Path(nothing), listen=listen, transport=transport)
        server = Server(config, store=NullStore.open(nothing))
        await server.start()
        try:
            connection.send(server.address)
            await asyncio.to_thread(lambda: deque(questions(connection), maxlen=0))
        finally:
            await server.stop()
