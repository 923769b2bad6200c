"""A sink whose chunks are read over NIXL by a real storage server in a process of its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.server import ServerProcess
from support.synthetic import SyntheticSample
from transport.sink_conformance import Sender, SinkConformance, Stored

from slotstream.client import connect
from slotstream.transport.base import FellBack
from slotstream.transport.grpc import GrpcSink
from slotstream.transport.nixl import NixlPlane
from slotstream.v1 import ingest_pb2
from slotstream.wire.names import PROTOCOL_VERSION
from slotstream.wire.nixl import is_installed

pytestmark = pytest.mark.skipif(not is_installed(), reason="NIXL is not installed")


@pytest.fixture(scope="module")
def nixl_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path_factory.mktemp("data"), "--transport", "nixl", "--metrics", "127.0.0.1:0") as process:
        yield process
        print("CODE", process.process.poll(), process.log()[-6000:])


class TestNixlSink(SinkConformance):
    @pytest.fixture
    def sink(self, nixl_server: ServerProcess) -> GrpcSink:
        hello = ingest_pb2.Hello(protocol=PROTOCOL_VERSION, engine_id="test-engine")
        return GrpcSink(nixl_server.address, hello, plane=NixlPlane(required=True))

    @pytest.fixture
    def stored(self, nixl_server: ServerProcess) -> Stored:
        def read(sample: SyntheticSample) -> tuple[bytes, list[int]]:
            with connect(nixl_server.address) as client, client.read(sample.sample_id, namespace=sample.namespace) as reader:
                return b"".join(block.data for block in reader), list(reader.token_ids)

        return read

    def test_every_chunk_is_read_over_nixl(self, sender: Sender, sample: SyntheticSample, nixl_server: ServerProcess) -> None:
        before = nixl_server.metric("slotstream_chunks_total", transport="nixl")
        number = sender.open(sample)
        for at in range(0, sample.num_tokens, 4):
            sender.send(number, sample, at, at + 4)
        sender.commit(number, sample)
        sender.settle(sample)
        assert nixl_server.metric("slotstream_chunks_total", transport="nixl") == before + sample.num_tokens // 4 + 1
        assert nixl_server.metric("slotstream_nixl_quarantined_slots") == 0
        assert sender.recorder.of(FellBack) == []

    def test_rows_outside_of_staging_are_sent_as_frames(
        self, sender: Sender, stored: Stored, sample: SyntheticSample, nixl_server: ServerProcess
    ) -> None:
        before = nixl_server.metric("slotstream_chunks_total", transport="grpc")
        number = sender.open(sample)
        sender.send(number, sample, 0, 8)
        sender.send(number, sample, 8, 24, into=memoryview(bytearray(16 * sample.row_bytes)))
        sender.commit(number, sample)
        sender.settle(sample)
        assert nixl_server.metric("slotstream_chunks_total", transport="grpc") == before + 1
        assert stored(sample) == (sample.rows(), sample.token_ids)
