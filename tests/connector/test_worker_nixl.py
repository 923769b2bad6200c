"""The connector's own staging, read over NIXL by a real server."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.server import ServerProcess
from support.worker_rig import make_rig

from slotstream.client import connect
from slotstream.transport.grpc import GrpcSink
from slotstream.transport.nixl import NixlPlane
from slotstream.v1 import ingest_pb2
from slotstream.wire.names import PROTOCOL_VERSION
from slotstream.wire.nixl import is_installed

pytestmark = pytest.mark.skipif(not is_installed(), reason="NIXL is not installed")


def test_rows_reach_the_server_out_of_staging(tmp_path: Path) -> None:
    with ServerProcess(tmp_path, "--metrics", "127.0.0.1:0", transport="auto") as server:
        hello = ingest_pb2.Hello(protocol=PROTOCOL_VERSION, engine_id="rig")
        sink = GrpcSink(server.address, hello, plane=NixlPlane(required=True))
        rig = make_rig(sink=sink)
        try:
            for tokens in (40, 3, 60):
                rig.capture(f"r{tokens}", tokens)
            with connect(server.address) as client:
                for tokens in (40, 3, 60):
                    with client.read(f"r{tokens}") as reader:
                        assert b"".join(block.data for block in reader) == rig.rows(f"r{tokens}", 0, tokens)
        finally:
            rig.worker.close()
        assert server.metric("slotstream_chunks_total", transport="nixl") >= 3
        assert server.metric("slotstream_chunks_total", transport="grpc") == 0
