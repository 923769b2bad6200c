"""Between the store's records and the read service's messages."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from slotstream.store.catalogue.queries import ListQuery, Standing, Usage
from slotstream.store.records import SampleKey, SampleRecord, State
from slotstream.store.upkeep.preview import Forecast
from slotstream.store.upkeep.restoring import Restored
from slotstream.store.upkeep.retention import Policy, Rule
from slotstream.store.upkeep.scrubbing import Progress
from slotstream.store.upkeep.verifying import Verdict
from slotstream.v1 import sample_pb2, samples_pb2
from slotstream.wire.errors import BadParams
from slotstream.wire.names import DEFAULT_NAMESPACE

PAGE_SIZE_DEFAULT = 100
_LATEST_NS = (1 << 63) - 1
_TO_WIRE = {
    State.ARRIVING: sample_pb2.SAMPLE_STATE_ARRIVING,
    State.COMMITTED: sample_pb2.SAMPLE_STATE_COMMITTED,
    State.FAILED: sample_pb2.SAMPLE_STATE_FAILED,
}
_FROM_WIRE = {wire: state for state, wire in _TO_WIRE.items()}


def key_of(namespace: str, sample_id: str) -> SampleKey:
    """Raises BadNamespace and BadSampleId. An empty namespace is the default one."""
    return SampleKey.checked(namespace or DEFAULT_NAMESPACE, sample_id)


def info_of(
    record: SampleRecord,
    standing: Standing | None = None,
    rule: Rule | None = None,
    refused: Mapping[str, int] = MappingProxyType({}),
) -> sample_pb2.SampleInfo:
    """With its standing and its namespace's rule, also what they say; without, those fields are empty.

    `refused`: the samples that failed under the id, by code. A row that is not committed says itself why.
    """
    expires = rule.expires_unix_ns(record.committed_unix_ns) if rule and record.state is State.COMMITTED else 0
    standing = standing or Standing()
    return sample_pb2.SampleInfo(
        reads=standing.reads,
        acked_unix_ns=standing.acked_unix_ns,
        leased_until_unix_ns=standing.leased_until_unix_ns,
        expires_unix_ns=min(expires, _LATEST_NS),
        namespace=record.namespace,
        sample_id=record.sample_id,
        state=_TO_WIRE[record.state],
        model=record.model,
        dtype=record.dtype,
        layer_ids=record.layer_ids,
        hidden_size=record.hidden_size,
        num_tokens=record.num_tokens,
        file_bytes=record.file_bytes,
        created_unix_ns=record.created_unix_ns,
        committed_unix_ns=record.committed_unix_ns,
        error_code=record.error_code,
        error_message=record.error_message,
        tags=record.tags,
        metadata=record.metadata,
        refused=refused if record.state is State.COMMITTED else {},
        header_xxh3=header_xxh3_of(record),
    )


def header_xxh3_of(record: SampleRecord) -> int | None:
    """Of the file that a committed sample has; None of what has none."""
    has_file = record.state is State.COMMITTED and record.header_xxh3 and not record.attempt
    return int(record.header_xxh3, 16) if has_file else None


def query_of(request: samples_pb2.ListRequest, spaces: tuple[str, ...] | None) -> ListQuery:
    """A listing of samples in these namespaces (None: every one). Raises BadParams."""
    if request.state not in _FROM_WIRE and request.state != sample_pb2.SAMPLE_STATE_UNSPECIFIED:
        raise BadParams(f"sample state {request.state} is not known")
    return ListQuery(
        namespaces=spaces,
        model=request.model,
        state=_FROM_WIRE.get(request.state),
        created_from_unix_ns=request.created_from_unix_ns,
        created_until_unix_ns=request.created_until_unix_ns,
        tags=dict(request.tags),
        page_size=request.page_size or PAGE_SIZE_DEFAULT,
        page_token=request.page_token,
        request_id=request.request_id,
    )


def usage_of(usage: Usage, policy: Policy) -> samples_pb2.NamespaceUsage:
    limits = policy.rule_for(usage.namespace).limits()
    return samples_pb2.NamespaceUsage(
        namespace=usage.namespace,
        samples=usage.samples,
        bytes=usage.bytes,
        failed=usage.failed,
        limits={name: str(value).lower() if isinstance(value, bool) else f"{value:.15g}" for name, value in limits.items()},
    )


def scrub_of(progress: Progress, every_s: float) -> samples_pb2.ScrubProgress:
    return samples_pb2.ScrubProgress(
        every_s=every_s,
        begun_unix_ns=progress.begun_unix_ns,
        ended_unix_ns=progress.ended_unix_ns,
        samples=progress.samples,
        damaged=progress.damaged,
    )


def reply_of(verdict: Verdict, *, quarantined: bool = False) -> samples_pb2.VerifyReply:
    return samples_pb2.VerifyReply(
        namespace=verdict.namespace,
        sample_id=verdict.sample_id,
        damage=verdict.damage,
        message=verdict.message,
        bytes=verdict.bytes_checked,
        quarantined=quarantined,
    )


def forecast_of(one: Forecast, held: frozenset[str], age_held: frozenset[str]) -> samples_pb2.RetentionReply:
    return samples_pb2.RetentionReply(
        namespace=one.namespace,
        key=one.key,
        samples=one.samples,
        bytes=one.bytes,
        stored=one.stored,
        held=one.namespace in held,
        age_held=one.namespace in age_held,
    )


def restored_of(one: Restored) -> samples_pb2.RestoreReply:
    return samples_pb2.RestoreReply(
        namespace=one.key.namespace,
        sample_id=one.key.sample_id,
        file=one.file,
        restored=not one.kept,
        damage=one.damage,
        message=one.kept,
        bytes=one.bytes_checked,
    )
