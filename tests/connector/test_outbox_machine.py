"""A random machine: the real outbox, staging pool and spool files against a server, a disk and an engine that do anything.

Time, the link, the disk's thread and the server's answers are moves of the machine, and so is a crash after which another
engine finds the spool. The long run: `SLOTSTREAM_MACHINE_EXAMPLES=2000 pytest tests/connector/test_outbox_machine.py`.
"""

from __future__ import annotations

import os
import random
import shutil
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support.outbox_rig import Engine, Promise, Server, Stream, rot, spool_files_in

from slotstream.transport.base import Committed, Failed

EXAMPLES = int(os.environ.get("SLOTSTREAM_MACHINE_EXAMPLES", "60"))
WHICH = st.integers(0, 99)
SOME = st.sampled_from([1, 2, 5, 100])


class OutboxMachine(RuleBasedStateMachine):
    @initialize(spooling=st.booleans(), link_up=st.booleans(), seed=st.integers(0, 9), lanes=st.sampled_from([1, 1, 2, 4]))
    def start(self, spooling: bool, link_up: bool, seed: int, lanes: int) -> None:
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr("slotstream.connector.sending.spool.backlog.AT_ONCE", 2)
        self.patch.setattr("slotstream.connector.sending.failure_reports._AT_ONCE", 2)
        names = random.Random(seed)  # A run that is repeated finds files in the same order.
        name = SimpleNamespace(uuid4=lambda: UUID(int=names.getrandbits(128)))
        self.patch.setattr("slotstream.connector.sending.spool.files.uuid", name)
        self.base = Path(tempfile.mkdtemp(prefix="slotstream-machine-"))
        self.spooling = spooling
        self.promises: dict[str, Promise] = {}  # by sample id, of all engines
        self.server = Server(self.promises, lanes)
        self._begin(slot_rows=4)
        if link_up:
            self._all_links_up()

    def _begin(self, slot_rows: int) -> None:
        self.engine = Engine(self.base if self.spooling else None, slot_rows, self.server, self.promises)
        self.hoard: list[int] = []

    # What the engine says.

    @rule()
    def open(self) -> None:
        self.engine.open()

    @precondition(lambda self: self.engine.live)
    @rule(which=WHICH, rows=st.integers(1, 9))
    def rows(self, which: int, rows: int) -> None:
        self.engine.add_rows(_pick(self.engine.live, which), rows)

    @precondition(lambda self: self.engine.live)
    @rule(which=WHICH)
    def finish(self, which: int) -> None:
        self.engine.finish(_pick(self.engine.live, which))

    @rule(rows=st.integers(1, 12))
    def prompt(self, rows: int) -> None:
        """The usual sample: all of it in one step."""
        promise = self.engine.open()
        self.engine.add_rows(promise, rows)
        if promise in self.engine.live:
            self.engine.finish(promise)

    @precondition(lambda self: self.engine.live)
    @rule(which=WHICH)
    def abort(self, which: int) -> None:
        self.engine.abort(_pick(self.engine.live, which), "ABORTED")

    @rule(slots=st.integers(1, 8))
    def hoard_staging(self, slots: int) -> None:
        """Steps whose copies are under way."""
        self.hoard += self.engine.lease(slots) or []

    @rule()
    def free_staging(self) -> None:
        self.engine.pool.release(self.hoard)
        self.hoard = []

    @rule(seconds=st.sampled_from([0.1, 1.0, 6.0, 40.0]))
    def tick(self, seconds: float) -> None:
        self.engine.tick(seconds)

    # What the link and the server say.

    @precondition(lambda self: self.server.down)
    @rule(which=WHICH)
    def link_up(self, which: int) -> None:
        stream = _pick(self.server.down, which)
        stream.up = True
        self.engine.outbox.link_is_up(self.engine.lane(stream))

    def _all_links_up(self) -> None:
        while self.server.down:
            self.link_up(0)

    @precondition(lambda self: self.server.up)
    @rule(which=WHICH, stores=st.booleans())
    def link_down(self, which: int, stores: bool) -> None:
        """One of them. `stores`: what the server had whole is durable, and its answers got lost."""
        self._lose_link(_pick(self.server.up, which), "", stores=stores)

    def _lose_link(self, stream: Stream, code: str, *, stores: bool = False) -> None:
        stream.lose_link(stores=stores)
        self.engine.outbox.link_is_down(self.engine.lane(stream), "it broke", code)
        assert stream.resets

    def _lose_all_links(self, code: str, *, stores: bool = False) -> None:
        for stream in self.server.streams:
            self._lose_link(stream, code, stores=stores)

    @precondition(lambda self: self.server.in_flight)
    @rule(which=WHICH, count=SOME)
    def ack(self, which: int, count: int) -> None:
        at = which % len(self.server.in_flight)
        for stream, number in self.server.in_flight[at : at + count]:
            self._ack(stream, [number])

    def _ack(self, stream: Stream, numbers: list[int]) -> None:
        if taken := [stream.ack(number) for number in numbers if number in stream.in_flight]:
            self.engine.outbox.acked(self.engine.lane(stream), taken)

    @precondition(lambda self: self.server.answerable)
    @rule(which=WHICH)
    def answer(self, which: int) -> None:
        """A commit is stored, an abort is taken."""
        stream, number = _pick(self.server.answerable, which)
        self.engine.hear(stream, stream.answer(number))

    @precondition(lambda self: self.server.uploads)
    @rule()
    def serve(self) -> None:
        """The usual server: everything is taken and answered."""
        for stream, number in self.server.in_flight:
            self._ack(stream, [number])
        for stream, number in self.server.answerable:
            self.engine.hear(stream, stream.answer(number))

    @precondition(lambda self: self.server.uploads)
    @rule(which=WHICH, code=st.sampled_from(["STORE_FULL", "IO_ERROR", "SERVER_DRAINING", "INTERRUPTED", "DAMAGED"]))
    def refuse(self, which: int, code: str) -> None:
        """For now, or for good."""
        stream, number = _pick(self.server.uploads, which)
        self.engine.hear(stream, stream.refuse(number, code, for_good=code == "DAMAGED"))

    @rule(rows=st.lists(st.integers(1, 12), min_size=1, max_size=6), spool=st.booleans())
    def outage(self, rows: list[int], spool: bool) -> None:
        """More samples than staging holds, in the spool or not."""
        self._lose_all_links("", stores=True)
        for count in rows:
            self.prompt(count)
            if spool:
                self.spool()
        self._all_links_up()

    # What the disk does.

    @precondition(lambda self: self.spooling)
    @rule(count=SOME)
    def disk_works(self, count: int) -> None:
        for _ in range(count):
            if not self.engine.work():
                break

    @precondition(lambda self: self.engine.answers)
    @rule(count=SOME)
    def disk_answers(self, count: int) -> None:
        self.engine.hear_disk(count)

    @precondition(lambda self: self.spooling)
    @rule()
    def spool(self) -> None:
        """The usual disk: everything is written and answered."""
        while self.engine.work() or self.engine.hear_disk(100):
            pass

    # What seldom happens.

    @rule(
        disaster=st.sampled_from(["crash", "shut down", "refused token", "rude server", "full disk", "failing disk", "rot"]),
        data=st.data(),
    )
    def disaster(self, disaster: str, data: st.DataObject) -> None:
        if disaster == "crash":
            self._crash(data.draw(st.sampled_from([4, 4, 2, 1, 0])), data.draw(st.integers(0, 40)), data.draw(WHICH))
        elif disaster == "shut down":
            self._shut_down()
        elif disaster == "refused token":  # Of a stream that was up, or instead of it.
            self._lose_all_links("UNAUTHENTICATED")
        elif disaster == "full disk" and self.spooling:
            self.engine.disk.full = not self.engine.disk.full
        elif disaster == "failing disk" and self.spooling:
            self.engine.disk.failing = not self.engine.disk.failing
        elif disaster == "rude server" and (numbers := self.server.ended):
            stream, number = _pick(numbers, data.draw(WHICH))
            verdicts: list[Committed | Failed] = [Committed(number, False), Failed(number, "STORE_FULL", "again")]
            self.engine.hear(stream, data.draw(st.sampled_from(verdicts)))
        elif disaster == "rot" and (files := spool_files_in(self.base)):
            rot(self.promises, _pick(files, data.draw(WHICH)), data.draw(st.integers(0, 1 << 16)))

    def _crash(self, slot_rows: int, torn_bytes: int, which: int) -> None:
        """A file may be cut short. The next engine's chunks may be smaller, even than a row."""
        self._end_engine()
        if files := spool_files_in(self.base):
            path = _pick(files, which)
            with path.open("r+b") as file:
                file.truncate(max(0, path.stat().st_size - torn_bytes))
        self._begin(slot_rows)
        self.engine.inherit()

    def _shut_down(self) -> None:
        """What is whole is left to the next engine, and what is not as a failure."""
        for promise in self.engine.live:
            self.engine.abort(promise, "ABORTED")
        for stream in self.server.streams:
            stream.lose_link(stores=False)
        self.engine.outbox.give_up_links("it shuts down")
        if self.spooling:
            self.engine.disk.full = False
        for _ in self.promises:  # What was refused before is asked for again, a few at a time.
            self.spool()
            self.engine.tick(2.0)
        self.spool()
        self.engine.look_at_the_spool()
        self._end_engine()
        self._begin(slot_rows=4)
        self.engine.inherit()

    def _end_engine(self) -> None:
        for stream in self.server.streams:
            stream.lose_link(stores=False)
        self.engine.die()

    # What always holds.

    @invariant()
    def a_sample_ends_once_and_for_a_reason(self) -> None:
        self.engine.look_at_ends()

    @invariant()
    def no_staging_slot_leaks(self) -> None:
        self.engine.look_at_staging(len(self.hoard))

    def teardown(self) -> None:
        """Everything works from here on: then nothing is left anywhere, and every promise has its end."""
        if not hasattr(self, "engine"):
            return
        try:
            self._settle()
        finally:
            self.patch.undo()
            shutil.rmtree(self.base)

    def _settle(self) -> None:
        engine, server = self.engine, self.server
        self.free_staging()
        if self.spooling:
            engine.disk.full = engine.disk.failing = False
        for promise in list(engine.live):
            self.engine.finish(promise)
        for _ in range(1000):
            self._all_links_up()
            self.spool()
            self.serve()
            if engine.outbox.is_empty and not server.in_flight:
                break
            engine.tick(10.0)
        assert engine.outbox.is_empty, "something never ended"
        self.spool()
        assert (engine.pool.in_use, engine.pool.kept) == (0, 0)
        assert engine.reserved_free == engine.pool.reserved_slots
        engine.look_at_the_last()
        for promise in self.promises.values():
            if promise.owed and promise.sample_id not in engine.promised:
                assert promise.sample_id in server.stored.keys() | server.failed.keys(), "the server never heard of it"
        assert not spool_files_in(self.base)
        engine.die()


def _pick(items: Any, which: int) -> Any:
    return items[which % len(items)]


TestOutboxMachine = OutboxMachine.TestCase
TestOutboxMachine.settings = settings(
    max_examples=EXAMPLES, stateful_step_count=100, deadline=None, suppress_health_check=list(HealthCheck)
)
