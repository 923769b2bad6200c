"""Rules that differ from those of the last run are shown before they act, and wait.

What a file of rules means is plain only once one sees what it deletes: a wrong unit in `age_s_max` is a whole store. So rules
that changed delete nothing for `grace_s`, and the log says what they would. After that they delete nothing in a namespace of
which they would at once take more than half, until somebody accepts them: `slotstream retention --accept`.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Iterable
from dataclasses import replace

from slotstream.store.upkeep.lifetimes import Lifetimes
from slotstream.store.upkeep.preview import Imagined, Preview, preview
from slotstream.store.upkeep.retention import UNLIMITED, Policy, Rule
from slotstream.wire.errors import SlotStreamError
from slotstream.wire.hashing import xxh3

_log = logging.getLogger(__name__)
_META = "rules"
_NOTHING = Rule(failed_age_s_max=UNLIMITED)  # Not even failed samples are forgotten, as they are without a rule.
_AHEAD_NS = 60 * 10**9  # What is too old within a minute counts as too old: samples need not be old to be all that there is.
_LINES_MAX = 50


class NewRules:
    """The rules of one store. Thread safe. `policy`: as they are configured; `in_force`: what may be applied now."""

    def __init__(self, lifetimes: Lifetimes, policy: Policy, free_bytes: Callable[[], int], grace_s: float) -> None:
        self.policy = policy
        self.in_force = Policy(default=_NOTHING)
        self.held: frozenset[str] = frozenset()  # Namespaces in which nothing is deleted until somebody accepts it.
        self._lifetimes = lifetimes
        self._free_bytes = free_bytes
        self._digest = digest_of(policy)
        self._grace_ns = round(grace_s * 1e9)
        self._until: int | None = None  # By the clock that is never set.
        self._accepted: set[str] = set()
        self._settled = False
        self._to_remember = ""  # What the catalogue refused, until it takes it.
        self._lock = threading.Lock()

    @property
    def wait_s(self) -> float:
        """For how long nothing is deleted yet, because the rules changed."""
        until = self._until
        return 0.0 if self._settled or until is None else max(0.0, (until - self._lifetimes.clock.elapsed()) / 1e9)

    def look(self) -> bool:
        """Goes on with what the rules are waiting for; whether they begin to act with this call.

        Raises what asking the catalogue raises; the next call tries again.
        """
        with self._lock:
            if self._settled:
                self._remember()
                return False
            if self._until is None and not self._begin():
                return self._settled
            if self._until is not None and self._lifetimes.clock.elapsed() < self._until:
                return False
            self._settle(self.foreseen(ahead_ns=_AHEAD_NS).emptied() - self._accepted)
            return True

    def accept(self, namespaces: Iterable[str] | None = None) -> frozenset[str]:
        """The rules may delete what they say, in these namespaces or in all: they wait no longer there. Which were held."""
        with self._lock:
            if not self._settled and namespaces is not None:
                # The others are still waiting: what is accepted is not held once that is over.
                self._accepted |= set(namespaces)
                return frozenset()
            released = self.held if namespaces is None else self.held & frozenset(namespaces)
            self._settle(self.held - released)
            if released:
                _log.warning("the rules are accepted, and act in %s too", sorted(released))
            return released

    def foreseen(self, policy: Policy | None = None, *, ahead_ns: int | None = None) -> Preview:
        """What `policy`, by default the configured one, would delete now. Deletes nothing. Raises what the catalogue raises.

        `ahead_ns`: as of so much later, and as if the clock were not in doubt: that doubt may end at any moment.
        """
        lifetimes = self._lifetimes
        now = lifetimes.clock.now() + (ahead_ns or 0)
        doubt = lifetimes.watch.trouble if ahead_ns is None else ""
        store = Imagined(lifetimes.questions, now, doubt)
        return preview(store, self.policy if policy is None else policy, self._free_bytes)

    def _begin(self) -> bool:
        """Whether the rules changed since the last run, and have something to delete: then the log says what."""
        digest, held = _parsed(self._lifetimes.remembered(_META))
        if digest == self._digest:
            self._settle(held - self._accepted)
            return False
        foreseen = self.foreseen(ahead_ns=_AHEAD_NS)
        if not self.policy.has_rules or not foreseen.forecasts:
            self._settle(frozenset())
            return False
        _log.warning(
            "the rules of retention changed: nothing is deleted for %g seconds; after that they would delete:",
            self._grace_ns / 1e9,
        )
        for one in foreseen.forecasts[:_LINES_MAX]:
            what = (one.namespace, one.key, one.samples, one.stored, one.bytes)
            _log.warning("  in %s by %s: %d samples, of %d, with %d bytes", *what)
        if (more := len(foreseen.forecasts) - _LINES_MAX) > 0:
            _log.warning("  and more in %d other lines: slotstream retention shows them", more)
        self._until = self._lifetimes.clock.elapsed() + self._grace_ns
        return True

    def _settle(self, held: frozenset[str]) -> None:
        if held - self.held:
            _log.warning(
                "the rules would delete more than half of what is stored in %s: nothing is deleted there until "
                "somebody says that they are right: slotstream retention --accept",
                sorted(held),
            )
        self.held = held
        self.in_force = _sparing(self.policy, held)
        self._settled = True
        self._to_remember = json.dumps([self._digest, sorted(held)])
        if error := self._remember():
            _log.warning("that these rules are known cannot be remembered yet: %s", error)

    def _remember(self) -> SlotStreamError | None:
        """Otherwise the next start takes them for new ones. Why the catalogue does not take it; the next `look` tries again."""
        if self._to_remember:
            try:
                self._lifetimes.remember(_META, self._to_remember, durable=True)
            except SlotStreamError as error:
                return error
            self._to_remember = ""
        return None


def digest_of(policy: Policy) -> str:
    """Equal for two policies that say the same, however their files are written."""
    rules = {"default": policy.default, **{f"namespace {name}": rule for name, rule in policy.namespaces.items()}}
    said = {name: {key: float(value) for key, value in rule.limits().items()} for name, rule in rules.items()}
    room = [policy.free_bytes_target, *([policy.bucket_bytes_max] if policy.bucket_bytes_max else ())]
    return f"{xxh3(json.dumps([said, *room], sort_keys=True).encode()):016x}"


def _sparing(policy: Policy, namespaces: frozenset[str]) -> Policy:
    """`policy`, without any rule in these namespaces."""
    return replace(policy, namespaces={**policy.namespaces, **dict.fromkeys(namespaces, _NOTHING)})


def _parsed(text: str | None) -> tuple[str, frozenset[str]]:
    try:
        digest, held = json.loads(text or "")
        return str(digest), frozenset(str(name) for name in held)
    except (ValueError, TypeError):
        return "", frozenset()  # Nothing, or another version's.
