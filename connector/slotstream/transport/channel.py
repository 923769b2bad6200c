"""Channels to the storage server, as the connector's options say: plain or TLS."""

from __future__ import annotations

import grpc

from slotstream.common.channel import channel_options
from slotstream.transport.targets import Target
from slotstream.wire.access import Access
from slotstream.wire.errors import ConfigError, ServerUnavailable
from slotstream.wire.names import MESSAGE_BYTES_MAX

CHANNEL_OPTIONS = (
    *channel_options(MESSAGE_BYTES_MAX),
    # How long an attempt may take at least (Subchannel::StartConnectingLocked): on a host that is busy loading a model a
    # moment is not enough.
    ("grpc.min_reconnect_backoff_ms", 5000),
    ("grpc.max_reconnect_backoff_ms", 1000),
    # A host that vanishes without a word is noticed by unanswered pings.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
)


def open_channel(target: Target, access: Access) -> grpc.Channel:
    """A channel with the certificates of now. Raises ServerUnavailable when their files cannot be used any more.

    The server's certificate must have the name that the operator gave, also where that name stands for several servers.
    """
    try:
        files = access.tls_files()
    except ConfigError as error:
        raise ServerUnavailable(f"no connection to {target}: {error}") from error
    named = () if target.address == target.name else (("grpc.default_authority", target.name),)
    options = (*CHANNEL_OPTIONS, *named)
    if files is None:
        return grpc.insecure_channel(target.address, options=options)
    return grpc.secure_channel(target.address, grpc.ssl_channel_credentials(*files), options=options)
