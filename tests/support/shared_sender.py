"""A connector's worker half that sends a few samples over NIXL to the server of argv[1], and checks what is stored. A program.

It says on stdout how many samples were stored whole.
"""

from __future__ import annotations

import logging
import sys

from slotstream.client import connect
from slotstream.transport.grpc import GrpcSink
from slotstream.transport.nixl import planes_for
from slotstream.v1 import ingest_pb2
from slotstream.wire.names import PROTOCOL_VERSION
from support.worker_rig import make_rig


def main() -> int:
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    server = sys.argv[1]
    hello = ingest_pb2.Hello(protocol=PROTOCOL_VERSION, engine_id="engine")
    rig = make_rig(sink=GrpcSink(server, hello, plane=planes_for("auto", [server])[0]))
    stored = 0
    try:
        for number in range(6):
            rig.capture(f"s{number}", 40)
            with connect(server) as client, client.read(f"s{number}") as reader:
                stored += b"".join(block.data for block in reader) == rig.rows(f"s{number}", 0, 40)
    finally:
        rig.worker.close()
    print(stored)
    return 0


if __name__ == "__main__":
    sys.exit(main())
