"""Samples are dealt out among the processes that read over NIXL. That they are read is in test_server_nixl.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from slotstream.server.config import ServerConfig
from slotstream.server.nixl.reader import ReadAnswer, ReadPeer, ReadRequest
from slotstream.server.nixl.readers import NixlReaders, readers_for
from slotstream.wire.nixl import NixlFault


@dataclass
class Recorder:
    """A reader that notes what it is asked for."""

    asked: list[int] = field(default_factory=list)
    calls: list[int] = field(default_factory=list)
    peers: list[ReadPeer] = field(default_factory=list)

    def connect(self, name: str, metadata: bytes, take: Callable[[ReadAnswer], None]) -> Future[ReadPeer]:
        self.peers.append(ReadPeer(len(self.peers), name, metadata, take))
        return self.peers[-1].connected

    def request(self, peer: ReadPeer, requests: Sequence[ReadRequest]) -> None:
        assert peer in self.peers
        self.calls.append(len(requests))
        self.asked += [request.chunk for request in requests]

    def disconnect(self, peer: ReadPeer) -> list[ReadRequest]:
        self.peers.remove(peer)
        return [chunk(number) for number in self.asked]


def chunk(number: int, sample: int = 1) -> ReadRequest:
    return ReadRequest(sample, number, 0, 1, 0, 4096, 1)


def team(count: int) -> tuple[Any, list[Recorder]]:
    recorders = [Recorder() for _ in range(count)]
    return NixlReaders(recorders), recorders  # type: ignore[arg-type]


def answer(recorder: Recorder, problem: str = "") -> None:
    peer = recorder.peers[-1]
    if problem:
        peer.connected.set_exception(NixlFault(problem))
    else:
        peer.connected.set_result(peer)


def test_samples_are_dealt_out_and_their_chunks_stay_in_order() -> None:
    readers, recorders = team(3)
    connected = readers.connect("a", b"m", lambda answer: None)
    for recorder in recorders:
        assert not connected.done()
        answer(recorder)
    route = connected.result(0)
    readers.request(route, [chunk(1, 1)])
    readers.request(route, [chunk(2, 1), chunk(3, 2), chunk(4, 1), chunk(5, 3), chunk(6, 4)])
    readers.request(route, [chunk(7, 2)])
    assert [recorder.asked for recorder in recorders] == [[5], [1, 2, 4, 6], [3, 7]]
    assert [recorder.calls for recorder in recorders] == [[1], [1, 3], [1, 1]]
    assert sorted(request.chunk for request in readers.disconnect(route)) == [1, 2, 3, 4, 5, 6, 7]
    assert not any(recorder.peers for recorder in recorders)


def test_a_reader_that_cannot_read_from_a_sender_gets_none_of_its_chunks() -> None:
    readers, recorders = team(2)
    connected = readers.connect("a", b"m", lambda answer: None)
    answer(recorders[1], "no")
    answer(recorders[0])
    readers.request(connected.result(0), [chunk(1, 1), chunk(2, 2)])
    assert [recorder.asked for recorder in recorders] == [[1, 2], []]


def test_a_sender_that_no_reader_can_read_from_is_refused() -> None:
    readers, recorders = team(2)
    connected = readers.connect("a", b"m", lambda answer: None)
    answer(recorders[1], "second")
    answer(recorders[0], "first")
    with pytest.raises(NixlFault, match="first"):
        connected.result(0)


@pytest.mark.parametrize(
    ("options", "cores", "readers"),
    [
        ({}, 1, 1),
        ({}, 7, 1),
        ({}, 8, 2),
        ({}, 15, 3),
        ({}, 128, 4),
        ({"workers": 2}, 15, 1),
        ({"workers": 2}, 16, 2),
        ({"nixl_pool_bytes": 63 << 20}, 16, 1),
        ({"nixl_pool_bytes": 127 << 20}, 16, 3),
        ({"nixl_readers": 3}, 2, 3),
        ({"nixl_readers": 8}, 2, 8),
    ],
)
def test_readers_go_by_cores_unless_their_number_is_given(
    tmp_path: Path, options: dict[str, int], cores: int, readers: int
) -> None:
    assert readers_for(ServerConfig(data_dir=tmp_path, **options), cores) == readers  # type: ignore[arg-type]
