"""A stream in a process of its own against a real storage server in another one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from support.lane_process import Staging, lane_process
from support.synthetic import SyntheticSample
from transport.sink_conformance import SLOT_BYTES, SLOTS, Sender, SinkConformance, Stored

from slotstream.client import connect
from slotstream.connector.sending.process.lane import LaneProcess
from slotstream.transport.base import LinkUp

if TYPE_CHECKING:
    from support.server import ServerProcess


class TestLaneProcess(SinkConformance):
    @pytest.fixture
    def shared(self) -> Iterator[Staging]:
        staging = Staging(SLOTS, SLOT_BYTES)
        yield staging
        staging.close()

    @pytest.fixture
    def staging(self, shared: Staging) -> memoryview:
        return shared.memory

    @pytest.fixture
    def sink(self, server: ServerProcess, shared: Staging) -> LaneProcess:
        return lane_process(server.address, shared)

    @pytest.fixture
    def sender(self, sink: LaneProcess, staging: memoryview) -> Iterator[Sender]:
        """Once the link is up, as the pump sends nothing before: a process that has not begun keeps nothing."""
        made = Sender(sink, staging)
        made.recorder.wait(LinkUp)
        yield made
        sink.close(30.0)

    @pytest.fixture
    def stored(self, server: ServerProcess) -> Stored:
        def read(sample: SyntheticSample) -> tuple[bytes, list[int]]:
            with connect(server.address) as client, client.read(sample.sample_id, namespace=sample.namespace) as reader:
                return b"".join(block.data for block in reader), list(reader.token_ids)

        return read
