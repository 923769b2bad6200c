"""Calls whose message never ends: each promises 16 MiB, sends what the server lets through, and keeps a byte."""

from __future__ import annotations

import select
import socket
import time
from types import TracebackType
from typing import Self

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import ResponseReceived, StreamEnded, StreamReset, TrailersReceived
from h2.exceptions import ProtocolError

MESSAGE_BYTES = 16 << 20
_BYTES_PER_S = 125_000_000  # A network of a gigabit: on the loopback interface everything is a race of processors.
_PREFIX = bytes([0]) + MESSAGE_BYTES.to_bytes(4, "big")
_BLOCK = bytes(1 << 16)


class UnfinishedCalls:
    """`calls` calls of a method on one connection, from an address of this machine."""

    def __init__(self, address: str, method: str, calls: int, source: str = "127.0.0.2") -> None:
        host, _, port = address.rpartition(":")
        self._socket = socket.create_connection((host, int(port)), source_address=(source, 0))
        self._socket.setblocking(False)
        self._http2 = H2Connection(H2Configuration(client_side=True, validate_outbound_headers=False))
        self._http2.initiate_connection()
        self._left: dict[int, int] = {}
        self.sent_bytes = 0
        self.statuses: dict[int, str] = {}  # stream -> grpc-status of those that the server ended
        for _ in range(calls):
            stream = self._http2.get_next_available_stream_id()
            fixed = [(":method", "POST"), (":scheme", "http"), (":path", method), (":authority", "test"), ("te", "trailers")]
            self._http2.send_headers(stream, [*fixed, ("content-type", "application/grpc")])
            self._http2.send_data(stream, _PREFIX)
            self._left[stream] = MESSAGE_BYTES - 1
        self.open = set(self._left)

    def push(self, quiet_s: float, limit_s: float) -> None:
        """Sends until the server lets nothing more through for `quiet_s`, or ended every call, but no longer than `limit_s`."""
        begun, sent_before = time.monotonic(), self.sent_bytes
        end, progress_at = begun + limit_s, begun
        unsent = b""
        while self.open and time.monotonic() < min(end, progress_at + quiet_s):
            if not unsent:
                self._fill()
                unsent = self._http2.data_to_send()
            room = int((time.monotonic() - begun) * _BYTES_PER_S) - (self.sent_bytes - sent_before)
            wants = [self._socket] if unsent and room > 0 else []
            readable, writable, _ = select.select([self._socket], wants, [], 0.001 if unsent else 0.05)
            try:
                sent = self._socket.send(unsent[:room]) if writable else 0
                data = self._socket.recv(1 << 16) if readable else None
            except ConnectionError:
                data = b""
            if data == b"":
                self.open.clear()
                return
            if sent:
                unsent, progress_at = unsent[sent:], time.monotonic()
                self.sent_bytes += sent
            if data:
                self._hear(data)

    def _fill(self) -> None:
        """Some of what the windows allow, of each call in turn: all of them are to be under way."""
        for stream in sorted(self.open):
            window = self._http2.local_flow_control_window(stream)
            room = min(window, self._http2.max_outbound_frame_size, self._left[stream], len(_BLOCK))
            if room > 0:
                self._http2.send_data(stream, _BLOCK[:room])
                self._left[stream] -= room

    def _hear(self, data: bytes) -> None:
        try:
            events = self._http2.receive_data(data)
        except ProtocolError:  # The server speaks of a call that it has ended.
            return
        for event in events:
            if isinstance(event, ResponseReceived | TrailersReceived):
                told = {bytes(k).decode(): bytes(v).decode() for k, v in event.headers or ()}
                if "grpc-status" in told and event.stream_id is not None:
                    self.statuses[event.stream_id] = told["grpc-status"]
            if isinstance(event, StreamEnded | StreamReset):
                self.open.discard(event.stream_id or 0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._socket.close()
