"""The calls of the Samples service that look at everything stored: usage, checks, and what comes back from the quarantine."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import grpc

from slotstream.server.access.gate import Gate, Session
from slotstream.server.access.limits import VERIFICATIONS
from slotstream.server.housekeeping import Housekeeping
from slotstream.server.parts import ServerParts
from slotstream.server.samples import convert
from slotstream.server.samples.calls import Calls, Context, key_for, parsed, spaces_for, stream, unary
from slotstream.store.samples import SampleStore
from slotstream.store.upkeep.retention import Policy
from slotstream.store.upkeep.verifying import Verdict
from slotstream.v1 import samples_pb2 as pb
from slotstream.wire.errors import BadParams, ConfigError
from slotstream.wire.names import check_namespace

USAGE_PAGE = 1000
_T = TypeVar("_T")
_VERIFYING = 4  # At a time: each step keeps a thread and the disk busy, and others need threads too.


class AdminCalls:
    """Usage, Verify and Restore. Belongs to the event loop."""

    def __init__(self, parts: ServerParts[SampleStore], calls: Calls, housekeeping: Housekeeping) -> None:
        self._calls = calls
        self._housekeeping = housekeeping
        self._config, self._store, self._waiters = parts.config, parts.store, parts.waiters
        self._verify_shares = VERIFICATIONS.shares(parts.config)
        self._verify_turns = asyncio.Semaphore(_VERIFYING)

    def handlers(self, gate: Gate) -> dict[str, grpc.RpcMethodHandler[Any, Any]]:
        return {
            "Usage": unary(self._usage, gate, pb.UsageReply),
            "Verify": stream(self._verify, gate, pb.VerifyReply),
            "Restore": stream(self._restore, gate, pb.RestoreReply),
            "Retention": stream(self._retention, gate, pb.RetentionReply),
        }

    async def _usage(self, gate: Gate, context: Context) -> pb.UsageReply:
        async with self._calls.answering("Usage", gate, context) as (session, raw):
            request = parsed(pb.UsageRequest, raw)
            return await self._calls.check(
                request.namespace, self._usage_of, request, spaces_for(session, "read", request.namespace)
            )

    def _usage_of(self, request: pb.UsageRequest, spaces: tuple[str, ...] | None) -> pb.UsageReply:
        """Of the namespaces that the caller may read. The disk, the quarantine and the clock only for one who may read all."""
        policy, lifetimes = self._housekeeping.policy, self._store.lifetimes
        if spaces is not None:
            return pb.UsageReply(namespaces=[convert.usage_of(lifetimes.usage(space), policy) for space in spaces])
        after = check_namespace(request.page_token) if request.page_token else ""
        page = lifetimes.usages(after, USAGE_PAGE)
        files, nbytes = lifetimes.quarantine_totals()
        return pb.UsageReply(
            namespaces=[convert.usage_of(usage, policy) for usage in page],
            next_page_token=page[-1].namespace if len(page) == USAGE_PAGE else "",
            whole=True,
            free_bytes=self._store.free_bytes(),
            free_bytes_target=policy.free_bytes_target,
            quarantined_files=files,
            quarantined_bytes=nbytes,
            scrub=convert.scrub_of(self._housekeeping.scrub_progress, self._config.scrub_every_s),
            clock=lifetimes.watch.trouble,
            age_held=sorted(self._housekeeping.age_held),
            rules_held=sorted(self._housekeeping.rules.held),
            rules_wait_s=self._housekeeping.rules.wait_s,
        )

    async def _verify(self, gate: Gate, context: Context) -> None:
        async with self._calls.answering("Verify", gate, context) as (session, raw):
            request = parsed(pb.VerifyRequest, raw)
            verdicts = self._verdicts(session, request)
            with self._verify_shares.one(session.peer):
                while (verdict := await self._step(request.namespace, next, verdicts, None)) is not None:
                    done = None
                    if request.quarantine:
                        done = await self._calls.check(request.namespace, self._store.lifetimes.quarantine, verdict)
                    await self._calls.write(context, convert.reply_of(verdict, quarantined=done is not None))

    async def _restore(self, gate: Gate, context: Context) -> None:
        async with self._calls.answering("Restore", gate, context) as (session, raw):
            request = parsed(pb.RestoreRequest, raw)
            if request.sample_id:
                key = key_for(session, "admin", request)
                done = self._store.restore(key.namespace, key.sample_id)
            else:
                spaces = spaces_for(session, "admin", request.namespace)
                namespaces = (request.namespace,) if spaces is None else spaces
                done = itertools.chain.from_iterable(self._store.restore(namespace) for namespace in namespaces)
            with self._verify_shares.one(session.peer):
                while (one := await self._step(request.namespace, next, done, None)) is not None:
                    if not one.kept:
                        self._waiters.notify(one.key)
                    await self._calls.write(context, convert.restored_of(one))

    async def _retention(self, gate: Gate, context: Context) -> None:
        async with self._calls.answering("Retention", gate, context) as (session, raw):
            request = parsed(pb.RetentionRequest, raw)
            spaces = spaces_for(session, "admin", request.namespace)
            with self._verify_shares.one(session.peer):
                asked = self._accepted if request.accept else self._foreseen
                for reply in await self._step(request.namespace, asked, request, spaces):
                    await self._calls.write(context, reply)

    async def _step(self, namespace: str, call: Callable[..., _T], *arguments: Any) -> _T:
        """One sample of a verification, or all of a forecast, when it is its turn."""
        async with self._verify_turns:
            return await self._calls.check(namespace, call, *arguments)

    def _foreseen(self, request: pb.RetentionRequest, spaces: tuple[str, ...] | None) -> list[pb.RetentionReply]:
        rules = self._housekeeping.rules
        policy = None
        if request.HasField("rules"):
            try:
                policy = Policy.from_text(request.rules, "these rules", free_bytes_min=self._config.free_bytes_min)
            except ConfigError as error:
                raise BadParams(str(error)) from error
        foreseen = rules.foreseen(policy)
        held = rules.held if policy is None else frozenset()
        replies = [convert.forecast_of(one, held, foreseen.age_held) for one in foreseen.forecasts]
        silent = (held | foreseen.age_held) - {one.namespace for one in foreseen.forecasts}
        replies += [pb.RetentionReply(namespace=n, held=n in held, age_held=n in foreseen.age_held) for n in sorted(silent)]
        return [reply for reply in replies if spaces is None or reply.namespace in spaces]

    def _accepted(self, request: pb.RetentionRequest, spaces: tuple[str, ...] | None) -> list[pb.RetentionReply]:
        if request.HasField("rules"):
            raise BadParams("what is accepted are the rules that the server runs with, and no others")
        return [pb.RetentionReply(namespace=name) for name in sorted(self._housekeeping.accept_rules(spaces))]

    def _verdicts(self, session: Session, request: pb.VerifyRequest) -> Iterator[Verdict]:
        """Of one sample, with the right to read it. Of all in the namespaces in which the caller is admin."""
        if request.sample_id:
            # Taking a sample out of service is more than looking at it.
            key = key_for(session, "admin" if request.quarantine else "read", request)
            return _once(lambda: self._store.verify(key))
        spaces = spaces_for(session, "admin", request.namespace)
        namespaces = (request.namespace,) if spaces is None else spaces
        return itertools.chain.from_iterable(self._store.verify_all(namespace) for namespace in namespaces)


def _once(verify: Callable[[], Verdict]) -> Iterator[Verdict]:
    yield verify()
