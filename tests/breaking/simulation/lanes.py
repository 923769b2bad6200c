"""A client with several streams, as a connector with the option `streams` is one."""

from __future__ import annotations

from server.server_kit import hello
from simulation.clients import ANSWER_S, Client
from simulation.clients import _Put as Put
from simulation.network import Call
from simulation.scheduler import running

from slotstream.store.records import SampleKey


class ClientWithLanes(Client):
    """Half of its puts go over several streams."""

    def put(self, key: SampleKey) -> None:
        if self._rng.random() < 0.5:
            _put(self, key, self._world.lanes)
        else:
            super().put(key)


def _put(client: Client, key: SampleKey, lanes: int) -> None:
    """Samples on several streams. One is cut, and its samples go over another at once: the server may not know yet."""
    rng, world = client._rng, client._world
    calls = [Call(world.server, "Ingest/Stream", client._address) for _ in range(lanes)]
    for call in calls:
        call.send(hello(batches=rng.random() < 0.5).SerializeToString())
    welcomes = [call.receive(ANSWER_S) for call in calls]
    if None in welcomes:
        for call in calls:
            client._check_answered(call, "a Hello") if call.status else call.cut()
        return
    puts: list[list[Put]] = [[] for _ in calls]
    for at in range(rng.randint(2, lanes + 1)):
        lane = rng.choice(puts)
        lane.append(Put(world.pick() if at else key, client._value(), len(lane) + 1, running().now))
    cut = rng.randrange(lanes)
    sound = [client._send(call, puts[at], rng.randint(1, 8) if at == cut else -1) for at, call in enumerate(calls)]
    other = (cut + 1) % lanes
    if not sound[cut] and sound[other]:
        again = [Put(put.key, put.value, len(puts[other]) + n, running().now) for n, put in enumerate(puts[cut], 1)]
        client._note_unanswered(puts[cut])
        puts[cut] = []
        world.model.counts["samples moved to another stream"] += len(again)
        puts[other] += again
        sound[other] = client._send(calls[other], again)
    for at, call in enumerate(calls):
        if sound[at]:
            client._hear_all(call, puts[at])
        client._note_unanswered(puts[at])
        client._leave(call)
