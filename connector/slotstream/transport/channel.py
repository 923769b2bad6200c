"""Channels to the storage server, as the connector's options say: plain or TLS."""

from __future__ import annotations

import grpc

from slotstream.wire.access import Access
from slotstream.wire.errors import ConfigError, ServerUnavailable
from slotstream.wire.names import MESSAGE_BYTES_MAX

CHANNEL_OPTIONS = (
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    # A reconnect must not wait for gRPC's own back-off, which grows to two minutes. The second is how long an attempt may
    # take at least (Subchannel::StartConnectingLocked): on a host that is busy loading a model a moment is not enough.
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.min_reconnect_backoff_ms", 5000),
    ("grpc.max_reconnect_backoff_ms", 1000),
    # A host that vanishes without a word is noticed by unanswered pings.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
    # Each stream its own connection: a shared one would outlive the channel that is closed to drop it.
    ("grpc.use_local_subchannel_pool", 1),
    # A storage server is never behind the web proxy that http_proxy names, which vLLM may need for its models.
    ("grpc.enable_http_proxy", 0),
)


def open_channel(target: str, access: Access) -> grpc.Channel:
    """A channel with the certificates of now. Raises ServerUnavailable when their files cannot be used any more."""
    try:
        files = access.tls_files()
    except ConfigError as error:
        raise ServerUnavailable(f"no connection to {target}: {error}") from error
    if files is None:
        return grpc.insecure_channel(target, options=CHANNEL_OPTIONS)
    return grpc.secure_channel(target, grpc.ssl_channel_credentials(*files), options=CHANNEL_OPTIONS)
