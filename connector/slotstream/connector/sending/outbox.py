"""The outbox: every sample from its open until the server's verdict, also where the link breaks in between.

What can become of a sample is a table (`phases.py`); here is what is done on each of its moves. A sample is failed on this side
only when its rows are lost, or never were here; then the server is told, now or when it is back. The server stores the same
content once, so that sending it again is always safe.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Sequence
from functools import partial

from slotstream.connector.counters import Counters
from slotstream.connector.faults import Faults, SampleFault
from slotstream.connector.plan import SampleOpen
from slotstream.connector.sending.failure_reports import Report, Reports
from slotstream.connector.sending.lane import NO_LANE, Lane, Lanes
from slotstream.connector.sending.phases import Event, Phase
from slotstream.connector.sending.sample_state import ChunkState, SampleState, format_of, numbered, open_message
from slotstream.connector.sending.spool.backlog import Backlog
from slotstream.connector.sending.spool.disk_thread import Adopted, Appended, Loaded, ReadBack
from slotstream.connector.sending.spool.reader import SpoolReader
from slotstream.connector.sending.spool.writer import SpoolWriter
from slotstream.connector.sending.staging_pool import StagingPool
from slotstream.connector.sending.unacked_chunks import UnackedChunks
from slotstream.connector.sending.verdicts import is_final
from slotstream.connector.vllm_config import ConnectorConfig
from slotstream.transport.base import Failed, SampleSink
from slotstream.v1 import ingest_pb2
from slotstream.wire.errors import Damaged, Interrupted, IoError, SlotStreamError, UnsupportedFormat

_RETRY_S, _RETRY_S_MAX = 0.5, 30.0
_DOUBLINGS_MAX = 16

# Does something with a sample. Whatever that raises is a bug of ours, and costs this sample only.
Guard = Callable[[Callable[[SampleState], object], SampleState], object]


class Outbox:
    """For the pump's thread, but for the properties and plain attributes, which any thread may read.

    `on_end` is called with the request of each sample that is durable, or failed as the server knows. `guard` stands around
    what is done with one sample of many. `clock`: monotonic seconds.
    """

    def __init__(
        self,
        config: ConnectorConfig,
        pool: StagingPool,
        sinks: Sequence[SampleSink],
        writer: SpoolWriter,
        reader: SpoolReader,
        counters: Counters,
        faults: Faults,
        on_end: Callable[[str], None],
        guard: Guard,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._pool = pool
        self._writer = writer
        self._reader = reader
        self._counters = counters
        self._faults = faults
        self._on_end = on_end
        self._guard = guard
        self._clock = clock
        self.lanes = Lanes(sinks)
        self._serials = itertools.count(1)
        self._live: dict[str, SampleState] = {}  # by request, until its finish or abort
        self._held: dict[int, SampleState] = {}  # by serial, until they are over: in the order of their opens
        self._backlog = Backlog(reader)
        self._rows = UnackedChunks(pool, writer, reader, clock)
        self._reports = Reports(counters, faults, writer.put_report, writer.drop, on_end, clock)

    @property
    def link_up(self) -> bool:
        """Whether a lane is up."""
        return self.lanes.any_up

    @property
    def samples(self) -> int:
        """Samples without a verdict, those that only the spool holds included."""
        return len(self._held) + self._backlog.files

    @property
    def is_empty(self) -> bool:
        """Whether nothing is owed to the server."""
        return not (self.samples or self._reports)

    @property
    def live(self) -> list[str]:
        """Requests whose samples still get rows."""
        return list(self._live)

    # What the engine says.

    def open(self, item: SampleOpen) -> None:
        """A sample begins."""
        sample = SampleState(next(self._serials), item.req_id, open_message(self._config, item))
        self._live[item.req_id] = self._held[sample.serial] = sample
        self._counters.add("samples_opened")
        if item.columns:
            try:
                format_of(sample.opened)
            except SlotStreamError as error:
                self.give_up(sample, error.code, str(error))
                return
        if not self.link_up:
            self._writer.put(sample)
        elif (lane := self._lane_for(sample)) is not None:
            self._announce(sample, lane)

    def sample(self, req_id: str) -> SampleState | None:
        """The sample of a request, if it still takes rows."""
        return self._live.get(req_id)

    def add(self, sample: SampleState, chunk: ChunkState) -> None:
        """Rows of a sample that still takes them, in a leased staging slot."""
        sample.add(chunk)
        self._counters.add("rows", chunk.rows)
        self._counters.add("bytes", chunk.nbytes)
        self._counters.add("chunks")
        if sample.phase is Phase.OPEN:
            self._rows.submit(self.lanes.of(sample), sample, chunk)
        else:
            self._writer.put_chunk(sample, chunk)
            self._rows.settle(sample, chunk)

    def finish(self, sample: SampleState, commit: ingest_pb2.CommitSample) -> None:
        """No more rows come: commit."""
        self._no_rows_come(sample)
        sample.commit = commit
        if sample.phase.on_stream:  # What it promised beyond its rows does not come.
            self.lanes.of(sample).owes(sample, sum(chunk.nbytes for chunk in sample.chunks if chunk.wire))
        self._progress(sample)

    def give_up(self, sample: SampleState, code: str, message: str) -> None:
        """Fail a sample for a reason on this side. The server is told."""
        self._no_rows_come(sample)
        if sample.phase is Phase.ABORTING:
            return
        sample.why = (code, message)
        if sample.move(Event.GIVEN_UP) is Phase.OVER:
            self._end_untold(sample)
        else:
            lane = self.lanes.of(sample)
            lane.owes(sample, 0)
            lane.sink.abort(ingest_pb2.AbortSample(sample=sample.number, code=code, message=message))
            self._rows.let_go(sample)

    def _no_rows_come(self, sample: SampleState) -> None:
        if self._live.get(sample.req_id) is sample:
            del self._live[sample.req_id]

    # What the link says.

    def link_is_up(self, lane: Lane, taken_columns: frozenset[str] = frozenset()) -> None:
        """The server answers on a lane. Where that is the first, all that waits in memory is sent again at once.

        What only the spool holds is sent bit by bit. `taken_columns`: what the server takes beside the default pair.
        """
        first = not self.link_up
        lane.up, lane.taken_columns = True, taken_columns
        if not first:
            return  # Nothing waits for a link.
        for sample in list(self._held.values()):
            if sample.commit is None or sample.in_memory:
                self._guard(self._send, sample)
            else:
                self._backlog.add(sample)
        self._reader.adopt()
        self._advance()

    def link_is_down(self, lane: Lane, message: str, code: str = "") -> None:
        """A lane's stream broke, or was refused (`code`): nothing counts that was sent on it without a verdict."""
        self._lanes_are_down([lane], (code or Interrupted.code, message))

    def give_up_links(self, message: str) -> None:
        """Nothing more is waited for on any lane."""
        self._lanes_are_down(list(self.lanes), (Interrupted.code, message))

    def _lanes_are_down(self, lanes: Sequence[Lane], why: tuple[str, str]) -> None:
        last = all(lane in lanes for lane in self.lanes.up)
        samples = list(self._held.values()) if last else [sample for lane in lanes for sample in lane.samples.values()]
        for lane in lanes:
            self._rows.link_down(lane, last=last)
            self._reports.link_down(lane)
            lane.up = lane.up and last
        if last:
            self._backlog.link_down()
            self._reader.link_down()
        for sample in sorted(samples, key=lambda sample: sample.phase is not Phase.ABORTING):  # Failures first.
            self._guard(partial(self._back_here, why=why, spool=last), sample)
        for lane in lanes:
            lane.up = False  # The last only now that the spool is at work: an engine that waits for room would give up between.
        if not last:
            self._send_elsewhere(samples)
        for lane in lanes:
            lane.sink.reset()

    def _send_elsewhere(self, samples: Sequence[SampleState]) -> None:
        """Samples of a lane that went down while another is up: the others get them at once."""
        for sample in samples:
            if sample.phase is not Phase.WAITING:
                continue
            if sample.commit is None or sample.in_memory or self._backlog.has_turn(sample):
                self._guard(self._send, sample)
            else:
                self._backlog.add(sample)
        self._advance()

    def _back_here(self, sample: SampleState, why: tuple[str, str], *, spool: bool) -> None:
        """What was sent of a sample no longer counts: it waits for a lane, if it can be sent again. `spool`: there is none."""
        if sample.move(Event.LINK_DOWN) is Phase.OVER:
            self._end_untold(sample)
            return
        sample.why = why
        if not self._rows.recover(sample):
            self._rows_lost(sample)
        elif spool:
            self._writer.put(sample)

    def _rows_lost(self, sample: SampleState) -> None:
        sample.move(Event.ROWS_LOST)
        self._end_untold(sample)

    def acked(self, lane: Lane, numbers: Sequence[int]) -> None:
        """The server took these chunks of a lane."""
        self._rows.acked(lane, numbers)

    def committed(self, lane: Lane, number: int) -> None:
        """A sample is durable."""
        sample = lane.samples.get(number)
        if sample is not None:
            sample.move(Event.STORED)
            self._counters.add("samples_committed")
            self._forget(sample)
            self._on_end(sample.req_id)
            self._advance()

    def failed(self, lane: Lane, event: Failed) -> None:
        """The server will not store a sample, or cannot now."""
        if self._reports.answered(lane, event, again=not is_final(event.code)):
            self._advance()
            return
        sample = lane.samples.get(event.sample)
        if sample is None:
            return
        not_now = not is_final(event.code, sample.refusals)
        if not_now and sample.phase is Phase.ABORTING:
            sample.move(Event.NOT_NOW)
            self._end_untold(sample)
        elif not_now and not self._pool.was_robbed(sample.serial):
            self._back_off(sample, event)
        else:
            sample.move(Event.FAILED)
            sample.why = (event.code, event.message)
            self._end_told(sample)
        self._advance()

    def _back_off(self, sample: SampleState, event: Failed) -> None:
        """Its rows stay for as long as nobody needs their room; then, or when none are lost, it is sent again."""
        sample.move(Event.NOT_NOW)
        self.lanes.of(sample).end(sample)
        sample.why = (event.code, event.message)
        sample.retry_at = self._clock() + min(_RETRY_S * 2 ** min(sample.refusals, _DOUBLINGS_MAX), _RETRY_S_MAX)
        sample.refusals += 1
        self._backlog.refused(sample)
        self._writer.put(sample)
        for chunk in sample.chunks:
            self._rows.settle(sample, chunk)

    def tick(self) -> None:
        """Called about once a second."""
        now = self._clock()
        behind = self._writer.is_behind()
        for sample in list(self._held.values()):
            if sample.phase is Phase.BACKING_OFF and sample.retry_at <= now and not any(chunk.wire for chunk in sample.chunks):
                if sample.commit is None or sample.in_memory:
                    self._guard(self._send, sample)
                else:  # Only the spool has it: it comes again in its turn.
                    sample.retry_at = math.inf
                    self._backlog.add_again(sample)
            elif behind and sample.phase.waits_here:
                self._writer.put(sample)
        if behind and self._reports.put_again():
            self._writer.stay_behind()
        self._reports.tick()
        self._backlog.tick(now)
        self._advance()

    # What the spool says.

    def appended(self, event: Appended) -> None:
        """A record was written, or refused."""
        if isinstance(event.token, Report):
            self._reports.written(event.token, refused=event.offset is None)
        record = self._writer.appended(event)
        if record is not None:
            if record.chunk is not None:
                self._rows.settle(record.sample, record.chunk)
            if record.sample.phase.waits_here:
                self._writer.put_commit(record.sample)

    def adopted(self, event: Adopted) -> None:
        """A dead engine left files."""
        self._backlog.adopted(event.files)
        self._advance()

    def loaded(self, event: Loaded) -> None:
        """What such a file says."""
        if event.sample is None:
            self._backlog.unread(event.file, self._clock())
            return
        if not self._backlog.loaded(event.file, link_up=self.link_up):
            return
        sample, failure = self._reader.restore(event.file, event.sample, next(self._serials))
        self._counters.add("samples_opened")
        self._held[sample.serial] = sample
        if failure is not None:
            self.give_up(sample, *failure)
        else:
            self._backlog.add(sample)
        self._advance()

    def read_back(self, event: ReadBack) -> None:
        """Rows came back from the spool."""
        fetch = self._reader.read_back(event)
        if fetch is None:
            return
        if event.digest is None:
            self._reader.give_back(fetch.staging_slot)
            if event.later:
                self._read_later(fetch.sample)
            else:
                self.give_up(fetch.sample, Damaged.code, "rows of the sample cannot be read back from the spool")
        else:
            fetch.chunk.digest = event.digest
            self._rows.submit(self.lanes.of(fetch.sample), fetch.sample, fetch.chunk, fetch.staging_slot)
            self._progress(fetch.sample)

    def _read_later(self, sample: SampleState) -> None:
        """The spool's disk fails. Its rows may be there yet, so the sample comes again, and holds nothing at the server."""
        failed = Failed(sample.number, IoError.code, "rows of the sample cannot be read back from the spool now")
        abort = ingest_pb2.AbortSample(sample=failed.sample, code=failed.code, message=failed.message)
        self.lanes.of(sample).sink.abort(abort)
        self._back_off(sample, failed)

    # Sending.

    def _lane_for(self, sample: SampleState) -> Lane | None:
        """The lane that a sample goes to. One of a format that the server does not take fails before a row of it is sent."""
        lane = self.lanes.for_sample(sample)
        if not (unknown := sorted(set(sample.opened.columns) - lane.taken_columns)):
            return lane
        message = f"the server takes no column {unknown[0][:64]!r}: upgrade servers before connectors"
        self.give_up(sample, UnsupportedFormat.code, message)
        return None

    def _announce(self, sample: SampleState, lane: Lane) -> None:
        sample.move(Event.SEND)
        if sample.commit is None:
            owed_bytes = sample.opened.rows_max * self._config.row_bytes
        else:
            owed_bytes = sum(chunk.nbytes for chunk in sample.chunks)
        lane.begin(sample, owed_bytes)
        sample.unsent = len(sample.chunks)
        lane.sink.open_sample(numbered(sample.opened, sample.number))

    def _send(self, sample: SampleState) -> None:
        """Open a sample again and send all there is of it. One that lost rows meanwhile fails."""
        lane = self._lane_for(sample)
        if lane is None:
            return
        if not self._rows.recover(sample, spare=True):
            self._rows_lost(sample)
            return
        self._announce(sample, lane)
        self._counters.add("samples_replayed")
        for chunk in sample.chunks:
            if chunk.staging_slot is not None:
                self._rows.submit(lane, sample, chunk)
            else:
                self._reader.fetch(sample, chunk)
        self._reader.read_more()
        self._progress(sample)

    def _progress(self, sample: SampleState) -> None:
        """Commit once there is nothing left to submit; while the sample waits, see that the spool knows it is whole."""
        if sample.commit is None:
            return
        if sample.phase.waits_here:
            self._writer.put_commit(sample)
        elif not sample.unsent:
            sample.move(Event.LAST_ROW)
            request = ingest_pb2.CommitSample()
            request.CopyFrom(sample.commit)
            request.sample = sample.number
            self.lanes.of(sample).sink.commit(request)

    def _advance(self) -> None:
        """Send more of what only the spool holds, and tell more failures, as far as the limits allow."""
        if not self.link_up:
            return
        while (sample := self._backlog.next()) is not None:
            self._guard(self._send, sample)
        self._reports.send(self.lanes.least_owing())

    # The end. The sample is OVER.

    def _end_told(self, sample: SampleState) -> None:
        """A sample failed, as the server knows."""
        self._faults.add(sample.opened.sample_id, SampleFault(sample.req_id, *sample.why))
        self._on_end(sample.req_id)
        self._forget(sample)

    def _end_untold(self, sample: SampleState) -> None:
        """A sample failed, and the server has yet to hear of it."""
        file, sample.file = sample.file, None
        if file is not None and sample.req_id:  # An earlier engine's file stays until the server has heard of it.
            self._writer.drop(file)
            file = None
        self._reports.add(Report.of(sample.opened, sample.serial, SampleFault(sample.req_id, *sample.why), file))
        self._forget(sample)

    def _forget(self, sample: SampleState) -> None:
        del self._held[sample.serial]
        if sample.lane != NO_LANE:
            self.lanes.of(sample).end(sample)
        self._no_rows_come(sample)
        self._backlog.done(sample)
        self._rows.let_go(sample)
        if sample.file is not None:
            self._writer.drop(sample.file)
