"""Where a trainer's loss counts a token, as a request says it: the late column `loss_mask` of its sample."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from slotstream.wire.columns import LOSS_MASK, NO_COLUMNS, LateColumns
from slotstream.wire.errors import BadParams, BadTokenRange

OUTPUT = "output"
SPANS_MAX = 512
_POSITION_MAX = 1 << 40
_FORM = f'loss_mask must be [[start, stop], ...], at most {SPANS_MAX} spans of token positions, or "{OUTPUT}"'


@dataclass(frozen=True, slots=True)
class LossMask:
    """The tokens that count: those of these spans [start, stop) of positions, ascending, or None: those of the output."""

    spans: tuple[tuple[int, int], ...] | None

    def check(self, tokens: int) -> None:
        """Raises BadTokenRange where a span ends past so many tokens, the most that prompt and output can have."""
        if self.spans and self.spans[-1][1] > tokens:
            start, stop = self.spans[-1]
            raise BadTokenRange(f"loss_mask [{start}, {stop}] ends past the {tokens} tokens that prompt and output can have")

    def rows(self, start: int, stop: int, prompt_tokens: int) -> bytes:
        """A byte for each of the positions [start, stop): 1 where the token counts, else 0."""
        mask = bytearray(stop - start)
        for first, last in ((prompt_tokens, stop),) if self.spans is None else self.spans:
            begin, end = max(first, start), min(last, stop)
            if begin < end:
                mask[begin - start : end - start] = b"\1" * (end - begin)
        return bytes(mask)


def parse_loss_mask(value: object) -> LossMask | None:
    """A request's `loss_mask`; None where it has none. Raises BadParams for another form, BadTokenRange for wrong spans."""
    if value is None:
        return None
    if value == OUTPUT:
        return LossMask(None)
    if not isinstance(value, list | tuple) or len(value) > SPANS_MAX:
        raise BadParams(_FORM)
    spans: list[tuple[int, int]] = []
    for span in value:
        if not isinstance(span, list | tuple) or len(span) != 2 or not all(map(_is_position, span)):
            raise BadParams(_FORM)
        spans.append((span[0], span[1]))
    for start, stop in spans:
        if start >= stop:
            raise BadTokenRange(f"loss_mask [{start}, {stop}] holds no token: start must be below stop")
    for (_, stop), (start, _) in pairwise(spans):
        if start < stop:
            raise BadTokenRange(f"loss_mask spans must ascend: one begins at {start}, before the last one ends at {stop}")
    return LossMask(tuple(spans))


def mask_names(mask: LossMask | None) -> tuple[str, ...]:
    """The columns that a sample is opened with."""
    return () if mask is None else (LOSS_MASK,)


def mask_columns(mask: LossMask | None, start: int, stop: int, prompt_tokens: int) -> LateColumns:
    """The columns that its commit brings."""
    return NO_COLUMNS if mask is None else LateColumns({LOSS_MASK: mask.rows(start, stop, prompt_tokens)})


def _is_position(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _POSITION_MAX
