"""Whether what clients saw of one id can be: a register that is put, read and deleted, one operation after the other.

Each operation took effect at one moment between its call and its return, or, where nobody knows how it ended, at some moment
after its call, or never. `explain` looks for an order of these moments in which every answer is right (Wing and Gong's search).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf

NONE = ""  # Nothing is stored.
State = str


@dataclass(frozen=True, slots=True)
class Operation:
    """`kind`: put, read or delete. `value`: what was put, or read. `answer`: see `_STEPS`; "unknown": none was heard."""

    client: int
    kind: str
    answer: str
    called_at: float
    returned_at: float
    value: str = NONE


def _put_new(state: State, value: str) -> State | None:
    return value if state == NONE else None


def _put_again(state: State, value: str) -> State | None:
    return state if state == value else None


def _put_other(state: State, value: str) -> State | None:
    return state if state not in (NONE, value) else None


def _unchanged(state: State, value: str) -> State | None:
    return state


def _read(state: State, value: str) -> State | None:
    return state if state == value else None


def _gone(state: State, value: str) -> State | None:
    return NONE


# (kind, answer) -> the state after it, by the one before and the value; None where that answer would be wrong.
_STEPS: dict[tuple[str, str], Callable[[State, str], State | None]] = {
    ("put", "committed"): _put_new,
    ("put", "duplicate"): _put_again,
    ("put", "exists"): _put_other,
    ("put", "failed"): _unchanged,
    ("read", "is"): _read,
    ("delete", "deleted"): _gone,  # Also of a failure that was remembered.
    ("delete", "nothing"): lambda state, value: state if state == NONE else None,
    ("delete", "refused"): _unchanged,
}
_MAY_HAVE_HAPPENED: dict[str, Callable[[State, str], State]] = {
    "put": lambda state, value: state if state != NONE else value,
    "read": lambda state, value: state,
    "delete": lambda state, value: NONE,
}


def explain(history: Sequence[Operation], ends_of_lives: Sequence[float] = ()) -> bool:
    """Whether the operations on one id, which begins with nothing stored, have an order.

    `ends_of_lives`: when servers died, where that is known. Of what was asked of one before, nothing is done by the next one,
    except what rules may do (a client below 0).
    """
    operations = sorted(history, key=lambda one: one.called_at)
    ends = [inf if one.answer == "unknown" else one.returned_at for one in operations]
    latest = [_latest(one, ends_of_lives) for one in operations]
    everything = frozenset(number for number, end in enumerate(ends) if end < inf)
    seen: set[tuple[frozenset[int], State]] = set()
    stack: list[tuple[frozenset[int], State]] = [(frozenset(), NONE)]
    while stack:
        done, state = stack.pop()
        if everything <= done:
            return True
        if (done, state) in seen:
            continue
        seen.add((done, state))
        # Nothing may come before what had returned when it was called.
        first_end = min(end for number, end in enumerate(ends) if number not in done)
        now = max((operations[number].called_at for number in done), default=0.0)
        for number, one in enumerate(operations):
            if number in done or one.called_at > first_end or now > latest[number]:
                continue
            unknown = one.answer == "unknown"
            step = _MAY_HAVE_HAPPENED[one.kind] if unknown else _STEPS[one.kind, one.answer]
            after = step(state, one.value)
            if after is not None and not (unknown and after == state):
                stack.append((done | {number}, after))
    return False


def _latest(one: Operation, ends_of_lives: Sequence[float]) -> float:
    """Until when it may have taken effect."""
    if one.answer != "unknown" or one.client < 0:
        return inf
    return min((end for end in ends_of_lives if end > one.called_at), default=inf)


def deleted_under_a_lease(
    history: Sequence[Operation], leases: Sequence[tuple[float, float]]
) -> list[tuple[Operation, tuple[float, float]]]:
    """Deletions that were answered although a lease, granted before they were called, was held until after."""
    return [
        (one, (granted_at, ends_at))
        for one in history
        for granted_at, ends_at in leases
        if (one.kind, one.answer) == ("delete", "deleted") and granted_at < one.called_at and one.returned_at < ends_at
    ]
