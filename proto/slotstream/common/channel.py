"""What every channel to a storage server has in common, the connector's and the clients'."""

from __future__ import annotations


def channel_options(message_bytes_max: int) -> tuple[tuple[str, int], ...]:
    """gRPC's options for a channel whose messages have at most `message_bytes_max` bytes, either way."""
    return (
        ("grpc.max_send_message_length", message_bytes_max),
        ("grpc.max_receive_message_length", message_bytes_max),
        # A reconnect must not wait for gRPC's own back-off, which grows to two minutes.
        ("grpc.initial_reconnect_backoff_ms", 200),
        # Each channel its own connection: a shared one would share its back-off, and outlive the channel that is closed to
        # drop it.
        ("grpc.use_local_subchannel_pool", 1),
        # A storage server is never behind the web proxy that http_proxy names, which vLLM may need for its models.
        ("grpc.enable_http_proxy", 0),
    )
