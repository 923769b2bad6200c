"""Reading: exactly the rows and layers asked for, and never a byte that cannot be trusted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from store.store_kit import BROKEN, FaultyFiles, Sample, read_all

from slotstream.store.records import SampleKey
from slotstream.store.sample import reading
from slotstream.store.sample.reading import SampleReader
from slotstream.store.samples import SampleStore, WholeFile
from slotstream.wire.errors import BadLayers, BadTokenRange, Damaged, InternalFault, IoError, SampleNotFound

LAYERS = (2, 5, 6, 9)
SAMPLE = Sample(rows=23, layer_ids=LAYERS)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    bounds=st.tuples(st.integers(0, 23), st.integers(0, 23)).map(sorted),
    layers=st.lists(st.sampled_from(LAYERS), unique=True),
    block=st.sampled_from([1, 100, 300, 1 << 20]),
    verify=st.booleans(),
)
def test_any_range_and_layers_in_any_order(
    store: SampleStore, bounds: list[int], layers: list[int], block: int, verify: bool
) -> None:
    if store.stat(SAMPLE.key) is None:
        SAMPLE.put(store)
    start, stop = bounds
    with pytest.MonkeyPatch.context() as patch, store.reader(SAMPLE.key) as reader:
        patch.setattr(reading, "BLOCK_BYTES", block)
        blocks = list(reader.blocks(start, stop, reader.positions(layers) if layers else None, verify=verify))
        assert list(reader.token_ids(start, stop)) == SAMPLE.token_ids[start:stop]
    assert [row for b in blocks for row in range(b.first_row, b.first_row + b.rows)] == list(range(start, stop))
    wanted = [LAYERS.index(layer) for layer in layers or LAYERS]
    cells = [SAMPLE.data[at : at + 32] for at in range(0, len(SAMPLE.data), 32)]
    expected = b"".join(cells[row * 4 + at] for row in range(start, stop) for at in wanted)
    assert b"".join(bytes(piece) for b in blocks for piece in b.data) == expected


def test_only_what_is_wanted_is_read(tmp_path: Path) -> None:
    files = FaultyFiles()
    store = SampleStore.open(tmp_path, files=files)
    SAMPLE.put(store)
    with store.reader(SAMPLE.key) as reader:
        files.calls.clear()
        list(reader.blocks(5, 7))
        assert files.calls == ["pread"] * 2  # Rows 4 to 5 and 6 to 7: a group is 2 rows here.
        files.calls.clear()
        list(reader.blocks(5, 8, reader.positions([9])))
        assert files.calls == ["pread"] * 2  # Whole groups, to check them.
        files.calls.clear()
        list(reader.blocks(5, 8, reader.positions([9, 2]), verify=False))
        assert files.calls == ["pread"] * 2  # Half of the layers: picking them would cost no less.
        files.calls.clear()
        list(reader.blocks(5, 8, reader.positions([9]), verify=False))
        assert files.calls == ["pread"] * 3  # A row at a time, of that layer alone.
    store.close()


@pytest.mark.parametrize(("start", "stop"), [(5, 4), (0, 24), (-1, 3), (24, None)])
def test_what_is_not_a_range_is_refused(store: SampleStore, start: int, stop: int | None) -> None:
    SAMPLE.put(store)
    with store.reader(SAMPLE.key) as reader, pytest.raises(BadTokenRange):
        reader.check_range(start, stop)


@pytest.mark.parametrize("layers", [[3], [2, 2], [2, 100]])
def test_layers_that_are_not_there_or_named_twice_are_refused(store: SampleStore, layers: list[int]) -> None:
    SAMPLE.put(store)
    with store.reader(SAMPLE.key) as reader, pytest.raises(BadLayers):
        reader.positions(layers)


def _flip(offset: int) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        raw = bytearray(path.read_bytes())
        raw[offset] ^= 1
        path.write_bytes(raw)

    return damage


@pytest.mark.files_only
@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(Path.unlink, id="gone"),
        pytest.param(lambda path: path.write_bytes(b""), id="empty"),
        pytest.param(lambda path: path.write_bytes(path.read_bytes()[:-1]), id="truncated"),
        pytest.param(lambda path: path.write_bytes(path.read_bytes()[:100]), id="truncated in the header"),
        pytest.param(lambda path: path.write_bytes(path.read_bytes() + b"x"), id="padded"),
        pytest.param(lambda path: path.write_bytes(b"\xff" * 10_000), id="not safetensors"),
        pytest.param(_flip(-1), id="token ids"),
        pytest.param(_flip(-23 * 8 - 1), id="last row"),
        pytest.param(_flip(40), id="header"),
        pytest.param(lambda path: (path.rename(path.parent / "x"), path.symlink_to("x")), id="a link"),
        pytest.param(lambda path: (path.unlink(), path.mkdir()), id="a directory"),
    ],
)
def test_a_damaged_file_is_never_served(store: SampleStore, damage: Callable[[Path], None]) -> None:
    SAMPLE.put(store)
    damage(SAMPLE.path(store))
    with pytest.raises(Damaged):
        read_all(store, SAMPLE.key)


@pytest.mark.files_only
@pytest.mark.parametrize("layers", [[2, 5, 6, 9], [9, 6, 5, 2], [5, 9, 2], [2, 5], [2]], ids=str)
def test_damage_in_a_layer_that_is_not_wanted_is_found(store: SampleStore, layers: list[int]) -> None:
    SAMPLE.put(store)
    _flip(-23 * 8 - 1)(SAMPLE.path(store))  # In layer 9 of the last row.
    with store.reader(SAMPLE.key) as reader, pytest.raises(Damaged, match="hash"):
        list(reader.blocks(0, 23, reader.positions(layers)))


@pytest.mark.files_only
def test_damage_elsewhere_does_not_hide_sound_rows(store: SampleStore) -> None:
    SAMPLE.put(store)
    _flip(-23 * 8 - 1)(SAMPLE.path(store))
    with store.reader(SAMPLE.key) as reader:
        assert b"".join(bytes(p) for b in reader.blocks(0, 20) for p in b.data) == SAMPLE.data[: 20 * 128]
        with pytest.raises(Damaged):
            list(reader.blocks(22, 23))


@pytest.mark.files_only
def test_another_samples_file_is_not_served(store: SampleStore) -> None:
    SAMPLE.put(store)
    other = replace(SAMPLE, sample_id="other")
    other.put(store)
    other.path(store).replace(SAMPLE.path(store))
    with pytest.raises(Damaged, match="not the one that was committed"):
        store.reader(SAMPLE.key)


def test_a_disk_that_cannot_be_read_is_no_damage(tmp_path: Path) -> None:
    files = FaultyFiles()
    store = SampleStore.open(tmp_path, files=files)
    SAMPLE.put(store)
    reader = store.reader(SAMPLE.key)
    files.faults = {"pread": (0, BROKEN)}
    with pytest.raises(IoError, match="Input/output error"):
        list(reader.blocks(0, 23))
    with pytest.raises(IoError):
        store.reader(SAMPLE.key)
    reader.close()
    store.close()


def test_what_was_never_there(store: SampleStore) -> None:
    with pytest.raises(SampleNotFound):
        store.reader(SAMPLE.key)


def _whole(opened: SampleReader | WholeFile) -> bytes:
    assert isinstance(opened, SampleReader), "no file was wanted"
    with opened as reader:
        return b"".join(bytes(piece) for block in reader.blocks(0, 23) for piece in block.data)


def test_what_is_held_is_opened_also_where_it_came_later(store: SampleStore) -> None:
    """The catalogue is asked before, for all at once."""
    samples = [SAMPLE, *(replace(SAMPLE, sample_id=name, seed=1) for name in ("other", "late"))]
    for sample in samples[:2]:
        sample.put(store)
    held = store.hold([sample.key for sample in samples])
    assert [one.record and one.record.sample_id for one in held] == ["s", "other", None]
    assert all(store._catalogue.is_held(one.key) for one in held)
    samples[2].put(store)
    assert [_whole(store.open_held(one, lambda _: False)) for one in held] == [sample.data for sample in samples]
    with pytest.raises(SampleNotFound):
        store.open_held(store.hold([SampleKey("default", "nobody")])[0], lambda _: False)
    assert not any(store._catalogue.is_held(one.key) for one in held)


@pytest.mark.files_only
def test_what_is_held_and_then_deleted_or_replaced_is_no_more_what_it_was(store: SampleStore) -> None:
    """In a cluster its object stays for a while, and is what it was."""
    gone, other = (replace(SAMPLE, sample_id=name, seed=1) for name in ("gone", "other"))
    for sample in (gone, other):
        sample.put(store)
    held = store.hold([gone.key, other.key])
    for sample in (gone, other):
        store.delete(sample.key)
    replace(other, seed=2).put(store)
    with pytest.raises(SampleNotFound):
        store.open_held(held[0], lambda _: False)
    assert _whole(store.open_held(held[1], lambda _: False)) == replace(other, seed=2).data


def test_a_question_that_fails_for_all_is_asked_again_for_each(store: SampleStore, monkeypatch: pytest.MonkeyPatch) -> None:
    SAMPLE.put(store)

    def damaged(keys: object) -> object:
        raise InternalFault("a row is damaged")

    monkeypatch.setattr(store._catalogue, "get_many", damaged)
    with store.reader(SAMPLE.key) as reader:
        assert list(reader.token_ids(0, 23)) == SAMPLE.token_ids


@pytest.mark.files_only
def test_a_file_that_shrinks_while_it_is_read_is_an_error_and_no_more(store: SampleStore) -> None:
    SAMPLE.put(store)
    with store.reader(SAMPLE.key) as reader:
        blocks = reader.blocks(0, 23)
        next(blocks)
        with SAMPLE.path(store).open("r+b") as file:
            file.truncate(reader.file.header.header_bytes + 300)
        with pytest.raises(Damaged, match="shorter"):
            list(blocks)
