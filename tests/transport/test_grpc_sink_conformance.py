"""GrpcSink against a real storage server in a process of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from support.synthetic import SyntheticSample
from transport.sink_conformance import Sender, SinkConformance, Stored

from slotstream.client import connect
from slotstream.transport.base import Committed, Failed, LinkUp
from slotstream.transport.grpc import GrpcSink
from slotstream.v1 import ingest_pb2
from slotstream.wire.names import PROTOCOL_VERSION

if TYPE_CHECKING:
    from support.server import ServerProcess


class TestGrpcSink(SinkConformance):
    @pytest.fixture
    def sink(self, server: ServerProcess) -> GrpcSink:
        return GrpcSink(server.address, ingest_pb2.Hello(protocol=PROTOCOL_VERSION, engine_id="test-engine"))

    @pytest.fixture
    def stored(self, server: ServerProcess) -> Stored:
        def read(sample: SyntheticSample) -> tuple[bytes, list[int]]:
            with connect(server.address) as client, client.read(sample.sample_id, namespace=sample.namespace) as reader:
                return b"".join(block.data for block in reader), list(reader.token_ids)

        return read

    def test_the_link_comes_up_first(self, sender: Sender, sample: SyntheticSample) -> None:
        sender.settle(sample)
        assert isinstance(sender.recorder.events[0], LinkUp)

    def test_the_same_sample_again_is_a_duplicate(self, sender: Sender, sample: SyntheticSample) -> None:
        for expected in (1, 2):
            number = sender.open(sample)
            sender.send(number, sample, 0, 24)
            sender.commit(number, sample)
            assert sender.recorder.wait(Committed, expected)[-1] == Committed(number, duplicate=expected == 2)

    def test_a_refused_sample_fails(self, sender: Sender, sample: SyntheticSample) -> None:
        number = sender.open(SyntheticSample("no/such/id", namespace=sample.namespace))
        sender.send(number, sample, 0, 8)
        (failed,) = sender.recorder.wait(Failed)
        assert (failed.sample, failed.code) == (number, "BAD_SAMPLE_ID")
