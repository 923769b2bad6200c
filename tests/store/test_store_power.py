"""Loss of power: what was committed is there, whole; what was deleted stays away; and half a sample is never served."""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from store.power import Plugged
from store.store_kit import BROKEN, Crash, Sample, crash, read_all

from slotstream.store.catalogue.queries import ListQuery
from slotstream.store.records import Failure, State
from slotstream.store.samples import SampleStore
from slotstream.store.upkeep.retention import Policy, Rule
from slotstream.store.upkeep.sweeping import Sweeper
from slotstream.wire.errors import SlotStreamError

# The long run: SLOTSTREAM_POWER_ROUNDS=2000.
ROUNDS = int(os.environ.get("SLOTSTREAM_POWER_ROUNDS", "8"))


def _check(store: SampleStore, expected: dict[str, Sample], possible: dict[str, list[Sample]]) -> None:
    """Every expected sample is there, whole; besides them only possible ones are, whole too."""
    found = {record.sample_id for record in store.list_page(ListQuery(state=State.COMMITTED))[0]}
    assert expected.keys() <= found
    assert found <= expected.keys() | possible.keys()
    for sample_id in found:
        choices = [expected[sample_id]] if sample_id in expected else possible[sample_id]
        content = read_all(store, choices[0].key)
        assert content in [(s.data, s.token_ids) for s in choices]


def _put_aborted(store: SampleStore, sample: Sample) -> None:
    sample.send(store).abort(Failure("ABORTED", "no"))


@pytest.mark.parametrize("catalogue", ["kept", "cut", "lost"])
@pytest.mark.parametrize("seed", range(ROUNDS))
def test_power_is_lost_at_a_random_moment(tmp_path: Path, seed: int, catalogue: str) -> None:
    rng = random.Random(seed * 3 + len(catalogue))
    plugged = Plugged(tmp_path / "before")
    store = plugged.store
    expected: dict[str, Sample] = {}
    possible: dict[str, list[Sample]] = {}
    fault = rng.choice(["sync_data", "sync_dir", "rename", "unlink", "pwrite", "create"])
    what: list[int | type[Crash]] = [Crash, BROKEN]
    plugged.files.faults = {fault: (rng.randint(1, 20), rng.choice(what))}

    def attempt(action: Callable[[], Any]) -> bool:
        try:
            action()
        except SlotStreamError:
            return False
        return True

    try:
        for number in range(rng.randint(2, 9)):
            sample = Sample(f"s{rng.randint(0, 4)}", rng.randint(1, 14), seed=number, exact=rng.random() < 0.5)
            name = sample.sample_id
            move = rng.choice(["put", "put", "put", "abandon", "abort", "delete", "retain"])
            if move == "put" and name not in expected:
                possible.setdefault(name, []).append(sample)  # Until it is told: either is right.
                if attempt(partial(sample.put, store)):
                    expected[name] = sample
                    del possible[name]
            elif move == "abandon":
                attempt(partial(sample.send, store, sample.chunks()[:2]))
            elif move == "abort":
                attempt(partial(_put_aborted, store, sample))
            elif move in ("delete", "retain") and name in expected:
                possible[name] = [expected.pop(name)]
                key = sample.key
                if move == "delete":
                    gone = attempt(partial(store.delete, key))
                else:
                    store.lifetimes.ack(key)
                    policy = Policy(default=Rule(delete_on_ack=True))
                    sweeper = Sweeper(store.lifetimes, policy, store.free_bytes)
                    # A file that the disk would not remove stays behind its DELETING row.
                    gone = (
                        attempt(sweeper.sweep) and not key.path(store.data_dir).exists() and store._catalogue.get(key) is None
                    )
                if gone:
                    del possible[name]
    except Crash:
        pass
    plugged.lose_power(tmp_path / "after", rng, catalogue)
    for _ in range(2):
        after = SampleStore.open(tmp_path / "after")
        _check(after, expected, possible)
        assert not list((tmp_path / "after").rglob("*.partial"))
        crash(after)


def test_the_model_does_lose_what_is_not_synced(tmp_path: Path) -> None:
    """A store that skips any one sync is caught by the test above: the model is no friend of it."""
    for skipped in ("sync_data", "sync_dir"):
        lost = 0
        for seed in range(8):
            plugged = Plugged(tmp_path / f"{skipped}-{seed}")
            setattr(plugged.files, skipped, lambda _: None)
            sample = Sample(rows=14, seed=seed)
            assert sample.put(plugged.store) is False
            after = tmp_path / f"{skipped}-{seed}-after"
            plugged.lose_power(after, random.Random(seed), "kept")
            store = SampleStore.open(after)
            try:
                lost += read_all(store, sample.key) != (sample.data, sample.token_ids)
            except SlotStreamError:
                lost += 1
            crash(store)
        assert lost > 0, skipped


def test_a_sync_that_failed_is_never_tried_again(tmp_path: Path) -> None:
    """The kernel forgets which pages were dirty: a second fdatasync would succeed over bytes that are lost."""
    plugged = Plugged(tmp_path / "before")
    plugged.files.faults = {"sync_data": (1, BROKEN)}
    sample = Sample()
    with pytest.raises(SlotStreamError):
        sample.put(plugged.store)
    assert plugged.files.calls.count("sync_data") == 1
    assert sample.put(plugged.store) is False  # Into a new file.
    plugged.lose_power(tmp_path / "after", random.Random(1), "cut")
    store = SampleStore.open(tmp_path / "after")
    assert read_all(store, sample.key) == (sample.data, sample.token_ids)
    store.close()


@pytest.mark.parametrize("catalogue", ["kept", "cut"])
@pytest.mark.parametrize("refused", [("sync_dir",), ("sync_dir", "unlink")], ids=" and ".join)
def test_what_was_told_to_have_failed_is_not_there_when_the_power_is_back(
    tmp_path: Path, refused: tuple[str, ...], catalogue: str
) -> None:
    """The disk refuses to sync the sample's name, and then to remove it, or to sync that."""
    sample = Sample()
    for seed in range(8):
        plugged = Plugged(tmp_path / f"before-{seed}")
        upload = sample.send(plugged.store)
        plugged.files.faults = dict.fromkeys(refused, (0, BROKEN))
        with pytest.raises(SlotStreamError):
            upload.commit(sample.rows, sample.token_ids)
        plugged.lose_power(tmp_path / f"after-{seed}", random.Random(seed), catalogue)
        store = SampleStore.open(tmp_path / f"after-{seed}")
        record = store.stat(sample.key)
        assert record is None or record.state is State.FAILED
        assert Sample(seed=1).put(store) is False  # The id is free.
        store.close()


@pytest.mark.parametrize("how", ["asked again", "killed"])
def test_a_deletion_whose_sync_was_missing_stays_done_once_it_is_done(tmp_path: Path, how: str) -> None:
    """The file was gone before, but not durably: the call that finishes the deletion syncs that."""
    sample = Sample()
    for seed in range(8):
        plugged = Plugged(tmp_path / f"before-{seed}")
        sample.put(plugged.store)
        plugged.files.faults = {"sync_dir": (0, BROKEN if how == "asked again" else Crash)}
        with pytest.raises((SlotStreamError, Crash)):
            plugged.store.delete(sample.key)
        plugged.files.faults, plugged.files.crashed = {}, False
        if how == "asked again":
            plugged.store.delete(sample.key)
        else:
            crash(plugged.store)
            plugged = Plugged(tmp_path / f"before-{seed}", plugged.files)
        assert plugged.store.stat(sample.key) is None
        plugged.lose_power(tmp_path / f"after-{seed}", random.Random(seed), "kept")
        store = SampleStore.open(tmp_path / f"after-{seed}")
        assert store.stat(sample.key) is None
        store.close()


@pytest.mark.parametrize("catalogue", ["kept", "cut", "lost"])
def test_a_deletion_that_was_told_stays_done(tmp_path: Path, catalogue: str) -> None:
    for seed in range(6):
        plugged = Plugged(tmp_path / f"before-{seed}")
        for name in "abc":
            Sample(name).put(plugged.store)
        plugged.store.delete(Sample("a").key)
        plugged.lose_power(tmp_path / f"after-{seed}", random.Random(seed), catalogue)
        store = SampleStore.open(tmp_path / f"after-{seed}")
        assert store.stat(Sample("a").key) is None  # Not DAMAGED, "its file is gone": it was deleted.
        for name in "bc":
            assert read_all(store, Sample(name).key)[0] == Sample(name).data
        store.close()


@pytest.mark.parametrize(
    ("operation", "at"), [("rename", 1), *(("sync_dir", at) for at in range(1, 5)), ("none", 1)], ids=lambda value: str(value)
)
def test_a_damaged_sample_on_its_way_to_the_quarantine_is_served_from_nowhere(tmp_path: Path, operation: str, at: int) -> None:
    for seed in range(3):
        plugged = Plugged(tmp_path / f"before-{seed}")
        sample = Sample()
        sample.put(plugged.store)
        path = sample.path(plugged.store)
        raw = bytearray(path.read_bytes())
        raw[-1] ^= 1
        path.write_bytes(raw)
        plugged.files._live[path].durable = bytes(raw)  # The rot is on the disk itself.
        verdict = plugged.store.verify(sample.key)
        assert verdict.damage == "HASH_MISMATCH"
        plugged.files.faults = {operation: (plugged.files.calls.count(operation) + at, Crash)}
        with contextlib.suppress(Crash):
            plugged.store.lifetimes.quarantine(verdict)
        assert plugged.files.crashed == (operation != "none")
        after = tmp_path / f"after-{seed}"
        plugged.lose_power(after, random.Random(seed), "cut")
        store = SampleStore.open(after)
        with pytest.raises(SlotStreamError):
            read_all(store, sample.key)
        assert all(kept.read_bytes() == bytes(raw) for kept in after.rglob("*.safetensors"))
        store.close()
