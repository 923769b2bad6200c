"""What a catalogue is asked to do. Each implementation does it in its own way.

Each operation is one transaction, with its condition inside: a condition that does not hold is an answer. No type of a database
gets out. Everything here is thread safe, and raises StoreFull, IoError and InternalFault beside what it says. Times are Unix
nanoseconds, 0 for never.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Protocol

from slotstream.store.catalogue.holds import ReadHold
from slotstream.store.catalogue.queries import Candidate, ListQuery, Queue, Standing, Usage
from slotstream.store.records import SampleKey, SampleRecord, State

_PAGE = 256


class CatalogueUnreadable(Exception):
    """A catalogue that only reads cannot be read. Says why."""


class Questions(Protocol):
    """What changes nothing: also asked where nobody may write, as `slotstream verify --data` does."""

    def get(self, key: SampleKey) -> SampleRecord | None: ...

    def scan_page(self, after: int, limit: int, namespace: str = "") -> list[tuple[int, SampleRecord]]:
        """Up to `limit` rows (of one namespace) with their numbers, numbered above `after`, in the order of their numbers.

        A sample keeps its number as long as its id is known. Rows that come and go meanwhile may be missed.
        """

    def candidates(self, queue: Queue, namespace: str, after: tuple[int, int], limit: int) -> list[Candidate]:
        """Up to `limit` samples of a queue behind position `after`, in order. (n, -1) stands before all whose column is n."""

    def committed_until(self, namespace: str, until_unix_ns: int) -> int:
        """How many samples of a namespace were committed by then."""

    def usage(self, namespace: str) -> Usage: ...

    def usages(self, after: str, limit: int) -> list[Usage]:
        """Namespaces behind `after`, in the order of their names."""

    def standing(self, key: SampleKey) -> Standing:
        """Reads, ack and lease of a sample."""

    def is_held(self, key: SampleKey) -> bool:
        """Whether somebody is known to have the sample open."""

    def get_meta(self, name: str) -> str | None:
        """What `set_meta` said last; None also where that is damaged."""


class Catalogue(Questions, Protocol):
    """Samples by name, state, tags and time."""

    # Attempts. A future is done once the change is written; who only announces need not wait for it.

    def begin(self, record: SampleRecord) -> Future[bool]:
        """A sample is arriving. A row of that name stays unless it says failed: False."""

    def commit(self, record: SampleRecord) -> Future[SampleRecord | None]:
        """The sample is committed, in place of any row that was there. Its bytes are durable already.

        The answer is None. Of objects it may be the sample that is committed already, and stays (`catalogue/attempts.py`).
        """

    def fail(self, record: SampleRecord, code: str, message: str) -> Future[bool]:
        """The sample failed; a row that says arriving is kept as far as failed ones are. False where one says committed or
        deleting, and stays.
        """

    def forget(self, key: SampleKey) -> Future[bool]:
        """A sample that was arriving was never announced. False where its row says something else, and stays."""

    # What becomes of stored bytes beside that.

    def adopt(self, record: SampleRecord) -> Future[None]:
        """A sample is stored whole, and its row is lost or says otherwise: it is committed."""

    def put_damaged(self, record: SampleRecord, message: str) -> Future[None]:
        """A committed sample failed: its bytes are damaged or gone.

        Durable: another upload may take the sample's place, and its bytes must not be found beside the old one's row.
        """

    def put_deleting(self, record: SampleRecord) -> Future[None]:
        """A sample whose commit failed, and whose bytes may still be there, is being deleted. Durable."""

    # Deletion: a mark, then the sample's bytes, then the row. So a crash between two of them leaves nothing that looks whole.

    def mark_deleting(self, record: SampleRecord) -> int:
        """The sample is being deleted, durably: nobody sees it from here on. 0; or, where it stays, when its last lease ends.

        Raises SampleNotFound where the row is not that of `record` any more.
        """

    # Of several servers one leads. What it does as leader it does in a `term` (see `lead`); in one that is over, nothing is
    # done. 0: not as leader.

    def mark_unused(self, candidates: Sequence[Candidate], term: int = 0) -> list[Candidate]:
        """Mark those that nobody reads, holds a lease on, or has replaced, durably; which they were."""

    def drop_deleting(self, keys: Sequence[SampleKey], term: int = 0) -> None:
        """Forget samples whose deletion is finished; one that was committed again meanwhile stays."""

    # Readers.

    def hold_read(self, key: SampleKey) -> ReadHold:
        """The sample is not deleted but by name until the hold ends. Taken before its bytes are looked for."""

    def count_reads(self, reads: Sequence[tuple[SampleKey, int]]) -> Future[None]:
        """Every row of the samples, each committed then, was read. Done when it is counted; a crash may lose the last."""

    def ack(self, key: SampleKey) -> bool:
        """Note that a reader is done with a committed sample; the first time stays. False when it is not committed."""

    def lease(self, key: SampleKey, holder: str, seconds: float, leases_max: int, namespace_max: int) -> int:
        """Keep a committed sample for `holder` for so long from now, in place of a lease of its own; when that ends.

        Raises SampleNotFound; StoreFull when `leases_max` are held already, or `namespace_max` in its namespace.
        """

    def end_leases(self, key: SampleKey, holder: str | None) -> None:
        """Give back the lease of `holder` on a committed sample; None: everybody's. Raises SampleNotFound."""

    def shorten_leases(self, until_unix_ns: int, term: int = 0) -> None:
        """No lease lasts longer than until then."""

    # Rows.

    def get_many(self, keys: Sequence[SampleKey]) -> list[SampleRecord | None]:
        """As `get`, of each key, in their order, with one question."""

    def get_settled(self, key: SampleKey) -> SampleRecord | None:
        """As `get`, once all that was asked so far is written."""

    def list_page(self, query: ListQuery) -> tuple[list[SampleRecord], str]:
        """One page, newest first, and the next page's token ("" on the last). Raises BadPage."""

    def unfinished(self) -> list[SampleRecord]:
        """Rows that are neither committed nor failed: few, among any number."""

    def totals(self) -> dict[State, tuple[int, int]]:
        """State -> (samples, bytes)."""

    # The rest.

    def set_meta(self, name: str, value: str, *, durable: bool = False) -> None:
        """`durable`: a loss of power does not forget it."""

    # Several servers.

    def lead(self) -> int:
        """The term in which this server deletes, checks and sweeps, which begins now where no server leads; 0 where another
        does. Ask before each round of work: a term ends with the catalogue, or with the connection to it, and is never again.
        """

    def watch(self, told: Callable[[SampleKey | None], None]) -> None:
        """From here on `told(key)` whenever a sample's row came, went or changed its state, by any server; `told(None)` where
        that may have happened to any sample. In a thread of the catalogue's: it must not wait. Ends with the catalogue.
        """

    def now(self) -> int:
        """The clock by which leases end and ages count."""

    @property
    def writer(self) -> threading.Thread:
        """The thread that writes: without it nothing is committed. It ends when the catalogue is closed."""

    def close(self, *, clean: bool = True) -> None:
        """Write what was asked so far and close. `clean`: nothing is left that the next start has to look for."""


def scan(catalogue: Questions, namespace: str = "") -> Iterator[SampleRecord]:
    """Every row (of one namespace), in the order of their numbers."""
    after = 0
    while page := catalogue.scan_page(after, _PAGE, namespace):
        after = page[-1][0]
        for _, record in page:
            yield record
