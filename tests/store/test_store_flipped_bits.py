"""One flipped bit in the catalogue: it starts, serves every sound file, and says what it lost.

`SLOTSTREAM_FLIPS=400` is how many bytes are tried after each kind of stop; `SLOTSTREAM_FLIP_SEED` picks them, and the bits.
The extended test tries every byte, of a catalogue in small pages: most bytes of large ones are not used. It comes in parts, of
which several can run beside each other: `pytest -m extended -n 8 tests/store/test_store_flipped_bits.py`.
"""

from __future__ import annotations

import logging
import os
import random
import shutil
import sqlite3
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from store.store_kit import Sample, crash, read_all
from support.sqlite_of import sqlite_of

from slotstream.store.catalogue.queries import ListQuery
from slotstream.store.catalogue.sqlite.log_end import frames_taken
from slotstream.store.records import Failure, State
from slotstream.store.samples import SampleStore
from slotstream.store.upkeep.scrubbing import Progress, Scrubber

FLIPS = int(os.environ.get("SLOTSTREAM_FLIPS", "400"))
SEED = int(os.environ.get("SLOTSTREAM_FLIP_SEED", "1"))
PARTS = 8
SMALL_PAGE_BYTES = 512
Place = tuple[str, int]  # The name of a file, and a byte of it.
SAMPLES = [Sample(f"s{n}", rows=3, seed=n, namespace=f"n{n % 2}", tags={"k": str(n % 3)}) for n in range(12)]


def _left(directory: Path, *, killed: bool, page_bytes: int = 4096) -> Path:
    """A data directory as a server left it, and what is in it but for the catalogue never changes."""
    directory.mkdir(parents=True)
    with closing(sqlite3.connect(directory / "catalog.sqlite")) as db:
        db.execute(f"PRAGMA page_size = {page_bytes}")
        db.execute("PRAGMA journal_mode = WAL")  # Writes the header.
    store = SampleStore.open(directory)
    for sample in SAMPLES[:8]:
        sample.put(store)
    replace(SAMPLES[8], seed=99).put(store)
    store.close()
    store = SampleStore.open(directory)  # Some rows in the file, some in the log.
    store.delete(SAMPLES[8].key)  # And sent again with other content.
    for sample in SAMPLES[8:]:
        sample.put(store)
    Sample("bad").send(store).abort(Failure("ABORTED", "no"))
    store.lifetimes.ack(SAMPLES[0].key)
    store.lifetimes.lease(SAMPLES[1].key, "me", 3600)
    if killed:
        image = directory.with_name("killed")
        shutil.copytree(directory, image)  # With the log, which the end of this process would take away.
        crash(store)
        return image
    store.close()
    return directory


def _catalogue_files(directory: Path) -> dict[str, bytes]:
    names = ("catalog.sqlite", "catalog.sqlite-wal", "catalog.sqlite.seal")
    return {name: (directory / name).read_bytes() for name in names if (directory / name).exists()}


def _put_back(directory: Path, files: dict[str, bytes]) -> None:
    for path in directory.glob("catalog.sqlite*"):
        path.unlink()
    for name, content in files.items():
        (directory / name).write_bytes(content)


def _places(files: dict[str, bytes]) -> list[Place]:
    return [(name, at) for name, content in files.items() for at in range(len(content))]


def _chosen(files: dict[str, bytes]) -> list[Place]:
    """Most bytes of a small catalogue are not used: half of these are bytes that are not zero."""
    rng = random.Random(SEED)
    places = _places(files)
    used = [(name, at) for name, at in places if files[name][at]]
    return rng.sample(used, min(FLIPS // 2, len(used))) + rng.sample(places, min(FLIPS - FLIPS // 2, len(places)))


def _check(directory: Path, what: str) -> None:
    store = SampleStore.open(directory)
    try:
        listed = {r.key for n in range(2) for r in store.list_page(ListQuery(namespace=f"n{n}"))[0]}
        assert listed == {sample.key for sample in SAMPLES}, what
        tagged = {r.key for value in "012" for r in store.list_page(ListQuery(tags={"k": value}, state=State.COMMITTED))[0]}
        assert tagged == listed, what
        for sample in SAMPLES:
            assert read_all(store, sample.key) == (sample.data, sample.token_ids), what
        assert store.totals()[State.COMMITTED][0] == len(SAMPLES), what
        assert [(u.namespace, u.samples) for u in store.lifetimes.every_usage() if u.samples] == [("n0", 6), ("n1", 6)], what
        assert not (directory / ".quarantine").exists(), what
    finally:
        store.close()


@pytest.fixture
def memory() -> Iterator[Path]:
    """A directory whose syncs cost nothing, where there is one."""
    shm = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shm if os.access(shm, os.W_OK) else None, prefix="slotstream-flips-") as name:
        yield Path(name)


STOPS = pytest.mark.parametrize("killed", [False, True], ids=["after a clean stop", "after a kill"])


def _flip(directory: Path, files: dict[str, bytes], places: Iterable[Place]) -> None:
    rng = random.Random(SEED)
    for name, at in places:
        bit = 1 << rng.randrange(8)
        changed = bytearray(files[name])
        changed[at] ^= bit
        _put_back(directory, {**files, name: bytes(changed)})
        try:
            _check(directory, f"bit {bit:#x} of byte {at} of {name}")
        except Exception as error:
            raise AssertionError(f"bit {bit:#x} of byte {at} of {name}: {error!r}") from error


@STOPS
def test_any_flipped_bit_of_the_catalogue_hides_no_sound_file(memory: Path, killed: bool) -> None:
    directory = _left(memory / "data", killed=killed)
    files = _catalogue_files(directory)
    assert ("catalog.sqlite-wal" in files) == killed
    _flip(directory, files, _chosen(files))


def test_a_log_that_one_bit_cuts_short_hides_no_sample_that_was_sent_again(memory: Path) -> None:
    """A bit in each of its frames: behind it, SQLite sees nothing."""
    directory = _left(memory / "data", killed=True)
    files = _catalogue_files(directory)
    frames = range(32, len(files["catalog.sqlite-wal"]), 24 + 4096)
    assert len(frames) > 40
    _flip(directory, files, [("catalog.sqlite-wal", at + 8 + number % 16) for number, at in enumerate(frames)])


def test_a_whole_log_is_not_taken_for_one_that_was_cut(memory: Path) -> None:
    """Also where frames of an earlier round stand behind those of this one."""
    store = SampleStore.open(memory / "data")
    for number in range(150):
        Sample(f"s{number}", rows=3, tags={"k": "v"}).put(store)
    log = memory / "data" / "catalog.sqlite-wal"
    taken = frames_taken(memory / "data" / "catalog.sqlite")
    assert 0 < taken < (log.stat().st_size - 32) // (24 + 4096), "the log did not begin anew"
    crash(store)
    store = SampleStore.open(memory / "data")
    assert not sqlite_of(store).log_was_cut
    store.close()


@pytest.mark.extended
@pytest.mark.timeout(1800)
@STOPS
@pytest.mark.parametrize("part", range(PARTS))
def test_every_byte_of_a_small_catalogue(memory: Path, killed: bool, part: int) -> None:
    logging.disable()  # It says what it lost, for every byte: too much to keep.
    directory = _left(memory / "data", killed=killed, page_bytes=SMALL_PAGE_BYTES)
    files = _catalogue_files(directory)
    try:
        _flip(directory, files, _places(files)[part::PARTS])
    finally:
        logging.disable(logging.NOTSET)


def _change(directory: Path, statement: str) -> None:
    db = sqlite3.connect(directory / "catalog.sqlite")
    db.execute(statement)
    db.commit()
    db.close()


ROT = [
    "sample_id = CAST(X'f331' AS TEXT)",  # Text that is none.
    "header_xxh3 = 'x' || substr(header_xxh3, 2)",
    "state = 'failed'",
    "committed_unix_ns = committed_unix_ns - (1 << 40)",
    "acked_unix_ns = 5",
    "file_bytes = file_bytes + 64",
]


@pytest.mark.parametrize("rot", ROT)
@STOPS
def test_a_row_whose_checksum_fails_comes_back_from_its_file_and_the_others_stay(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, rot: str, killed: bool
) -> None:
    directory = _left(tmp_path / "data", killed=killed)
    _change(directory, f"UPDATE samples SET {rot} WHERE sample_id = 's5'")
    with caplog.at_level(logging.ERROR):
        store = SampleStore.open(directory)
    assert "1 rows were damaged" in caplog.text
    record = store.stat(SAMPLES[5].key)
    assert record is not None
    assert record.state is State.COMMITTED
    assert read_all(store, SAMPLES[5].key)[0] == SAMPLES[5].data
    # What no file tells is kept: a failure, an ack and a lease.
    bad = store.stat(Sample("bad").key)
    assert bad is not None
    assert bad.error_code == "ABORTED"
    assert store.lifetimes.standing(SAMPLES[0].key).acked_unix_ns
    assert store.lifetimes.standing(SAMPLES[1].key).leased_until_unix_ns
    store.close()


def test_a_row_whose_checksum_holds_still_beats_an_older_file(tmp_path: Path) -> None:
    directory = _left(tmp_path / "data", killed=False)
    older = _left(tmp_path / "other", killed=False)
    path = SAMPLES[3].key.path(directory)
    path.write_bytes(SAMPLES[3].key.path(older).read_bytes())  # The same sample, committed another time.
    _change(directory, "UPDATE samples SET model = 'x' WHERE sample_id = 's5'")
    store = SampleStore.open(directory)
    assert store.verify(SAMPLES[3].key).damage == "HASH_MISMATCH"
    assert read_all(store, SAMPLES[5].key)[0] == SAMPLES[5].data
    store.close()


@pytest.mark.parametrize(("name", "runs"), [("clock", False), ("scrub", False), ("scrub", True)])
@pytest.mark.parametrize("flipped", ["X'b1' || substr(value, 2)", "replace(value, '17', '13')"], ids=["no text", "earlier"])
def test_what_is_remembered_counts_only_while_its_checksum_holds(tmp_path: Path, name: str, runs: bool, flipped: str) -> None:
    directory = _left(tmp_path / "data", killed=True)
    store = SampleStore.open(directory)
    Scrubber(store.lifetimes, 1e12).run_pass()
    if not runs:
        store.close()
    _change(directory, f"UPDATE meta SET value = CAST({flipped} AS TEXT) WHERE key = '{name}'")
    if not runs:
        store = SampleStore.open(directory)
    assert store.lifetimes.watch.trouble == ""
    assert name == "clock" or Scrubber(store.lifetimes, 1e12).progress == Progress()
    assert Scrubber(store.lifetimes, 1e12).run_pass()
    store.close()
    _check(directory, name)


# While it is used.


@pytest.mark.parametrize("rot", ROT)
def test_damage_that_shows_while_the_server_runs_is_mended_at_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, rot: str
) -> None:
    store = SampleStore.open(tmp_path)
    for sample in SAMPLES:
        sample.put(store)
    arriving = Sample("arriving", namespace="n0").send(store)
    _change(tmp_path, f"UPDATE samples SET {rot} WHERE sample_id = 's5'")
    with caplog.at_level(logging.ERROR):
        assert Scrubber(store.lifetimes, 1e12).run_pass()  # It walks over every row, and so would a listing.
    assert "rebuilt" in caplog.text
    assert "1 rows were damaged; 1 samples come from their files" in caplog.text
    for sample in SAMPLES:
        assert read_all(store, sample.key)[0] == sample.data
        assert sample.put(store) is True
    assert store.totals()[State.COMMITTED][0] == len(SAMPLES)
    arriving.commit(10, Sample("arriving").token_ids)
    assert read_all(store, Sample("arriving", namespace="n0").key)[0] == Sample("arriving").data
    Sample("later").put(store)
    store.close()
    store = SampleStore.open(tmp_path)
    assert sqlite_of(store).was_shut_down_cleanly
    assert store.totals()[State.COMMITTED][0] == len(SAMPLES) + 2
    store.close()


def test_a_write_that_meets_damage_is_done_after_the_mending(tmp_path: Path) -> None:
    store = SampleStore.open(tmp_path)
    for sample in SAMPLES:
        sample.put(store)
    _change(tmp_path, "UPDATE samples SET metadata = '[' WHERE sample_id = 's5'")
    store.lifetimes.ack(SAMPLES[5].key)
    assert store.lifetimes.standing(SAMPLES[5].key).acked_unix_ns
    store.delete(SAMPLES[5].key)
    assert store.stat(SAMPLES[5].key) is None
    assert store.totals()[State.COMMITTED][0] == len(SAMPLES) - 1
    store.close()


# Another catalogue in its place.


@pytest.mark.parametrize("end", [SampleStore.close, crash], ids=["after a clean stop", "after a kill"])
def test_an_older_catalogue_that_is_put_back_is_seen(tmp_path: Path, caplog: pytest.LogCaptureFixture, end: object) -> None:
    directory = tmp_path / "data"
    store = SampleStore.open(directory)
    for sample in SAMPLES[:6]:
        sample.put(store)
    store.close()
    before = (directory / "catalog.sqlite").read_bytes()
    store = SampleStore.open(directory)
    for sample in SAMPLES[6:]:
        sample.put(store)
    store.delete(SAMPLES[0].key)
    store.delete(SAMPLES[1].key)
    again = Sample("s1", rows=3, seed=77, namespace="n1")  # Other content under an id that the old catalogue knows.
    again.put(store)
    end(store)  # type: ignore[operator]
    for path in directory.glob("catalog.sqlite-*"):
        path.unlink()
    (directory / "catalog.sqlite").write_bytes(before)
    with caplog.at_level(logging.ERROR):
        store = SampleStore.open(directory)
    assert "older one" in caplog.text
    assert store.stat(SAMPLES[0].key) is None  # It was deleted, and does not come back in any form.
    for sample in (again, *SAMPLES[2:]):
        assert read_all(store, sample.key)[0] == sample.data
    assert store.totals()[State.COMMITTED][0] == len(SAMPLES) - 1
    store.close()


def test_a_clean_stop_is_trusted_only_while_not_a_bit_changed(tmp_path: Path) -> None:
    SampleStore.open(tmp_path).close()
    store = SampleStore.open(tmp_path)
    assert sqlite_of(store).was_shut_down_cleanly
    store.close()
    raw = bytearray((tmp_path / "catalog.sqlite").read_bytes())
    raw[-1] ^= 1
    (tmp_path / "catalog.sqlite").write_bytes(raw)
    store = SampleStore.open(tmp_path)
    assert not sqlite_of(store).was_shut_down_cleanly
    store.close()
