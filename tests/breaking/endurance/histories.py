"""Histories: `histories.py [--seconds N] [--seed N] [--streams N] [--store cluster]`; `make histories` calls it.

Clients put, repeat, conflict, read, lease and delete the same few ids, on a server of two processes. Senders break off in the
middle of a sample, and keep what a full disk refuses until it has room. Meanwhile a nemesis (`nemesis.py`) kills the primary
and the worker, shifts the clock, fills the disk, and flips bits of samples and of the catalogue. What every client saw of an id
must be what a register could have answered (`register.py`).

With `--store cluster` there are two servers over a bucket and a PostgreSQL, each call goes to one of them, and another nemesis
strikes all four (`pair_nemesis.py`). In the end the bucket must hold the objects of committed samples, and nothing else.
"""

from __future__ import annotations

import argparse
import itertools
import random
import re
import signal
import struct
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(1, str(Path(__file__).parents[1]))
sys.path.insert(2, str(Path(__file__).parents[2]))

import grpc
from nemesis import NAMESPACE, RULES, Below, Nemesis, Strikes
from pair import Pair
from pair_nemesis import PairNemesis
from register import NONE, Operation, cut_short, deleted_under_a_lease, explain
from support.ingest_client import IngestClient
from support.synthetic import SyntheticSample
from world import World

from slotstream.client import SampleNotFound, SlotStreamError, connect
from slotstream.client.reading import RowReader
from slotstream.v1 import ingest_pb2, samples_pb2
from slotstream.wire.frames import encode_chunk
from slotstream.wire.hashing import xxh3
from slotstream.wire.names import CHUNK_BYTES_MAX

_CLIENTS = 5
_IDS = 6  # At a time; new ones take their place, for the search grows with what happened to an id.
_OPERATIONS_OF_ID = 40
_VALUES = ("a", "b", "c")
_LARGE = "large"  # With a bucket: a sample whose object is sent in parts.
_LEASE_S = 0.5
_CALL_S = 10.0
_HANGS_S = 120.0
_TELLING = re.compile(r"WARNING|ERROR|retention deleted|; looked at")  # Lines of a log, where something was wrong.
_ANCHORS = 30  # Samples of before all leaps of the clock: more than are put during one in the beginning.
_FAILURES = {"ALREADY_EXISTS": "exists", "STORE_FULL": "full", "DAMAGED": "damaged"}
_SILENCE = "sent nothing for"  # The client's own limit, and no answer.
_NOT_STORED = {"NOT_FOUND", "SAMPLE_FAILED", "DEADLINE_EXCEEDED", "STILL_ARRIVING"}


class Histories:
    """One run. `wrong` is empty when all is well."""

    def __init__(self, world: World, below: Below | None, seed: int, streams: int = 1) -> None:
        """`streams` of a client: what was not stored over one goes over the next at once. `below`: None with a pair."""
        self.world = world
        self.wrong: list[str] = []
        self.done: Counter[str] = Counter()
        self._streams = streams
        self._rng = random.Random(seed)
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._reads = itertools.count()
        self._names = (f"h{seed}-{number}" for number in itertools.count())
        self._ids = [next(self._names) for _ in range(_IDS)]
        self._history: defaultdict[str, list[Operation]] = defaultdict(list)
        self._leases: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
        self._uses: Counter[str] = Counter()
        self._held: dict[int, list[tuple[str, str]]] = {client: [] for client in range(_CLIENTS)}
        strikes = random.Random(seed)
        self._nemesis: Strikes
        if world.pair is None:
            assert below is not None, "one server has a disk and a clock of its own"
            self._values: tuple[str, ...] = _VALUES
            self._nemesis = Nemesis(world, below, strikes, lambda: list(self._ids), self._note)
        else:
            self._values = (*_VALUES, _LARGE)
            self._nemesis = PairNemesis(world, world.pair, strikes, lambda: list(self._ids), self._note)

    def run(self, seconds: float) -> None:
        """For so long, and until the nemesis did everything once."""
        for number in range(_ANCHORS):
            self._put_and_note(0, f"anchor{number}", "a")
        threads = [
            threading.Thread(target=self._client, args=(n, self._rng.randrange(1 << 30)), daemon=True) for n in range(_CLIENTS)
        ]
        for thread in threads:
            thread.start()
        end = time.monotonic() + seconds
        while (time.monotonic() < end or not self._nemesis.done["rounds"]) and not self.wrong:
            time.sleep(self._rng.random())
            self._nemesis.strike()
        self._stop.set()
        for client, thread in enumerate(threads):
            thread.join(_HANGS_S)
            if thread.is_alive():
                self.wrong.append(f"client {client} hangs, whatever its deadlines say")
        self._send_held()
        if self.world.pair is not None:
            self._restart_all()
        self._read_all()
        if self.world.pair is not None:
            self.world.pair.sweep()
            self.wrong += self.world.pair.left_over()
        self.done += self._nemesis.done
        self.wrong += self._nemesis.wrong
        for sample_id, history in self._history.items():
            if not explain(history):
                self.wrong.append(f"{sample_id}: no order explains\n" + "\n".join(f"    {one}" for one in _sorted(history)))
            leases = cut_short(self._leases[sample_id], _LEASE_S, self._nemesis.lease_ends)
            for one, lease in deleted_under_a_lease(history, leases):
                self.wrong.append(f"{sample_id}: {one} was done although a lease held: {lease}")
        self.done["ids"] += len(self._history)

    def _client(self, client: int, seed: int) -> None:
        rng = random.Random(seed)
        while not self._stop.is_set():
            try:
                self._operate(client, rng)
            except Exception as error:  # Of ours: the run is worth nothing.
                self.wrong.append(f"client {client}: {type(error).__name__}: {error}")
                return

    def _operate(self, client: int, rng: random.Random) -> None:
        if self._held[client] and rng.random() < 0.3:
            self._put_and_note(client, *self._held[client].pop(0))
            return
        sample_id = self._pick(rng)
        kind = rng.choice(("put", "put", "put", "read", "read", "read", "delete", "lease"))
        called_at = time.monotonic()
        if kind == "put":
            self._put_and_note(client, sample_id, rng.choice(self._values), breaks_off=rng.random() < 0.1)
        elif kind == "lease":
            self._lease(sample_id, f"client{client}")
        elif kind == "read":
            answer, value = self._read(sample_id)
            self._note(sample_id, Operation(client, kind, answer, called_at, time.monotonic(), value))
        else:
            answer = self._delete(sample_id)
            self._note(sample_id, Operation(client, kind, answer, called_at, time.monotonic()))

    def _put_and_note(self, client: int, sample_id: str, value: str, *, breaks_off: bool = False) -> str:
        """The answer. What the server has no room for is held, to be sent again."""
        for stream in range(self._streams):
            called_at = time.monotonic()
            answer = self._put(_sample(sample_id, value), breaks_off=breaks_off and not stream)
            self._note(sample_id, Operation(client, "put", answer, called_at, time.monotonic(), value))
            if answer not in ("unknown", "failed"):
                break
            self.done["sent again over another stream"] += stream + 1 < self._streams
        if answer == "full":
            self._held[client].append((sample_id, value))
        return answer

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

    def _address(self) -> str:
        """Of one of the servers: what it says must hold for all."""
        return self.world.address if self.world.pair is None else random.choice(self.world.addresses)

    def _restart_all(self) -> None:
        """What was committed is there in the servers' next lives too."""
        for server in self.world.servers:
            server.end(signal.SIGKILL)
            server.start()
        for server in self.world.servers:
            self.world.wait_for(server)

    def _put(self, sample: SyntheticSample, *, breaks_off: bool) -> str:
        try:
            with IngestClient(self._address(), timeout_s=_CALL_S) as peer:
                number = peer.open(sample)
                rows = max(1, min(sample.num_tokens, CHUNK_BYTES_MAX // 2 // sample.row_bytes))
                for chunk, first in enumerate(range(0, sample.num_tokens, rows), 1):
                    data = sample.rows(first, min(first + rows, sample.num_tokens))
                    count = len(data) // sample.row_bytes
                    header = ingest_pb2.ChunkHeader(sample=number, chunk=chunk, first_row=first, rows=count, xxh3=xxh3(data))
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
            with connect(self._address(), connect_timeout_s=_CALL_S, call_timeout_s=_CALL_S) as client:
                if next(self._reads) % 2:
                    with client.read(sample_id, wait_s=0) as reader:
                        token_ids, data = _received(reader)
                else:  # As `get_many` reads: a small sample comes as its file.
                    reads = [(sample_id, samples_pb2.ReadRequest(sample_id=sample_id))]
                    ((_, answer),) = client.many(wait_s=0, retry_s=0).answers(reads, _received)
                    if isinstance(answer, SlotStreamError):
                        raise answer
                    token_ids, data = answer
        except SlotStreamError as error:
            if _SILENCE in str(error):
                return "unknown", NONE
            if error.code in _NOT_STORED:
                return "is", NONE
            if error.code == "DAMAGED":
                return "damaged", NONE
            return "unknown", NONE
        for value in self._values:
            sample = _sample(sample_id, value)
            if (token_ids, data) == (sample.token_ids, sample.rows()):
                return "is", value
        self.wrong.append(f"{sample_id}: rows that nobody put were served")
        return "unknown", NONE

    def _delete(self, sample_id: str) -> str:
        try:
            with connect(self._address(), connect_timeout_s=_CALL_S, call_timeout_s=_CALL_S) as client:
                client.delete(sample_id)
        except SampleNotFound:
            return "nothing"
        except SlotStreamError as error:
            return "refused" if error.code in ("LEASED", "STILL_ARRIVING") else "unknown"
        return "deleted"

    def _lease(self, sample_id: str, holder: str) -> None:
        called_at = time.monotonic()
        try:
            with connect(self._address(), connect_timeout_s=_CALL_S, call_timeout_s=_CALL_S) as client:
                client.lease(sample_id, seconds=_LEASE_S, holder=holder)
        except SlotStreamError:
            return
        with self._lock:
            self._leases[sample_id].append((time.monotonic(), called_at + _LEASE_S))
            self.done["lease"] += 1

    def _send_held(self) -> None:
        """In the end there is room for everything."""
        for client, held in self._held.items():
            for sample_id, value in held[:]:
                if (answer := self._put_and_note(client, sample_id, value)) not in ("committed", "duplicate", "exists"):
                    self.wrong.append(f"{sample_id}: the disk has room again, and what was held is {answer}")
                self.done["held and sent again"] += 1

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
            return _FAILURES.get(reply.failed.code, "failed")


@dataclass(frozen=True)
class _LargeSample(SyntheticSample):
    """More than one part has, and soon made."""

    num_tokens: int = 4
    hidden_size: int = 400_000
    seed: int = len(_VALUES)

    def rows(self, start: int = 0, stop: int | None = None, layers: tuple[int, ...] | None = None) -> bytes:
        stop = self.num_tokens if stop is None else stop
        return b"".join(struct.pack("<H", 0x3F80 + row) * (self.row_bytes // 2) for row in range(start, stop))


def _received(reader: RowReader) -> tuple[list[int], bytes]:
    return list(reader.token_ids), b"".join(bytes(block.data) for block in reader)


def _sample(sample_id: str, value: str) -> SyntheticSample:
    if value == _LARGE:
        return _LargeSample(sample_id, NAMESPACE)
    return SyntheticSample(sample_id, NAMESPACE, num_tokens=4, seed=_VALUES.index(value))


def _sorted(history: list[Operation]) -> list[Operation]:
    return sorted(history, key=lambda one: one.called_at)


def run_histories(seconds: float, seed: int, streams: int = 1, pair: Pair | None = None) -> Histories:
    if pair is not None:
        with World(0, seed % 1000, pair=pair, server_options=("--scrub-every-s", "1", "--scrub-bytes-per-s", "1e9")) as world:
            run = Histories(world, None, seed, streams)
            run.run(seconds)
        return run
    below = Below()
    with tempfile.TemporaryDirectory(prefix="slotstream-histories-") as directory:
        rules = Path(directory) / "rules.toml"
        rules.write_text(RULES)
        options = ("--retention", str(rules), "--scrub-every-s", "1", "--scrub-bytes-per-s", "1e9")
        with World(0, seed % 1000, workers=2, shims=below, server_options=options) as world:
            run = Histories(world, below, seed, streams)
            run.run(seconds)
            if run.wrong:
                print("\n".join(line for line in world.server.log().splitlines() if _TELLING.search(line)))
    return run


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--seed", type=int, default=0, help="0: any, and it is printed")
    parser.add_argument("--streams", type=int, default=1, help="of a client: what is cut goes over the next one at once")
    parser.add_argument("--store", choices=["files", "cluster"], default="files", help="what the samples are kept in")
    arguments = parser.parse_args()
    seed = arguments.seed or random.SystemRandom().randrange(1, 1 << 31)
    print(f"seed {seed}", flush=True)
    with Pair() if arguments.store == "cluster" else nullcontext() as pair:
        run = run_histories(arguments.seconds, seed, arguments.streams, pair)
    print("\n".join(f"{count:>8}  {what}" for what, count in sorted(run.done.items())))
    print("\n".join(run.wrong[:5]) or "every answer can be explained")
    return int(bool(run.wrong))


if __name__ == "__main__":
    sys.exit(main())
