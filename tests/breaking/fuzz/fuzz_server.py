"""Targets of the two services, in this process and over a real store: streams of requests as a state machine, and reads.

What gRPC does before and after them (framing, flow control, deadlines) is left out; tests/server/test_server_hostile.py has
that in. A model beside the server, which parses with an ordinary protobuf library, says what every verdict must mean.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from types import SimpleNamespace
from typing import Any

import grpc
from fuzz_disk import put, scratch
from fuzz_harness import Source, Target
from google.protobuf.message import DecodeError

from slotstream.server.access.gate import Gate
from slotstream.server.config import ServerConfig
from slotstream.server.disk_threads import DiskThreads
from slotstream.server.housekeeping import Housekeeping
from slotstream.server.ingest.service import IngestService
from slotstream.server.metrics import Metrics
from slotstream.server.parts import ServerParts
from slotstream.server.samples.service import SamplesService
from slotstream.server.waiters import Waiters
from slotstream.store.catalogue.queries import ListQuery
from slotstream.store.records import Failure, SampleKey, SampleSpec, State
from slotstream.store.samples import SampleStore
from slotstream.v1 import ingest_pb2 as pb
from slotstream.v1 import sample_pb2, samples_pb2
from slotstream.wire import errors
from slotstream.wire.columns import RowFormat
from slotstream.wire.errors import SlotStreamError
from slotstream.wire.frames import decode_reply, encode_batch, encode_chunk
from slotstream.wire.hashing import xxh3

_EOF: Any = grpc.aio.EOF  # type: ignore[attr-defined]
_CODES = frozenset(
    kind.code
    for name in errors.__all__
    if isinstance(kind := getattr(errors, name), type) and issubclass(kind, SlotStreamError)
)
_IDS = ("a", "b", "c")
ROWS_MAX = 12
_LAYERS, _HIDDEN, ROW_BYTES = (3, 7), 8, 64


class Aborted(Exception):
    """The call was ended with a status."""

    def __init__(self, code: str) -> None:
        super().__init__(code)
        self.code = code


class Call:
    """What a service sees of a call: requests that come as they are read, replies that arrive as they are written."""

    def __init__(self, requests: list[bytes], *, breaks: bool = False) -> None:
        self._requests = deque(requests)
        self._breaks = breaks
        self.read_all = asyncio.Event()
        self.replies: list[bytes] = []

    def peer(self) -> str:
        return "fuzz"

    def add_done_callback(self, callback: object) -> None:
        """Nobody asks how many calls there are."""

    def invocation_metadata(self) -> tuple[()]:
        return ()

    def auth_context(self) -> dict[str, Any]:
        return {}

    async def read(self) -> Any:
        if self._requests:
            await asyncio.sleep(0)
            return self._requests.popleft()
        self.read_all.set()
        if self._breaks:
            await asyncio.Event().wait()  # The peer is gone without a word: the call is cancelled.
        return _EOF

    async def write(self, reply: bytes) -> None:
        self.replies.append(reply)

    async def abort(self, status: grpc.StatusCode, details: str, trailing: Any = ()) -> None:
        details.encode()
        raise Aborted(dict(trailing)["slotstream-code"])


class Harness:
    """Both services over one store, and the loop that they run on."""

    def __init__(self, reader: Any = None) -> None:
        self.loop = asyncio.new_event_loop()
        self.store = SampleStore.open(scratch("server"))
        config = ServerConfig(data_dir=self.store.data_dir, appear_grace_s=0.0, open_samples_max=4)
        disk_threads, metrics = DiskThreads(), Metrics(self.store)
        parts = ServerParts(config, self.store, disk_threads, metrics, Waiters(), Gate(config))
        housekeeping = Housekeeping(config, self.store, metrics, lambda healthy: None)
        self.disk_threads = disk_threads

        async def services() -> tuple[IngestService, SamplesService]:
            return (
                IngestService(parts, housekeeping.touch, reader),
                SamplesService(parts, housekeeping),
            )

        self.ingest, self.samples = self.loop.run_until_complete(services())
        self.metrics = metrics

    def method(self, service: str, name: str) -> Any:
        handler = (self.ingest if service == "Ingest" else self.samples).handler()
        call: Any = SimpleNamespace(method=f"/slotstream.v1.{service}/{name}", invocation_metadata=())
        found = handler.service(call)
        assert found is not None
        return found

    def count(self, name: str) -> float:
        return self.metrics.registry.get_sample_value(f"slotstream_{name}") or 0.0


@cache
def _ingest_harness() -> Harness:
    return Harness()


# Ingest.


def rows_of(seed: int, first: int, count: int) -> bytes:
    """Rows that two seeds agree on in every second row, so that overlapping chunks and equal samples happen."""
    return b"".join(
        bytes([(row * 37 + (seed if row % 2 else 0) + at) % 256 for at in range(ROW_BYTES)])
        for row in range(first, first + count)
    )


def _open(source: Source) -> pb.IngestRequest:
    request = pb.OpenSample(
        sample=source.below(6),
        namespace="default",
        sample_id=source.pick(_IDS),
        model="m",
        dtype="F32",
        layer_ids=_LAYERS,
        hidden_size=_HIDDEN,
        rows_max=source.below(ROWS_MAX) + 1,
        rows_exact=bool(source.below(2)),
    )
    match source.below(24):
        case 1:
            request.dtype = source.pick(("", "BF16", "I64", "f32"))
        case 2:
            request.layer_ids[:] = source.pick(((), (3, 3), (1,), tuple(range(1100)), (2**32 - 1, 0)))
        case 3:
            request.hidden_size = source.pick((0, 1, 2**32 - 1, 1 << 20))
        case 4:
            request.rows_max = source.pick((0, 2**64 - 1, 1 << 21, (1 << 21) + 1, 1 << 40))
        case 5:
            request.tags[source.text(300)] = source.text(300)
        case 6:
            request.metadata[source.pick(("hashes", "format", "é", "k" * 20000, "chunks"))] = source.text(200)
        case 7:
            request.sample_id = source.pick(("../x", "", "a/b", ".a", "x" * 129, "CON", "a\0"))
        case 8:
            request.namespace = source.pick(("", "..", "catalog.sqlite", "Catalog.x", "n" * 65, "other"))
        case 9:
            request.model = "m" * source.below(2000)
    return pb.IngestRequest(open=request)


def _chunk(source: Source, number: int) -> bytes:
    first, rows = source.below(ROWS_MAX), source.below(5) + 1
    data = rows_of(source.below(2), first, rows)
    header = pb.ChunkHeader(sample=source.below(6), chunk=number, first_row=first, rows=rows, xxh3=xxh3(data))
    match source.below(24):
        case 1:
            header.xxh3 ^= 1
        case 2:
            header.rows = source.pick((0, rows + 1, 2**32 - 1))
        case 3:
            header.first_row = source.pick((2**32 - 1, 1 << 21, ROWS_MAX))
        case 4:
            data = data[:-1]
        case 5:
            return pb.IngestRequest(chunk=header, data=data).SerializeToString() + source.take(4)
    return encode_chunk(header, data)


def _commit(source: Source) -> pb.IngestRequest:
    rows = source.below(ROWS_MAX + 1)
    ids = [5 + row for row in range(rows + source.pick((0, 0, 0, 0, 0, 0, 1, 1 << 10)))]
    request = pb.CommitSample(sample=source.below(6), row_count=rows, token_ids=ids)
    match source.below(16):
        case 1:
            request.row_count = source.pick((2**64 - 1, 0, 1 << 32))
        case 2:
            request.token_ids[:] = [2**64 - 1] * rows
        case 3:
            request.metadata[source.text(20)] = "m" * source.below(20000)
    return pb.IngestRequest(commit=request)


@dataclass
class Stream:
    """The requests of one stream, and how the peer leaves: with a goodbye, or without."""

    requests: list[bytes] = field(default_factory=list)
    breaks: bool = False


def make_streams(
    source: Source, hello: Callable[[Source], pb.Hello], say: Callable[[Source, Stream, int], None]
) -> list[list[Stream]]:
    """Rounds, one after another, of streams that run side by side; `say` adds a request to one of them."""
    rounds: list[list[Stream]] = []
    for _ in range(1 + source.below(2)):
        streams = [Stream([pb.IngestRequest(hello=hello(source)).SerializeToString()]) for _ in range(1 + source.below(2))]
        rounds.append(streams)
        for number in range(source.below(24)):
            if not source.left:
                break
            say(source, source.pick(streams), number)
        for stream in streams:
            stream.breaks = source.below(4) == 3
    return rounds


def _report(source: Source) -> bytes:
    report = pb.EngineReport(host=source.text(80), layer_ids=range(source.below(300)), has_final=bool(source.below(2)))
    return pb.IngestRequest(report=report).SerializeToString()


def say_frames(source: Source, stream: Stream, number: int) -> None:
    """Anything that a peer may say, and some that it may not; chunks as frames."""
    frame: bytes
    match source.below(17):
        case 0 | 1 | 2 | 3:
            frame = _open(source).SerializeToString()
        case 4 | 5 | 6 | 7 | 8:
            frame = _chunk(source, number)
        case 9 | 10 | 11:
            frame = _commit(source).SerializeToString()
        case 12:
            abort = pb.AbortSample(
                sample=source.below(6), code=source.pick(("ABORTED", "", "x", "A" * 70)), message=source.text(40)
            )
            frame = pb.IngestRequest(abort=abort).SerializeToString()
        case 13:
            frame = source.take(source.below(40))
        case 14 if stream.requests:
            spoilt = bytearray(stream.requests.pop())
            if spoilt:
                spoilt[source.below(len(spoilt))] ^= 1 << source.below(8)
            frame = bytes(spoilt)
        case 16:
            last = -1 - source.below(4)
            frame = encode_batch(stream.requests[last:])
            del stream.requests[last:]
        case _:
            frame = stream.requests[source.below(len(stream.requests))] if stream.requests else _report(source)
    stream.requests.append(frame)


@dataclass
class Model:
    """What one stream has said, as an ordinary protobuf library reads it."""

    opened: dict[int, pb.OpenSample] = field(default_factory=dict)
    opens: int = 0
    rows: dict[int, dict[int, set[bytes]]] = field(default_factory=dict)  # sample -> row -> what it may be
    commits: dict[int, pb.CommitSample] = field(default_factory=dict)
    chunks: Counter[int] = field(default_factory=Counter)
    reasons: set[str] = field(default_factory=lambda: {"ABORTED"})  # Codes that it gave samples up with.
    staged: Callable[[pb.Announce], bytes | None] | None = None  # What of staging the server can read.

    def take(self, frame: bytes) -> None:
        try:
            request = pb.IngestRequest.FromString(frame)
        except DecodeError:
            return  # The stream ends here; what follows is never looked at, and changes nothing that was committed before.
        if request.HasField("open") and request.open.sample not in self.opened:
            self.opened[request.open.sample] = request.open
            self.opens += 1
        elif request.HasField("chunk"):
            self._rows(request.chunk, request.data)
        elif request.HasField("announcements"):
            for announce in request.announcements.chunks:
                self.chunks[announce.header.chunk] += 1
                if self.staged is not None and (data := self.staged(announce)) is not None:
                    self._rows(announce.header, data)
        elif request.HasField("commit"):
            self.commits.setdefault(request.commit.sample, request.commit)
        elif request.HasField("abort"):
            self.reasons.add(request.abort.code)
        for one in request.batch.requests:
            self.take(one.SerializeToString())

    def _rows(self, header: pb.ChunkHeader, data: bytes) -> None:
        self.chunks[header.chunk] += 1
        if header.sample not in self.opened or header.sample in self.commits:
            return
        rows = self.rows.setdefault(header.sample, {})
        size = max(1, len(data) // header.rows) if header.rows else 1
        for at in range(min(header.rows, 64)):
            row = rows.setdefault(header.first_row + at, set())
            # Of a row that was said twice the first to arrive stays: of frames the first, of what is read either.
            if not row or self.staged is not None:
                row.add(data[at * size : (at + 1) * size])

    def content(self, number: int) -> tuple[str, str, list[set[bytes]], list[int]]:
        """(namespace, id, what each row may be, token ids) of a sample that was committed."""
        opened, commit = self.opened[number], self.commits[number]
        rows = [self.rows[number][row] for row in range(commit.row_count)]
        return opened.namespace, opened.sample_id, rows, list(commit.token_ids)


async def _serve(harness: Harness, stream: Stream) -> tuple[Call, str]:
    """Runs one stream to its end: its call, and the code that it ended with."""
    call = Call(stream.requests, breaks=stream.breaks)
    serving = asyncio.ensure_future(harness.method("Ingest", "Stream").stream_stream(None, call))
    if stream.breaks:
        waiting = asyncio.ensure_future(call.read_all.wait())
        await asyncio.wait((serving, waiting), return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        serving.cancel()
    try:
        await serving
    except Aborted as aborted:
        return call, aborted.code
    except asyncio.CancelledError:
        return call, "CANCELLED"
    return call, ""


def _check_replies(call: Call, ended: str, model: Model) -> list[int]:
    """Every sample gets one verdict, every chunk one ack. Returns the samples that were committed."""
    verdicts: Counter[int] = Counter()
    acks: Counter[int] = Counter()
    committed: list[int] = []
    messages = [pb.IngestReply.FromString(raw) for raw in call.replies]
    for reply in (one for message in messages for one in message.batch.replies or (message,)):
        acks.update(reply.ack.chunks)
        if reply.HasField("committed"):
            verdicts[reply.committed.sample] += 1
            committed.append(reply.committed.sample)
        elif reply.HasField("failed"):
            verdicts[reply.failed.sample] += 1
            if reply.failed.code not in model.reasons:
                assert reply.failed.code in _CODES - {"INTERNAL"}, reply.failed
                assert "\n" not in reply.failed.message, reply.failed
    assert max(verdicts.values(), default=1) == 1, "a sample got two verdicts"
    assert verdicts.keys() <= model.opened.keys()
    assert not acks - model.chunks, "a chunk was acked that never came, or twice"
    assert ended in ("", "PROTOCOL", "CANCELLED"), ended
    if ended == "":
        assert len(verdicts) == model.opens, "a sample got no verdict"
    return committed


def check_ingest(data: bytes) -> None:
    """Any requests in any order: one verdict a sample, and what is committed is exactly what was sent. Nothing stays behind."""
    greeting = pb.Hello(protocol=1, batches=True)
    check_streams(_ingest_harness(), make_streams(Source(data), lambda source: greeting, say_frames), Model)


def check_streams(harness: Harness, rounds: list[list[Stream]], make_model: Callable[[], Model]) -> None:
    """Serves the streams, and holds what became of them against what models of them say."""
    stored: dict[tuple[str, str], tuple[list[set[bytes]], list[int]]] = {}
    for streams in rounds:
        models = [make_model() for _ in streams]
        for model, stream in zip(models, streams, strict=True):
            for frame in stream.requests:
                model.take(frame)
        served = harness.loop.run_until_complete(_all(harness, streams))
        for model, (call, ended) in zip(models, served, strict=True):
            for number in _check_replies(call, ended, model):
                namespace, sample_id, rows, ids = model.content(number)
                before = stored.get((namespace, sample_id), (rows, ids))
                assert (len(before[0]), before[1]) == (len(rows), ids), "an id was committed with two contents"
                both = [row & other for row, other in zip(before[0], rows, strict=True)]
                assert all(both), "an id was committed with two contents"
                stored[namespace, sample_id] = both, ids
    _check_store(harness, stored)


async def _all(harness: Harness, streams: list[Stream]) -> list[tuple[Call, str]]:
    served = await asyncio.gather(*(_serve(harness, stream) for stream in streams))
    await harness.ingest.idle()
    async with asyncio.timeout(30):  # What was written for a sample that had ended is noticed a moment later.
        while harness.count("held_bytes"):  # noqa: ASYNC110 - a gauge tells nobody when it changes
            await asyncio.sleep(0.001)
    return list(served)


def _check_store(harness: Harness, stored: dict[tuple[str, str], tuple[list[set[bytes]], list[int]]]) -> None:
    """Exactly the committed samples are there, with exactly their rows; then they are deleted and nothing is left."""
    assert harness.count("open_samples") == 0
    assert harness.count("ingest_streams") == 0
    store = harness.store
    for (namespace, sample_id), (rows, ids) in stored.items():
        with store.reader(SampleKey(namespace, sample_id)) as reader:
            count = reader.file.header.num_tokens
            data = b"".join(bytes(piece) for block in reader.blocks(0, count) for piece in block.data)
            size = len(data) // count
            found = [data[at : at + size] for at in range(0, len(data), size)]
            assert len(found) == len(rows)
            assert all(row in said for row, said in zip(found, rows, strict=True))
            assert list(reader.token_ids(0, count)) == ids
    records, token = store.list_page(ListQuery(page_size=1000))
    assert token == ""
    for record in records:
        # A verdict that the peer did not live to hear may be a commit too.
        assert record.state is not State.ARRIVING, record
        store.delete(record.key)
    left = [path for path in store.data_dir.rglob("*") if path.suffix in (".partial", ".safetensors")]
    assert not left, left


def _ingest_seeds() -> list[bytes]:
    """Streams whose bytes follow `make_streams`: whole samples, an overlap, a replay, a break."""
    opened = bytes((0, 0, 1, 0, 7, 1, 0))  # stream, action, number, id, rows, exact, nothing wrong
    chunks = bytes((0, 4, 0, 4, 0, 1, 0)) + bytes((0, 4, 4, 3, 0, 1, 0))
    commit = bytes((0, 9, 8, 0, 1, 0))
    whole = opened + chunks + commit
    overlap = bytes((0, 4, 1, 2, 1, 1, 0))  # Rows 1 to 3 again, with other content.
    other = opened + bytes((0, 4, 0, 4, 1, 1, 0)) + chunks[7:] + commit
    return [
        bytes((0, 0, 20)) + opened + chunks[:7] + overlap + chunks[7:] + commit,
        bytes((1, 0, 4)) + whole + bytes((0, 4)) + other,
        bytes((0, 0, 20)) + whole,
        bytes((1, 0, 20)) + whole + bytes((0, 0, 20)) + whole,
        bytes((0, 1, 23)) + whole + bytes((0, 15, 1)) * 3,
        bytes((0, 0, 23)) + opened + chunks * 2 + commit + bytes((0, 12, 1, 0, 0)),
        bytes((0, 0, 23)) + opened + bytes((0, 14, 3, 1)) + chunks,
    ]


# Reads.

_READ_KEY = SampleKey("default", "read")
_READ_ROWS = 9
_READ_DATA = rows_of(1, 0, _READ_ROWS)


@cache
def _reads_harness() -> Harness:
    harness = Harness()
    harness.store.open_upload(SampleSpec("default", "arriving", "m", _LAYERS, RowFormat.of("F32", len(_LAYERS), _HIDDEN), 4))
    failed = harness.store.open_upload(
        SampleSpec("default", "failed", "m", _LAYERS, RowFormat.of("F32", len(_LAYERS), _HIDDEN), 4)
    )
    failed.abort(Failure("ABORTED", "no"))
    for index in range(3):
        put(harness.store, SampleKey("other", f"n{index}"), bytes(ROW_BYTES), [index])
    return harness


_METHODS: dict[str, Any] = {
    "Read": samples_pb2.ReadRequest,
    "Stat": samples_pb2.StatRequest,
    "List": samples_pb2.ListRequest,
    "Delete": samples_pb2.DeleteRequest,
    "Verify": samples_pb2.VerifyRequest,
    "Ack": samples_pb2.AckRequest,
    "CountRead": samples_pb2.CountReadRequest,
    "Lease": samples_pb2.LeaseRequest,
    "Usage": samples_pb2.UsageRequest,
}


def _request(source: Source, name: str) -> bytes:
    """A request of known fields with likely and unlikely values, or raw bytes."""
    if source.below(4) == 3:
        return source.take(60)
    request = _METHODS[name]()
    if name not in ("List", "Usage"):
        request.sample_id = source.pick(("read", "arriving", "failed", "nothing", "", "../x"))
        request.namespace = source.pick(("", "default", "other", ".."))
    if name == "Read":
        request.start = source.pick((0, 1, 8, 9, 10, 2**64 - 1))
        if source.below(2):
            request.stop = source.pick((0, 1, 5, 9, 10, 2**64 - 1))
        request.layer_ids[:] = source.pick(((), (3,), (7,), (7, 3), (3, 7), (3, 3), (2**32 - 1,), tuple(range(5000))))
        request.wait_s = source.pick((0.0, 1e-4, -1.0, float("nan"), float("inf"), 3601.0))
        request.unverified, request.in_place = bool(source.below(2)), source.below(4) == 3
    elif name == "CountRead":
        request.committed_unix_ns = source.pick((0, 1, -1, 2**63 - 1, -(2**63)))
    elif name == "Lease":
        request.holder = source.pick(("me", "", "a b", "x" * 200, "\x00"))
        request.seconds = source.pick((0.0, 1e-3, 86_400.0, -1.0, float("nan"), float("inf"), 1e300))
    elif name == "Usage":
        request.namespace = source.pick(("", "other", "..", "\n"))
        request.page_token = source.text(30)
    elif name == "List":
        request.namespace = source.pick(("", "other", "..", "\n"))
        request.page_size = source.pick((0, 1, 2, 1000, 1001, 2**32 - 1))
        request.state = source.below(6)
        request.page_token = source.text(30)
        request.created_from_unix_ns = source.pick((0, 1, -1, 2**63 - 1, -(2**63)))
        for _ in range(source.below(12)):
            request.tags[source.text(3) or "k"] = source.pick(("v", "", "é"))
    return bytes(request.SerializeToString())


def check_reads(data: bytes) -> None:
    """Any request is answered with what was stored, or with a documented code."""
    harness = _reads_harness()
    if harness.store.stat(_READ_KEY) is None:
        put(harness.store, _READ_KEY, _READ_DATA, list(range(_READ_ROWS)))
    source = Source(data)
    name = source.pick(tuple(_METHODS))
    raw = _request(source, name)
    if name == "Read" and _waits(raw):
        return
    method = harness.method("Samples", name)
    call = Call([raw])
    try:
        answering = (method.stream_stream or method.stream_unary)(None, call)
        reply = harness.loop.run_until_complete(asyncio.wait_for(answering, 60))
    except Aborted as aborted:
        if aborted.code not in _CODES - {"INTERNAL"}:
            raise AssertionError("a request was answered with a code that is not documented for it") from aborted
    else:
        _check_answer(name, raw, reply, call.replies)
    assert harness.count("reads") == 0
    assert harness.count("waiting_reads") == 0


def _waits(raw: bytes) -> bool:
    """Whether a raw request asks for a real wait: right, and of no use here."""
    try:
        return bool(1e-3 < samples_pb2.ReadRequest.FromString(raw).wait_s <= 3600)
    except DecodeError:
        return False


def _check_answer(name: str, raw: bytes, reply: Any, replies: list[bytes]) -> None:
    request = _METHODS[name].FromString(raw)
    if name == "List":
        reply.SerializeToString()
        assert len(reply.samples) <= (request.page_size or 100)
        for info in reply.samples:
            assert not request.namespace or info.namespace == request.namespace
            assert not request.state or info.state == request.state
    elif name == "Stat":
        assert (reply.namespace, reply.sample_id) == (request.namespace or "default", request.sample_id)
        assert reply.state != sample_pb2.SAMPLE_STATE_UNSPECIFIED
    elif name == "Read" and (request.namespace or "default", request.sample_id) == ("default", "read"):
        _check_rows(request, replies)


def _check_rows(request: samples_pb2.ReadRequest, replies: list[bytes]) -> None:
    header = decode_reply(replies[0])[0].header
    layers = tuple(request.layer_ids) or _LAYERS
    stop = request.stop if request.HasField("stop") else _READ_ROWS
    assert (header.start, header.stop, tuple(header.layer_ids)) == (request.start, stop, layers)
    assert list(header.token_ids) == list(range(request.start, stop))
    layer_bytes = ROW_BYTES // len(_LAYERS)
    wanted = b"".join(
        _READ_DATA[row * ROW_BYTES + _LAYERS.index(layer) * layer_bytes :][:layer_bytes]
        for row in range(request.start, stop)
        for layer in layers
    )
    if request.in_place:
        assert (header.HasField("header_xxh3"), len(replies)) == (True, 1)
        return
    assert b"".join(bytes(decode_reply(raw)[1]) for raw in replies[1:]) == wanted, "other rows than were stored"


TARGETS = (
    Target("ingest", check_ingest, 4, 512, _ingest_seeds),
    Target("reads", check_reads, 6, 128, lambda: [bytes((n, kind)) + bytes(12) for n in range(9) for kind in (0, 3)]),
)
