"""Targets of what lies on a disk: sample files by themselves, in a store, and the catalogue. What is served is what was
stored, after any change to them."""

from __future__ import annotations

import atexit
import json
import os
import random
import shutil
import sqlite3
import struct
import tempfile
from collections.abc import Iterator
from contextlib import closing
from functools import cache
from pathlib import Path

from fuzz_harness import Source, Target, damaged, scratch_base, sentence

from slotstream.server.samples.convert import info_of
from slotstream.store.catalogue.queries import ListQuery
from slotstream.store.catalogue.sqlite import schema, sql
from slotstream.store.directory.looking import verify_directory
from slotstream.store.disk.directory import CATALOGUE_NAME
from slotstream.store.disk.files import Files
from slotstream.store.records import Failure, SampleKey, SampleRecord, SampleSpec, State
from slotstream.store.sample.file import read_sample_file
from slotstream.store.sample.reading import SampleReader
from slotstream.store.samples import SampleStore
from slotstream.store.upkeep import verifying
from slotstream.store.upkeep.verifying import verify_record
from slotstream.wire.columns import RowFormat
from slotstream.wire.errors import ConfigError, Damaged, SlotStreamError, UnsupportedFormat
from slotstream.wire.hashing import xxh3
from slotstream.wire.layout import decode_header, encode_header

verifying._SETTLE_S = 0.0  # Nobody commits beside these checks, so nobody has to be waited for.
KEY = SampleKey("default", "s")
_ROWS, _ROW_BYTES = 9, 64
_DATA = random.Random(1).randbytes(_ROWS * _ROW_BYTES)
_TOKEN_IDS = [1000 + row for row in range(_ROWS)]


def scratch(name: str) -> Path:
    """A directory of this process, in memory where there is such a place, that goes when the process does."""
    directory = Path(tempfile.mkdtemp(prefix=f"slotstream-fuzz-{name}-", dir=scratch_base()))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    return directory


def put(store: SampleStore, key: SampleKey = KEY, data: bytes = _DATA, token_ids: list[int] | None = None) -> None:
    """Stores rows of 2 layers x 8 F32 values."""
    ids = _TOKEN_IDS if token_ids is None else token_ids
    spec = SampleSpec(
        key.namespace, key.sample_id, "m", (3, 7), RowFormat.of("F32", 2, 8), len(ids), True, {"k": "v"}, {"engine_id": "e"}
    )
    upload = store.open_upload(spec)
    upload.write_chunk(0, len(ids), data, xxh3(data))
    upload.commit(len(ids), ids)


@cache
def _stored() -> tuple[bytes, SampleRecord]:
    """The file of a sample, and its row."""
    store = SampleStore.open(scratch("file"))
    try:
        put(store)
        record = store.stat(KEY)
        assert record is not None
        return KEY.path(store.data_dir).read_bytes(), record
    finally:
        store.close()


# Headers.


def check_headers(data: bytes) -> None:
    """A header that is taken describes its file exactly: written again it says the same, and other readers agree."""
    raw = struct.pack("<Q", len(data)) + data
    try:
        header = decode_header(raw)
    except (Damaged, UnsupportedFormat):
        return
    again = decode_header(encode_header(header)) if _fits(header) else header
    assert again == header
    shape = (header.num_tokens, header.row_format.num_layers, header.row_format.hidden_size)
    assert min(shape) > 0
    if header.file_bytes < 1 << 16:
        _as_others_read_it(raw, header.file_bytes, shape)


def _fits(header: object) -> bool:
    try:
        encode_header(header)  # type: ignore[arg-type]
    except ValueError:
        return False  # Written by others with other spaces: ours would be longer.
    return True


def _as_others_read_it(raw: bytes, file_bytes: int, shape: tuple[int, ...]) -> None:
    try:
        from safetensors import deserialize
    except ImportError:
        return
    tensors = dict(deserialize(raw + bytes(file_bytes - len(raw))))  # type: ignore[no-untyped-call]
    assert tuple(tensors["hidden_states"]["shape"]) == shape
    assert tuple(tensors["token_ids"]["shape"]) == shape[:1]


def _header_seeds() -> Iterator[bytes]:
    file, _ = _stored()
    (length,) = struct.unpack("<Q", file[:8])
    yield file[8 : 8 + length].rstrip()
    small = {
        "__metadata__": {},
        "hidden_states": {"dtype": "F16", "shape": [1, 1, 1], "data_offsets": [0, 2]},
        "token_ids": {"dtype": "I64", "shape": [1], "data_offsets": [2, 10]},
    }
    yield json.dumps(small).encode()
    yield json.dumps(small | {"more": 1}).encode()
    yield b'{"__metadata__":{"a":"\\ud800"},"hidden_states":{"dtype":"BF16","shape":[1,1,true]}}'
    yield b"[" * 300


# Whole files.


def check_sample_files(data: bytes) -> None:
    """A file that is taken can be catalogued, shown and read, for any claim of its header."""
    source = Source(data)
    changes = source.take(source.below(64))
    file = _with_metadata(source) + _stored()[0][_header_bytes() :]
    file = damaged(file, Source(changes))
    fd = os.memfd_create("sample")
    try:
        os.write(fd, file)
        sample = read_sample_file(Files(), fd)
        record = sample.record()
    except (Damaged, UnsupportedFormat):
        return
    finally:
        os.close(fd)
    assert sample.header.file_bytes == len(file)
    info_of(record).SerializeToString()
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as db:
        schema.bring_forward(db, 0)
        sql.put(db, record)
        assert sql.get(db, record.namespace, record.sample_id) == record


def _header_bytes() -> int:
    return 8 + int(struct.unpack("<Q", _stored()[0][:8])[0])


_NUMBERS = ("3", "-1", "4294967296", "18446744073709551616", "1e2", "0x1", " 7", "1_0", "true", "null", "9" * 4400, "", "²")
_TEXTS = (
    "",
    "default",
    "s",
    "..",
    "\0",
    "é",
    "[" * 2000,
    '{"a":1}',
    '{"a":"b"}',
    '{"a":"\\ud800"}',
    "[3,7]",
    "[3,3]",
    "[-1,2]",
)


def _with_metadata(source: Source) -> bytes:
    """The stored header with some of its entries changed, dropped, or of the wrong kind."""
    raw = _stored()[0][8 : _header_bytes()]
    parsed = json.loads(raw)
    entries = parsed["__metadata__"]
    for _ in range(source.below(4)):
        name = source.pick(sorted(_stored_entries()))
        match source.below(5):
            case 0:
                entries.pop(name, None)
            case 1:
                entries[name] = source.pick(_NUMBERS)
            case 2:
                entries[name] = source.pick(_TEXTS)
            case 3:
                entries[name] = json.dumps([source.below(1 << 40), source.below(1 << 33)])
            case _:
                entries[name] = source.text(12)
    body = json.dumps(parsed, separators=(",", ":")).encode()
    return struct.pack("<Q", len(raw)) + body.ljust(len(raw))[: len(raw)]


@cache
def _stored_entries() -> tuple[str, ...]:
    return tuple(json.loads(_stored()[0][8 : _header_bytes()])["__metadata__"])


# A file that was committed and then damaged.


@cache
def _damage_dir() -> Path:
    directory = scratch("damage")
    path = KEY.path(directory)
    path.parent.mkdir(parents=True)
    return directory


def check_damage(data: bytes) -> None:
    """A reader of a damaged file gets the rows that were committed, or DAMAGED; and verify says so too."""
    file, record = _stored()
    changed = damaged(file, Source(data))
    path = KEY.path(_damage_dir())
    path.write_bytes(changed)
    served = True
    try:
        with SampleReader(Files(), path, record) as reader:
            for start, stop in ((0, _ROWS), (2, 5), (_ROWS, _ROWS)):
                rows = b"".join(bytes(piece) for block in reader.blocks(start, stop) for piece in block.data)
                assert rows == _DATA[start * _ROW_BYTES : stop * _ROW_BYTES], "a damaged row was served"
                assert list(reader.token_ids(start, stop)) == _TOKEN_IDS[start:stop], "a damaged token id was served"
    except Damaged:
        served = False
    verdict = verify_record(Files(), _damage_dir(), record)
    assert (verdict.damage == "") == served
    assert served == (changed == file) or changed == file, "damage was not found"


# The catalogue.


@cache
def _directories() -> tuple[Path, ...]:
    """Data directories as servers left them: shut down, and killed with rows in the log only."""
    clean, killed = scratch("clean"), scratch("killed")
    for directory in (clean, killed):
        store = SampleStore.open(directory)
        put(store)
        upload = store.open_upload(SampleSpec("default", "half", "m", (3, 7), RowFormat.of("F32", 2, 8), 4, False))
        upload.abort(Failure("ABORTED", "no"))
        put(store, SampleKey("other", "t"), bytes(64), [5])
        if directory is clean:
            store.close()
        else:
            image = scratch("image")
            shutil.copytree(directory, image, dirs_exist_ok=True)
            store.close()
    return clean, image


_CATALOGUE_FILES = (CATALOGUE_NAME, CATALOGUE_NAME + "-wal", CATALOGUE_NAME + "-shm")


@cache
def _damaged_directory() -> Path:
    """Where `check_catalogues` puts its copy of an image."""
    return scratch("damaged") / "data"


def check_catalogues(data: bytes) -> None:
    """A server opens it, rebuilt if need be, or says what to do; and then serves what was stored or nothing."""
    source = Source(data)
    image = source.pick(_directories())
    directory = _damaged_directory()
    shutil.rmtree(directory, ignore_errors=True)
    shutil.copytree(image, directory)
    for name in (source.pick(_CATALOGUE_FILES), source.pick(_CATALOGUE_FILES)):
        path = directory / name
        before = path.read_bytes() if path.exists() else b""
        path.write_bytes(damaged(before, Source(source.take(source.below(48)))))
    if source.below(2):
        _rewrite(directory / CATALOGUE_NAME, source)
    _opens(directory)
    try:
        for verdict in verify_directory(directory):
            assert verdict.damage in ("", "MISSING", "UNREADABLE", "TRUNCATED", "HASH_MISMATCH", "FOREIGN")
    except SlotStreamError:
        pass


_COLUMNS = (
    "namespace",
    "sample_id",
    "model",
    "dtype",
    "layer_ids",
    "hidden_size",
    "num_tokens",
    "file_bytes",
    "tags",
    "metadata",
)
_VALUES = (None, "", "x", -1, 1 << 40, 1.5, b"\xff\xfe", "[1,2]", '{"a":1}', "[" * 5000, '{"a":"b"}', "..", "[1e9]", "[-1]")


def _rewrite(path: Path, source: Source) -> None:
    """What a person with an sqlite3 shell can do."""
    try:
        with closing(sqlite3.connect(path, isolation_level=None)) as db:
            column, value = source.pick((*_COLUMNS, "created_unix_ns", "error_code", "header_xxh3")), source.pick(_VALUES)
            db.execute(f"UPDATE samples SET {column} = ? WHERE id = ?", (value, source.below(4)))
    except (sqlite3.Error, UnicodeDecodeError):  # The latter: a message that quotes a damaged schema.
        pass


def _opens(directory: Path) -> None:
    try:
        store = SampleStore.open(directory)
    except ConfigError as error:
        sentence(error)
        return
    try:
        for key, data in ((KEY, _DATA), (SampleKey("other", "t"), bytes(64)), (SampleKey("default", "half"), b"")):
            _served(store, key, data)
        for state in (None, State.COMMITTED, State.FAILED):
            try:
                records, _ = store.list_page(ListQuery(state=state))
            except SlotStreamError:
                continue
            for record in records:
                info_of(record).SerializeToString()
        try:
            store.totals()
            put(store, SampleKey("default", "new"))
        except SlotStreamError:
            return
        _served(store, SampleKey("default", "new"), _DATA)
    finally:
        store.close()


def _served(store: SampleStore, key: SampleKey, data: bytes) -> None:
    """The sample's own rows, or an error."""
    try:
        with store.reader(key) as reader:
            rows = reader.file.header.num_tokens
            assert b"".join(bytes(piece) for block in reader.blocks(0, rows) for piece in block.data) == data
            assert len(reader.token_ids(0, rows)) == rows
            info_of(reader.record).SerializeToString()
    except SlotStreamError:
        pass


TARGETS = (
    Target("headers", check_headers, 15, 2048, _header_seeds),
    Target("sample_files", check_sample_files, 6, 128, lambda: (b"", b"\x00\x01\x04\x00\x00", b"\x00\x02\x05\x03\x09\x02")),
    Target("damage", check_damage, 6, 64, lambda: (b"", b"\x00\x10\x00\x00", b"\x04\x00\x60\x00\x03abcd")),
    Target(
        "catalogues",
        check_catalogues,
        1,
        128,
        lambda: (b"", b"\x01" + bytes(30), bytes(range(50)), b"\x00\x00\x00\x00\x01\x05\x02\x01"),
    ),
)
