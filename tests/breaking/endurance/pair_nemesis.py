"""What the histories of two servers are written under: all that they share is killed, stopped and cut, and so are they.

Each may do nothing to a sample. A flipped bit of an object may do something to that sample only (`register.py`).
"""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable, Sequence

from nemesis import CLIENT, NAMESPACE, Strikes
from pair import Pair
from register import Operation
from world import World

_MOMENT_S = 1.5
_LONG_S = 7.0


class PairNemesis(Strikes):
    """Strikes two servers, their database and their object store."""

    def __init__(
        self,
        world: World,
        pair: Pair,
        rng: random.Random,
        ids: Callable[[], list[str]],
        note: Callable[[str, Operation], None],
    ) -> None:
        """`ids`: which are in use; `note` is told what became of them here."""
        super().__init__(rng)
        self._world, self._pair, self._ids, self._note = world, pair, ids, note

    def strikes(self) -> Sequence[Callable[[], None]]:
        return (
            self.kill_a_server,
            self.kill_a_server,
            self.stop_a_server,
            self.stop_a_server,
            self.strike_the_database,
            self.strike_the_database,
            self.strike_the_objects,
            self.flip_an_object,
            self.flip_an_object,
        )

    def kill_a_server(self) -> None:
        server = self._rng.choice(self._world.servers)
        server.end(signal.SIGKILL)
        self._moment()
        server.start()
        self._world.wait_for(server)
        self.done["server killed"] += 1

    def stop_a_server(self) -> None:
        server = self._rng.choice(self._world.servers)
        server.send(signal.SIGSTOP)
        time.sleep(_LONG_S if self._rng.random() < 0.2 else self._rng.random() * _MOMENT_S)
        server.send(signal.SIGCONT)
        self.done["server stopped"] += 1

    def strike_the_database(self) -> None:
        self.done[f"database: {self._pair.strike_database(self._rng, _MOMENT_S)}"] += 1

    def strike_the_objects(self) -> None:
        self.done[f"object store: {self._pair.strike_objects(self._rng, _MOMENT_S)}"] += 1

    def flip_an_object(self) -> None:
        for sample_id in self._rng.sample(ids := self._ids(), len(ids)):
            called_at = time.monotonic()
            hit = self._pair.flip(NAMESPACE, sample_id, self._rng)
            if hit is None:  # It is not stored.
                continue
            self.done["object's bit flipped"] += 1
            answer = "flipped" if hit else "perhaps"
            self._note(sample_id, Operation(CLIENT, "flip", answer, called_at, time.monotonic()))
            return
