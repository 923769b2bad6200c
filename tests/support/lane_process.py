"""One stream in a process of its own, over memory that both have mapped, without a sender around it."""

from __future__ import annotations

import os

from slotstream.connector.options import ConnectorOptions
from slotstream.connector.sending.process.lane import LaneProcess
from slotstream.connector.sending.process.lane_messages import LaneSetup
from slotstream.connector.sending.staging_area import control_bytes, control_offset, map_staging
from slotstream.connector.sending.staging_pool import StagingShape
from slotstream.transport.spread import Spread
from slotstream.v1 import ingest_pb2
from slotstream.wire.names import PROTOCOL_VERSION

LANE = "slotstream.connector.sending.process.lane_main"
HELLO = ingest_pb2.Hello(protocol=PROTOCOL_VERSION, engine_id="test-engine")


class Staging:
    """Memory of `slots` slots. `fd`: by which a process maps it; `memory`: its slots, here."""

    def __init__(self, slots: int = 16, slot_bytes: int = 4096) -> None:
        self.shape = StagingShape(slots, 0, slot_bytes, slot_bytes)
        self.fd = os.memfd_create("slotstream-staging")
        os.ftruncate(self.fd, control_offset(self.shape) + control_bytes(self.shape))
        self.memory = map_staging(self.shape, self.fd).slots

    def close(self) -> None:
        os.close(self.fd)


def lane_process(
    address: str, staging: Staging, spread: Spread | None = None, stream: int = 0, level: int = 20, ack_timeout_s: float = 30.0
) -> LaneProcess:
    """Not started, and told of no memory yet. `level`: of the log's lines that it hands on."""
    spread = spread or Spread(1)
    options = ConnectorOptions(server=address, transport="grpc", streams=spread.streams, ack_timeout_s=ack_timeout_s)
    setup = LaneSetup(options, HELLO.SerializeToString(), staging.shape, stream, level)
    return LaneProcess(setup, staging.fd, spread)
