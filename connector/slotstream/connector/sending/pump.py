"""The pump: one thread between staging and the transport. It owns every sample's state, so none of it needs a lock.

The engine's thread only posts what it staged; once that is copied, the pump checks slots, hashes, and hands rows to the outbox,
which knows what has become of them.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from slotstream.common.logtext import log_text
from slotstream.common.throttle import Throttle
from slotstream.connector.counters import SENDER_REASONS, Counters, capture_off
from slotstream.connector.faults import Faults, SampleFault
from slotstream.connector.plan import SampleAbort, SampleFinish, SampleOpen
from slotstream.connector.sending.engine_reports import EngineReports
from slotstream.connector.sending.inbox import BESIDE_THE_ENGINE, EngineItem, FailSample, Inbox, Looks, RowBatch, Stop
from slotstream.connector.sending.lane import Lane, Said
from slotstream.connector.sending.outbox import Outbox
from slotstream.connector.sending.phases import Phase
from slotstream.connector.sending.row_check import INFINITY, Checkable, Segment, count_bad_rows
from slotstream.connector.sending.row_hashes import Digests
from slotstream.connector.sending.sample_state import ChunkState, NotAllowed, SampleState, format_of
from slotstream.connector.sending.spool.disk_thread import Adopted, Appended, DiskThread, Loaded, ReadBack, SpoolEvent
from slotstream.connector.sending.spool.reader import SpoolReader
from slotstream.connector.sending.spool.writer import SpoolWriter
from slotstream.connector.sending.staging_area import StagingArea, Words
from slotstream.connector.sending.staging_pool import StagingPool
from slotstream.connector.vllm_config import ConnectorConfig
from slotstream.transport.base import Acked, Committed, Failed, FellBack, LinkDown, LinkUp, SampleSink, SinkEvent
from slotstream.transport.logs import connector_logger
from slotstream.transport.targets import Target
from slotstream.v1 import ingest_pb2
from slotstream.wire.address import shown_addresses
from slotstream.wire.errors import (
    BadParams,
    BadRows,
    CaptureAborted,
    InternalFault,
    ServerUnavailable,
    SlotStreamError,
    StagingFull,
    Unauthenticated,
)

logger = connector_logger(__name__)

_TICK_S = 1.0

_Event = Said | SpoolEvent


class Pump:
    """See the module. `post` never blocks; everything else happens on the pump's thread. For `on_end` see `Outbox`."""

    looks = True

    def __init__(
        self,
        config: ConnectorConfig,
        pool: StagingPool,
        area: StagingArea,
        sinks: Sequence[SampleSink],
        counters: Counters,
        on_end: Callable[[str], None] = lambda req_id: None,
        looks: Looks = BESIDE_THE_ENGINE,
    ) -> None:
        options = config.options
        self._wait_s_max = options.wait_s_max
        self._fail_bad_rows = options.bad_rows == "fail"
        self._servers = shown_addresses(options.servers)
        self.server: Target | None = None  # See `Sender`.
        self._infinity = INFINITY[config.dtype]
        self._pool = pool
        self._area = area
        self._row_bytes = config.row_bytes
        self._counters = counters
        self._inbox: Inbox[_Event] = Inbox(lambda: area.done, looks)
        self._disk: DiskThread | None = None
        if options.spool_dir is not None:
            self._disk = DiskThread(Path(options.spool_dir), options.spool_bytes_max, counters, self._inbox.put)
        self._digests = Digests()
        self._faults = Faults(counters)
        self._spool_writer = SpoolWriter(self._disk, pool)
        reader = SpoolReader(self._disk, pool)
        self._outbox = Outbox(config, pool, sinks, self._spool_writer, reader, counters, self._faults, on_end, self._guard)
        self._batches_posted = 0  # Written by the engine's thread only,
        self._batches_done = 0  # and this by ours.
        self._stop: Stop | None = None
        self._throttle = Throttle(every_s=10.0)
        self._throttle_link = Throttle(every_s=60.0)
        self._refused = False  # The server does not know our token.
        self._reports = EngineReports(config, self._outbox.lanes, self.gauges)
        self.lent_bytes: Callable[[], int] = lambda: 0  # Of staging that is lent ahead, and holds no rows yet.
        self._thread = threading.Thread(target=self._run, name="slotstream-pump", daemon=True)

    def start(self) -> None:
        """Start the threads and the sink."""
        self._thread.start()
        if self._disk is not None:
            self._disk.start()
        for lane in self._outbox.lanes:
            lane.sink.start(partial(self._said, lane))

    def _said(self, lane: Lane, event: SinkEvent) -> None:
        self._inbox.put(Said(lane, event))

    def post(self, item: SampleOpen | RowBatch | SampleFinish | SampleAbort | FailSample) -> None:
        """Hand something over, from the engine's thread; kept in order."""
        self._batches_posted += isinstance(item, RowBatch)
        self._inbox.put(item)

    def hand_over(self) -> None:
        """See `Sender`. All is on its way."""

    def look(self) -> None:
        """See `Sender`."""
        self._inbox.look()

    def device_is_gone(self) -> None:
        """Reads that are not over fail their samples."""
        self._inbox.wait_no_more()

    def lease(self, count: int, deadline: float) -> list[int] | None:
        """Staging slots for rows: waits for room until `deadline` (monotonic); None, which `why_full` explains, without."""
        return self._pool.acquire(count, deadline=deadline, keep_waiting=lambda: self.taking_rows)

    def release(self, staging_slots: list[int]) -> None:
        """Leased staging slots that were not needed, or have been read."""
        self._pool.release(staging_slots)

    @property
    def taking_rows(self) -> bool:
        """Whether waiting for room in staging makes sense: something has freed staging within the last `wait_s_max` seconds."""
        if not self._outbox.link_up:
            unseen = self._batches_posted != self._batches_done  # What the spool will be asked to write.
            return (self._disk is not None and unseen) or self._spool_writer.taking_rows(self._wait_s_max)
        return self._outbox.lanes.answered_since(time.monotonic() - self._wait_s_max)

    @property
    def link_up(self) -> bool:
        """Whether the stream to the server is up."""
        return self._outbox.link_up

    def why_full(self) -> SlotStreamError:
        """What to tell of a sample for which there is no room in staging."""
        if self._outbox.link_up:
            return StagingFull("no room in staging: the server or the network takes rows too slowly")
        where = "staging" if self._disk is None else "staging and the spool"
        return ServerUnavailable(f"the server at {self._servers} is away, and {where} can hold no more rows until it is back")

    @property
    def has_faults(self) -> bool:
        """See `Sender`."""
        return bool(self._faults)

    def take_faults(self) -> list[SampleFault]:
        """Samples that failed since the last call."""
        return self._faults.take()

    def gauges(self) -> Mapping[str, float]:
        """`counters.SENDER_GAUGES`, now."""
        pool = self._pool
        return {
            "samples_in_flight": self._outbox.samples,
            "staging_bytes_in_use": pool.in_use * pool.slot_bytes - self.lent_bytes(),
            "staging_bytes_kept": pool.kept * pool.slot_bytes,
            "staging_bytes_limit": pool.nbytes,
            "spool_bytes_in_use": 0 if self._disk is None else self._disk.bytes_in_use,
            "link_up": int(self._outbox.link_up),
            "streams_up": len(self._outbox.lanes.up),
            **capture_off(SENDER_REASONS, Unauthenticated.code if self._refused else None),
        }

    def close(self, timeout_s: float) -> None:
        """Let what is in flight finish, for at most `timeout_s`; what cannot goes to the spool. Then stop the threads."""
        deadline = time.monotonic() + timeout_s
        stop = Stop(deadline - timeout_s / 2 if self._disk is not None else deadline, deadline)
        self._inbox.put(stop)
        self._stop = stop  # Not only when it is handled: a copy before that may never end.
        self._thread.join(timeout_s + 2 * _TICK_S)
        self._digests.close()
        if self._disk is not None:
            self._disk.close(max(1.0, deadline - time.monotonic()))
        for lane in self._outbox.lanes:
            lane.sink.close(1.0)

    # -- the thread

    def _run(self) -> None:
        next_check = 0.0
        while not self._may_stop():
            if time.monotonic() >= next_check:  # Also while items keep coming: the server may have stopped all the same.
                next_check = time.monotonic() + _TICK_S
                for lane in self._outbox.lanes:
                    lane.sink.check_deadlines()
                self._safely(self._outbox.tick)
                self._safely(self._faults.tick)
                self._safely(self._reports.tick)
            item = self._inbox.get(_TICK_S if self._stop is None else 0.05)
            if item is not None:
                self._handle_safely(item)
        if self._outbox.samples:
            what = "lost" if self._disk is None else "left to the next engine, as far as they are in the spool"
            logger.warning("slotstream: closed with %d samples in flight; they are %s", self._outbox.samples, what)

    def _may_stop(self) -> bool:
        """Whether the engine ended and nothing is left to wait for."""
        stop, now = self._stop, time.monotonic()
        if stop is None or now >= stop.deadline:
            return stop is not None
        if self._outbox.link_up and now >= stop.patience:
            self._safely(lambda: self._outbox.give_up_links("the engine shut down"))
        if len(self._inbox):
            return False
        if self._disk is None:  # A link that is not up yet, or not again, is all that can save what is left.
            return self._outbox.is_empty
        return self._outbox.is_empty or (not self._outbox.link_up and self._spool_writer.writing == 0)

    def _handle_safely(self, item: EngineItem | _Event) -> None:
        """Our own bug must neither stop the pump nor leak staging: the samples concerned fail."""
        if self._safely(lambda: self._handle(item)):
            return
        req_ids = {s.req_id for s in item.segments} if isinstance(item, RowBatch) else {getattr(item, "req_id", "")}
        for req_id in req_ids:
            if (sample := self._outbox.sample(req_id)) is not None:
                self._fault(sample)

    def _safely(self, action: Callable[[], object]) -> bool:
        """Do it; False after a bug of ours. Where that was a move that the table has not, its sample fails."""
        try:
            action()
        except Exception as bug:
            self._counters.add("hook_faults")
            logger.exception("slotstream: the pump failed")
            if isinstance(bug, NotAllowed):
                self._fault(bug.sample)
            return False
        return True

    def _guard(self, action: Callable[[SampleState], object], sample: SampleState) -> None:
        """Do it with one sample of many: a bug costs that one, and the others have their turn."""
        if not self._safely(lambda: action(sample)):
            self._fault(sample)

    def _fault(self, sample: SampleState) -> None:
        """A bug of ours met this sample."""
        if sample.phase is not Phase.OVER:
            error = InternalFault("a fault of slotstream's own: the log says which")
            self._safely(lambda: self._outbox.give_up(sample, error.code, str(error)))

    def _handle(self, item: EngineItem | _Event) -> None:
        outbox = self._outbox
        match item:
            case RowBatch():
                self._batch(item)
            case Said():
                self._heard(item.lane, item.event)
            case SampleOpen():
                outbox.open(item)
            case SampleFinish():
                self._finish(item)
            case SampleAbort():
                self._fail(item.req_id, item.code, item.message)
            case FailSample():
                self._give_up(item.req_id, item.error)
            case Appended():
                outbox.appended(item)
            case ReadBack():
                outbox.read_back(item)
            case Adopted():
                outbox.adopted(item)
            case Loaded():
                outbox.loaded(item)
            case Stop():
                self._stop = item
                for req_id in outbox.live:  # Those that wait for their commit's answer only are left alone.
                    self._give_up(req_id, CaptureAborted("the engine shut down before all rows existed"))

    def _heard(self, lane: Lane, event: SinkEvent) -> None:
        """What the server says on a lane."""
        outbox = self._outbox
        match event:
            case Acked():
                outbox.acked(lane, event.chunks)
            case Committed():
                outbox.committed(lane, event.sample)
            case Failed():
                outbox.failed(lane, event)
            case FellBack():
                self._counters.add("nixl_fallbacks")
            case LinkUp():
                self.server, self._refused = event.target, False
                outbox.link_is_up(lane, event.columns)
                where, version, streams = event.target or self._servers, event.server_version, self._streams_up()
                logger.info("slotstream: connected to %s (server %s)%s", where, version, streams)
                self._reports.link_is_up()
            case LinkDown():
                self._refused = event.code == Unauthenticated.code  # Before the log says it: who reads that looks at the gauge.
                # A server that refuses our token says so at every try.
                if (unsaid := self._throttle_link.admit(event.code)) is not None or lane.up:
                    why, waiting = log_text(event.code or ServerUnavailable.code, event.message), outbox.samples
                    more = f" ({unsaid} more times not logged)" if unsaid else ""
                    if outbox.lanes.up in ([], [lane]):
                        logger.warning("slotstream: no link to the server: %s; %d samples wait%s", why, waiting, more)
                    else:
                        logger.warning("slotstream: a stream to the server ended: %s%s", why, self._streams_up(without=lane))
                self._reports.link_is_down(lane)
                outbox.link_is_down(lane, event.message, event.code)

    def _streams_up(self, *, without: Lane | None = None) -> str:
        """What a line of the log says of them, where there may be several."""
        lanes = list(self._outbox.lanes)
        up = sum(lane.up and lane is not without for lane in lanes)
        return f"; {up} of {len(lanes)} streams are up" if len(lanes) > 1 else ""

    def _batch(self, batch: RowBatch) -> None:
        done, read_unix_ns = 0, time.time_ns()
        try:
            if batch.number > self._area.done:
                error = InternalFault("the engine ended before its rows were read")
                for req_id in {segment.req_id for segment in batch.segments}:
                    self._give_up(req_id, error)
                return
            found = batch.evidence.find(self._area, batch.segments)
            digests = self._digests.of([self._pool.buffer(s.staging_slot, s.rows * self._row_bytes) for s in batch.segments])
            for segment, digest, problem in zip(batch.segments, digests, self._problems(batch, found), strict=True):
                done += 1
                self._segment(segment, problem, digest, read_unix_ns)
        finally:
            self._pool.release([*batch.scratch, *(s.staging_slot for s in batch.segments[done:])])
            self._batches_done += 1  # Last: an engine that waits for room must not give up just before there is some.

    def _problems(self, batch: RowBatch, found: Checkable) -> Iterator[SlotStreamError | None]:
        """What is wrong with each segment, looked at when it is asked for."""
        peaks = found.peaks
        if found.problem(0, len(peaks)) is None and count_bad_rows(0, peaks, self._infinity) is None:
            # Nearly always. Asked of each segment it would be a third of what that costs.
            yield from itertools.repeat(None, len(batch.segments))
            return
        at = 0
        for segment in batch.segments:
            sample = self._outbox.sample(segment.req_id)
            first, at = at, at + segment.rows
            problem: SlotStreamError | None = None
            if sample is not None:
                problem = found.problem(first, at)
                problem = problem or self._check_rows(sample, segment, peaks[first:at])
            yield problem

    def _segment(self, segment: Segment, problem: SlotStreamError | None, digest: int, read_unix_ns: int) -> None:
        sample = self._outbox.sample(segment.req_id)
        if problem is not None:
            self._give_up(segment.req_id, problem)
        if sample is None or problem is not None:
            self._pool.release([segment.staging_slot])
            return
        sample.rows_unix_ns = read_unix_ns
        nbytes = segment.rows * self._row_bytes
        self._outbox.add(sample, ChunkState(segment.first_row, segment.rows, nbytes, digest, segment.staging_slot))

    def _check_rows(self, sample: SampleState, segment: Segment, peaks: Words) -> BadRows | None:
        """Count and note rows of zeros and rows with a NaN or an infinity; why the sample fails, where the option says so."""
        found = count_bad_rows(segment.first_row, peaks, self._infinity)
        if found is None:
            return None
        count, problem = found
        self._counters.add("zero_rows", count.zero)
        self._counters.add("nonfinite_rows", count.nonfinite)
        sample.bad_rows = count if sample.bad_rows is None else sample.bad_rows + count
        if self._fail_bad_rows:
            return problem
        if (unsaid := self._throttle.admit(BadRows.code)) is not None:
            more = f" ({unsaid} more samples were not logged)" if unsaid else ""
            logger.warning("slotstream: of sample %s, %s%s", sample.opened.sample_id, problem, more)
        return None

    def _finish(self, item: SampleFinish) -> None:
        sample = self._outbox.sample(item.req_id)
        if sample is None:
            return
        if sample.opened.columns or item.columns.values:
            try:
                item.columns.check(format_of(sample.opened), len(item.token_ids))
            except BadParams as error:
                self._give_up(item.req_id, error)
                return
        metadata = {**item.metadata, **(sample.bad_rows.metadata if sample.bad_rows is not None else {})}
        metadata["last_rows_unix_ns"] = str(sample.rows_unix_ns)  # By this host's clock.
        self._outbox.finish(
            sample,
            ingest_pb2.CommitSample(
                row_count=len(item.token_ids), token_ids=item.token_ids, metadata=metadata, columns=item.columns.to_wire()
            ),
        )

    def _give_up(self, req_id: str, error: SlotStreamError) -> None:
        self._fail(req_id, error.code, str(error))

    def _fail(self, req_id: str, code: str, message: str) -> None:
        """Fail a sample that still takes rows; the server is told."""
        if (sample := self._outbox.sample(req_id)) is not None:
            self._outbox.give_up(sample, code, message)
