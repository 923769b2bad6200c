"""Histories: `python tests/endurance/histories.py [--seconds 120] [--seed N]`; `make histories` calls it.

Clients put, repeat, conflict, read, lease and delete the same few ids, on a server of two processes, while a nemesis kills the
primary and the worker, and senders break off in the middle of a sample. What every client saw of an id must be what a register
could have answered (`register.py`). Left out: clocks that shift, disks that fill, and bits that flip. They have tests of their
own, and a sample whose bit was flipped is no register.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import signal
import sys
import threading
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(1, str(Path(__file__).parents[1]))

import grpc
from register import NONE, Operation, deleted_under_a_lease, explain
from support.ingest_client import IngestClient
from support.synthetic import SyntheticSample
from world import World

from slotstream.client import SampleNotFound, SlotStreamError, connect
from slotstream.v1 import ingest_pb2
from slotstream.wire.frames import encode_chunk
from slotstream.wire.hashing import xxh3

_CLIENTS = 5
_IDS = 6  # At a time; new ones take their place, for the search grows with what happened to an id.
_OPERATIONS_OF_ID = 40
_VALUES = ("a", "b", "c")
_LEASE_S = 0.5
_CALL_S = 10.0
_NOT_STORED = {"NOT_FOUND", "SAMPLE_FAILED", "DEADLINE_EXCEEDED", "STILL_ARRIVING"}


class Histories:
    """One run. `wrong` is empty when all is well."""

    def __init__(self, world: World, seed: int) -> None:
        self.world = world
        self.wrong: list[str] = []
        self.done: Counter[str] = Counter()
        self._rng = random.Random(seed)
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._names = (f"h{seed}-{number}" for number in itertools.count())
        self._ids = [next(self._names) for _ in range(_IDS)]
        self._history: defaultdict[str, list[Operation]] = defaultdict(list)
        self._leases: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
        self._uses: Counter[str] = Counter()

    def run(self, seconds: float) -> None:
        threads = [threading.Thread(target=self._client, args=(n, self._rng.randrange(1 << 30))) for n in range(_CLIENTS)]
        for thread in threads:
            thread.start()
        end = time.monotonic() + seconds
        while time.monotonic() < end and not self.wrong:
            time.sleep(self._rng.random())
            self._strike()
        self._stop.set()
        for thread in threads:
            thread.join()
        self._read_all()
        for sample_id, history in self._history.items():
            if not explain(history):
                self.wrong.append(f"{sample_id}: no order explains\n" + "\n".join(f"    {one}" for one in _sorted(history)))
            for one, lease in deleted_under_a_lease(history, self._leases[sample_id]):
                self.wrong.append(f"{sample_id}: {one} was done although a lease held: {lease}")
        self.done["ids"] += len(self._history)

    def _strike(self) -> None:
        """The nemesis: it kills the primary process, or the worker beside it."""
        if self._rng.random() < 0.5:
            self.done["primary killed"] += 1
            self.world.server.end(signal.SIGKILL)
            self.world.server.start()
            self.world.wait_for_server()
        elif pids := self.world.server_workers():
            self.done["worker killed"] += 1
            os.kill(pids[0], signal.SIGKILL)

    def _client(self, client: int, seed: int) -> None:
        rng = random.Random(seed)
        while not self._stop.is_set():
            try:
                self._operate(client, rng)
            except Exception as error:  # Of ours: the run is worth nothing.
                self.wrong.append(f"client {client}: {type(error).__name__}: {error}")
                return

    def _operate(self, client: int, rng: random.Random) -> None:
        sample_id = self._pick(rng)
        kind = rng.choice(("put", "put", "put", "read", "read", "read", "delete", "lease"))
        value = rng.choice(_VALUES)
        called_at = time.monotonic()
        if kind == "lease":
            self._lease(sample_id, f"client{client}")
            return
        if kind == "put":
            answer = self._put(_sample(sample_id, value), breaks_off=rng.random() < 0.1)
        elif kind == "read":
            answer, value = self._read(sample_id)
        else:
            answer, value = self._delete(sample_id), NONE
        self._note(sample_id, Operation(client, kind, answer, called_at, time.monotonic(), value))

    def _note(self, sample_id: str, operation: Operation) -> None:
        with self._lock:
            self._history[sample_id].append(operation)
            self.done[f"{operation.kind} {operation.answer}"] += 1

    def _pick(self, rng: random.Random) -> str:
        with self._lock:
            at = rng.randrange(_IDS)
            sample_id = self._ids[at]
            self._uses[sample_id] += 1
            if self._uses[sample_id] >= _OPERATIONS_OF_ID:
                self._ids[at] = next(self._names)
            return sample_id

    def _put(self, sample: SyntheticSample, *, breaks_off: bool) -> str:
        try:
            with IngestClient(self.world.address, timeout_s=_CALL_S) as peer:
                number = peer.open(sample)
                data = sample.rows()
                header = ingest_pb2.ChunkHeader(sample=number, chunk=1, rows=sample.num_tokens, xxh3=xxh3(data))
                peer.send_raw(encode_chunk(header, data))
                if breaks_off:
                    return "failed"  # It was never committed, whenever the server notices.
                request = ingest_pb2.CommitSample(sample=number, row_count=sample.num_tokens, token_ids=sample.token_ids)
                peer.send(ingest_pb2.IngestRequest(commit=request))
                return _verdict(peer)
        except grpc.RpcError:
            return "unknown"

    def _read(self, sample_id: str) -> tuple[str, str]:
        try:
            with (
                connect(self.world.address, connect_timeout_s=_CALL_S, call_timeout_s=_CALL_S) as client,
                client.read(sample_id, wait_s=0) as reader,
            ):
                token_ids, data = list(reader.token_ids), b"".join(bytes(block.data) for block in reader)
        except SlotStreamError as error:
            if error.code in _NOT_STORED:
                return "is", NONE
            return "unknown", NONE
        for value in _VALUES:
            sample = _sample(sample_id, value)
            if (token_ids, data) == (sample.token_ids, sample.rows()):
                return "is", value
        self.wrong.append(f"{sample_id}: rows that nobody put were served")
        return "unknown", NONE

    def _delete(self, sample_id: str) -> str:
        try:
            with connect(self.world.address, connect_timeout_s=_CALL_S, call_timeout_s=_CALL_S) as client:
                client.delete(sample_id)
        except SampleNotFound:
            return "nothing"
        except SlotStreamError as error:
            return "refused" if error.code in ("LEASED", "STILL_ARRIVING") else "unknown"
        return "deleted"

    def _lease(self, sample_id: str, holder: str) -> None:
        called_at = time.monotonic()
        try:
            with connect(self.world.address, connect_timeout_s=_CALL_S, call_timeout_s=_CALL_S) as client:
                client.lease(sample_id, seconds=_LEASE_S, holder=holder)
        except SlotStreamError:
            return
        with self._lock:
            self._leases[sample_id].append((time.monotonic(), called_at + _LEASE_S))
            self.done["lease"] += 1

    def _read_all(self) -> None:
        """In the end, when nothing is killed any more, each id is read once: what was committed must be there."""
        for sample_id in list(self._history):
            called_at = time.monotonic()
            answer, value = self._read(sample_id)
            if answer == "unknown":
                self.wrong.append(f"{sample_id}: it cannot be read")
            self._note(sample_id, Operation(_CLIENTS, "read", answer, called_at, time.monotonic(), value))


def _verdict(peer: IngestClient) -> str:
    while True:
        reply: Any = next(peer._replies)
        kind = reply.WhichOneof("kind")
        if kind == "committed":
            return "duplicate" if reply.committed.duplicate else "committed"
        if kind == "failed":
            return "exists" if reply.failed.code == "ALREADY_EXISTS" else "failed"


def _sample(sample_id: str, value: str) -> SyntheticSample:
    return SyntheticSample(sample_id, num_tokens=4, seed=_VALUES.index(value))


def _sorted(history: list[Operation]) -> list[Operation]:
    return sorted(history, key=lambda one: one.called_at)


def run_histories(seconds: float, seed: int) -> Histories:
    with World(0, seed % 1000, workers=2) as world:
        run = Histories(world, seed)
        run.run(seconds)
        if run.wrong:
            print(world.server.log()[-4000:])
    return run


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--seed", type=int, default=0, help="0: any, and it is printed")
    arguments = parser.parse_args()
    seed = arguments.seed or random.SystemRandom().randrange(1, 1 << 31)
    print(f"seed {seed}", flush=True)
    run = run_histories(arguments.seconds, seed)
    print("\n".join(f"{count:>8}  {what}" for what, count in sorted(run.done.items())))
    print("\n".join(run.wrong[:5]) or "every answer can be explained")
    return int(bool(run.wrong))


if __name__ == "__main__":
    sys.exit(main())
