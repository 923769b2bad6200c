"""What several servers share: a bucket and a catalogue of their own, real ones, that can be killed, stopped and cut off."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self
from unittest.mock import patch

import psycopg
from support.postgres import Cluster
from support.postgres_proxy import Proxy
from support.relay import Relay
from support.seaweedfs import ObjectStore
from support.waiting import wait_until

from slotstream.store.blobs.s3.bucket import S3Blobs
from slotstream.store.catalogue.postgres.migrating import migrate
from slotstream.store.cluster.generation import is_own
from slotstream.store.cluster.reading import attempt_of, object_key
from slotstream.store.records import SampleKey

_SWEEPS = 3
_LONG_S = 7.0  # For so long that others take a stream, or a server, for dead.


class Pair:
    """A SeaweedFS and a PostgreSQL, with something before each that can cut its connections. Ends both on leaving."""

    def __init__(self) -> None:
        self._ends = ExitStack()
        try:
            self.database = Cluster()
            self._ends.callback(self.database.stop)
            self.objects = ObjectStore()
            self._ends.callback(self.objects.stop)
            self._url = self.database.database()
            migrate(self._url)
            self._proxy = Proxy(self.database.folder)
            self._ends.callback(self._proxy.close)
            self._relay = self._ends.enter_context(Relay(self.objects.endpoint.removeprefix("http://")))
        except BaseException:
            self._ends.close()
            raise
        self._store = self.objects.bucket()
        through = f"http://{self._relay.address}"
        url = self.database.url(self._url.rpartition("/")[2], self._proxy.folder)
        self.environment = {**self.objects.environment(endpoint=through), "SLOTSTREAM_SERVE_CATALOGUE": url}

    def options(self, scratch: Path) -> list[str]:
        """Of one of the servers."""
        return ["--store", self._store, "--scratch", str(scratch)]

    # What goes wrong. Each returns once everything is there again.

    def strike_database(self, rng: random.Random, moment_s: float) -> str:
        """What was done."""
        return self._strike(rng, moment_s, self.database, (self._cut_database, self._cut_a_commit))

    def strike_objects(self, rng: random.Random, moment_s: float) -> str:
        return self._strike(rng, moment_s, self.objects, (self._cut_objects,))

    def _strike(
        self,
        rng: random.Random,
        moment_s: float,
        engine: Cluster | ObjectStore,
        cuts: Sequence[Callable[[random.Random], str]],
    ) -> str:
        kind = rng.choice(("kill", "pause", "cut", "cut"))
        pause_s = rng.random() * moment_s
        if kind == "cut":
            return rng.choice(cuts)(rng)
        if kind == "kill":
            engine.kill()
            time.sleep(pause_s)
            engine.start()
            return "SIGKILL"
        engine.pause()
        try:
            time.sleep(pause_s if rng.random() < 0.7 else _LONG_S)
        finally:
            engine.go_on()
        return "SIGSTOP"

    def _cut_database(self, rng: random.Random) -> str:
        """For a moment nobody gets there; or only what was open is cut."""
        self._proxy.refuses = rng.random() < 0.5
        self._proxy.cut_all()
        time.sleep(rng.random())
        self._proxy.refuses = False
        return "connections cut"

    def _cut_a_commit(self, rng: random.Random) -> str:
        """A transaction is committed, and nobody hears of it."""
        self._proxy.cut_at_commit = rng.randint(1, 4)
        for _ in range(self._proxy.cut_at_commit):
            self._proxy.commits_cut.acquire(timeout=5.0)
        self._proxy.cut_at_commit = 0
        return "answers to COMMIT lost"

    def _cut_objects(self, rng: random.Random) -> str:
        """In the middle of requests: again and again, for there are many connections and few are in use."""
        ends_at = time.monotonic() + rng.random() * 2
        while time.monotonic() < ends_at:
            for link in self._relay.live:
                if rng.random() < 0.5:
                    link.cut()
            time.sleep(rng.random() * 0.05)
        self._relay.links[:] = self._relay.live
        return "connections cut"

    def flip(self, namespace: str, sample_id: str, rng: random.Random) -> bool | None:
        """Flip a bit of a committed sample's object. None where there is none; False where it is another's by then."""
        attempt = self._attempt(namespace, sample_id)
        if attempt is None:
            return None
        key = object_key(SampleKey(namespace, sample_id), attempt)
        with self._blobs() as blobs:
            found = blobs.open(key)
            if found is None:
                return None
            data = bytearray(found.read(0, found.nbytes))
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
            blobs.put(key, len(data), lambda at, nbytes: bytes(data[at : at + nbytes])).finish(len(data))
        return self._attempt(namespace, sample_id) == attempt

    def _attempt(self, namespace: str, sample_id: str) -> str | None:
        """Of a committed sample."""
        rows = self._sql(
            "SELECT attempt FROM slotstream.samples WHERE namespace = %s AND sample_id = %s AND state = 'committed'",
            namespace,
            sample_id,
        )
        return str(rows[0][0]) if rows else None

    # What is left over.

    def sweep(self) -> None:
        """Let the leader sweep three times what is left of servers that are gone, as if the time for each had passed."""
        for _ in range(_SWEEPS):
            self._sql("UPDATE slotstream.attempts SET due_unix_ns = 0")
            wait_until(lambda: not self._sql("SELECT 1 FROM slotstream.attempts WHERE due_unix_ns = 0"), "a sweep")

    def left_over(self) -> list[str]:
        """What the bucket or the catalogue holds beside the committed samples and their objects, or lacks of them."""
        samples = self._sql("SELECT namespace, sample_id, attempt FROM slotstream.samples WHERE state = 'committed'")
        known = {(str(namespace), str(sample_id), str(attempt)) for namespace, sample_id, attempt in samples}
        there, foreign = set(), []
        with self._blobs() as blobs:
            for stored in blobs.list():
                if is_own(stored.key):
                    continue
                one = attempt_of(stored.key)
                if is_own(stored.key):
                    continue
                if one is None:
                    foreign.append(stored.key)
                else:
                    there.add((one[0].namespace, one[0].sample_id, one[1]))
        attempts = self._sql("SELECT attempt FROM slotstream.attempts")
        return [
            *(f"{key} is an object of nothing" for key in foreign),
            *(f"an object is there of {one}, which is no sample" for one in sorted(there - known)),
            *(f"the object of {one} is gone" for one in sorted(known - there)),
            *(f"attempt {name} is left" for (name,) in attempts),
        ]

    @contextmanager
    def _blobs(self) -> Iterator[S3Blobs]:
        """Past what cuts connections."""
        with patch.dict(os.environ, self.objects.environment()), closing(S3Blobs(self._store)) as blobs:
            yield blobs

    def _sql(self, statement: str, *values: str) -> list[tuple[object, ...]]:
        with psycopg.connect(self._url, autocommit=True) as db:
            done = db.execute(statement.encode(), values)
            return done.fetchall() if done.description else []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._ends.close()
