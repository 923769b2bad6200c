"""Every error code by where the sample's rows are: held, sent again, or final."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.waiting import wait_until
from support.worker_rig import Rig, WatchedSink, make_rig

from slotstream.connector.sending import outbox, pump
from slotstream.connector.sending.verdicts import VERDICTS, Verdict, is_final
from slotstream.transport.base import Acked, Failed, RowChunk
from slotstream.v1 import ingest_pb2
from slotstream.wire import errors
from slotstream.wire.errors import SlotStreamError

KINDS = {
    kind.code: kind
    for name in errors.__all__
    if isinstance(kind := getattr(errors, name), type) and issubclass(kind, SlotStreamError) and kind is not SlotStreamError
}
# Rows are wherever the connector has them: in staging alone, or in the spool too.
PLACES = ("connector", "spool")
NEWER = "SOMETHING_OF_A_NEWER_SERVER"


class _Sink(WatchedSink):
    """Answers the first `count` commits with a code, and stores what comes after."""

    def __init__(self) -> None:
        super().__init__()
        self.code, self.count = "", 0
        self.tries = 0

    def submit(self, chunk: RowChunk) -> None:
        if self.count:
            self._on_event(Acked((chunk.chunk,)))
        else:
            super().submit(chunk)

    def commit(self, request: ingest_pb2.CommitSample) -> None:
        self.tries += 1
        if self.count:
            self.count -= 1
            self._on_event(Failed(request.sample, self.code, "so it is"))
        else:
            super().commit(request)


@pytest.fixture(params=PLACES)
def rig(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    monkeypatch.setattr(outbox, "_RETRY_S", 0.0)  # No test waits for its back-off.
    monkeypatch.setattr(pump, "_TICK_S", 0.01)
    more: dict[str, Any] = {"spool_dir": str(tmp_path / "spool")} if request.param == "spool" else {}
    made = make_rig(sink=_Sink(), **more)
    yield made
    made.worker.close()


def _is_empty(rig: Rig) -> bool:
    return not rig.worker._sender._inbox and rig.worker._sender._outbox.is_empty


def test_every_code_has_its_verdict_and_what_a_retry_helps_is_no_final_one() -> None:
    assert VERDICTS.keys() == KINDS.keys()
    ours = {"STAGING_FULL", "ROW_POOL_FULL"}  # A retry of the whole request: these rows were never read.
    for code, kind in KINDS.items():
        if kind.retryable and code not in ours:
            assert VERDICTS[code] is not Verdict.FINAL, code
    assert not is_final(NEWER, 1000)


@pytest.mark.parametrize("code", [*KINDS, NEWER])
def test_a_sample_is_held_sent_again_or_final(rig: Rig, code: str) -> None:
    verdict = VERDICTS.get(code, Verdict.HELD)
    rig.sink.code, rig.sink.count = code, 2
    rig.capture("a", 30)
    wait_until(lambda: _is_empty(rig))
    faults = [(fault.req_id, fault.code) for fault in rig.worker.take_faults()]
    stored = [sample for sample in rig.sink.samples.values() if sample.committed is not None]
    if verdict is Verdict.FINAL:
        assert (rig.sink.tries, faults, stored) == (1, [("a", code)], [])
    else:
        assert (rig.sink.tries, faults) == (3, [])
        (sample,) = stored
        assert b"".join(sample.rows[i] for i in sorted(sample.rows)) == rig.rows("a", 0, 30)


def test_rows_that_never_arrive_as_they_were_sent_are_not_sent_for_ever(rig: Rig) -> None:
    rig.sink.code, rig.sink.count = "HASH_MISMATCH", 100
    rig.capture("a", 30)
    wait_until(lambda: _is_empty(rig))
    most = re.search(r"up to (\d+) times", Verdict.AGAIN.value)
    assert most is not None
    assert rig.sink.tries == int(most[1])
    assert [(fault.req_id, fault.code) for fault in rig.worker.take_faults()] == [("a", "HASH_MISMATCH")]
