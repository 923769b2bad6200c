"""What a check found: counts of all, and the first few of what is wrong, each with its row."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from slotstream.truth.compare import Tensor, Truth, compare

NAMED_MAX = 20  # Problems that are told one by one; the others are counted.
_OF_A_SAMPLE_MAX = 3

WRONG_ROW = "WRONG_ROW"  # Rows that are not those of their tokens and layers.
WRONG_TOKENS = "WRONG_TOKENS"  # Token ids that are not those of the request, or of no known one.
WRONG_LAYERS = "WRONG_LAYERS"  # Other layers, shapes or elements than were asked for.
LOST = "LOST"  # A sample that was asked for, and is not there.
UNASKED = "UNASKED"  # A sample that nobody asked for.
UNREADABLE = "UNREADABLE"  # A file that is no safetensors file with rows and token ids.
REFUSED = "REFUSED"  # A request that the engine answered with an error.


@dataclass(frozen=True, slots=True)
class Problem:
    """`row`: the first one that it is about, None where it is about none."""

    code: str
    sample: str
    row: int | None
    message: str

    def __str__(self) -> str:
        where = self.sample if self.row is None else f"{self.sample} row {self.row}"
        return f"{where}: {self.message} ({self.code})"


@dataclass(slots=True)
class Findings:
    """Of samples that were compared. `wrong` and `lost` are rows; lost ones are those of samples that are not there."""

    samples: int = 0
    rows: int = 0
    output_rows: int = 0
    wrong: int = 0
    lost: int = 0
    problems: list[Problem] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)

    @property
    def clean(self) -> bool:
        """Whether nothing was wrong."""
        return not self.counts

    def add(self, code: str, sample: str, row: int | None, message: str, count: int = 1) -> None:
        """Something is wrong; `count`: how many rows, or samples, in all."""
        self.counts[code] += count
        if len(self.problems) < NAMED_MAX:
            self.problems.append(Problem(code, sample, row, message))

    def compare(
        self, sample: str, rows: Tensor, token_ids: Tensor, layer_ids: Sequence[int], truth: Truth, first: int = 0
    ) -> None:
        """Compare rows, [tokens, layers, hidden], with those of `token_ids` [tokens]. `first`: the first one's number."""
        wrong, named = compare(rows, token_ids, layer_ids, truth, named=_OF_A_SAMPLE_MAX)
        self.rows += len(token_ids)
        self.wrong += wrong
        for number, one in enumerate(named):
            rest = wrong - len(named) if number == 0 else 0
            self.add(WRONG_ROW, sample, first + one.row, f"token {one.token_id}, {one.why}", 1 + rest)

    def fits(self, sample: str, shape: Sequence[int], tokens: int, layer_ids: Sequence[int], truth: Truth) -> bool:
        """Whether rows of this shape can be compared; else it is noted."""
        wanted = (tokens, len(layer_ids), truth.hidden)
        if tuple(shape) == wanted:
            return True
        row = min(tokens, shape[0]) if len(shape) == 3 and shape[0] != tokens else None
        self.add(WRONG_LAYERS, sample, row, f"rows of shape {list(shape)}, and not {list(wanted)}")
        return False

    def missing(self, sample: str, tokens: int, message: str) -> None:
        """A sample that was asked for is not there."""
        self.lost += tokens
        self.add(LOST, sample, 0, f"rows 0 to {tokens - 1} are not there: {message}")

    def tokens_differ(self, sample: str, stored: Sequence[int], wanted: Sequence[int]) -> bool:
        """Whether the stored token ids are others than those of the request; it is noted."""
        if list(stored) == list(wanted):
            return False
        row = next((at for at, (a, b) in enumerate(zip(stored, wanted, strict=False)) if a != b), min(len(stored), len(wanted)))
        if row < len(stored) and row < len(wanted):
            message = f"token {stored[row]} is stored, and the request has {wanted[row]}"
        else:
            message = f"{len(stored)} tokens are stored, and the request has {len(wanted)}"
        self.add(WRONG_TOKENS, sample, row, message)
        return True
