"""Clients, each on a simulated thread: they put, repeat, conflict, break off and give up; read, delete, lease, ack, verify.

What a client is answered goes to the model. What the protocol promises beyond that is checked here: one verdict a sample, one
ack a chunk, and the acks first; rows that somebody put, in order and whole; no error that nothing explains.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from google.protobuf.message import Message
from register import NONE, Operation
from server.server_kit import Sample, hello
from simulation.network import OK, Call
from simulation.scheduler import running

from slotstream.store.records import SampleKey
from slotstream.v1 import ingest_pb2, sample_pb2
from slotstream.v1 import samples_pb2 as pb
from slotstream.wire.frames import decode_reply

if TYPE_CHECKING:
    from simulation.world import World

ANSWER_S = 150.0  # A client that is not answered by then waits without end: disks are slow here, but none hangs.
_VALUES = ("a", "b", "c")
# What a client does next, and how often of a hundred or so.
_KINDS = {
    "put": 40,
    "read": 22,
    "delete": 14,
    "stat": 6,
    "list": 6,
    "ack": 6,
    "lease": 6,
    "verify": 2,
    "usage": 2,
    "restore": 1,
}
_LIKELY = (6, 2, 1)  # Most puts of an id bring the same.
_CHUNK_ROWS = 3
_NOT_STORED = {"NOT_FOUND", "SAMPLE_FAILED", "DEADLINE_EXCEEDED", "STILL_ARRIVING"}
_NEVER = {"DAMAGED", "PROTOCOL", "TOO_SLOW", "TOO_MANY", "BAD_PARAMS", "HASH_MISMATCH"}  # Whatever goes wrong here.
_MISTAKES = ("hash", "gap", "abort", "silence")


def sample_of(key: SampleKey, value: str) -> Sample:
    """What is stored under an id when `value` is."""
    at = _VALUES.index(value)
    return Sample(key.sample_id, rows=4 + 3 * at, seed=at, namespace=key.namespace, tags={"value": value})


@dataclass
class _Put:
    """One sample on one stream. `mistake`: what the connector does wrong with it; it is never committed then."""

    key: SampleKey
    value: str
    number: int
    called_at: float
    mistake: str = ""
    chunks: set[int] = field(default_factory=set)  # Sent, and not acked.
    committed_sent: bool = False
    answer: str = ""


class Client:
    """One of them. `run` does so many operations, each chosen by chance."""

    def __init__(self, world: World, number: int) -> None:
        self._world = world
        self._number = number
        self._address = f"10.0.0.{number + 1}"
        self._rng = running().rng

    def run(self, operations: int) -> None:
        for _ in range(operations):
            if self._rng.random() < 0.6:
                running().pause(self._rng.random())
            kind = self._rng.choices(list(_KINDS), list(_KINDS.values()))[0]
            getattr(self, kind)(self._world.pick())

    def _value(self) -> str:
        return self._rng.choices(_VALUES, _LIKELY)[0]

    def _note(self, key: SampleKey, kind: str, answer: str, called_at: float, value: str = NONE) -> None:
        running().note(f"{kind} {key} {value or '-'}: {answer}")
        self._world.model.note(key, Operation(self._number, kind, answer, called_at, running().now, value))

    # Putting.

    def put(self, key: SampleKey) -> None:
        """Some samples on one stream, interleaved."""
        call = Call(self._world.server, "Ingest/Stream", self._address)
        call.send(hello(batches=self._rng.random() < 0.5).SerializeToString())
        welcome = call.receive(ANSWER_S)
        if welcome is None:
            self._check_answered(call, "a Hello")
            return
        puts = [_Put(key, self._value(), 1, running().now)]
        for number in range(2, 2 + self._rng.choice((0, 0, 1, 2))):
            puts.append(_Put(self._world.pick(), self._value(), number, running().now))
        for put in puts:
            if self._rng.random() < 0.12:
                put.mistake = self._rng.choice(_MISTAKES)
        self._send_all(call, puts, cut_after=self._rng.randrange(20) if self._rng.random() < 0.15 else -1)
        self._note_unanswered(puts)
        self._leave(call)

    def _note_unanswered(self, puts: list[_Put]) -> None:
        for put in puts:
            if not put.answer:
                self._note(put.key, "put", "unknown" if put.committed_sent else "failed", put.called_at, put.value)

    def _leave(self, call: Call) -> None:
        if self._rng.random() < 0.5:
            call.half_close()
            if not call.status and not call.receive(ANSWER_S):
                self._check_answered(call, "the end of a stream")
        else:
            call.cut()

    def _send_all(self, call: Call, puts: list[_Put], cut_after: int) -> None:
        if self._send(call, puts, cut_after):
            self._hear_all(call, puts)

    def _send(self, call: Call, puts: list[_Put], cut_after: int = -1) -> bool:
        """Whether all was sent, and the call goes on."""
        to_send = [self._messages(put) for put in puts]
        for put in puts:
            put.called_at = running().now
        sent = 0
        while any(to_send):
            messages = self._rng.choice([left for left in to_send if left])
            put = puts[to_send.index(messages)]
            message, chunk = messages.pop(0)
            if chunk:
                put.chunks.add(chunk)
            put.committed_sent |= not messages and not put.mistake
            call.send(message)
            sent += 1
            if sent == cut_after:
                call.cut()
                return False
            if call.status:
                return False
        return True

    def _hear_all(self, call: Call, puts: list[_Put]) -> None:
        while any(not put.answer for put in puts if put.mistake != "silence"):
            if not self._hear(call, puts):
                return

    def _messages(self, put: _Put) -> list[tuple[bytes, int]]:
        """Of one sample, in order: each message, and the number of its chunk, if it is one."""
        sample, number = sample_of(put.key, put.value), put.number
        starts = list(range(0, sample.rows, _CHUNK_ROWS))
        if self._rng.random() < 0.3:
            self._rng.shuffle(starts)
        if self._rng.random() < 0.2:
            starts.append(self._rng.choice(starts))  # Once more.
        if put.mistake == "gap":
            starts = [start for start in starts if start]
        exact = self._rng.random() < 0.5
        messages = [(sample.open(number, rows_exact=exact, rows_max=sample.rows + (not exact)).SerializeToString(), 0)]
        for at, start in enumerate(starts):
            chunk = number * 100 + at + 1
            frame = sample.chunk(number, chunk, start, min(start + _CHUNK_ROWS, sample.rows))
            if put.mistake == "hash" and at == 0:
                frame = frame[:-1] + bytes([frame[-1] ^ 1])
            messages.append((frame, chunk))
        if put.mistake == "abort":
            aborting = ingest_pb2.IngestRequest(abort=ingest_pb2.AbortSample(sample=number, code="ABORTED", message="no"))
            messages.append((aborting.SerializeToString(), 0))
        elif put.mistake != "silence":
            messages.append((sample.commit(number).SerializeToString(), 0))
        return messages

    def _hear(self, call: Call, puts: list[_Put]) -> bool:
        """The next reply. False when there is none."""
        raw = call.receive(self._world.silent_s)
        if raw is None:
            self._check_answered(call, "a commit", self._world.silent_s)
            return False
        reply = ingest_pb2.IngestReply.FromString(raw)
        for one in reply.batch.replies if reply.WhichOneof("kind") == "batch" else (reply,):
            kind = one.WhichOneof("kind")
            if kind == "ack":
                self._acked(puts, one.ack.chunks)
            elif kind in ("committed", "failed"):
                self._verdict(puts, one, getattr(one, kind))
            elif kind != "draining":
                running().fail(f"client {self._number} was told {kind}")
        return True

    def _acked(self, puts: list[_Put], chunks: Any) -> None:
        for chunk in chunks:
            put = puts[chunk // 100 - 1]
            if chunk not in put.chunks:
                running().fail(f"client {self._number}: chunk {chunk} was acked again, or was never sent")
            put.chunks.discard(chunk)

    def _verdict(self, puts: list[_Put], reply: ingest_pb2.IngestReply, verdict: Any) -> None:
        put = puts[verdict.sample - 1]
        if put.answer:
            running().fail(f"client {self._number}: {put.key} got two verdicts")
        if reply.WhichOneof("kind") == "committed":
            put.answer = "duplicate" if verdict.duplicate else "committed"
            if put.mistake:
                running().fail(
                    f"client {self._number}: {put.key} is {put.answer}, though its connector made a mistake: {put.mistake}"
                )
            if put.chunks:
                running().fail(f"client {self._number}: {put.key} is {put.answer}, and chunks {put.chunks} are not acked")
        else:
            put.answer = "exists" if verdict.code == "ALREADY_EXISTS" else "failed"
            running().note(f"{put.key} failed: {verdict.code}")
            self._world.model.counts[f"failed {verdict.code}"] += 1
            self._world.told_failed(put.key, put.called_at)
            if put.answer == "failed" and not put.mistake:
                if verdict.code in _NEVER | self._world.never:
                    running().fail(f"client {self._number}: {put.key} failed as {verdict.code}")
                self._check_reason(put.called_at, f"a put of {put.key} failed as {verdict.code}: {verdict.message}")
        self._note(put.key, "put", put.answer, put.called_at, put.value)

    # Reading.

    def read(self, key: SampleKey) -> None:
        called_at = running().now
        call = Call(self._world.server, "Samples/Read", self._address)
        part = self._rng.random() < 0.2
        request = pb.ReadRequest(
            namespace=key.namespace,
            sample_id=key.sample_id,
            wait_s=self._rng.choice((0, 0, 0, 3)),
            start=1 if part else 0,
            layer_ids=[9] if self._rng.random() < 0.2 else [],
            unverified=self._rng.random() < 0.1,
        )
        call.slow_s = self._rng.choice((0.0, 0.0, 0.0, 1.0))
        call.send(request.SerializeToString())
        frames: list[bytes] = []
        gives_up_after = self._rng.randint(1, 3) if self._rng.random() < 0.1 else -1
        while (frame := call.receive(ANSWER_S)) is not None:
            frames.append(frame)
            if len(frames) == gives_up_after:
                call.cut()
                return
        self._check_answered(call, f"a read of {key}")
        if call.status == OK:
            value = self._value_read(key, request, frames)
            if value != NONE:
                self._note(key, "read", "is", called_at, value)
        elif call.code in _NOT_STORED:
            self._check_reason_of_failure(key, call.reason)
            self._note(key, "read", "is", called_at)
        else:
            self._check_error(call, called_at, f"a read of {key}")

    def _value_read(self, key: SampleKey, request: pb.ReadRequest, frames: list[bytes]) -> str:
        header, _ = decode_reply(frames[0])
        at, rows = header.header.start, b""
        for frame in frames[1:]:
            reply, data = decode_reply(frame)
            if reply.rows.first_row != at:
                running().fail(f"rows of {key} are out of order")
            at += reply.rows.rows
            rows += bytes(data)
        value = header.header.info.tags["value"]
        sample = sample_of(key, value)
        wanted = sample.part(request.start, sample.rows)
        if request.layer_ids:  # The second of two layers.
            half = sample.row_bytes // 2
            wanted = b"".join(wanted[at + half : at + 2 * half] for at in range(0, len(wanted), 2 * half))
        if rows != wanted or list(header.header.token_ids) != sample.token_ids[request.start :]:
            running().fail(f"client {self._number}: rows of {key} are not those that were put as {value}")
            return NONE
        return value

    def stat(self, key: SampleKey) -> None:
        called_at = running().now
        reply = self._ask("Stat", pb.StatRequest(namespace=key.namespace, sample_id=key.sample_id), sample_pb2.SampleInfo)
        if isinstance(reply, sample_pb2.SampleInfo):
            is_there = reply.state == sample_pb2.SAMPLE_STATE_COMMITTED
            self._check_reason_of_failure(key, reply.error_code)
            self._note(key, "read", "is", called_at, reply.tags["value"] if is_there else NONE)
        elif reply == "NOT_FOUND":
            self._note(key, "read", "is", called_at)

    def list(self, key: SampleKey) -> None:
        called_at = running().now
        request = pb.ListRequest(namespace=key.namespace, state=sample_pb2.SAMPLE_STATE_COMMITTED)
        reply = self._ask("List", request, pb.ListReply)
        if isinstance(reply, pb.ListReply):
            found = {info.sample_id: info.tags["value"] for info in reply.samples}
            for one in self._world.keys:
                if one.namespace == key.namespace:
                    self._note(one, "read", "is", called_at, found.get(one.sample_id, NONE))

    def verify(self, key: SampleKey) -> None:
        called_at = running().now
        call = Call(self._world.server, "Samples/Verify", self._address)
        call.send(pb.VerifyRequest(quarantine=self._rng.random() < 0.5).SerializeToString())
        while (raw := call.receive(ANSWER_S)) is not None:
            verdict = pb.VerifyReply.FromString(raw)
            if verdict.damage not in ("", "IO_ERROR", "FOREIGN"):
                running().fail(f"{verdict.namespace}/{verdict.sample_id} is {verdict.damage}: {verdict.message}")
        self._check_answered(call, "a verification")
        if call.status != OK:
            self._check_error(call, called_at, "a verification")

    def restore(self, key: SampleKey) -> None:
        """Nothing is ever damaged, so nothing is put aside."""
        called_at = running().now
        call = Call(self._world.server, "Samples/Restore", self._address)
        call.send(pb.RestoreRequest().SerializeToString())
        while (raw := call.receive(ANSWER_S)) is not None:
            running().fail(f"the quarantine has {pb.RestoreReply.FromString(raw)}")
        self._check_answered(call, "a restore")
        if call.status != OK:
            self._check_error(call, called_at, "a restore")

    def usage(self, key: SampleKey) -> None:
        self._ask("Usage", pb.UsageRequest(), pb.UsageReply)

    # What stays and what goes.

    def delete(self, key: SampleKey) -> None:
        called_at = running().now
        self._world.model.deletes(key)
        reply = self._ask("Delete", pb.DeleteRequest(namespace=key.namespace, sample_id=key.sample_id), pb.DeleteReply)
        answers = {"NOT_FOUND": "nothing", "LEASED": "refused", "STILL_ARRIVING": "refused"}
        answer = answers.get(reply, "unknown") if isinstance(reply, str) else "deleted"
        self._note(key, "delete", answer, called_at)

    def ack(self, key: SampleKey) -> None:
        self._world.model.acked(key, running().now)
        self._ask("Ack", pb.AckRequest(namespace=key.namespace, sample_id=key.sample_id), pb.AckReply)

    def lease(self, key: SampleKey) -> None:
        called_at = running().now
        seconds = self._rng.choice((2.0, 10.0, 30.0))
        holder = f"client{self._number}-{self._world.serial()}"
        request = pb.LeaseRequest(namespace=key.namespace, sample_id=key.sample_id, holder=holder, seconds=seconds)
        if isinstance(self._ask("Lease", request, pb.LeaseReply), pb.LeaseReply):
            running().note(f"lease {key} for {seconds:g} s")
            self._world.model.leased(key, running().now, called_at + seconds)
            if self._rng.random() < 0.5:  # A rule that deletes on an ack waits for the end of the lease.
                self.ack(key)
                running().pause(self._rng.random())
                self.stat(key)

    def accept_rules(self) -> set[str]:
        """The namespaces in which the rules were held until now."""
        called_at = running().now
        call = Call(self._world.server, "Samples/Retention", self._address)
        call.send(pb.RetentionRequest(accept=True).SerializeToString())
        held = set()
        while (raw := call.receive(ANSWER_S)) is not None:
            held.add(pb.RetentionReply.FromString(raw).namespace)
        self._check_answered(call, "an acceptance of the rules")
        if call.status != OK:
            self._check_error(call, called_at, "an acceptance of the rules")
        return held

    def _ask(self, method: str, request: Message, kind: Any) -> Any:
        """The reply of a short call, or the code that it was refused with."""
        called_at = running().now
        call = Call(self._world.server, f"Samples/{method}", self._address)
        call.send(request.SerializeToString())
        raw = call.receive(ANSWER_S)
        if raw is not None:
            return kind.FromString(raw)
        self._check_answered(call, method)
        if call.code not in _NOT_STORED and call.code != "LEASED":
            self._check_error(call, called_at, method)
        return call.code or call.status

    # What may be wrong with an answer.

    def _check_reason_of_failure(self, key: SampleKey, code: str) -> None:
        if code == "DAMAGED":
            running().fail(f"client {self._number} was told that {key} is damaged, and nothing is")

    def _check_answered(self, call: Call, what: str, limit_s: float = ANSWER_S) -> None:
        if not call.status:
            running().fail(f"client {self._number}: {what} was not answered within {limit_s:g} s\n{running().stacks()}")
            call.cut()

    def _check_error(self, call: Call, called_at: float, what: str) -> None:
        running().note(f"{what}: {call.status} {call.code}")
        self._world.model.counts[f"refused {call.code or call.status}"] += 1
        if call.code in _NEVER | self._world.never:
            running().fail(f"client {self._number}: {what} was answered with {call.status} {call.code}")
        self._check_reason(called_at, f"{what} was answered with {call.status} {call.code}")

    def _check_reason(self, called_at: float, what: str) -> None:
        """Without trouble nothing is refused."""
        if not self._world.was_troubled(called_at):
            running().fail(f"client {self._number}: {what}, and nothing was wrong with disk, clock or server")
