"""Further columns in a sample's file, and files of formats that this version does not know: never damage, never touched."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from store.store_kit import Sample, crash, read_all, tree

from slotstream.store.catalogue.queries import ListQuery
from slotstream.store.directory.looking import verify_directory
from slotstream.store.records import State
from slotstream.store.sample.file import sample_file_at
from slotstream.store.samples import SampleStore
from slotstream.store.upkeep.quarantine import QUARANTINE_NAME
from slotstream.store.upkeep.retention import Policy, Rule
from slotstream.store.upkeep.scrubbing import Scrubber
from slotstream.store.upkeep.sweeping import Sweeper
from slotstream.wire import columns
from slotstream.wire.columns import Column, LateColumns
from slotstream.wire.errors import AlreadyExists, BadParams, Damaged, SampleNotFound, TooLarge, UnsupportedFormat
from slotstream.wire.hashing import to_hex, xxh3
from slotstream.wire.layout import decode_header, header_length

MASK = bytes([0, 0, 0, 1, 1, 0, 1, 1, 1, 1])
MASKED = Sample("masked", columns={"loss_mask": MASK})
FAST = 1e12
NEW = Sample("new", seed=3, columns={"weights": bytes(range(40))})


def _header(path: Path) -> dict[str, str]:
    raw = path.read_bytes()
    return decode_header(raw[: header_length(raw)]).metadata


def _read(store: SampleStore, sample: Sample, name: str, start: int = 0, stop: int = 10) -> bytes:
    with store.reader(sample.key) as reader:
        return bytes(reader.column(name, start, stop))


@pytest.mark.files_only
def test_a_late_column_is_stored_and_read(store: SampleStore) -> None:
    assert MASKED.put(store) is False
    assert read_all(store, MASKED.key) == (MASKED.data, MASKED.token_ids)
    assert _read(store, MASKED, "loss_mask") == MASK
    assert _read(store, MASKED, "loss_mask", 3, 7) == MASK[3:7]
    assert _read(store, MASKED, "loss_mask", 4, 4) == b""
    assert MASKED.path(store).read_bytes().endswith(MASK)
    assert json.loads(_header(MASKED.path(store))["columns"]).keys() == {"loss_mask"}
    assert store.verify(MASKED.key).damage == ""
    store.close()
    (verdict,) = verify_directory(store.data_dir)
    assert verdict.damage == ""


@pytest.mark.files_only
def test_columns_stand_in_the_order_of_the_file(store: SampleStore) -> None:
    positions = b"".join(n.to_bytes(8, "little") for n in range(10))
    both = Sample("both", columns={"loss_mask": MASK, "positions": positions})
    both.put(store)
    raw = both.path(store).read_bytes()
    assert raw.endswith(positions + MASK)
    assert list(json.loads(_header(both.path(store))["columns"])) == ["positions", "loss_mask"]
    assert (_read(store, both, "positions"), _read(store, both, "loss_mask")) == (positions, MASK)


@pytest.mark.files_only
def test_the_default_pair_has_no_new_key(store: SampleStore) -> None:
    Sample("plain").put(store)
    assert "columns" not in _header(Sample("plain").path(store))


@pytest.mark.files_only
def test_what_the_catalogue_says_comes_from_the_file_too(store: SampleStore) -> None:
    MASKED.put(store)
    before = store.stat(MASKED.key)
    assert before is not None
    assert json.loads(before.metadata["columns"]).keys() == {"loss_mask"}
    data_dir = store.data_dir
    store.close()
    _lose_the_catalogue(data_dir)
    again = SampleStore.open(data_dir)
    assert again.stat(MASKED.key) == before
    assert _read(again, MASKED, "loss_mask") == MASK
    again.close()


@pytest.mark.files_only
@pytest.mark.parametrize("at", [-1, -10], ids=["last", "first"])
def test_a_flipped_bit_in_a_column_is_found(store: SampleStore, at: int) -> None:
    MASKED.put(store)
    path = MASKED.path(store)
    raw = bytearray(path.read_bytes())
    raw[at] ^= 1
    path.write_bytes(raw)
    with store.reader(MASKED.key) as reader, pytest.raises(Damaged, match="loss_mask does not match its hash"):
        reader.column("loss_mask", 4, 5)
    for verdict in (store.verify(MASKED.key), *verify_directory(store.data_dir)):
        assert verdict.damage == "HASH_MISMATCH"
    assert Scrubber(store.lifetimes, FAST).run_pass()
    found = store.stat(MASKED.key)
    assert found is not None
    assert (found.state, found.error_code) == (State.FAILED, "DAMAGED")
    assert MASKED.put(store) is False
    assert _read(store, MASKED, "loss_mask") == MASK


def test_columns_are_part_of_what_makes_a_duplicate(store: SampleStore) -> None:
    MASKED.put(store)
    assert MASKED.put(store) is True
    for other in (replace(MASKED, columns={"loss_mask": bytes(10)}), replace(MASKED, columns={})):
        with pytest.raises(AlreadyExists):
            other.put(store)
    assert _read(store, MASKED, "loss_mask") == MASK


@pytest.mark.parametrize(
    "sent", [{}, {"loss_mask": MASK[:-1]}, {"positions": bytes(80)}, {"loss_mask": MASK, "positions": bytes(80)}], ids=len
)
def test_a_commit_without_its_columns_fails_the_sample(store: SampleStore, sent: dict[str, bytes]) -> None:
    with pytest.raises(BadParams, match="as the sample was opened with"):
        MASKED.send(store).commit(10, MASKED.token_ids, columns=LateColumns(sent))
    found = store.stat(MASKED.key)
    assert found is not None
    assert found.error_code == "BAD_PARAMS"
    assert tree(store.data_dir) == {}


def test_a_column_that_cannot_come_with_a_commit_is_refused_at_the_open() -> None:
    with pytest.raises(UnsupportedFormat):
        Sample("s", columns={"scales": b""}).spec()
    with pytest.raises(TooLarge):
        Sample("s", columns={"positions": b""}, rows_max=1_300_000).spec()


def test_the_header_has_room_for_every_column_and_metadata(store: SampleStore) -> None:
    full = replace(MASKED, columns={"loss_mask": MASK, "positions": bytes(80)}, metadata={"k": "\n" * 8000})
    full.put(store)
    assert _read(store, full, "positions") == bytes(80)


# Formats that this version does not know.


def _lose_the_catalogue(data_dir: Path) -> None:
    for path in data_dir.glob("catalog.sqlite*"):
        path.unlink()


def _put_new(store: SampleStore, sample: Sample = NEW) -> bytes:
    """What a later version stores: with a column that this one does not know. The file's bytes."""
    with pytest.MonkeyPatch.context() as later:
        later.setitem(columns.COLUMNS, "weights", Column("weights", "F32", late=True))
        sample.put(store)
        assert _read(store, sample, "weights") == sample.columns["weights"]
    return sample.path(store).read_bytes()


def _fp8(store: SampleStore) -> bytes:
    """Rows of an element type that this version does not know."""
    Sample("new", seed=3).put(store)
    path, key = NEW.path(store), NEW.key
    raw = path.read_bytes().replace(b'"dtype":"F32","shape":[10,2,8]', b'"dtype":"F7","shape":[10,2,32]', 1)
    store.delete(key)
    path.write_bytes(raw)
    return raw


def _restarted(store: SampleStore) -> SampleStore:
    crash(store)
    return SampleStore.open(store.data_dir)


def _stopped(store: SampleStore) -> SampleStore:
    store.close()
    return SampleStore.open(store.data_dir)


def _without_catalogue(store: SampleStore) -> SampleStore:
    crash(store)
    _lose_the_catalogue(store.data_dir)
    return SampleStore.open(store.data_dir)


@pytest.fixture(params=[lambda store: store, _stopped, _restarted, _without_catalogue], ids=["runs", "stop", "crash", "lost"])
def found(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[SampleStore, bytes]]:
    """A store with a file of a later version, beside one of ours, after a start; and the file's bytes."""
    opened = SampleStore.open(tmp_path / "data")
    Sample("ours").put(opened)
    raw = _put_new(opened)
    opened = request.param(opened)
    yield opened, raw
    opened.close()


def test_an_unknown_format_is_never_damage(found: tuple[SampleStore, bytes]) -> None:
    store, raw = found
    info = store.stat(NEW.key)
    assert info is not None
    assert (info.state, info.num_tokens, info.layer_ids, info.file_bytes) == (State.COMMITTED, 10, (3, 7), len(raw))
    with pytest.raises(UnsupportedFormat, match="weights"):
        store.reader(NEW.key)
    assert store.verify(NEW.key).damage == "UNSUPPORTED_FORMAT"
    assert {v.sample_id: v.damage for v in store.verify_all()} == {"ours": "", "new": "UNSUPPORTED_FORMAT"}
    assert store.lifetimes.quarantine(store.verify(NEW.key)) is None
    scrubber = Scrubber(store.lifetimes, FAST)
    assert scrubber.run_pass()
    assert scrubber.progress.damaged == 0
    for other in (replace(NEW, columns={}), replace(NEW, columns={}, seed=9), replace(NEW, columns={"loss_mask": MASK})):
        with pytest.raises(UnsupportedFormat, match="cannot be compared, and stays"):
            other.put(store)
    assert store.stat(NEW.key) == info
    assert NEW.path(store).read_bytes() == raw
    assert not (store.data_dir / QUARANTINE_NAME).exists()
    with pytest.MonkeyPatch.context() as later:  # And a later version still has all of it.
        later.setitem(columns.COLUMNS, "weights", Column("weights", "F32", late=True))
        assert read_all(store, NEW.key) == (NEW.data, NEW.token_ids)
        assert _read(store, NEW, "weights") == NEW.columns["weights"]
        assert NEW.put(store) is True


def test_it_is_deleted_by_name_and_by_rule(found: tuple[SampleStore, bytes]) -> None:
    store, _ = found
    store.delete(NEW.key)
    assert not NEW.path(store).exists()
    assert store.stat(NEW.key) is None
    _put_new(store)
    Sweeper(store.lifetimes, Policy(default=Rule(bytes_max=1)), store.free_bytes).sweep()
    assert tree(store.data_dir) == {}


@pytest.mark.files_only
def test_rows_of_an_unknown_element_type_are_kept_and_listed(store: SampleStore, caplog: pytest.LogCaptureFixture) -> None:
    raw = _fp8(store)
    again = _without_catalogue(store)
    assert "cannot be read by this version (UNSUPPORTED_FORMAT)" in caplog.text
    info = again.stat(NEW.key)
    assert info is not None
    assert (info.state, info.dtype) == (State.COMMITTED, "F7")
    with pytest.raises(UnsupportedFormat):
        again.reader(NEW.key)
    assert NEW.path(again).read_bytes() == raw
    again.close()


@pytest.mark.files_only
@pytest.mark.parametrize("layers", [b"55555", b"[3,3]", b"{3:7}"])
def test_layer_ids_that_this_version_cannot_read_are_no_fault_of_the_server(tmp_path: Path, layers: bytes) -> None:
    """Of a header that is the committed one: nothing but UnsupportedFormat comes of it."""
    store = SampleStore.open(tmp_path / "data")
    sample = Sample("ours")
    sample.put(store)
    path = sample.path(store)
    path.write_bytes(path.read_bytes().replace(b'"layer_ids":"[3,7]"', b'"layer_ids":"%b"' % layers, 1))
    raw = path.read_bytes()
    committed_xxh3 = to_hex(xxh3(raw[: header_length(raw)]))
    with pytest.raises(UnsupportedFormat):
        sample_file_at(store._files, path, committed_xxh3)
    store.close()


@pytest.mark.files_only
def test_verify_without_a_server_says_so_with_and_without_a_catalogue(store: SampleStore) -> None:
    _put_new(store)
    store.close()
    assert {v.damage for v in verify_directory(store.data_dir)} == {"UNSUPPORTED_FORMAT"}
    assert {v.damage for v in verify_directory(store.data_dir, sample_id="new")} == {"UNSUPPORTED_FORMAT"}
    _lose_the_catalogue(store.data_dir)
    assert {(v.sample_id, v.damage) for v in verify_directory(store.data_dir)} == {("new", "UNSUPPORTED_FORMAT")}


@pytest.mark.files_only
def test_a_file_that_appears_under_a_running_server_is_kept(store: SampleStore, tmp_path: Path) -> None:
    """Somebody put it back: it has no row, or one that says that it failed."""
    other = SampleStore.open(tmp_path / "other")
    raw = _put_new(other)
    for given_up in (False, True):
        if given_up:
            Sample("new").put(store)
            Sample("new").path(store).write_bytes(b"rotten")
            assert Scrubber(store.lifetimes, FAST).run_pass()
            shutil.rmtree(store.data_dir / QUARANTINE_NAME)
        NEW.path(store).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(NEW.path(other), NEW.path(store))
        assert {v.damage for v in store.verify_all()} == {"UNSUPPORTED_FORMAT"}
        with pytest.raises(UnsupportedFormat):
            Sample("new").put(store)
        assert NEW.path(store).read_bytes() == raw
        NEW.path(store).unlink()
        with suppress(SampleNotFound):
            store.delete(NEW.key)
    other.close()


@pytest.mark.files_only
def test_the_quarantine_keeps_what_it_cannot_read(store: SampleStore) -> None:
    """Where an earlier version put it: that took it for damaged."""
    raw = _put_new(store)
    info = store.stat(NEW.key)
    assert info is not None
    aside = store.data_dir / QUARANTINE_NAME / "default" / f"new.{info.committed_unix_ns}.safetensors"
    store.delete(NEW.key)
    aside.parent.mkdir(parents=True)
    aside.write_bytes(raw)
    (kept,) = store.restore()
    assert (kept.damage, bool(kept.kept)) == ("UNSUPPORTED_FORMAT", True)
    assert aside.read_bytes() == raw
    assert store.stat(NEW.key) is None
    with pytest.MonkeyPatch.context() as later:
        later.setitem(columns.COLUMNS, "weights", Column("weights", "F32", late=True))
        (restored,) = store.restore()
        assert restored.kept == ""
        assert _read(store, NEW, "weights") == NEW.columns["weights"]


@pytest.mark.files_only
@pytest.mark.parametrize("restart", [_stopped, _restarted], ids=["stop", "crash"])
def test_a_header_that_is_not_the_committed_one_is_damage_whatever_it_looks_like(
    store: SampleStore, restart: Callable[[SampleStore], SampleStore]
) -> None:
    """One flipped bit makes another column's name of `token_ids`: the catalogue knows better."""
    sample = Sample("s")
    sample.put(store)
    path = sample.path(store)
    path.write_bytes(path.read_bytes().replace(b'"token_ids"', b'"tokeo_ids"', 1))
    again = restart(store)
    with pytest.raises(Damaged):
        again.reader(sample.key)
    assert again.verify(sample.key).is_damage
    assert Scrubber(again.lifetimes, FAST).run_pass()
    assert [r.state for r in again.list_page(ListQuery())[0]] == [State.FAILED]
    again.close()


@pytest.mark.files_only
def test_what_was_committed_and_cannot_be_parsed_at_all_is_no_damage(store: SampleStore) -> None:
    """The header's hash is the one that was committed: these bytes are what a later version wrote."""
    sample = Sample("s")
    sample.put(store)
    path, record = sample.path(store), store.stat(sample.key)
    assert record is not None
    raw = path.read_bytes()
    length = header_length(raw)
    header = raw[:8] + b"{}".ljust(length - 8)
    path.write_bytes(header + raw[length:])
    store._catalogue.commit(replace(record, header_xxh3=to_hex(xxh3(header)))).result()
    assert store.verify(sample.key).damage == "UNSUPPORTED_FORMAT"
    with pytest.raises(UnsupportedFormat):
        store.reader(sample.key)
    with pytest.raises(UnsupportedFormat):
        sample.put(store)
    assert path.read_bytes() == header + raw[length:]
