"""Samples of an engine's answers, read back and compared: each that was asked for, and no other."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence

from slotstream.certify.findings import REFUSED, UNASKED, WRONG_LAYERS, Findings
from slotstream.certify.load import NAMESPACE, Answer
from slotstream.client import Client, Sample, SampleFailed
from slotstream.truth.compare import Truth
from slotstream.wire.errors import SlotStreamError

_WAIT_S, _HURRY_S = 60.0, 2.0


def check(
    client: Client,
    answers: Sequence[Answer],
    layer_ids: Sequence[int],
    truth: Truth,
    findings: Findings,
    told: Callable[[], None],
    *,
    namespace: str = NAMESPACE,
    wait_s: float = _WAIT_S,
) -> None:
    """Every sample of `answers`, and that there is no other. Raises what `Client.list` raises.

    wait_s: for a sample, after its text; once one did not come, the others get a moment each.
    """
    for answer in answers:
        began = time.monotonic()
        get = functools.partial(client.get, answer.request.name, namespace=namespace, wait_s=wait_s)
        _check(get, answer, layer_ids, truth, findings)
        if time.monotonic() - began >= wait_s:
            wait_s = min(wait_s, _HURRY_S)
        told()
    asked = {answer.request.name for answer in answers if answer.request.capture}
    for info in client.list(namespace=namespace):
        if info.sample_id not in asked:
            findings.add(UNASKED, info.sample_id, None, f"{info.num_tokens} rows that nobody asked for")


def _check(get: Callable[[], Sample], answer: Answer, layer_ids: Sequence[int], truth: Truth, findings: Findings) -> None:
    request, name = answer.request, answer.request.name
    if answer.failure:
        findings.add(REFUSED, name, None, answer.failure)
        return
    if not request.capture:
        return
    tokens = request.prompt + (answer.tokens[:-1] if request.outputs else ())
    said = answer.said
    if said is None or "error" in said:
        error = {} if said is None else said["error"]
        why = f"{error.get('code')}: {error.get('message')}" if error else "the answer says nothing of a capture"
        findings.missing(name, len(tokens), why)
        return
    try:
        sample = get()
    except SampleFailed as error:
        findings.missing(name, len(tokens), f"{error.reason or error.code}: {error}")
        return
    except SlotStreamError as error:
        findings.missing(name, len(tokens), f"{error.code}: {error}")
        return
    findings.samples += 1
    if list(sample.layer_ids) != list(layer_ids):
        wanted = ",".join(map(truth.name_of, layer_ids))
        findings.add(WRONG_LAYERS, name, None, f"layers {','.join(sample.layer_names)}, and not {wanted}")
        return
    findings.tokens_differ(name, sample.token_ids.tolist(), tokens)
    if len(sample.token_ids) < len(tokens):
        findings.lost += len(tokens) - len(sample.token_ids)
    if findings.fits(name, sample.hidden_states.shape, len(sample.token_ids), layer_ids, truth):
        findings.output_rows += max(0, len(sample.token_ids) - len(request.prompt))
        findings.compare(name, sample.hidden_states, sample.token_ids, layer_ids, truth)
