"""What the sender process tells the engine's worker, and when: each message takes that one's interpreter for a moment."""

from __future__ import annotations

import logging
import queue
from collections.abc import Iterator
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

import pytest

from slotstream.connector.counters import Counters
from slotstream.connector.faults import SampleFault
from slotstream.connector.sending.process import main
from slotstream.connector.sending.process.messages import Update, hear
from slotstream.transport.logs import CONNECTOR_LOGGER

LONG_S = 3600.0


class _Pump:
    server = None

    def __init__(self) -> None:
        self.faults: list[SampleFault] = []

    def take_faults(self) -> list[SampleFault]:
        taken, self.faults = self.faults, []
        return taken

    def gauges(self) -> dict[str, float]:
        return {"link_up": 1.0}


class _Rig:
    def __init__(self, theirs: Connection) -> None:
        self.pump = _Pump()
        self.counters = Counters()
        self.ended: queue.SimpleQueue[str] = queue.SimpleQueue()
        pump: Any = self.pump
        self.news = main._News(theirs, pump, self.counters, self.ended, main._Log(logging.INFO))


@pytest.fixture
def ours_and_rig(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Connection, _Rig]]:
    """The worker's end, and a process that tells at once what cannot wait, and the rest never."""
    monkeypatch.setattr(main, "_SAY_S", 0.001)
    monkeypatch.setattr(main, "_SAY_REST_S", LONG_S)
    monkeypatch.setattr(main, "HEARTBEAT_S", LONG_S)
    logger = logging.getLogger(CONNECTOR_LOGGER)
    before = list(logger.handlers), logger.level, logger.propagate
    ours, theirs = Pipe()
    rig = _Rig(theirs)
    yield ours, rig
    rig.news._closing.set()
    rig.news._thread.join(10.0)
    logger.handlers, logger.level, logger.propagate = before
    ours.close()
    theirs.close()


def _heard(ours: Connection) -> Update:
    assert ours.poll(10.0)
    update: Update = hear(ours)
    return update


def test_what_went_well_waits_for_company_and_a_fault_takes_all_along(ours_and_rig: tuple[Connection, _Rig]) -> None:
    ours, rig = ours_and_rig
    rig.ended.put("a")
    rig.counters.add("samples_committed")
    assert not ours.poll(0.05)
    rig.ended.put("b")
    assert not ours.poll(0.05)
    fault = SampleFault("c", "INTERNAL", "why")
    rig.pump.faults.append(fault)
    update = _heard(ours)
    assert (update.ended, update.faults, update.counts) == (["a", "b"], [fault], {"samples_committed": 1})
    assert not ours.poll(0.05)


def test_a_line_of_the_log_does_not_wait(ours_and_rig: tuple[Connection, _Rig]) -> None:
    ours, rig = ours_and_rig
    rig.ended.put("a")
    logging.getLogger(f"{CONNECTOR_LOGGER}.x").warning("it is so")
    update = _heard(ours)
    assert ([line.text for line in update.lines], update.ended) == (["it is so"], ["a"])


def test_counts_are_told_once_they_have_waited_and_the_last_ones_at_the_end(
    ours_and_rig: tuple[Connection, _Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, rig = ours_and_rig
    rig.counters.add("samples_committed")
    assert not ours.poll(0.05)
    monkeypatch.setattr(main, "_SAY_REST_S", 0.0)
    assert _heard(ours).counts == {"samples_committed": 1}
    monkeypatch.setattr(main, "_SAY_REST_S", LONG_S)
    rig.ended.put("z")
    rig.news.close()
    assert _heard(ours).ended == ["z"]
