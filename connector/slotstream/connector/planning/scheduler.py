"""The scheduler half: decides, for each engine step, which rows of which requests are read, and answers the callers.

It knows tokens and positions, never slots: where rows lie is the worker's business. Facts about vLLM are those of 0.32
and 0.33 (docs/design.md names the sources).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from slotstream.common.logtext import log_text
from slotstream.common.throttle import Throttle
from slotstream.connector.counters import Counters
from slotstream.connector.faults import SampleFault
from slotstream.connector.plan import EMPTY_PLAN, SampleAbort, SampleOpen, StepPlan
from slotstream.connector.planning.captured_request import CapturedRequest, refused_sample
from slotstream.connector.planning.external_loads import ExternalLoads
from slotstream.connector.planning.request_params import CaptureParams, names_of, parse_params, sequence_of
from slotstream.connector.planning.row_places import BlockPlaces, RowPlaces
from slotstream.connector.planning.row_planner import RowPlanner
from slotstream.connector.planning.sessions import Sessions, asked_of
from slotstream.connector.planning.typos import Typos, warning_of
from slotstream.connector.vllm_config import ConnectorConfig
from slotstream.transport.logs import connector_logger
from slotstream.wire.errors import (
    AlreadyExists,
    BadTokenRange,
    CaptureAborted,
    InternalFault,
    RowsNotComputed,
    ServerDraining,
    ServerUnavailable,
    SlotStreamError,
    TooLarge,
    UnsupportedRequest,
)
from slotstream.wire.names import ROWS_MAX, layer_names

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

logger = connector_logger(__name__)

_RESETS_MAX = 100
_GAUGES_EVERY_S = 1.0


@dataclass(slots=True)
class _Pending:
    """What the next plan must carry besides the rows of running requests."""

    opens: list[SampleOpen] = field(default_factory=list)
    refused: list[SampleOpen] = field(default_factory=list)  # Of requests that are aborted at once.
    aborts: list[SampleAbort] = field(default_factory=list)
    releases: list[str] = field(default_factory=list)


class SchedulerHalf:
    """Runs in the engine core's process. `server_problem` says why the server has taken no samples for longer than so many
    seconds, or None.

    `group` is the index, in a request's block tables, of the KV-cache group whose slots name its rows, and whose blocks hold
    `block_size` tokens. `places`: where rows are; without, in that group's own cache layer. `may_wait`: see `RowPlanner`.
    """

    def __init__(
        self,
        config: ConnectorConfig,
        group: int,
        block_size: int,
        max_model_len: int,
        server_problem: Callable[[float], SlotStreamError | None],
        places: RowPlaces | None = None,
        clock: Callable[[], float] = time.monotonic,
        *,
        may_wait: bool = True,
    ) -> None:
        self._config = config
        self._servers = ",".join(config.options.servers)
        self._layer_names = layer_names(config.layer_ids, config.metadata)
        self._max_model_len = max_model_len
        self._server_problem = server_problem
        self._no_room = False  # The server is away and the worker can hold no more.
        self._captures: dict[str, CapturedRequest] = {}  # until the request is finished
        self._live: dict[str, CapturedRequest] = {}  # those with rows still to be planned
        self._asked: dict[str, CaptureParams] = {}  # What waiting requests ask for, as far as it is known.
        self._refused: dict[str, SlotStreamError] = {}
        self._pending = _Pending()
        self._undelivered = EMPTY_PLAN
        self._counters = Counters()
        self._clock = clock
        self._told: dict[str, float] = {}  # The gauges, as they were last told.
        self._looked_at = -_GAUGES_EVERY_S
        self._was_live = False  # At the last `take_stats`, told or not: what the last capture changed is told at its end.
        self.tells_gauges = True  # Whether the last `take_stats` was to.
        self._throttle = Throttle(60.0, clock)
        self._unsaid = 0  # Refusals that the log has not counted yet.
        self._sessions = Sessions()
        self._typos = Typos()
        self._external_loads = ExternalLoads(group, block_size)
        self._rows = RowPlanner(places or BlockPlaces(), group, config.options.output_rows_per_chunk, may_wait=may_wait)

    # -- hooks

    def on_new(self, request: Request) -> None:
        """A request came. Rows of a prefix-cache hit may exist nowhere: one that is captured then computes all its tokens.

        It still fills the cache, and the hits of all others stay as they are.
        """
        if not self._rows.computes_all or (request.kv_transfer_params or {}).get("do_remote_prefill"):
            return
        try:
            params = self._params(request)
        except SlotStreamError:
            return  # It is refused when it is scheduled.
        if params.capture and self._sessions.has(request):
            return
        if not getattr(request, "resumable", False):  # Else it asks anew with each chunk.
            self._asked[request.request_id] = params
        if params.capture and params.tokens[0] < request.num_prompt_tokens:
            request.skip_reading_prefix_cache = True

    def on_match(self, request: Request, hit_tokens: int) -> None:
        """vLLM found the first `hit_tokens` tokens of a request in its own prefix cache, and now asks who has more."""
        self._external_loads.on_match(request.request_id, hit_tokens)

    def on_alloc(self, request: Request, blocks: KVCacheBlocks) -> None:
        """vLLM gave a request its blocks: a new one, one resumed after a preemption, or one whose load is over."""
        req_id = request.request_id
        self._external_loads.on_alloc(req_id, blocks)
        if req_id in self._refused or req_id in self._captures:
            return
        self._typos.look(asked_of(request))
        try:
            self._admit(request)
        except SlotStreamError as error:
            self._refuse_request(request, error)

    def plan(self, output: SchedulerOutput) -> StepPlan:
        """The plan of the step that `output` schedules."""
        if self._live or not self._external_loads.idle:
            self._plan_step(output)
        pending = self._pending
        if pending.refused:
            # Before these: else a reader that waits for the id could hear of a refusal, and not of the sample.
            for capture in self._live.values():
                if capture.hit_tokens is not None:
                    self._open(capture)
        rows, finishes, table = self._rows.end_plan(output, self._live)
        # Behind a step that computes nothing, vLLM may give the device's memory away.
        beside = rows != () and self._live != {} and output.num_scheduled_tokens != {} and self._rows.computes_all
        if pending.opens or pending.refused or pending.aborts or pending.releases:
            # Only now: had anything raised, the blocks that vLLM holds for us would never be released.
            self._pending = _Pending()
            opens, aborts, releases = (*pending.opens, *pending.refused), tuple(pending.aborts), tuple(pending.releases)
            self._undelivered = StepPlan(opens, rows, finishes, aborts, releases, table, beside)
        elif rows or finishes or table:
            self._undelivered = StepPlan((), rows, finishes, (), (), table, beside)
        else:
            return EMPTY_PLAN
        return self._undelivered

    def delivered(self) -> None:
        """The last plan went out."""
        self._undelivered = EMPTY_PLAN

    def on_finished(self, request: Request, block_ids: Sequence[int]) -> tuple[bool, dict[str, Any] | None]:
        """A request ended; `block_ids` is its table in our group. Returns (hold the blocks, the response's params)."""
        req_id = request.request_id
        self._external_loads.forget(req_id)
        self._asked.pop(req_id, None)
        refused = self._refused.pop(req_id, None)
        capture = self._captures.get(req_id)
        live = self._live.pop(req_id, None)
        if refused is None and capture is None:
            return False, None
        hold, error = False, refused
        if live is not None and refused is None:
            hold, error = self._finish_live(live, block_ids)
        answer = self._response(request, capture, error)
        self._captures.pop(req_id, None)  # Last: `forget` looks at it, should anything have raised.
        return hold, answer

    def on_faults(self, faults: Sequence[SampleFault]) -> None:
        """The worker gave samples up. Answers that are still to come say so."""
        for fault in faults:
            self._no_room |= fault.code == ServerUnavailable.code
            capture = self._captures.get(fault.req_id)
            if capture is not None:
                self._let_go(fault.req_id)
                self._refused[fault.req_id] = _Relayed(fault.code, fault.message)

    def on_cache_reset(self) -> None:
        """vLLM dropped its caches, as is done when weights are replaced: samples that have rows already will say so."""
        for capture in self._live.values():
            row = self._rows.first_row_after_reset(capture)
            if 0 < row < capture.stop - capture.start and row not in capture.resets and len(capture.resets) < _RESETS_MAX:
                capture.resets.append(row)

    def has_unread(self) -> bool:
        """Whether rows wait that a step can read which computes nothing."""
        return self._rows.has_unread(self._live)

    def why_off(self) -> SlotStreamError | None:
        """Why nothing new is captured now; None while something would be."""
        if self._no_room and self._server_problem(0.0) is None:
            self._no_room = False
        return self._server_problem(0.0 if self._no_room else self._config.options.outage_s_max)

    def take_stats(self) -> dict[str, float]:
        """Counts since the last call; once a second the gauges too where one changed, and at once where no capture is left.

        What is told goes to vLLM's front end, in a message of every step that has something to tell. A step looks no more
        often, whether or not anything is captured: an engine whose requests want no rows pays for every look.
        """
        counts, now = self._counters.take(), self._clock()
        is_last = not self._live and (self._was_live or bool(counts))
        self._was_live = bool(self._live)
        self.tells_gauges = is_last or now - self._looked_at >= _GAUGES_EVERY_S
        if not self.tells_gauges:
            return counts
        self._looked_at = now
        if self._unsaid:
            for code, unsaid in self._throttle.overdue().items():
                self._unsaid -= unsaid
                logger.warning("slotstream: %d more requests are not captured: %s", unsaid, code)
        gauges = dict(self._rows.gauges())
        if gauges != self._told:
            self._told = gauges
            counts |= gauges
        return counts

    def count_fault(self) -> None:
        """A hook raised."""
        self._counters.add("hook_faults")

    def fail_all(self) -> None:
        """After a fault in `plan`: no capture that it touched, and none that is live, can be trusted to be whole."""
        error = InternalFault("a fault of slotstream's own: the log says which")
        lost, self._undelivered = self._undelivered, EMPTY_PLAN
        # Rows in pages that the next plan would read are not to be had any more, either.
        waiting = self._rows.reset() if self._rows.computes_all else []
        self._pending.releases.extend(lost.releases)
        for req_id in (*waiting, *(finish.req_id for finish in lost.finishes)):
            self._pending.aborts.append(SampleAbort(req_id, error.code, str(error)))
            if req_id in self._captures:
                self._refused[req_id] = error
        self._pending.opens.extend(lost.opens)
        self._pending.aborts.extend(lost.aborts)
        for req_id, capture in list(self._live.items()):
            self._open_as_refused(capture)  # What its sample would have been is not asked: it may be this that raised.
            self._refuse(req_id, error)

    def forget(self, req_id: str) -> None:
        """After a fault in `on_finished`: vLLM frees the request's blocks now, and its sample must not stay open."""
        capture = self._captures.pop(req_id, None)
        self._let_go(req_id)
        self._asked.pop(req_id, None)
        self._refused.pop(req_id, None)
        self._external_loads.forget(req_id)
        pending = self._pending
        self._rows.drop(req_id)
        if capture is not None:
            self._open_as_refused(capture)
        pending.releases = [release for release in pending.releases if release != req_id]
        pending.aborts.append(SampleAbort(req_id, InternalFault.code, "a fault of slotstream's own: the log says which"))

    # -- admission

    def _admit(self, request: Request) -> None:
        """Begin the capture that a request asks for, if it asks for one. Raises SlotStreamError."""
        req_id = request.request_id
        params = self._asked.pop(req_id, None) or self._params(request)
        if not params.capture:
            return
        if request.prompt_token_ids is None or getattr(request, "prompt_embeds", None) is not None:
            raise UnsupportedRequest("prompts given as embeddings have no token ids to store")
        if self._sessions.has(request):
            raise UnsupportedRequest(
                "the prompt of a streaming input session grows while it runs: no sample would hold all of it"
            )
        start, stop = self._window(request, params)
        if params.loss_mask is not None:
            params.loss_mask.check(min(request.num_prompt_tokens + request.max_tokens, self._max_model_len))
        self._check_server()
        if self._rows.is_on_its_way(req_id):
            raise UnsupportedRequest("the last rows of another request with this id are on their way: give each its own id")
        capture = self._rows.begin(request, params, start, stop)
        same = [(other_id, other) for other_id, other in self._captures.items() if other.params.sample_id == params.sample_id]
        if any(other_id not in self._refused and capture.conflicts_with(other) for other_id, other in same):
            raise AlreadyExists("another request of this engine is captured under this sample_id, with other tokens")
        self._captures[req_id] = self._live[req_id] = capture

    def _params(self, request: Request) -> CaptureParams:
        """What a request asks for. Raises SlotStreamError."""
        options = self._config.options
        return parse_params(
            asked_of(request),
            req_id=request.request_id,
            sequence=sequence_of(request),
            namespace=options.namespace,
            capture=options.capture,
            include_output_tokens=options.include_output_tokens,
        )

    def _check_server(self) -> None:
        """Raises why there is no point in capturing: the server is away, for too long or with no room left to wait for it."""
        problem = self.why_off()
        if problem is not None:
            raise problem

    def _window(self, request: Request, params: CaptureParams) -> tuple[int, int]:
        """Positions [start, stop) to capture: exact for a prompt, an upper bound with output tokens."""
        prompt = request.num_prompt_tokens
        start, stop = params.tokens
        end = prompt
        if params.include_output_tokens:
            # The last sampled token is never run through the model: it has no row.
            end = min(prompt + request.max_tokens - 1, self._max_model_len)
        if stop is not None and stop > end:
            what = "that prompt and output can have" if params.include_output_tokens else "of the prompt"
            raise BadTokenRange(f"tokens [{start}, {stop}] reach past the {end} rows {what}")
        stop = end if stop is None else stop
        if start >= stop:
            raise BadTokenRange(f"tokens begin at {start}, but there are only {stop} rows")
        if stop - start > ROWS_MAX:
            raise TooLarge(f"{stop - start} rows are more than the {ROWS_MAX} a sample may have")
        return start, stop

    def _refuse(self, req_id: str, error: SlotStreamError) -> None:
        """Fail a capture from here on. The worker is told, which tells the server and the log."""
        live = self._let_go(req_id)
        self._refused[req_id] = error
        if live is not None:
            if live.hit_tokens is not None:
                self._open(live)
            else:
                self._open_as_refused(live)
            self._pending.aborts.append(SampleAbort(req_id, error.code, str(error)))

    def _refuse_request(self, request: Request, error: SlotStreamError) -> None:
        """Fail a capture that has not begun, under the names that it asked for, as far as they can be."""
        req_id = request.request_id
        self._refused[req_id] = error
        # Of a request whose id has rows on their way, what is said would be taken for that one's.
        if not isinstance(error, ServerUnavailable | ServerDraining) and not self._rows.is_on_its_way(req_id):
            options = self._config.options
            names = names_of(
                asked_of(request),
                req_id=req_id,
                sequence=sequence_of(request),
                namespace=options.namespace,
                include_output_tokens=options.include_output_tokens,
            )
            self._pending.refused.append(refused_sample(req_id, *names))
            self._pending.aborts.append(SampleAbort(req_id, error.code, str(error)))
            return
        self._counters.add("samples_failed", code=error.code)  # There is nobody to tell.
        unsaid = self._throttle.admit(error.code)
        if unsaid is None:
            self._unsaid += 1
        else:
            self._unsaid -= unsaid
            more = f" ({unsaid} more with this code since the last such line)" if unsaid else ""
            logger.warning("slotstream: request %s is not captured: %s%s", req_id, log_text(error.code, str(error)), more)

    def _open(self, capture: CapturedRequest) -> None:
        """Have the next plan say that a sample begins, unless one did. That comes with its first rows and no earlier: what is
        said wakes the thread that carries it, and a step with a prompt's tokens has no time for that.
        """
        if not capture.opened:
            self._pending.opens.append(capture.sample_open())
            capture.opened = True

    def _open_as_refused(self, capture: CapturedRequest) -> None:
        """The same of a sample that is aborted at once, by its names alone."""
        if not capture.opened:
            self._pending.refused.append(capture.refused())
            capture.opened = True

    def _let_go(self, req_id: str) -> CapturedRequest | None:
        """No more rows of a request are planned; what was captured, if it was live."""
        self._rows.end(req_id)
        return self._live.pop(req_id, None)

    def _refuse_loaded(self, tables: Mapping[str, Sequence[int]], computed: Mapping[str, int]) -> None:
        """Fail the captures that want rows of tokens which another connector loaded; `tables` are of whom to look at."""
        for req_id, table in tables.items():
            capture = self._live.get(req_id)
            if capture is None:
                continue
            tokens = self._external_loads.unusable(table, computed[req_id], capture.next, capture.stop)
            if tokens:
                what = f"{tokens} tokens were loaded by another connector: their rows were never computed here"
                self._refuse(req_id, RowsNotComputed(what))

    # -- planning

    def _plan_step(self, output: SchedulerOutput) -> None:
        """See that what the step computes has places, and plan the rows to be read."""
        if not self._external_loads.idle:
            computed = _computed_tokens(output)
            self._refuse_loaded(self._external_loads.on_step(output, computed), computed)
        for req_id in output.preempted_req_ids or ():
            if (capture := self._live.get(req_id)) is not None:
                try:
                    self._rows.preempted(capture)
                    self._after_read(capture)
                except SlotStreamError as error:
                    self._refuse(req_id, error)
        for req_id, capture, start, covered in self._rows.due(self._live, output):
            if capture.hit_tokens is None:
                capture.hit_tokens = start
            try:
                self._rows.advance(capture, start, covered, output)
            except SlotStreamError as error:
                self._refuse(req_id, error)
        for capture in self._rows.to_read(self._live, output):
            try:
                self._rows.read(capture, output)
                self._after_read(capture)
            except SlotStreamError as error:
                self._refuse(capture.request.request_id, error)

    def _after_read(self, capture: CapturedRequest) -> None:
        """Rows of a capture may have been planned: a sample begins with its first, and that of a prompt ends with its last."""
        if capture.next > capture.start:
            self._open(capture)
        if capture.next == capture.stop and not capture.params.include_output_tokens:
            self._rows.complete(capture, capture.stop)
            self._completed(capture, capture.stop)

    def _completed(self, capture: CapturedRequest, stop: int) -> None:
        """Every row up to `stop` is planned, and the commit."""
        capture.rows = stop - capture.start
        self._let_go(capture.request.request_id)

    def _finish_live(self, capture: CapturedRequest, block_ids: Sequence[int]) -> tuple[bool, SlotStreamError | None]:
        """A request ended with rows still to be planned. Returns (hold the blocks, why the sample failed)."""
        req_id = capture.request.request_id
        error = self._why_not_whole(capture)
        stop = min(capture.stop, capture.final_rows)
        if error is None and stop <= capture.start:
            error = BadTokenRange(f"tokens begin at {capture.start}, but the text ended after {stop} rows")
        hold = False
        if error is None:
            try:
                hold = self._rows.finish(capture, stop, block_ids)
            except SlotStreamError as missing:
                error = missing
        if error is not None:
            self._refuse_finished(capture, error)
            return False, error
        self._open(capture)
        if hold:
            self._pending.releases.append(req_id)
        capture.rows = stop - capture.start
        return hold, None

    def _why_not_whole(self, capture: CapturedRequest) -> SlotStreamError | None:
        request = capture.request
        if capture.hit_tokens is None:
            return CaptureAborted("the request ended before it was scheduled")
        if not capture.params.include_output_tokens:
            if capture.readable == capture.stop:
                return None  # Only read later than computed. How the text ended does not matter.
            return CaptureAborted("the request ended before its prompt was computed")
        if request.status.name == "FINISHED_ABORTED" and not _may_have_met_a_stop_string(request):
            return CaptureAborted("the request was aborted before all its rows existed")
        return None

    def _refuse_finished(self, capture: CapturedRequest, error: SlotStreamError) -> None:
        req_id = capture.request.request_id
        self._live[req_id] = capture
        self._refuse(req_id, error)
        self._refused.pop(req_id)

    # -- answers

    def _response(
        self, request: Request, capture: CapturedRequest | None, error: SlotStreamError | None = None
    ) -> dict[str, Any]:
        config = self._config
        answer: dict[str, Any] = {"server": self._servers}
        if capture is not None:
            rows = 0 if error is not None else capture.rows
            answer |= {
                "sample_id": capture.params.sample_id,
                "namespace": capture.params.namespace,
                "num_tokens": rows,
                "layer_ids": [*config.layer_ids],
                "layer_names": [*self._layer_names],
                "dtype": config.dtype,
                "shape": [rows, len(config.layer_ids), config.hidden_size],
            }
        if error is not None:
            code = error.relayed_code if isinstance(error, _Relayed) else error.code
            answer["error"] = {"code": code, "message": str(error)}
        if (warning := warning_of(asked_of(request))) is not None:
            answer["warning"] = warning
        if capture is None or error is not None or not config.options.response_handle:
            return {"slotstream": answer}
        return {"handle": f"{capture.params.namespace}/{capture.params.sample_id}", "slotstream": answer}


class _Relayed(SlotStreamError):
    """A failure that the worker or the server reported, with its own code."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.relayed_code = code


def _may_have_met_a_stop_string(request: Request) -> bool:
    """Stop strings are found outside the engine, which only hears that it must abort the request."""
    params = request.sampling_params
    return bool(params is not None and params.stop and request.num_output_tokens)


def _computed_tokens(output: SchedulerOutput) -> Mapping[str, int]:
    """Tokens that each scheduled request had computed before this step."""
    cached = output.scheduled_cached_reqs
    computed = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    for new in output.scheduled_new_reqs:
        computed[new.req_id] = new.num_computed_tokens
    return computed
