"""The pump in a process of its own, as the engine's worker sees it. See `main` for the other end.

The engine's thread only leases staging, of which some is lent ahead, and posts. A thread of ours carries over what was posted;
that the device has read the rows, the process sees for itself. Another thread hears what became of them. When the process
dies, another one is started, and tells the server that the samples which it had fail: those that were durable already, or lie
in the spool, are stored all the same.
"""

from __future__ import annotations

import logging
import os
import queue
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing import Pipe

from slotstream.connector.counters import SENDER_GAUGES, Counters
from slotstream.connector.faults import SampleFault
from slotstream.connector.plan import SampleAbort, SampleOpen
from slotstream.connector.sending.inbox import EngineItem, FailSample, RowBatch, Stop
from slotstream.connector.sending.process.messages import (
    HEARTBEAT_S,
    Close,
    Lent,
    Refused,
    Setup,
    Update,
    Want,
    hear,
    say,
)
from slotstream.connector.sending.sender import EnginePost, Sender, SenderMaker, in_thread
from slotstream.connector.sending.sinks import sinks_for
from slotstream.connector.sending.staging_area import HostMemory, LeaseRing
from slotstream.connector.sending.staging_pool import StagingShape
from slotstream.connector.vllm_config import ConnectorConfig
from slotstream.transport.logs import CONNECTOR_LOGGER, connector_logger
from slotstream.transport.targets import Target
from slotstream.v1 import ingest_pb2
from slotstream.wire.errors import ConfigError, InternalFault, SlotStreamError, StagingFull

logger = connector_logger(__name__)

_START_S = 60.0
_SILENT_S = 30.0  # Without a word for so long the process is taken for hung,
_GRACE_S = 5.0  # unless it was us who stood still.
_ANSWER_S = 1.0  # How late an answer about staging may be.
_RETRY_S, _RETRY_S_MAX = 1.0, 60.0
_ITEMS_MAX = 256  # In one message.
_OPEN_MAX = 1 << 16  # Samples that wait for a process to hear of them; as many as `reports` holds.
_AGAIN_S = 0.002


def in_process(config: ConnectorConfig, hello: ingest_pb2.Hello) -> SenderMaker:
    """A pump in a process of its own, which says `hello` to the server."""

    def make(memory: HostMemory, shape: StagingShape, counters: Counters) -> Sender:
        level = logging.getLogger(CONNECTOR_LOGGER).getEffectiveLevel()
        setup = Setup(config, hello.SerializeToString(), shape, 0, os.getpid(), level)
        return SenderProcess(setup, memory, counters)

    return make


def sender_for(config: ConnectorConfig, hello: ingest_pb2.Hello) -> SenderMaker:
    """What connector option `sender` asks for."""
    if config.sends_in_process:
        return in_process(config, hello)
    return in_thread(config, sinks_for(config.options, hello))


class _Child:
    """One process, and what it lent us. Raises ConfigError where it does not start."""

    def __init__(self, setup: Setup, memory: HostMemory) -> None:
        self.items, items = Pipe()
        self.leases, leases = Pipe()
        self.ring: LeaseRing = memory.area.lending(setup.first_turn)
        fds = (items.fileno(), leases.fileno(), memory.fd)
        command = [sys.executable, "-P", "-m", "slotstream.connector.sending.process.main", *map(str, fds)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        with items, leases:
            try:
                self.process = subprocess.Popen(command, pass_fds=fds, env=environment, stdin=subprocess.DEVNULL)
            except OSError as error:
                self.items.close()
                self.leases.close()
                raise ConfigError(f"the process that sends rows cannot start: {error}") from error
        self.began = self.heard_at = time.monotonic()
        self.stock: deque[int] = deque()  # What was given back. The engine's thread only, as the ring.
        self.asked = False
        self.listener: threading.Thread | None = None
        try:
            say(self.items, setup)
            answer = hear(self.items) if self.items.poll(_START_S) else Refused(f"not there after {_START_S:g} s")
        except (EOFError, OSError):
            answer = Refused("it ended at once (its own output may say why)")
        if isinstance(answer, Refused):
            self.end(0.0)
            raise ConfigError(f"the process that sends rows cannot start: {answer.message}")

    def lease(self, count: int) -> list[int] | None:
        """So many slots, if they are lent."""
        more = self.wanted(count)
        ready = self.ring.ready(more)
        if len(ready) < more:
            return None
        self.ring.take(more)
        self.stock.extend(ready)
        return [self.stock.pop() for _ in range(count)]

    def wanted(self, count: int) -> int:
        """How many the ring has to have for so many."""
        return max(0, count - len(self.stock))

    def end(self, within_s: float) -> None:
        """Return once the process is gone, killed if need be."""
        try:
            self.process.wait(within_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        if self.listener is not None:
            self.listener.join(HEARTBEAT_S)  # It may have said something last.
        self.items.close()
        self.leases.close()


@dataclass(frozen=True, slots=True)
class _LentBatch:
    """A batch in slots that `lender` lent."""

    batch: RowBatch
    lender: _Child | None


@dataclass(frozen=True, slots=True)
class _Lost:
    child: _Child


def _without_process(shape: StagingShape) -> dict[str, float]:
    """The gauges while there is none."""
    return dict.fromkeys(SENDER_GAUGES, 0.0) | {"staging_bytes_limit": float(shape.nbytes)}


class SenderProcess:
    """A `Sender`."""

    looks = False

    def __init__(self, setup: Setup, memory: HostMemory, counters: Counters) -> None:
        self._setup = setup
        self._memory = memory
        self._counters = counters
        self._child: _Child | None = None
        self._lender: _Child | None = None  # Of the slots leased last. The engine's thread only.
        self._refusal: SlotStreamError = InternalFault("")
        self._posted: list[EngineItem | _LentBatch] = []  # Since the last `hand_over`. The engine's thread only.
        self._taken: deque[EngineItem | _LentBatch] = deque()  # Handed over, and not carried on yet. The carrier's thread only.
        self._batches = self._carried = 0  # Posted, and carried on.
        self._inbox: queue.SimpleQueue[list[EngineItem | _LentBatch] | Stop | _Lost] = queue.SimpleQueue()
        self._open: dict[str, SampleOpen] = {}  # Samples that the process has, by request,
        self._failed: dict[str, SampleFault] = {}  # and why some of them failed.
        self._owed: list[EngineItem] = []  # What the process is to be told next.
        self._retry_s = _RETRY_S
        self._retry_at = 0.0
        self._faults: deque[SampleFault] = deque()
        self._stop: Stop | None = None
        self._gauges: Mapping[str, float] = _without_process(setup.shape)
        self.server: Target | None = None  # See `Sender`.
        self._carrier = threading.Thread(target=self._carry, name="slotstream-carrier", daemon=True)

    def start(self) -> None:
        """See `Sender`."""
        self._begin(_Child(self._setup, self._memory))
        self._carrier.start()

    # -- the engine's thread

    def post(self, item: EnginePost) -> None:
        """See `Sender`."""
        if isinstance(item, RowBatch):
            self._batches += 1
            self._posted.append(_LentBatch(item, self._lender))
        else:
            self._posted.append(item)

    def hand_over(self) -> None:
        """See `Sender`."""
        if self._posted:
            posted, self._posted = self._posted, []
            self._inbox.put(posted)

    def look(self) -> None:
        """See `Sender`. The process looks itself."""

    def lease(self, count: int, deadline: float) -> list[int] | None:
        """See `Sender`."""
        child = self._lender = self._child
        if child is None:
            self._refusal = InternalFault("the process that sends rows ended; another one is about to start")
            return None
        try:
            while (slots := child.lease(count)) is None:
                if not self._ask(child, count, deadline):
                    return None
        except (EOFError, OSError):
            self._refusal = InternalFault("the process that sends rows ended")
            return None
        return slots

    def _ask(self, child: _Child, count: int, deadline: float) -> bool:
        """Have the process lend more; whether it makes sense to go on."""
        self.hand_over()  # It makes room.
        now = time.monotonic()
        if now - child.heard_at > _ANSWER_S + 2 * HEARTBEAT_S:
            self._refusal = StagingFull("no room in staging: the process that sends rows does not answer")
            return False
        if not child.asked:
            say(child.leases, Want(child.wanted(count), deadline))
            child.asked = True
        if not child.leases.poll(max(0.0, deadline - now) + _ANSWER_S):
            self._refusal = StagingFull("no room in staging: the process that sends rows is too slow")
            return False
        answer: Lent = hear(child.leases)
        child.asked = False
        if answer.refusal is None:
            return True
        self._refusal = answer.refusal
        # What it has not been told of yet will make room.
        if self._batches == self._carried or time.monotonic() >= deadline:
            return False
        time.sleep(_AGAIN_S)
        return True

    def release(self, slots: list[int]) -> None:
        """See `Sender`."""
        if self._lender is not None:
            self._lender.stock.extend(slots)

    def why_full(self) -> SlotStreamError:
        """See `Sender`."""
        return self._refusal

    @property
    def has_faults(self) -> bool:
        """See `Sender`."""
        return bool(self._faults)

    def take_faults(self) -> list[SampleFault]:
        """See `Sender`."""
        return [self._faults.popleft() for _ in range(len(self._faults))]

    def gauges(self) -> Mapping[str, float]:
        """See `Sender`. As the process told them last."""
        return self._gauges

    def close(self, timeout_s: float) -> None:
        """See `Sender`."""
        self.hand_over()
        now = time.monotonic()
        self._stop = Stop(now + timeout_s / 2, now + timeout_s)
        self._inbox.put(self._stop)
        self._carrier.join(timeout_s)
        if self._child is not None:
            self._child.end(max(0.0, self._stop.deadline - time.monotonic()) + 2 * HEARTBEAT_S)

    # -- carrying over

    def _carry(self) -> None:
        while True:
            try:
                if self._carry_some():
                    return
            except Exception:  # Our own bug costs the samples under way, and neither this thread nor any staging.
                self._counters.add("hook_faults")
                logger.exception("slotstream: what is to be sent could not be carried over")
                if self._child is not None:
                    self._child.process.kill()

    def _carry_some(self) -> bool:
        """Takes what one step posted, and says what is due. Returns whether that was the last."""
        item = None
        if not self._taken:
            with suppress(queue.Empty):
                item = self._inbox.get(timeout=self._patience_s())
        if isinstance(item, list):
            self._taken.extend(item)
        while self._taken:  # What raises costs itself, and not what was posted with it.
            self._owe(self._taken.popleft())
        if isinstance(item, Stop) or (self._stop and time.monotonic() >= self._stop.patience):
            self._say_owed()
            self._say_close()
            return True
        if isinstance(item, _Lost):
            self._mourn(item.child)
        if self._child is None and time.monotonic() >= self._retry_at:
            self._restart()
        if self._inbox.empty() or len(self._owed) >= _ITEMS_MAX:
            self._say_owed()
        return False

    def _patience_s(self) -> float:
        """How long to wait for something to carry over."""
        if self._child is None:
            return min(HEARTBEAT_S, max(0.0, self._retry_at - time.monotonic()))
        return 0.0 if self._owed else HEARTBEAT_S

    def _owe(self, item: EngineItem | _LentBatch) -> None:
        """Notes something to tell the process. While there is none, only samples and why they failed are kept."""
        items: list[EngineItem] = []
        if isinstance(item, _LentBatch):
            items = self._staged(item)
            self._carried += 1
        else:
            items = [item]
        if isinstance(item, SampleOpen):
            if self._child is None and len(self._open) >= _OPEN_MAX:
                self._counters.add("reports_dropped")
                return
            self._open[item.req_id] = item
        if self._child is not None:
            self._owed += items
            return
        for said in items:
            match said:
                case FailSample():  # Rows are missing, so that fails whatever the process that died has said of the sample.
                    fault = SampleFault(said.req_id, said.error.code, str(said.error))
                    self._faults.append(fault)
                    self._note_failure(fault)
                case SampleAbort():
                    self._note_failure(SampleFault(said.req_id, said.code, said.message))

    def _note_failure(self, fault: SampleFault) -> None:
        """The next process is to tell the server, and us, why a sample failed."""
        if fault.req_id in self._open:
            self._failed.setdefault(fault.req_id, fault)

    def _staged(self, lent: _LentBatch) -> list[EngineItem]:
        """What to say of a batch: nothing where the process that lent its slots is gone."""
        if lent.lender is not None and lent.lender is self._child:
            return [lent.batch]
        error = InternalFault("the process that sends rows ended")
        return [FailSample(req_id, error) for req_id in dict.fromkeys(segment.req_id for segment in lent.batch.segments)]

    def _say_owed(self) -> None:
        child = self._child
        if child is None or not self._owed:
            return
        try:
            say(child.items, self._owed)
        except OSError:
            return  # It is about to be mourned; what was not said is said to the next one.
        self._owed.clear()

    def _say_close(self) -> None:
        if self._child is not None and self._stop is not None:
            try:
                say(self._child.items, Close(max(0.0, self._stop.deadline - time.monotonic())))
            except OSError:
                return

    # -- hearing, and the process's life

    def _begin(self, child: _Child) -> None:
        self._child = child
        child.listener = threading.Thread(target=self._hear, args=(child,), name="slotstream-news", daemon=True)
        child.listener.start()

    def _hear(self, child: _Child) -> None:
        try:
            while True:
                if not (child.items.poll(_SILENT_S) or child.items.poll(_GRACE_S)):
                    logger.error("slotstream: the process that sends rows said nothing for %g s and is killed", _SILENT_S)
                    child.process.kill()
                update: Update = hear(child.items)
                child.heard_at = time.monotonic()
                self._heard(update)
        except (EOFError, OSError):
            pass
        except Exception:
            self._counters.add("hook_faults")
            logger.exception("slotstream: what the process that sends rows says could not be heard")
            child.process.kill()
        self._inbox.put(_Lost(child))

    def _heard(self, update: Update) -> None:
        self._counters.merge(update.counts)
        self._gauges = update.gauges
        self.server = update.server or self.server
        self._faults.extend(update.faults)
        self._failed |= {fault.req_id: fault for fault in update.faults if fault.req_id in self._open}
        for req_id in update.ended:
            self._open.pop(req_id, None)
            self._failed.pop(req_id, None)
        for line in update.lines:
            logging.getLogger(line.logger).log(line.level, "%s", line.text)

    def _mourn(self, child: _Child) -> None:
        """The process is gone. What was in it is lost but for what the server or the spool has."""
        child.end(0.0)
        if child is not self._child or self._stop is not None:
            return
        self._child = None
        self._setup = replace(self._setup, first_turn=child.ring.after())
        self._gauges = _without_process(self._setup.shape)
        code = child.process.returncode
        logger.error("slotstream: the process that sends rows ended (%d) with %d samples", code, len(self._open))
        if time.monotonic() - child.began > _RETRY_S_MAX:
            self._retry_s = _RETRY_S  # It did well, and so may the next one.
        else:
            self._put_off()
        self._owed.clear()  # Rows among it lie in slots that nobody lends any more.
        why = "the process that sends rows ended before the sample was durable"
        for req_id in list(self._open):
            self._note_failure(SampleFault(req_id, InternalFault.code, why))

    def _put_off(self) -> None:
        self._retry_at = time.monotonic() + self._retry_s
        self._retry_s = min(self._retry_s * 2, _RETRY_S_MAX)

    def _restart(self) -> None:
        self._counters.add("sender_restarts")
        try:
            self._begin(_Child(self._setup, self._memory))
        except ConfigError as error:
            self._put_off()
            logger.error("slotstream: %s", error)
        else:
            for req_id, opened in list(self._open.items()):
                self._owed.append(opened)
                if (fault := self._failed.get(req_id)) is not None:
                    self._owed.append(SampleAbort(req_id, fault.code, fault.message))
            logger.info("slotstream: another process sends rows now")
