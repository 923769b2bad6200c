"""A client for each process that reads: forked or spawned workers connect on their own."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from typing import Any

from slotstream.client.client import Client, connect


class Connection:
    """What a data set needs to ask its server, in every process that it wakes up in. It can be pickled.

    A client that is passed stays the caller's to close. With an address, several, or None (`$SLOTSTREAM_SERVER`), each
    process opens its own when it first asks, with the token and certificates that the environment names.
    """

    def __init__(self, client_or_address: Client | str | Sequence[str] | None) -> None:
        self._given: Client | None = None
        self._own: Client | None = None
        self._pid = os.getpid()
        self._access: dict[str, Any] = {}
        self._address: str | Sequence[str] | None
        if isinstance(client_or_address, Client):
            self._given, self._address = client_or_address, client_or_address.addresses
            # Worker processes connect on their own, and show the server the same token and certificate.
            self._access = {**dataclasses.asdict(client_or_address.access), "data_dir": client_or_address.data_dir}
        else:
            self._address = client_or_address

    def client(self) -> Client:
        """Raises what `connect` raises."""
        if self._pid != os.getpid():
            self._given, self._own, self._pid = None, None, os.getpid()
        if self._given is not None:
            return self._given
        if self._own is None:
            self._own = connect(self._address, **self._access)
        return self._own

    def close(self) -> None:
        """Ends the connection that this process opened; the next question opens another."""
        if self._own is not None and self._pid == os.getpid():
            self._own.close()
            self._own = None

    def __getstate__(self) -> dict[str, Any]:
        """Everything but the connections, which no other process can use."""
        return {**self.__dict__, "_given": None, "_own": None}
