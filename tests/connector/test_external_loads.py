"""Which rows another connector's loads keep from being captured: cases, and a random machine against the truth."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from slotstream.connector.planning.external_loads import ExternalLoads

SIZE = 4


def blocks(*ids: int) -> Any:
    """A request's blocks as vLLM hands them out; ours are those of group 1."""
    return SimpleNamespace(blocks=([], [SimpleNamespace(block_id=i) for i in ids]))


def step(
    *, sync: bool = False, running: Mapping[str, Sequence[int]] | None = None, copies: Sequence[tuple[int, int]] = ()
) -> Any:
    """A scheduler output; `running` are requests with the blocks that they got in this step."""
    running = running or {}
    cached = SimpleNamespace(req_ids=list(running), new_block_ids=[([], list(ids)) for ids in running.values()])
    pairs = [SimpleNamespace(src_block_id=a, dst_block_id=b) for a, b in copies]
    return SimpleNamespace(has_sync_kv_loads=sync, scheduled_cached_reqs=cached, kv_cache_block_copies=pairs)


@pytest.fixture
def loaded() -> ExternalLoads:
    return ExternalLoads(1, SIZE)


def begin(loaded: ExternalLoads, hit: int | None, *ids: int, req_id: str = "r") -> None:
    if hit is not None:
        loaded.on_match(req_id, hit)
    loaded.on_alloc(req_id, blocks(*ids))


def test_without_loads_nothing_is_remembered(loaded: ExternalLoads) -> None:
    begin(loaded, 4, 1, 2, 3)
    assert not loaded.idle
    # A hit may be longer than what connectors are told of: their number is rounded down to blocks.
    assert loaded.on_step(step(), {"r": 6}) == {}
    assert loaded.idle


def test_a_load_in_the_step_itself_spoils_windows_beside_it_too(loaded: ExternalLoads) -> None:
    """Should it fail, that is known after rows computed with it were sent."""
    begin(loaded, 4, 1, 2, 3, 4)
    assert loaded.on_step(step(sync=True), {"r": 10}) == {"r": (1, 2, 3, 4)}
    assert loaded.unusable((1, 2, 3, 4), 10, 0, 16) == 6
    assert loaded.unusable((1, 2, 3, 4), 10, 12, 16) == 6
    assert loaded.unusable((1, 7, 8), 10, 0, 16) == 0
    assert loaded.unusable((1, 2, 8), 8, 0, 16) == 4


def test_an_asynchronous_load_spoils_its_own_rows_only(loaded: ExternalLoads) -> None:
    begin(loaded, 4, 1, 2, 3)
    assert loaded.on_step(step(), {}) == {}
    begin(loaded, None, 1, 2, 3, 4)
    # A whole prompt of 12 tokens was loaded, and the last is computed once more.
    assert loaded.on_step(step(), {"r": 11}) == {"r": (1, 2, 3, 4)}
    assert [loaded.unusable((1, 2, 3, 4), 11, *window) for window in ((0, 12), (0, 4), (10, 12), (11, 12))] == [7, 0, 1, 0]
    assert loaded.unusable((1, 2, 3, 9), 13, 11, 14) == 0  # Another request finds that token's block in the cache.


def test_what_a_failed_load_left_out_is_computed(loaded: ExternalLoads) -> None:
    begin(loaded, 0, 1, 2, 3)
    loaded.on_step(step(), {})
    begin(loaded, None, 1, 2, 3)
    loaded.on_step(step(), {"r": 4})
    assert loaded.unusable((1, 2, 3), 12, 0, 12) == 4


@pytest.mark.parametrize("how", ["running", "new", "copied over"])
def test_blocks_that_are_used_again_are_sound(loaded: ExternalLoads, how: str) -> None:
    begin(loaded, 0, 1, 2)
    loaded.on_step(step(), {})
    if how == "running":
        loaded.on_step(step(running={"other": [1, 2]}), {"other": 4})
    elif how == "new":
        begin(loaded, 0, 1, 2, req_id="other")
        loaded.on_step(step(), {"other": 0})
    else:
        begin(loaded, 8, 1, 2, req_id="other")
        loaded.on_step(step(copies=[(8, 1), (9, 2)]), {"other": 8})
    assert loaded.idle


def test_a_copy_of_a_loaded_block_is_no_better(loaded: ExternalLoads) -> None:
    begin(loaded, 0, 1)
    loaded.on_step(step(), {})
    begin(loaded, 0, 5, req_id="other")
    tables = loaded.on_step(step(copies=[(1, 5)]), {"other": 2})
    assert loaded.unusable(tables["other"], 2, 0, 8) == 2


def test_a_request_that_ends_while_it_waits_is_forgotten(loaded: ExternalLoads) -> None:
    loaded.on_match("r", 4)
    loaded.forget("r")
    begin(loaded, None, 1, 2)
    loaded.on_step(step(sync=True), {"r": 8})  # Nothing was looked up, as in a session that goes on: nothing was loaded.
    assert loaded.idle


@dataclass
class _Machine:
    """A scheduler with a prefix cache of blocks, and for each block which of its positions hold rows computed here."""

    rng: random.Random
    loaded: ExternalLoads = field(default_factory=lambda: ExternalLoads(1, SIZE))
    free: list[int] = field(default_factory=lambda: list(range(40)))
    cache: dict[tuple[int, ...], int] = field(default_factory=dict)  # by the tokens up to a block's end
    rows: dict[int, set[int]] = field(default_factory=dict)
    users: dict[int, int] = field(default_factory=dict)
    tables: dict[str, list[int]] = field(default_factory=dict)
    tokens: dict[str, tuple[int, ...]] = field(default_factory=dict)
    computed: dict[str, int] = field(default_factory=dict)
    arriving: list[str] = field(default_factory=list)  # loads that are under way
    wrong: int = 0
    refused: int = 0

    def new_block(self) -> int:
        block = self.free.pop(self.rng.randrange(len(self.free)))
        self.cache = {key: held for key, held in self.cache.items() if held != block}
        self.rows[block], self.users[block] = set(), 1
        return block

    def release(self, req_id: str) -> None:
        for block in self.tables.pop(req_id):
            self.users[block] -= 1
            if not self.users[block]:
                self.free.append(block)
        self.computed.pop(req_id)

    def grow(self, req_id: str, stop: int) -> list[int]:
        table = self.tables[req_id]
        new = [self.new_block() for _ in range(len(table), -(-stop // SIZE))]
        table += new
        return new

    def compute(self, req_id: str, stop: int) -> None:
        for position in range(self.computed[req_id], stop):
            self.rows[self.tables[req_id][position // SIZE]].add(position % SIZE)
        self.computed[req_id] = stop
        self.keep(req_id, stop)

    def keep(self, req_id: str, stop: int) -> None:
        for i in range(stop // SIZE):
            self.cache.setdefault(self.tokens[req_id][: (i + 1) * SIZE], self.tables[req_id][i])

    def check(self, req_id: str, tables: dict[str, tuple[int, ...]], sync: bool) -> None:
        computed, table = self.computed[req_id], self.tables[req_id]
        start, stop = sorted(self.rng.sample(range(len(self.tokens[req_id]) + 1), 2))
        missing = [p for p in range(computed) if p % SIZE not in self.rows[table[p // SIZE]]]
        in_window = [p for p in missing if start <= p < stop]
        refused = bool(self.loaded.unusable(tables[req_id], computed, start, stop)) if req_id in tables else False
        self.wrong += bool(in_window) and not refused
        self.refused += refused
        assert not refused or missing, "refused although every row is there"

    def admit(self, req_id: str, live: dict[str, int]) -> bool:
        """One lookup; returns whether a synchronous load was begun."""
        tokens, table, hit = self.tokens[req_id], [], 0
        while hit + SIZE < len(tokens) and (block := self.cache.get(tokens[: hit + SIZE])) is not None:
            table.append(block)
            hit += SIZE
        self.loaded.on_match(req_id, hit)
        for block in table:
            self.users[block] = self.users.get(block, 0) + 1
            if block in self.free:
                self.free.remove(block)
        kind = self.rng.choice(["none", "none", "sync", "async"])
        more = 0 if kind == "none" else self.rng.randrange(len(tokens) - hit)
        self.tables[req_id], self.computed[req_id] = table, hit + more
        is_async = kind == "async" and more > 0
        self.grow(req_id, hit + more if is_async else len(tokens))
        self.loaded.on_alloc(req_id, blocks(*self.tables[req_id]))
        if is_async:
            self.arriving.append(req_id)
            return False
        live[req_id] = self.computed[req_id]
        self.keep(req_id, hit + more)
        return more > 0

    def turn(self, number: int) -> None:
        """One step: loads that are over, new requests, running ones; then what is computed; then some end."""
        scheduled: dict[str, int] = {}
        running: dict[str, list[int]] = {}
        begun: list[str] = []
        for req_id in [r for r in self.tables if r not in self.arriving]:
            if len(self.free) > 8:
                self.tokens[req_id] += (number,)
                running[req_id] = self.grow(req_id, len(self.tokens[req_id]))
                scheduled[req_id] = self.computed[req_id]
        for req_id in [r for r in self.arriving if self.rng.random() < 0.5]:
            self.arriving.remove(req_id)
            self.keep(req_id, self.computed[req_id])
            if len(self.free) > 8:
                self.grow(req_id, len(self.tokens[req_id]))
                self.loaded.on_alloc(req_id, blocks(*self.tables[req_id]))
                scheduled[req_id] = self.computed[req_id]
                begun.append(req_id)
            else:  # Aborted before it ran; what was loaded stays in the cache.
                self.release(req_id)
        sync = False
        while len(self.free) > 16:
            req_id = f"r{len(self.tokens)}"
            stem = self.rng.randrange(3)
            self.tokens[req_id] = (*[stem] * self.rng.randrange(1, 20), 100 + number)
            new: dict[str, int] = {}
            sync |= self.admit(req_id, new)
            scheduled |= new
            begun += new
        tables = self.loaded.on_step(step(sync=sync, running=running), scheduled)
        for req_id in scheduled:
            if req_id in begun:
                self.check(req_id, tables, sync)
        for req_id in scheduled:
            self.compute(req_id, len(self.tokens[req_id]))
        for req_id in [r for r in self.tables if r not in self.arriving and self.rng.random() < 0.5]:
            self.release(req_id)
            self.loaded.forget(req_id)


@pytest.mark.parametrize("seed", range(20))
def test_a_random_scheduler_never_gets_a_row_that_does_not_exist(seed: int) -> None:
    machine = _Machine(random.Random(seed))
    for number in range(200):
        machine.turn(number)
    assert machine.wrong == 0
    assert machine.refused > 20
    assert len(machine.tokens) > 200
