"""What the catalogue keeps of samples that are not stored is little, however long their fields are, and goes after a time."""

from __future__ import annotations

import random
import string
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from store.store_kit import Sample, crash
from support.sqlite_of import sqlite_of

from slotstream.store.catalogue.queries import Candidate, ListQuery
from slotstream.store.catalogue.sqlite.catalogue import SqliteCatalogue
from slotstream.store.disk.clock import Clock
from slotstream.store.records import Failure, SampleRecord, State
from slotstream.store.samples import SampleStore
from slotstream.store.upkeep.retention import Policy, Reason, Rule
from slotstream.store.upkeep.sweeping import Sweeper
from slotstream.store.upkeep.verifying import Verdict

ROWS = 10_000
ROW_BYTES_MAX = 2048
DAY_NS = 86_400 * 10**9
_rng = random.Random(40)
_LETTERS = string.ascii_letters + string.digits
# Fields at their longest: in bytes, in characters that JSON spells with twelve, and as long as they are kept.
LONGEST: dict[str, dict[str, Any]] = {
    "letters": {
        "model": "m" * 1024,
        "layer_ids": tuple(range(2**31 - 1024, 2**31)),
        "tags": {f"{n:02}" + "k" * 254: "v" * 256 for n in range(32)},
        "metadata": {"m": "x" * 16_000},
        "error_message": "because " * 1000,
    },
    "emoji": {
        "model": "\N{SNAIL}" * 256,
        "layer_ids": tuple(range(2**31 - 1024, 2**31)),
        "tags": {f"{n:02}" + "\N{SNAIL}" * 63: "\N{SNAIL}" * 64 for n in range(32)},
        "metadata": {"m": "\N{SNAIL}" * 4000},
        "error_message": "\N{SNAIL}" * 1024,
    },
    "kept": {
        "model": "m" * 80,
        "layer_ids": tuple(range(2**31 - 7, 2**31)),
        "tags": {"k": "v" * 55},
        "metadata": {"m": "x" * 55},
        "error_message": "x" * 256,
    },
    "small_tags": {
        "model": "m" * 80,
        "layer_ids": tuple(range(100, 119)),
        "tags": {"a": "1", "b": "2"},
        "metadata": {"m": "x" * 55},
        "error_message": "x" * 256,
    },
    "short_names": {
        "model": "m" * 80,
        "layer_ids": tuple(range(100, 119)),
        "tags": {f"{n:02}": "" for n in range(32)},
        "metadata": {"m": "x" * 55},
        "error_message": "x" * 256,
    },
    "short_names_long_tags": {
        "model": "m" * 80,
        "layer_ids": tuple(range(100, 119)),
        "tags": {f"{n:02}": "v" * 20 for n in range(32)},
        "metadata": {"m": "x" * 55},
        "error_message": "x" * 256,
    },
}


def _records(fields: dict[str, Any], *, short: bool) -> list[SampleRecord]:
    """With names of full length, in no order; or with short ones."""
    made = {name: fields[name] for name in ("model", "layer_ids", "tags", "metadata")}
    names = ["".join(_rng.choices(_LETTERS, k=128)) for _ in range(ROWS)]
    spaces = ["".join(_rng.choices(_LETTERS, k=64)) for _ in range(ROWS)]
    if short:
        names, spaces = [name[:6] for name in names], [space[0] for space in spaces]
    return [
        SampleRecord(
            spaces[n],
            name,
            State.ARRIVING,
            1_700_000_000_000_000_000 + n,
            dtype="BF16",
            hidden_size=2**31 - 1,
            num_tokens=2**21,
            header_xxh3="",
            **made,
        )
        for n, name in enumerate(names)
    ]


def _aborted(catalogue: SqliteCatalogue, record: SampleRecord, message: str) -> list[Future[Any]]:
    return [catalogue.begin(record), catalogue.fail(record, "A" * 64, message)]


def _refused(catalogue: SqliteCatalogue, record: SampleRecord, message: str) -> list[Future[Any]]:
    refused = SampleRecord.refused(record.key, record.model, record.created_unix_ns)
    return [catalogue.fail(refused, "A" * 64, message)]


def _interrupted(catalogue: SqliteCatalogue, record: SampleRecord, message: str) -> list[Future[Any]]:
    """As a start finds them."""
    return [catalogue.begin(record)]


def _sent_twice(catalogue: SqliteCatalogue, record: SampleRecord, message: str) -> list[Future[Any]]:
    return [*_aborted(catalogue, record, message), *_aborted(catalogue, record, message)]


def _damaged(catalogue: SqliteCatalogue, record: SampleRecord, message: str) -> list[Future[Any]]:
    return [catalogue.put_damaged(record, message)]


WAYS = [_aborted, _refused, _interrupted, _sent_twice, _damaged]
QUICK = [(_aborted, "kept"), (_refused, "letters")]


@pytest.mark.parametrize(
    ("way", "fields"),
    [
        pytest.param(way, fields, marks=() if (way, fields) in QUICK else pytest.mark.extended, id=f"{way.__name__} {fields}")
        for way in WAYS
        for fields in LONGEST
    ],
)
def test_a_row_of_what_is_not_stored_takes_at_most_two_kibibytes(
    tmp_path: Path, way: Callable[[SqliteCatalogue, SampleRecord, str], list[Future[Any]]], fields: str
) -> None:
    kept = SampleRecord("n", "s", State.ARRIVING, 1, **LONGEST["kept"])
    assert kept.slim() == kept  # As long as may be kept.
    store = SampleStore.open(tmp_path)
    catalogue = sqlite_of(store)
    before = _bytes_of(catalogue)
    longest = LONGEST[fields]
    asked = [
        future
        for record in _records(longest, short=fields.startswith("short"))
        for future in way(catalogue, record, longest["error_message"])
    ]
    for future in asked:
        future.result()
    crash(store)
    reopened = SampleStore.open(tmp_path)
    taken = _bytes_of(sqlite_of(reopened)) - before
    print(f"{way.__name__} {fields}: {taken / ROWS:.0f} bytes a row")
    assert taken <= ROWS * ROW_BYTES_MAX
    assert reopened.totals()[State.FAILED] == (ROWS, 0)
    reopened.close()


def test_a_damaged_samples_row_is_as_short_and_says_where_the_file_is(tmp_path: Path) -> None:
    store = SampleStore.open(tmp_path)
    fields = LONGEST["letters"]
    sample = Sample(
        "s" * 128,
        namespace="n" * 64,
        model="m" * 1024,
        tags=fields["tags"],
        metadata=fields["metadata"],
        layer_ids=tuple(range(900)),
    )
    sample.put(store)
    record = store.stat(sample.key)
    assert record is not None
    sample.path(store).write_bytes(b"x")
    verdict = Verdict(record.namespace, record.sample_id, "HASH_MISMATCH", "because " * 1000, record=record)
    done = store.lifetimes.quarantine(verdict)
    assert done is not None
    failed = store.stat(sample.key)
    assert failed is not None
    assert (failed.error_code, failed.tags, failed.metadata, failed.layer_ids) == ("DAMAGED", {}, {}, ())
    assert len(failed.model.encode()) <= 80
    assert len(failed.error_message.encode()) <= 256
    where = done.removeprefix("moved to ")
    assert (tmp_path / where).read_bytes() == b"x"
    assert where in failed.error_message
    store.close()


def test_a_listing_finds_what_is_not_stored_by_its_long_model_and_by_its_tags(tmp_path: Path) -> None:
    store = SampleStore.open(tmp_path)
    long = "/models/" + "m" * 200
    tags = {"run": "2026-11-25-nightly", "split": "train", "source": "openwebtext", "shard": "00017"}
    sample = Sample("cmpl-8a3f6f0e1b7a4b6c9d2e5f708192a3b4-0", model=long, tags=tags)
    sample.send(store).abort(Failure("ABORTED", "no"))
    Sample("stored", model=long, tags=tags).put(store)
    Sample("another", model="/models/n").put(store)
    both = {sample.sample_id, "stored"}
    assert _listed(store, ListQuery(model=long)) == both
    assert _listed(store, ListQuery(model=long, namespace="default", page_size=1)) == both
    assert _listed(store, ListQuery(model=long, state=State.FAILED)) == {sample.sample_id}
    for key, value in tags.items():
        assert _listed(store, ListQuery(tags={key: value})) == both
    assert _listed(store, ListQuery(tags=tags, model=long)) == both
    store.close()


def _listed(store: SampleStore, query: ListQuery) -> set[str]:
    """Over all pages."""
    found: list[str] = []
    token = "-"
    while token:
        page, token = store.list_page(replace(query, page_token="" if token == "-" else token))
        found += [record.sample_id for record in page]
    assert len(found) == len(set(found))
    return set(found)


@pytest.mark.parametrize(
    ("rule", "days", "left"),
    [
        (Rule(), 29, {"damaged", "aborted"}),
        (Rule(), 31, {"damaged"}),  # Nobody else says where its file went.
        (Rule(delete_on_ack=True), 31, {"damaged"}),
        (Rule(failed_age_s_max=float("inf")), 31, {"damaged", "aborted"}),
        (Rule(failed_age_s_max=40 * 86400.0), 31, {"damaged", "aborted"}),
        (Rule(failed_age_s_max=86400.0), 2, set()),
    ],
)
def test_failed_samples_are_forgotten_after_thirty_days_where_no_rule_says_more(
    tmp_path: Path, rule: Rule, days: int, left: set[str]
) -> None:
    store = SampleStore.open(tmp_path)
    now = 1_700_000_000 * 10**9
    store.lifetimes.clock = Clock(0, lambda: now)
    for name in ("damaged", "kept"):
        Sample(name).put(store)
    record = store.stat(Sample("damaged").key)
    assert record is not None
    store.lifetimes.quarantine(Verdict("default", "damaged", "TRUNCATED", "so it is", record=record))
    store.open_upload(Sample("aborted").spec()).abort(Failure("ABORTED", "no"))
    store.lifetimes.clock = Clock(0, lambda: now + days * DAY_NS)
    sweeper = Sweeper(store.lifetimes, Policy(default=rule), store.free_bytes)
    for _ in range(3):
        sweeper.sweep()
        assert {record.sample_id for record in store.list_page(ListQuery())[0]} == left | {"kept"}
    store.close()


def test_samples_that_stay_do_not_hide_those_behind_them(tmp_path: Path) -> None:
    store = SampleStore.open(tmp_path)
    now = 1_700_000_000 * 10**9
    store.lifetimes.clock = Clock(0, lambda: now)
    catalogue = store._catalogue
    for n in range(200):
        record = SampleRecord("default", f"s{n:03}", State.ARRIVING, now + n, dtype="BF16")
        stays = n % 150 < 100
        (catalogue.put_damaged(record, "gone") if stays else catalogue.fail(record, "ABORTED", "no")).result()
    store.lifetimes.clock = Clock(0, lambda: now + 31 * DAY_NS)
    sweeper = Sweeper(store.lifetimes, Policy(), store.free_bytes)
    assert sweeper.sweep().samples == {Reason.FAILED_AGE: 50}
    assert store.totals()[State.FAILED] == (150, 0)
    looked: list[object] = []
    candidates = store.lifetimes.candidates

    def counted(*arguments: Any) -> list[Candidate]:
        looked.append(arguments)
        return candidates(*arguments)

    store.lifetimes.candidates = counted  # type: ignore[method-assign, assignment]
    sweeper.sweep()
    assert len(looked) == 2  # Refused ones, and failed ones from where the last sweep ended: a sweep costs what it deletes.
    store.close()


def _bytes_of(catalogue: SqliteCatalogue) -> int:
    (pages,) = catalogue.submit(lambda db: db.execute("PRAGMA page_count").fetchone()).result()
    return int(pages) * 4096
