"""What is kept of engines and of the last hour, by a clock of the test's own: how much, how long, and what it comes to."""

from __future__ import annotations

from slotstream.server.overview.engines import GONE_MAX, GONE_OF_PEER_MAX, GONE_S, LAYERS_KEPT_MAX, Engine, Engines
from slotstream.server.overview.history import Counted, History, failed_between, hours_until_full
from slotstream.v1 import ingest_pb2, samples_pb2


class _Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def _connect(engines: Engines, engine_id: str, peer: str = "p") -> Engine:
    return engines.connect(ingest_pb2.Hello(engine_id=engine_id, worker_rank=1), peer, "10.0.0.1", nixl=False)


def test_an_engine_that_comes_back_is_one_whose_link_broke() -> None:
    clock = _Clock()
    engines = Engines(clock)
    first = _connect(engines, "e")
    engines.stored(first, "default/s")
    clock.now += 5
    (told,) = engines.all()
    assert (told.connected, told.since_s, told.streams) == (True, 5, 1)
    assert (told.last_sample, told.last_sample_s) == ("default/s", 5)
    engines.ended(first)
    clock.now += 2
    (told,) = engines.all()
    assert (told.connected, told.since_s) == (False, 2)
    _connect(engines, "e")
    (told,) = engines.all()
    assert (told.connected, told.streams) == (True, 2)


def test_two_peers_that_name_one_engine_are_told_apart() -> None:
    engines = Engines(_Clock())
    engines.ended(_connect(engines, "e", "p"))
    _connect(engines, "e", "q")
    assert [(one.peer, one.connected, one.streams) for one in engines.all()] == [("q", True, 1), ("p", False, 1)]


def test_an_engine_that_is_gone_is_forgotten_after_an_hour() -> None:
    clock = _Clock()
    engines = Engines(clock)
    engines.ended(_connect(engines, "e"))
    clock.now += GONE_S
    assert len(engines.all()) == 1
    clock.now += 1
    assert engines.all() == []


def test_a_peer_that_comes_and_goes_pushes_out_its_own_and_then_those_of_the_peer_that_left_most() -> None:
    engines = Engines(_Clock())
    engines.ended(_connect(engines, "kept", "quiet"))
    for number in range(GONE_OF_PEER_MAX + 10):
        engines.ended(_connect(engines, f"e{number}", "loud"))
    mine = {one.engine_id for one in engines.all() if one.peer == "loud"}
    assert mine == {f"e{number}" for number in range(10, GONE_OF_PEER_MAX + 10)}
    for peer in range(8):
        for number in range(GONE_OF_PEER_MAX):
            engines.ended(_connect(engines, f"e{number}", f"loud-{peer}"))
    assert len(engines.all()) == GONE_MAX
    assert "kept" in {one.engine_id for one in engines.all()}


def test_what_a_peer_says_is_cut_and_cannot_be_a_terminals_command() -> None:
    engines = Engines(_Clock())
    _connect(engines, "\x1b[31m" + "e" * 100)
    (told,) = engines.all()
    assert told.engine_id == "[31m" + "e" * 59


def test_of_what_a_peer_reports_little_is_kept() -> None:
    clock = _Clock()
    engines = Engines(clock)
    engine = _connect(engines, "e")
    assert not engines.all()[0].HasField("report")
    report = ingest_pb2.EngineReport(host="\x1b]0;" + "h" * 5000, layer_ids=range(2000), staging_bytes=(1 << 64) - 1)
    engines.reported(engine, report)
    clock.now += 3
    (told,) = engines.all()
    assert told.report_s == 3
    assert told.report.host == "]0;" + "h" * 60
    assert list(told.report.layer_ids) == list(range(LAYERS_KEPT_MAX))
    assert told.report.staging_bytes == (1 << 64) - 1
    assert told.ByteSize() < 1024


def test_an_engine_that_went_to_another_process_is_connected() -> None:
    engines = Engines(_Clock())
    engines.ended(_connect(engines, "e"))
    there = samples_pb2.EngineStatus(engine_id="e", rank=1, peer="p", connected=True)
    engines.merge(1, [there])
    assert engines.all() == [there]
    engines.forget(1)
    assert [one.connected for one in engines.all()] == [False]


def test_the_history_is_an_hour_long_and_asked_from_its_first_reading() -> None:
    clock, committed = _Clock(), 0.0

    def read(at: float) -> Counted:
        return Counted(at, committed=committed)

    history = History(read, clock)
    for _ in range(3 * 360):
        clock.now += 10
        committed += 20
        history.note()
        history.note()  # Not due.
    before, now = history.over(60)
    assert (now.at - before.at, now.committed - before.committed) == (60, 120)
    before, now = history.over(3600)
    assert (now.at - before.at, now.committed - before.committed) == (3600, 7200)
    assert len(history._readings) == 361


def test_a_server_that_stood_still_compares_with_its_last_reading() -> None:
    clock = _Clock()
    history = History(Counted, clock)
    clock.now += 7200
    before, now = history.over(60)
    assert now.at - before.at == 7200


def test_failures_are_those_between_two_readings() -> None:
    before, now = Counted(0, failed={"A": 3, "B": 1}), Counted(10, failed={"A": 3, "B": 4, "C": 2})
    assert failed_between(before, now) == {"B": 3, "C": 2}


def test_hours_until_full_count_to_the_reserve() -> None:
    before, now = Counted(0, free_bytes=1000), Counted(1800, free_bytes=800)
    assert hours_until_full(before, now, 200) == 600 / (200 / 1800) / 3600
    assert hours_until_full(before, now, 900) == 0
    assert hours_until_full(now, Counted(3600, free_bytes=800), 200) is None
    assert hours_until_full(before, Counted(1800), 200) is None


def test_what_the_disk_does_is_counted_from_the_first_reading_that_knows_it() -> None:
    clock, free = _Clock(), iter([None, 500, 400, 300, None])

    def read(at: float) -> Counted:
        return Counted(at, free_bytes=next(free))

    history = History(read, clock)
    for _ in range(2):
        clock.now += 10
        history.note()
    clock.now += 10
    before, now = history.over(3600, of_disk=True)
    assert (before.free_bytes, now.free_bytes, now.at - before.at) == (500, 300, 20)
    assert history.over(3600, of_disk=True)[1].free_bytes is None
