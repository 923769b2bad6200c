"""The way to the server that the connector's options ask for."""

from __future__ import annotations

from slotstream.connector.options import ConnectorOptions
from slotstream.transport.base import SampleSink
from slotstream.transport.grpc import GrpcSink
from slotstream.transport.nixl import plane_for
from slotstream.v1 import ingest_pb2


def sink_for(options: ConnectorOptions, hello: ingest_pb2.Hello) -> SampleSink:
    """The sink of a worker that says `hello`."""
    return GrpcSink(
        options.server,
        hello,
        access=options.access,
        ack_timeout_s=options.ack_timeout_s,
        plane=plane_for(options.transport, options.server),
    )
