"""What every channel to a storage server has in common, the connector's and the clients'."""

from __future__ import annotations

from slotstream.wire.names import MESSAGE_BYTES_MAX

COMMON_OPTIONS = (
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    # A reconnect must not wait for gRPC's own back-off, which grows to two minutes.
    ("grpc.initial_reconnect_backoff_ms", 200),
    # Each channel its own connection: a shared one would share its back-off, and outlive the channel that is closed to drop it.
    ("grpc.use_local_subchannel_pool", 1),
    # A storage server is never behind the web proxy that http_proxy names, which vLLM may need for its models.
    ("grpc.enable_http_proxy", 0),
)
