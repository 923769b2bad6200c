"""After a load a server gives memory back."""

from __future__ import annotations

import re
from pathlib import Path

from server.server_kit import Peer, Sample
from support.ports import free_port
from support.server import ServerProcess
from support.waiting import wait_until

from slotstream.v1 import ingest_pb2 as pb
from slotstream.wire.frames import encode_chunk
from slotstream.wire.hashing import xxh3

_CHUNK_BYTES = 8 << 20
_LOAD_CHUNKS = 24
_LOAD_BYTES_MIN = 64 << 20  # Else there is nothing to be given back.


def _resident(server: ServerProcess) -> int:
    found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{server.process.pid}/status").read_text())
    assert found is not None
    return int(found[1]) << 10


def test_a_server_gives_memory_back_after_a_load(tmp_path: Path) -> None:
    """At least half of it: what glibc has at the end of each thread's heap it does not give back."""
    rows = _CHUNK_BYTES // Sample.row_bytes
    data = bytes(_CHUNK_BYTES)
    with ServerProcess(tmp_path / "data", address=f"127.0.0.1:{free_port()}") as server:
        idle = _resident(server)
        peers = [Peer(server.address) for _ in range(6)]
        sample = Sample(rows=rows * _LOAD_CHUNKS)
        most = idle
        for number, peer in enumerate(peers):
            peer.say(sample.open(1, sample_id=f"s{number}", rows_exact=False))
        for at in range(_LOAD_CHUNKS):
            header = pb.ChunkHeader(sample=1, chunk=at, first_row=at * rows, rows=rows, xxh3=xxh3(data))
            for peer in peers:
                peer.say(encode_chunk(header, data))
        for peer in peers:
            assert len(peer.acks(_LOAD_CHUNKS)) == _LOAD_CHUNKS
            most = max(most, _resident(server))
        for peer in peers:
            peer.close()
        assert most - idle > _LOAD_BYTES_MIN
        wait_until(lambda: _resident(server) - idle < (most - idle) / 2)
