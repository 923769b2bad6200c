"""The plan of one engine step: what the scheduler half wants done, frozen, for the worker half to do.

It crosses a process boundary, so it holds plain data only and checks itself; it imports neither vLLM nor torch. What nearly
every step makes is a named tuple: a frozen dataclass takes three times as long to make.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from slotstream.wire.columns import NO_COLUMNS, LateColumns


@dataclass(frozen=True, slots=True)
class SampleOpen:
    """A sample is about to be captured for request `req_id`.

    `first_position` is the token position that row 0 of the sample holds. `rows_max` bounds its rows; `rows_exact` says
    that it will have exactly as many. `columns` names those that its SampleFinish will carry.
    """

    req_id: str
    namespace: str
    sample_id: str
    first_position: int
    rows_max: int
    rows_exact: bool
    tags: Mapping[str, str] = field(default_factory=dict)
    metadata: Mapping[str, str] = field(default_factory=dict)
    columns: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.rows_max < 1 or self.first_position < 0:
            raise ValueError(f"a sample of {self.rows_max} rows from position {self.first_position} cannot be")


@dataclass(frozen=True, slots=True)
class BlockPlace:
    """Rows in a cache layer of vLLM's own: position p of the request lies in block `block_ids[p // block_size]`.

    `block_ids` is the request's whole table in the KV-cache group of the hidden states. Positions below `computed_from` were
    written by an earlier step (a prefix-cache hit, or output rows confirmed since); those from it on are written in this step,
    and must be found in its slot mapping.
    """

    block_ids: tuple[int, ...]
    computed_from: int

    def __post_init__(self) -> None:
        if not self.block_ids:
            raise ValueError("rows cannot be read without a block table")


@dataclass(frozen=True, slots=True)
class PagePlace:
    """Rows in row pages, one after another from the page that holds the first position on. int [n] each, one a page.

    `pages[i]` was given for the KV-cache slots of entry `entries[i]` of the page table, those from `entries[i] * page rows` on,
    in step `steps[i]`: what the device noted beside a row must agree.
    """

    pages: Sequence[int]
    entries: Sequence[int]
    steps: Sequence[int]


@dataclass(frozen=True, slots=True)
class RowPlan:
    """Rows of positions [start, stop) of request `req_id`, to be read in this step, from its row `first_row` on.

    `computed`: vLLM has the results of the steps that computed them, so nothing that the device still does writes them.
    """

    req_id: str
    start: int
    stop: int
    first_row: int
    place: BlockPlace | PagePlace
    computed: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.stop or not 0 <= self.first_row <= self.start:
            raise ValueError(f"positions [{self.start}, {self.stop}) from row {self.first_row} on are not a range")


class TableUpdate(NamedTuple):
    """What changes in the page table before a step's forward pass: `entries` maps KV-cache slot // page rows to a page, or -1.

    `step` is the number that the device notes beside each row from now on; it only grows. `clear`: every other entry is -1.
    `live`: how many entries are not -1 then.
    """

    step: int
    entries: Mapping[int, int]
    clear: bool
    live: int


@dataclass(frozen=True, slots=True)
class SampleFinish:
    """Every row of the sample has been planned, in this step or before: commit it. One token id a row, and so many rows of each
    of the columns that its SampleOpen named.
    """

    req_id: str
    token_ids: tuple[int, ...]
    metadata: Mapping[str, str] = field(default_factory=dict)
    columns: LateColumns = NO_COLUMNS


@dataclass(frozen=True, slots=True)
class SampleAbort:
    """The sample will never be whole: drop it. `code` is a stable error code."""

    req_id: str
    code: str
    message: str


class StepPlan(NamedTuple):
    """All that the connector does in one engine step, in this order: table, opens, rows, finishes, aborts, releases.

    `table` is done before the forward pass, the rest after it.
    `releases` names finished requests whose blocks vLLM holds for us until their last rows are read in this step.
    `beside`: the rows may be read beside the engine's thread, until the next step begins: there will be one.
    """

    opens: tuple[SampleOpen, ...] = ()
    rows: tuple[RowPlan, ...] = ()
    finishes: tuple[SampleFinish, ...] = ()
    aborts: tuple[SampleAbort, ...] = ()
    releases: tuple[str, ...] = ()
    table: TableUpdate | None = None
    beside: bool = False

    def __bool__(self) -> bool:
        return bool(self.opens or self.rows or self.finishes or self.aborts or self.releases or self.table is not None)


EMPTY_PLAN = StepPlan()
