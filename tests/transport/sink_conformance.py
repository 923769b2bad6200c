"""What every `SampleSink` does, for every way of the rows. An implementation's tests inherit `SinkConformance`."""

from __future__ import annotations

import mmap
import random
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from support.synthetic import SyntheticSample
from transport.recorder import Recorder

from slotstream.transport.base import Acked, Committed, Failed, RowChunk, SampleSink
from slotstream.v1 import ingest_pb2
from slotstream.wire.hashing import xxh3

Stored = Callable[[SyntheticSample], tuple[bytes, list[int]]]


SLOT_BYTES = 4096
SLOTS = 1024


class Sender:
    """Drives a sink as the connector's pump does, and numbers what it sends, each chunk from a slot of its own."""

    def __init__(self, sink: SampleSink, staging: memoryview) -> None:
        self.sink = sink
        self._staging = staging
        self._staged = 0
        sink.use_staging(self._staging, SLOT_BYTES)
        self.recorder = Recorder()
        self._samples = 0
        self._chunks = 0
        sink.start(self.recorder)

    def open(self, sample: SyntheticSample, *, rows_max: int | None = None) -> int:
        """Announce the sample; its number. `rows_max`: as a sample whose row count is not known yet."""
        self._samples += 1
        self.sink.open_sample(
            ingest_pb2.OpenSample(
                sample=self._samples,
                namespace=sample.namespace,
                sample_id=sample.sample_id,
                model=sample.model,
                dtype=sample.dtype,
                layer_ids=sample.layer_ids,
                hidden_size=sample.hidden_size,
                rows_max=rows_max or sample.num_tokens,
                rows_exact=rows_max is None,
                tags=sample.tags,
                metadata=sample.metadata,
            )
        )
        return self._samples

    def send(
        self, number: int, sample: SyntheticSample, start: int, stop: int, *, into: memoryview | None = None, flip: int = 0
    ) -> int:
        """Submit rows [start, stop) as one chunk; its number. `into`: staged in there. `flip`: in the hash it claims."""
        self._chunks += 1
        data = sample.rows(start, stop)
        buffer = (self.slot() if into is None else into)[: len(data)]
        buffer[:] = data
        self.sink.submit(RowChunk(number, self._chunks, start, stop - start, buffer, xxh3(buffer) ^ flip))
        return self._chunks

    def slot(self) -> memoryview:
        """A slot of staging that was not used before."""
        at = self._staged * SLOT_BYTES
        self._staged += 1
        return self._staging[at : at + SLOT_BYTES]

    def commit(self, number: int, sample: SyntheticSample) -> None:
        self.sink.commit(
            ingest_pb2.CommitSample(
                sample=number, row_count=sample.num_tokens, token_ids=sample.token_ids, metadata={"committed": "yes"}
            )
        )

    def abort(self, number: int, code: str = "ABORTED", message: str = "the request was aborted") -> None:
        self.sink.abort(ingest_pb2.AbortSample(sample=number, code=code, message=message))

    def endings(self) -> dict[int, list[Committed | Failed]]:
        """Every Committed and Failed, by sample."""
        found: dict[int, list[Committed | Failed]] = {}
        for event in self.recorder.events:
            if isinstance(event, Committed | Failed):
                found.setdefault(event.sample, []).append(event)
        return found

    def settle(self, sample: SyntheticSample) -> None:
        """Store one more sample. What was sent before it on the stream is answered by then, if it is answered at all."""
        committed = len(self.recorder.of(Committed))
        last = replace(sample, sample_id=f"{sample.sample_id}-settled")
        number = self.open(last)
        self.send(number, last, 0, last.num_tokens)
        self.commit(number, last)
        self.recorder.wait(Committed, committed + 1)


class SinkConformance:
    """Inherit, and provide the fixtures `sink` (not started yet) and `stored` (rows and token ids of a committed sample)."""

    @pytest.fixture
    def sink(self) -> SampleSink:
        raise NotImplementedError

    @pytest.fixture
    def stored(self, sink: SampleSink) -> Stored:
        raise NotImplementedError

    @pytest.fixture
    def staging(self) -> memoryview:
        """SLOTS of SLOT_BYTES."""
        return memoryview(mmap.mmap(-1, SLOTS * SLOT_BYTES))

    @pytest.fixture
    def sender(self, sink: SampleSink, staging: memoryview) -> Iterator[Sender]:
        yield Sender(sink, staging)
        sink.close(30.0)

    @pytest.fixture
    def sample(self, namespace: str) -> SyntheticSample:
        return SyntheticSample("s", namespace=namespace, num_tokens=24, tags={"split": "test"})

    def test_rows_arrive_exactly(self, sender: Sender, stored: Stored, sample: SyntheticSample) -> None:
        number = sender.open(sample)
        chunks = [sender.send(number, sample, at, at + 8) for at in (0, 8, 16)]
        sender.commit(number, sample)
        assert sender.recorder.wait(Committed) == [Committed(number, duplicate=False)]
        assert sender.recorder.of(Acked) == [Acked((chunk,)) for chunk in chunks]
        assert stored(sample) == (sample.rows(), sample.token_ids)

    @pytest.mark.parametrize("seed", range(3))
    def test_chunks_may_arrive_in_any_order(self, sender: Sender, stored: Stored, sample: SyntheticSample, seed: int) -> None:
        number = sender.open(sample)
        starts = list(range(0, sample.num_tokens, 3))
        random.Random(seed).shuffle(starts)
        for start in starts:
            sender.send(number, sample, start, start + 3)
        sender.commit(number, sample)
        sender.recorder.wait(Committed)
        assert stored(sample) == (sample.rows(), sample.token_ids)

    def test_the_same_chunk_twice_is_stored_once(self, sender: Sender, stored: Stored, sample: SyntheticSample) -> None:
        number = sender.open(sample)
        chunks = [sender.send(number, sample, at, at + 8) for at in (0, 8, 0, 16, 8, 8)]
        sender.commit(number, sample)
        assert sender.recorder.wait(Committed) == [Committed(number, duplicate=False)]
        assert sender.recorder.of(Acked) == [Acked((chunk,)) for chunk in chunks]
        assert stored(sample) == (sample.rows(), sample.token_ids)

    def test_chunks_may_overlap(self, sender: Sender, stored: Stored, sample: SyntheticSample) -> None:
        number = sender.open(sample)
        for start, stop in ((4, 12), (0, 8), (10, 24)):
            sender.send(number, sample, start, stop)
        sender.commit(number, sample)
        sender.recorder.wait(Committed)
        assert stored(sample) == (sample.rows(), sample.token_ids)

    def test_a_buffer_may_be_reused_once_acked(self, sender: Sender, stored: Stored, sample: SyntheticSample) -> None:
        staging = sender.slot()
        number = sender.open(sample)
        for sent, start in enumerate(range(0, sample.num_tokens, 4), 1):
            sender.send(number, sample, start, start + 4, into=staging)
            sender.recorder.wait(Acked, sent)
            staging[:] = b"\xff" * len(staging)
        sender.commit(number, sample)
        sender.recorder.wait(Committed)
        assert stored(sample) == (sample.rows(), sample.token_ids)

    def test_the_row_count_may_be_known_only_at_the_commit(
        self, sender: Sender, stored: Stored, sample: SyntheticSample
    ) -> None:
        number = sender.open(sample, rows_max=1000)
        sender.send(number, sample, 0, sample.num_tokens)
        sender.commit(number, sample)
        sender.recorder.wait(Committed)
        assert stored(sample) == (sample.rows(), sample.token_ids)

    def test_a_commit_comes_after_every_chunk(self, sender: Sender, sample: SyntheticSample) -> None:
        number = sender.open(sample)
        chunks = [sender.send(number, sample, row, row + 1) for row in range(sample.num_tokens)]
        sender.commit(number, sample)
        sender.recorder.wait(Committed)
        answers = [event for event in sender.recorder.events if isinstance(event, Acked | Committed)]
        assert answers == [*(Acked((chunk,)) for chunk in chunks), Committed(number, duplicate=False)]

    def test_a_wrong_hash_fails_the_sample(self, sender: Sender, sample: SyntheticSample) -> None:
        number = sender.open(sample)
        sender.send(number, sample, 0, 8)
        sender.send(number, sample, 8, 16, flip=1)
        (failed,) = sender.recorder.wait(Failed)
        assert (failed.sample, failed.code) == (number, "HASH_MISMATCH")
        assert failed.message

    def test_missing_rows_fail_the_sample(self, sender: Sender, sample: SyntheticSample) -> None:
        number = sender.open(sample)
        sender.send(number, sample, 0, 8)
        sender.send(number, sample, 9, 24)
        sender.commit(number, sample)
        (failed,) = sender.recorder.wait(Failed)
        assert (failed.sample, failed.code) == (number, "MISSING_ROWS")
        assert "8" in failed.message

    def test_an_abort_is_answered_with_its_own_code(self, sender: Sender, sample: SyntheticSample) -> None:
        number = sender.open(sample)
        sender.send(number, sample, 0, 8)
        sender.abort(number, "SLOT_MISMATCH", "the slots do not match")
        assert sender.recorder.wait(Failed) == [Failed(number, "SLOT_MISMATCH", "the slots do not match")]
        assert len(sender.recorder.of(Acked)) == 1

    def test_a_sample_may_be_aborted_before_its_first_row(self, sender: Sender, sample: SyntheticSample) -> None:
        number = sender.open(sample)
        sender.abort(number)
        assert sender.recorder.wait(Failed)[0].sample == number

    @pytest.mark.parametrize("how", ["hash", "abort"])
    def test_a_failed_sample_ends_once_and_its_later_chunks_are_acked(
        self, sender: Sender, sample: SyntheticSample, how: str
    ) -> None:
        number = sender.open(sample)
        sender.send(number, sample, 0, 8, flip=int(how == "hash"))
        if how == "abort":
            sender.abort(number)
        sender.recorder.wait(Failed)
        sender.send(number, sample, 0, 8)
        sender.send(number, sample, 8, 24, flip=1)
        sender.commit(number, sample)
        sender.abort(number)
        sender.settle(sample)
        assert len(sender.endings()[number]) == 1
        assert len(sender.recorder.of(Acked)) == 4

    def test_a_committed_sample_ends_once(self, sender: Sender, stored: Stored, sample: SyntheticSample) -> None:
        number = sender.open(sample)
        sender.send(number, sample, 0, 24)
        sender.commit(number, sample)
        sender.recorder.wait(Committed)
        sender.send(number, sample, 0, 8, flip=1)
        sender.abort(number)
        sender.settle(sample)
        assert sender.endings()[number] == [Committed(number, duplicate=False)]
        assert stored(sample) == (sample.rows(), sample.token_ids)

    def test_many_samples_interleave(self, sender: Sender, stored: Stored, namespace: str) -> None:
        samples = [SyntheticSample(f"s-{i}", namespace=namespace, num_tokens=6 + i, seed=i) for i in range(20)]
        numbers = [sender.open(sample) for sample in samples]
        for start in range(0, 26, 4):
            for number, sample in zip(numbers, samples, strict=True):
                if start < sample.num_tokens:
                    sender.send(number, sample, start, min(start + 4, sample.num_tokens))
        for number, sample in zip(numbers, samples, strict=True):
            if number % 3 == 0:
                sender.abort(number, "ABORTED", f"the message of {number}")
            else:
                sender.commit(number, sample)
        aborted = [number for number in numbers if number % 3 == 0]
        sender.recorder.wait(Committed, len(samples) - len(aborted))
        sender.recorder.wait(Failed, len(aborted))
        assert {number: len(found) for number, found in sender.endings().items()} == dict.fromkeys(numbers, 1)
        assert {(f.sample, f.message) for f in sender.recorder.of(Failed)} == {(n, f"the message of {n}") for n in aborted}
        for number, sample in zip(numbers, samples, strict=True):
            if number not in aborted:
                assert stored(sample) == (sample.rows(), sample.token_ids)

    def test_nothing_is_said_after_close(self, sender: Sender, sample: SyntheticSample) -> None:
        number = sender.open(sample)
        for row in range(sample.num_tokens):
            sender.send(number, sample, row, row + 1)
        sender.commit(number, sample)
        sender.sink.close(30.0)
        said = sender.recorder.events
        sender.send(number, sample, 0, 1)
        sender.sink.check_deadlines()
        sender.sink.close(30.0)
        assert sender.recorder.events == said
