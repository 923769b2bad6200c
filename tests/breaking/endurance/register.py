"""Whether what clients saw of one id can be: a register that is put, read and deleted, one operation after the other.

Each operation took effect at one moment between its call and its return, or, where nobody knows how it ended, at some moment
after its call, or never. `explain` looks for an order of these moments in which every answer is right (Wing and Gong's search).

What is stored may rot: a bit of its file flips. From then on its rows are not served, and no sender hears that they are stored.
It can be put aside at any moment, and then nothing is stored.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf

NONE = ""  # Nothing is stored.
State = str  # NONE, what is stored, or _ROTTEN and what was.
_ROTTEN = "~"


@dataclass(frozen=True, slots=True)
class Operation:
    """`kind`: put, read, delete or flip. `value`: what was put, or read. `answer`: see `_STEPS`; "unknown": none was heard."""

    client: int
    kind: str
    answer: str
    called_at: float
    returned_at: float
    value: str = NONE


def _when(condition: bool, *after: State) -> tuple[State, ...]:
    return after if condition else ()


def _rotten(state: State) -> State:
    return state if state == NONE or state.startswith(_ROTTEN) else _ROTTEN + state


# (kind, answer) -> the states that can come after it, by the one before and the value. None where that answer would be wrong.
_STEPS: dict[tuple[str, str], Callable[[State, str], tuple[State, ...]]] = {
    ("put", "committed"): lambda state, value: _when(state == NONE, value),
    ("put", "duplicate"): lambda state, value: _when(state == value, state),  # Not of what is rotten.
    ("put", "exists"): lambda state, value: _when(state not in (NONE, value, _ROTTEN + value), state),
    ("put", "failed"): lambda state, value: (state,),
    ("put", "full"): lambda state, value: (state,),
    ("put", "damaged"): lambda state, value: _when(state.startswith(_ROTTEN), state),
    ("read", "is"): lambda state, value: _when(state == value, state),
    ("read", "damaged"): lambda state, value: _when(state.startswith(_ROTTEN), state),
    ("delete", "deleted"): lambda state, value: (NONE,),  # Also of a failure that was remembered.
    ("delete", "nothing"): lambda state, value: _when(state == NONE, state),
    ("delete", "refused"): lambda state, value: (state,),
    ("flip", "flipped"): lambda state, value: (_rotten(state),),
    ("flip", "perhaps"): lambda state, value: (state, _rotten(state)),  # The file may have been another one's by then.
}
_MAY_HAVE_HAPPENED: dict[str, Callable[[State, str], tuple[State, ...]]] = {
    "put": lambda state, value: _when(state == NONE, value),
    "read": lambda state, value: (),
    "delete": lambda state, value: _when(state != NONE, NONE),
}


def _after(one: Operation, state: State) -> set[State]:
    """The states that `one` can leave behind. What is rotten may have been put aside before."""
    step = _MAY_HAVE_HAPPENED[one.kind] if one.answer == "unknown" else _STEPS[one.kind, one.answer]
    befores = (state, NONE) if state.startswith(_ROTTEN) else (state,)
    return {after for before in befores for after in step(before, one.value)}


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
            stack += [(done | {number}, after) for after in _after(one, state)]
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


def cut_short(
    leases: Sequence[tuple[float, float]], lease_s: float, ends: Sequence[tuple[float, float]]
) -> list[tuple[float, float]]:
    """The leases, each asked for `lease_s` before its end, where each of `ends` (began, over) may have ended those before."""
    return [
        (granted_at, min([ends_at, *(began for began, over in ends if ends_at - lease_s < over)]))
        for granted_at, ends_at in leases
    ]
