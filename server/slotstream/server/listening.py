"""The gRPC server object and its port, the same in every process of a server."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import grpc.aio

from slotstream.server.access.tls import Certificates
from slotstream.server.config import ServerConfig
from slotstream.wire.address import is_socket
from slotstream.wire.errors import ConfigError
from slotstream.wire.names import MESSAGE_BYTES_MAX

SERVICES = ("slotstream.v1.Ingest", "slotstream.v1.Samples")
# Between the processes of a server, which limited what comes from peers already.
LOCAL_OPTIONS = (("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", MESSAGE_BYTES_MAX * 2))
_FRAME_SPARE_BYTES = 64 << 10
_HANDSHAKE_MS = 20_000
_CONNECTION_CALLS_MAX = 1024
_METADATA_BYTES_MAX = 16 << 10


def has_tls(config: ServerConfig, address: str) -> bool:
    """Whether `address` speaks TLS. A unix socket never does: its mode says who may use it."""
    return config.tls_cert is not None and not is_socket(address)


def make_server(config: ServerConfig) -> grpc.aio.Server:
    """With several workers, all of them listen on the port, and the kernel shares connections out."""
    return grpc.aio.server(
        options=(
            ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX + _FRAME_SPARE_BYTES),
            ("grpc.max_send_message_length", MESSAGE_BYTES_MAX + _FRAME_SPARE_BYTES),
            ("grpc.so_reuseport", int(config.workers > 1)),  # Else a second server on the same port must fail, not share it.
            # A peer whose host vanished sends no goodbye: without pings its samples would stay open for ever.
            ("grpc.keepalive_time_ms", 30_000),
            ("grpc.keepalive_timeout_ms", 20_000),
            ("grpc.keepalive_permit_without_calls", 1),
            # Connectors and clients ping every 20 s too; by default a server takes that for abuse and hangs up. (The
            # shortest interval accepted, that is: GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS.)
            ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
            # A connection that never gets as far as a call, in TLS or before it, is dropped.
            ("grpc.server_handshake_timeout_ms", _HANDSHAKE_MS),
            ("grpc.max_allowed_incoming_connections", config.connections_max),
            ("grpc.max_concurrent_streams", _CONNECTION_CALLS_MAX),  # More wait at the caller's end.
            ("grpc.max_metadata_size", _METADATA_BYTES_MAX),
            # Calls that gRPC has and the event loop has not: past 1000 gRPC drops some, anybody's and without a code.
            ("grpc.server.max_pending_requests", 1 << 15),
            ("grpc.server.max_pending_requests_hard_limit", 1 << 16),
        )
    )


def add_ports(server: grpc.aio.Server, config: ServerConfig, certificates: Certificates | None) -> list[str]:
    """Listen where `config` says; the real addresses, in its order. Raises ConfigError."""
    return [_add_port(server, config, certificates, address) for address in config.addresses]


def _add_port(server: grpc.aio.Server, config: ServerConfig, certificates: Certificates | None, listen: str) -> str:
    try:
        if has_tls(config, listen):
            assert certificates is not None
            port = server.add_secure_port(listen, certificates.credentials())
        else:
            # The socket has its mode from its first moment: a chmod would come after somebody's connect.
            with _umask(~config.socket_mode & 0o777 if is_socket(listen) else None):
                port = server.add_insecure_port(listen)
    except RuntimeError as error:
        raise ConfigError(f"--listen: cannot listen on {listen}") from error
    return listen if is_socket(listen) else f"{listen.rpartition(':')[0]}:{port}"


@contextlib.contextmanager
def _umask(mask: int | None) -> Iterator[None]:
    """With this mask, which belongs to the whole process, for a moment. None: as it was."""
    if mask is None:
        yield
        return
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)
