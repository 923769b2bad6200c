"""What all ingest streams of a server share: the store and its threads, and what they may use of the server together."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from slotstream.common.logtext import log_text
from slotstream.common.throttle import Throttle
from slotstream.server.access.bodies import Bodies
from slotstream.server.access.limits import OPEN_SAMPLES
from slotstream.server.ingest.sample_writer import Ended, IngestStore, SampleWriter
from slotstream.server.logs import failure_fields
from slotstream.server.metrics import code_label
from slotstream.server.nixl.readers import NixlReaders
from slotstream.server.overview.engines import Engine
from slotstream.server.parts import ServerParts
from slotstream.store.records import Failure
from slotstream.wire.errors import HashMismatch
from slotstream.wire.names import CONTROL_BYTES_MAX

_log = logging.getLogger(__name__)
_HELLO_GROWTH_BYTES = 6 << 20
_SILENT_STREAM_BYTES = 64 << 10  # What a stream and its connection take that say nothing at all.


class Shared:
    """Belongs to the event loop."""

    def __init__(
        self,
        parts: ServerParts[IngestStore],
        committed: Callable[[str], None],
        readers: NixlReaders | None,
    ) -> None:
        """`committed` is told the namespace of every sample stored. `readers`: None where chunks come in frames only."""
        self.config, self.store, self.disk_threads = parts.config, parts.store, parts.disk_threads
        self.metrics, self.waiters, self.engines = parts.metrics, parts.waiters, parts.engines
        self.readers = readers
        # Those of Hellos. A sender may take its time with that, but not make the server hold more and more meanwhile.
        self.bodies = Bodies(
            CONTROL_BYTES_MAX,
            one_by_one=False,
            growth_bytes=_HELLO_GROWTH_BYTES,
            call_bytes=_SILENT_STREAM_BYTES,
            connections=parts.gate.connections,
        )
        self.process = secrets.randbits(64)  # What senders tell this process by from others at the same address.
        self.draining = False  # No more samples are opened.
        self.open_shares = OPEN_SAMPLES.shares(parts.config)
        self._committed = committed
        self._failures = Throttle(every_s=60.0)  # What is logged of samples that failed, by code.
        self._open = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._held_bytes = 0
        self._waiting: dict[asyncio.Event, None] = {}  # In the order in which they came, and are woken.
        parts.metrics.held_bytes.set_function(lambda: self._held_bytes)

    @property
    def is_full(self) -> bool:
        """Whether all streams together hold as many bytes of frames as they may: then all of them wait."""
        return self._held_bytes >= self.config.ingest_bytes_max

    def hold(self, nbytes: int) -> None:
        """Frames were taken, or freed (less than 0): then those who waited for it read on."""
        was_full = self.is_full
        self._held_bytes += nbytes
        if was_full and not self.is_full:
            for room in self._waiting:
                room.set()

    @contextmanager
    def waking(self, room: asyncio.Event) -> Iterator[None]:
        """While the block runs, `room` is set whenever `is_full` ends."""
        self._waiting[room] = None
        try:
            yield
        finally:
            del self._waiting[room]

    def opened(self) -> None:
        """A sample begins."""
        self._open += 1
        self._idle.clear()
        self.metrics.open_samples.set(self._open)

    def ended(self, writer: SampleWriter, ended: Ended, engine: Engine | None) -> None:
        """A sample of this engine ended: counts it, and wakes who waits for it."""
        self._open -= 1
        self.metrics.open_samples.set(self._open)
        if not self._open:
            self._idle.set()
        if ended.failure is None:
            self.metrics.samples.labels("duplicate" if ended.duplicate else "committed", "").inc()
            self.metrics.open_to_durable.observe(ended.open_s)
            self.metrics.commit_to_durable.observe(ended.commit_s)
            if writer.key is not None:
                self._committed(writer.key.namespace)
                if engine is not None:
                    self.engines.stored(engine, str(writer.key))
            _log.debug("sample %s committed", writer.key)
        else:
            label = code_label(ended.failure.code)
            self.metrics.samples.labels("failed", label).inc()
            if ended.failure.code == HashMismatch.code:
                self.metrics.hash_mismatches.inc()
            if (more := self._failures.more(label)) is not None:
                self._log_failure(writer, ended.failure, "" if engine is None else engine.engine_id, more)
        if writer.key is not None:
            self.waiters.notify(writer.key)

    def _log_failure(self, writer: SampleWriter, failure: Failure, engine: str, more: str) -> None:
        fields = failure_fields(
            "sample_failed",
            failure.code,
            namespace=None if writer.key is None else writer.key.namespace,
            sample_id=None if writer.key is None else writer.key.sample_id,
            peer=writer.peer,
            engine=engine,
            bytes=writer.nbytes,
            ms=round(writer.age_s * 1000, 1),
        )
        _log.warning("sample %s failed: %s%s", writer.key, log_text(failure.code, failure.message), more, extra=fields)

    async def idle(self) -> None:
        """Returns once no sample is open."""
        await self._idle.wait()
