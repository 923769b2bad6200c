"""The sink of other tests keeps the protocol that the real ones keep."""

from __future__ import annotations

import pytest
from support.synthetic import SyntheticSample
from transport.sink_conformance import SinkConformance, Stored

from slotstream.transport.loopback import LoopbackSink


class TestLoopbackSink(SinkConformance):
    @pytest.fixture
    def sink(self) -> LoopbackSink:
        return LoopbackSink()

    @pytest.fixture
    def stored(self, sink: LoopbackSink) -> Stored:
        def read(sample: SyntheticSample) -> tuple[bytes, list[int]]:
            (found,) = [s for s in sink.samples.values() if s.committed is not None and s.opened.sample_id == sample.sample_id]
            assert found.committed is not None
            return b"".join(found.rows[row] for row in sorted(found.rows)), list(found.committed.token_ids)

        return read
