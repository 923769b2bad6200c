"""Calls whose message never ends: each promises 16 MiB, sends what the server lets through, and keeps a byte.

HTTP/2 by hand, for no library fills windows as fast as the loopback interface carries them.
"""

from __future__ import annotations

import select
import socket
import struct
import time
from collections.abc import Iterator
from types import TracebackType
from typing import Self

import hpack

MESSAGE_BYTES = 16 << 20
_PREFIX = bytes([0]) + MESSAGE_BYTES.to_bytes(4, "big")
_ROWS = bytes(1 << 20)
_UNSENT_BYTES = 2 << 20  # So much is made ready at a time.
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
# RFC 9113, sections 6 and 6.5.2.
_DATA, _HEADERS, _RST_STREAM, _SETTINGS, _PING, _GOAWAY, _WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
_ACK, _END_STREAM, _END_HEADERS = 1, 1, 4
_INITIAL_WINDOW_SIZE, _MAX_FRAME_SIZE = 4, 5


class UnfinishedCalls:
    """`calls` calls of a method on one connection, from an address of this machine. Others may share it, as behind a proxy."""

    def __init__(self, address: str, method: str, calls: int, source: str = "127.0.0.2", token: str = "") -> None:
        host, _, port = address.rpartition(":")
        self.source = source
        self._socket = socket.create_connection((host, int(port)), source_address=(source, 0))
        self._socket.setblocking(False)
        self._decoder = hpack.Decoder()
        self._heard = b""
        self._unsent = bytearray(_PREFACE)
        self._frame(_SETTINGS, 0, 0, b"")
        self._frame_bytes_max = 16 << 10
        self._window = 65_535
        self._stream_window = 65_535
        self._taken: dict[int, int] = {}  # stream -> bytes less those that it was allowed beside its first window
        self._left: dict[int, int] = {}
        self._replies: dict[int, bytearray] = {}  # stream -> what the server said to a whole call
        self._encoder = hpack.Encoder()
        self._next_stream = 1
        self.open: set[int] = set()
        self.sent_bytes = 0
        self.is_closed = False  # By the server.
        self.statuses: dict[int, str] = {}  # stream -> grpc-status of those that the server ended
        self.begin(method, calls, token)

    def begin(self, method: str, calls: int, token: str = "") -> None:
        """So many more calls that never end."""
        for _ in range(calls):
            stream = self._headers(method, token)
            self._left[stream] = MESSAGE_BYTES - 1
            self._data(stream, _PREFIX)
            self.open.add(stream)

    def call(self, method: str, message: bytes, token: str = "") -> int:
        """A call that says `message` whole, and may say more. The number of its stream."""
        stream = self._headers(method, token)
        self._replies[stream] = bytearray()
        self.say(stream, message)
        return stream

    def say(self, stream: int, message: bytes, limit_s: float = 60.0) -> None:
        """Another whole message of a call, once the windows allow it."""
        end = time.monotonic() + limit_s
        unsaid = memoryview(bytes([0]) + len(message).to_bytes(4, "big") + message)
        while unsaid and not self.is_closed:
            if room := self._room(stream):
                self._data(stream, unsaid[:room])
                unsaid = unsaid[room:]
            elif time.monotonic() > end:
                raise TimeoutError("the server opens no window")
            else:
                self._exchange()

    def _room(self, stream: int) -> int:
        """So many bytes may be said in one frame."""
        return max(0, min(self._stream_window - self._taken[stream], self._window, self._frame_bytes_max))

    def hear(self, stream: int, limit_s: float = 60.0) -> bytes | None:
        """The next message that the server says in a call; None once it ended the call or the connection."""
        said = self._replies[stream]
        end = time.monotonic() + limit_s
        while len(said) < 5 or len(said) < 5 + int.from_bytes(said[1:5], "big"):
            if stream in self.statuses or self.is_closed:
                return None
            if time.monotonic() > end:
                raise TimeoutError("the server says nothing")
            self._exchange()
        stop = 5 + int.from_bytes(said[1:5], "big")
        message = bytes(said[5:stop])
        del said[:stop]
        return message

    def _headers(self, method: str, token: str) -> int:
        stream, self._next_stream = self._next_stream, self._next_stream + 2
        fixed = [(":method", "POST"), (":scheme", "http"), (":path", method), (":authority", "test"), ("te", "trailers")]
        access = [("authorization", f"Bearer {token}")] if token else []
        headers = self._encoder.encode([*fixed, ("content-type", "application/grpc"), *access])
        self._frame(_HEADERS, _END_HEADERS, stream, headers)
        self._taken[stream] = 0
        return stream

    @property
    def is_connected(self) -> bool:
        """Whether the server has not closed the connection."""
        self._exchange(0.0)
        return not self.is_closed

    def push(self, quiet_s: float, limit_s: float) -> None:
        """Sends until the server lets nothing more through for `quiet_s`, or ended every call, but no longer than `limit_s`."""
        end = time.monotonic() + limit_s
        progress_at = time.monotonic()
        while self.open and time.monotonic() < min(end, progress_at + quiet_s):
            self._fill()
            if self._exchange():
                progress_at = time.monotonic()

    def _exchange(self, wait_s: float = 0.05) -> bool:
        """Sends some of what is ready, and hears all that came. Whether anything was sent."""
        wants = [self._socket] if self._unsent else []
        sent = 0
        try:
            readable, writable, _ = select.select([self._socket], wants, [], wait_s)
            if writable:
                sent = self._socket.send(self._unsent)
            while readable and not self.is_closed:
                heard = self._socket.recv(1 << 20)
                self.is_closed = not heard
                self._heard += heard
        except BlockingIOError:
            pass
        except ConnectionError:
            self.is_closed = True
        del self._unsent[:sent]
        self.sent_bytes += sent
        for frame in self._frames():
            self._hear(*frame)
        if self.is_closed:
            self.open.clear()
        return sent > 0

    def _frame(self, kind: int, flags: int, stream: int, payload: bytes | memoryview) -> None:
        self._unsent += struct.pack(">I", len(payload))[1:] + bytes((kind, flags)) + struct.pack(">I", stream)
        self._unsent += payload

    def _data(self, stream: int, payload: bytes | memoryview) -> None:
        self._frame(_DATA, 0, stream, payload)
        self._window -= len(payload)
        self._taken[stream] += len(payload)

    def _fill(self) -> None:
        """Some of what the windows allow, of each call in turn: all of them must be under way."""
        filled = True
        while filled and len(self._unsent) < _UNSENT_BYTES:
            filled = False
            for stream in sorted(self.open):
                room = min(self._room(stream), self._left[stream])
                if room:
                    self._data(stream, memoryview(_ROWS)[:room])
                    self._left[stream] -= room
                    filled = True

    def _frames(self) -> Iterator[tuple[int, int, int, bytes]]:
        """Kind, flags, stream and payload of each that is here whole."""
        while len(self._heard) >= 9:
            length = int.from_bytes(self._heard[:3], "big")
            if len(self._heard) < 9 + length:
                return
            head, payload, self._heard = self._heard[:9], self._heard[9 : 9 + length], self._heard[9 + length :]
            yield head[3], head[4], int.from_bytes(head[5:], "big"), payload

    def _hear(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if kind == _SETTINGS and not flags & _ACK:
            for name, value in struct.iter_unpack(">HI", payload):
                if name == _INITIAL_WINDOW_SIZE:
                    self._stream_window = value
                elif name == _MAX_FRAME_SIZE:
                    self._frame_bytes_max = min(value, len(_ROWS))
            self._frame(_SETTINGS, _ACK, 0, b"")
        elif kind == _PING and not flags & _ACK:
            self._frame(_PING, _ACK, 0, payload)
        elif kind == _WINDOW_UPDATE and stream:
            self._taken[stream] -= int.from_bytes(payload, "big")
        elif kind == _WINDOW_UPDATE:
            self._window += int.from_bytes(payload, "big")
        elif kind == _GOAWAY:
            self.open.clear()
        elif kind == _DATA and stream in self._replies:
            self._replies[stream] += payload
        elif kind == _HEADERS:
            told = dict(self._decoder.decode(payload, raw=True))
            if b"grpc-status" in told:
                self.statuses[stream] = told[b"grpc-status"].decode()
        if kind == _RST_STREAM or (kind in (_DATA, _HEADERS) and flags & _END_STREAM):
            self.open.discard(stream)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._socket.close()
