"""The ways to the server that the connector's options ask for."""

from __future__ import annotations

from slotstream.connector.options import ConnectorOptions
from slotstream.transport.base import SampleSink
from slotstream.transport.grpc import GrpcSink
from slotstream.transport.nixl import planes_for
from slotstream.transport.spread import Spread
from slotstream.transport.targets import Targets
from slotstream.v1 import ingest_pb2


def sinks_for(options: ConnectorOptions, hello: ingest_pb2.Hello) -> list[SampleSink]:
    """The sinks of a worker that says `hello`, one a lane."""
    spread = Spread(options.streams)
    planes = planes_for(options.transport, options.servers, options.streams)
    return [
        GrpcSink(
            Targets(options.servers),
            hello,
            access=options.access,
            ack_timeout_s=options.ack_timeout_s,
            plane=plane,
            spread=spread,
            stream=number,
        )
        for number, plane in enumerate(planes)
    ]
