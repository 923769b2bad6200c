"""Which stream of a sender stays with which process of a server."""

from __future__ import annotations

import threading

from slotstream.transport.spread import _TRIES_MAX, Spread
from slotstream.v1 import ingest_pb2


def _met(process: int, processes: int = 4) -> ingest_pb2.Welcome:
    return ingest_pb2.Welcome(processes=processes, process=process)


def test_each_stream_gets_a_process_of_its_own() -> None:
    spread = Spread(4)
    assert spread.settles(0, _met(7))
    assert not spread.settles(1, _met(7))
    assert spread.settles(1, _met(8))
    assert not spread.settles(2, _met(8))
    spread.ended(1)
    assert spread.settles(2, _met(8))


def test_streams_share_processes_evenly_where_there_are_fewer() -> None:
    spread = Spread(4)
    assert [spread.settles(stream, _met(7, processes=2)) for stream in range(3)] == [True, True, False]
    assert [spread.settles(stream, _met(8, processes=2)) for stream in (2, 3)] == [True, True]
    alone = Spread(4)
    assert all(alone.settles(stream, _met(7, processes=1)) for stream in range(4))


def test_a_stream_that_finds_no_free_process_shares_one_in_the_end() -> None:
    spread = Spread(2)
    assert spread.settles(0, _met(7))
    assert [spread.settles(1, _met(7)) for _ in range(_TRIES_MAX + 1)] == [False] * _TRIES_MAX + [True]


def test_a_server_of_an_earlier_version_gets_one_stream() -> None:
    spread = Spread(2)
    assert (spread.may_connect(0), spread.may_connect(1)) == (True, False)
    assert spread.settles(0, ingest_pb2.Welcome())
    assert not spread.may_connect(1)
    spread.ended(0)
    assert spread.settles(0, _met(7))
    assert spread.may_connect(1)
    assert not spread.settles(1, ingest_pb2.Welcome())  # Another server, of before.


def test_who_waits_hears_that_the_server_takes_several() -> None:
    spread = Spread(2)
    waiting = threading.Thread(target=spread.wait, args=(1, lambda: False, 60.0))
    waiting.start()
    spread.settles(0, _met(7))
    waiting.join(30)
    assert not waiting.is_alive()
    stopped = threading.Event()
    waiting = threading.Thread(target=Spread(2).wait, args=(1, stopped.is_set, 0.05))
    waiting.start()
    waiting.join(30)
    assert not waiting.is_alive()
