"""Is every promised sample accounted for? Compares senders' ledgers with what the server has."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ledger import NAMESPACE, Promise, Try, row_data, token_ids

from slotstream.client import SampleNotFound, connect
from slotstream.client.client import Client
from slotstream.client.info import SampleInfo, SampleState
from slotstream.connector.sending.verdicts import is_final


@dataclass
class Account:
    """What was found: how often each case, and every sample for which there is no excuse."""

    cases: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)


def settle(
    address: str, promised: Iterable[Promise], *, spool: bool, tried: Mapping[str, Sequence[Try]] | None = None
) -> Account:
    """Holds each promise to its rule.

        the sender heard       the server must have
        --------------------   ------------------------------------------------------------------------------------------
        committed              the sample, with exactly its rows and token ids: always
        failed, or nothing as  FAILED with a reason; or the sample, whole and right (its Committed was lost on the way); or,
        it was told to end     without a `spool`, nothing (the server was away, and its sender ended before it was back)
        nothing, as it was     FAILED with a reason; or the sample, whole and right; or nothing, as it died before it could
        killed                 say a word
        nothing, and it lived  never

    No sample is there, none is arriving, and all that is stored is sound.

    What the server said on its streams (`tried`) is true: a sample that it said had failed was not stored by that try, and none
    failed for good that its sender had not given up itself.
    """
    account = Account()
    with connect(address) as client:
        listed = {info.sample_id: info for info in client.list(namespace=NAMESPACE)}
        for promise in promised:
            info = listed.pop(promise.sample_id, None)
            _settle_one(client, promise, info, account, spool)
            committed = info is not None and info.state is SampleState.COMMITTED
            account.wrong += lies((tried or {}).get(promise.sample_id, ()), promise.sample_id, committed=committed)
        account.wrong += [f"{sample_id}: nobody promised it" for sample_id in listed]
        account.wrong += [f"{v.sample_id}: {v.damage}: {v.message}" for v in client.verify(namespace=NAMESPACE) if not v.sound]
    return account


def lies(made: Sequence[Try], sample_id: str, *, committed: bool) -> Iterator[str]:
    """What the server said of a sample's tries that was not so, or more than it could know."""
    may_be_stored = False
    if sum(one.said == "committed" for one in made) > 1:
        yield f"{sample_id}: it was committed twice"
    for one in made:
        is_failure = one.said not in ("", "committed", "duplicate")
        if one.said == "duplicate" and not may_be_stored:
            yield f"{sample_id}: it was stored by a try of which the server said that it had failed"
        if is_failure and one.said != one.gave_up and is_final(one.said):
            yield f"{sample_id}: the server said {one.said}, which is final, of a sample that could be sent again"
        may_be_stored |= not is_failure
    if made and committed and not may_be_stored:
        yield f"{sample_id}: it is stored, and the server said of every try that it had failed"


def _settle_one(client: Client, promise: Promise, info: SampleInfo | None, account: Account, spool: bool) -> None:
    heard = promise.outcome or f"nothing ({promise.sender_end})"
    has = "nothing" if info is None else str(info.state).lower()
    account.cases[f"{heard}, server has {has}"] += 1

    def wrong(why: str) -> None:
        account.wrong.append(f"{promise.sample_id} ({promise.rows} rows; heard {heard} {promise.code}): {why}")

    if info is None:
        if promise.outcome == "committed":
            wrong("it is not there")
        elif spool and (promise.outcome == "failed" or promise.sender_end == "closed"):
            wrong("the server never heard of its failure")
    elif info.state is SampleState.ARRIVING:
        wrong("it is still arriving")
    elif info.state is SampleState.FAILED:
        if promise.outcome == "committed":
            wrong(f"the server says that it failed: {info.error_code}")
        elif not info.error_code:
            wrong("it failed without a reason")
    elif not _is_right(client, promise):
        wrong("its rows or token ids are not those that were sent")
    if not promise.outcome and not promise.sender_end:
        wrong("nothing was ever heard of it")


def _is_right(client: Client, promise: Promise) -> bool:
    try:
        with client.read(promise.sample_id, namespace=NAMESPACE, wait_s=0) as reader:
            ids = list(reader.token_ids)
            data = b"".join(bytes(block.data) for block in reader)
    except SampleNotFound:
        return False
    return data == row_data(promise.sample_id, promise.rows) and ids == token_ids(promise.sample_id, promise.rows)
