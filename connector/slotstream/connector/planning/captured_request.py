"""One request that is being captured: which of its rows, how far they are planned, and what its sample says of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from slotstream.connector.plan import BlockPlace, PagePlace, RowPlan, SampleFinish, SampleOpen
from slotstream.connector.planning.loss_mask import mask_columns, mask_names
from slotstream.connector.planning.multimodal import describe
from slotstream.connector.planning.request_params import CaptureParams, sequence_of
from slotstream.wire.errors import RowsNotComputed

if TYPE_CHECKING:
    from vllm.v1.request import Request


@dataclass(slots=True)
class Pace:
    """Counts the steps that are planned while something is captured. In nearly all of them each request computes one token."""

    steps: int = 0


@dataclass(slots=True)
class CapturedRequest:
    """Positions [start, stop) of a request; `next` is the first not planned yet. `pace` is that of the engine's steps."""

    request: Request
    params: CaptureParams
    start: int
    stop: int
    next: int
    pace: Pace = field(default_factory=Pace)
    lead: int = field(init=False)  # How far `covered` is ahead of the steps. It stays, while each step computes one token.
    next_look: int = 0  # The step that is to look whether it needs a place, or has rows worth reading.
    table: list[int] | None = None  # Its blocks in our group, where that can be known without asking.
    placed_until: int = 0  # Steps that compute no position from here on need no place for its row.
    quiet_until: int = 0  # Nor are there rows worth reading while none is computed from here on.
    hit_tokens: int | None = None  # When it was scheduled first, how many of its tokens were in vLLM's prefix cache.
    recomputed: bool = False  # It lost its blocks once: tokens are known whose rows are computed again.
    opened: bool = False  # A plan said, or the next will say, that its sample begins.
    rows: int = 0  # Of the sample, once all of them are planned, and the commit too.
    resets: list[int] = field(default_factory=list)  # First rows captured after vLLM dropped its caches.

    def __post_init__(self) -> None:
        self.covered = 0

    @property
    def covered(self) -> int:
        """Positions [0, covered) have been scheduled: their rows exist, or are about to."""
        return self.lead + self.pace.steps

    @covered.setter
    def covered(self, covered: int) -> None:
        self.lead = covered - self.pace.steps

    @property
    def final_rows(self) -> int:
        """Positions [0, n) whose rows never change once computed: the prompt's, and those of confirmed tokens but the last.

        Each decode step also writes a provisional row for its copy of the sampled token; it is rewritten unless confirmed.
        """
        prompt_tokens: int = self.request.num_prompt_tokens
        return max(prompt_tokens, len(self.request.all_token_ids) - 1)

    @property
    def readable(self) -> int:
        """Positions [next, n) are wanted, and their rows exist and are final."""
        final = len(self.request.all_token_ids) - 1  # As `final_rows`, with fewer calls: this is asked for often.
        prompt: int = self.request.num_prompt_tokens
        stop = self.lead + self.pace.steps
        if self.stop < stop:
            stop = self.stop
        if final < prompt:
            final = prompt
        return final if final < stop else stop

    def row_plan(self, stop: int, place: BlockPlace | PagePlace) -> RowPlan:
        """The rows from the next one to `stop`, which lie at `place`.

        vLLM has the results of the steps that computed them where it knows the token behind each.
        """
        request, start = self.request, self.next
        known = len(request.all_token_ids)  # As `final_rows`, with few calls.
        computed = stop < known > request.num_prompt_tokens and not self.recomputed
        return RowPlan(request.request_id, start, stop, start - self.start, place, computed)

    @property
    def is_in_output(self) -> bool:
        """Whether the next rows are those of output tokens, which come one or a few a step."""
        return self.params.include_output_tokens and self.next >= self.request.num_prompt_tokens

    def conflicts_with(self, other: CapturedRequest) -> bool:
        """Whether the two cannot both be stored: one name, and rows of other tokens. What output will be is not known yet."""
        ours, theirs = self.params, other.params
        if (ours.sample_id, ours.namespace) != (theirs.sample_id, theirs.namespace):
            return False
        if self.start != other.start:
            return True
        both = min(self._prompt_stop, other._prompt_stop)
        ours_ids, theirs_ids = self.request.prompt_token_ids, other.request.prompt_token_ids
        if ours_ids is None or theirs_ids is None or ours_ids[self.start : both] != theirs_ids[self.start : both]:
            return True
        outputs = ours.include_output_tokens or theirs.include_output_tokens
        return not outputs and self.stop != other.stop

    @property
    def _prompt_stop(self) -> int:
        return int(min(self.stop, self.request.num_prompt_tokens))

    def check_whole(self, stop: int) -> None:
        """Raises RowsNotComputed unless rows [start, stop) are all that the request, as it is now, was to have captured.

        What is committed is always asked this, however it ended: a request that grew has rows that nobody planned.
        """
        end = self.final_rows if self.params.include_output_tokens else self.request.num_prompt_tokens
        asked = self.params.tokens[1]
        whole = end if asked is None else min(asked, end)
        if stop != whole or self.next > stop:
            raise RowsNotComputed(f"rows up to {max(self.next, stop)} were planned, and the request ended with {whole}")

    def sample_open(self) -> SampleOpen:
        """The sample begins."""
        request, params = self.request, self.params
        lora = getattr(request, "lora_request", None)
        metadata = {
            "request_id": request.request_id[:256],
            "token_start": str(self.start),
            "prompt_tokens": str(request.num_prompt_tokens),
            "prefix_hit_tokens": str(self.hit_tokens or 0),
            **describe(request.mm_features),
        }
        if lora is not None:
            metadata["lora_name"] = str(lora.lora_name)[:256]
        seed = getattr(request.sampling_params, "seed", None)
        if seed is not None:
            metadata["sampling_seed"] = str(seed)
        if index := sequence_of(request):
            metadata["sequence_index"] = str(index)
        return SampleOpen(
            request.request_id,
            params.namespace,
            params.sample_id,
            self.start,
            self.stop - self.start,
            not params.include_output_tokens,
            params.tags,
            metadata,
            mask_names(params.loss_mask),
        )

    def refused(self) -> SampleOpen:
        """What `refused_sample` says of it: it never got as far as to compute a row."""
        params = self.params
        return refused_sample(self.request.request_id, params.namespace, params.sample_id, params.tags)

    def sample_finish(self, stop: int) -> SampleFinish:
        """The sample ends with the row before `stop`. Raises RowsNotComputed: see `check_whole`."""
        self.check_whole(stop)
        return self.checked_finish(stop)

    def checked_finish(self, stop: int) -> SampleFinish:
        """The same where `check_whole` was asked before."""
        request = self.request
        # A prompt's capture ends with its last row, however much of the text is written by then.
        metadata = {"finish_reason": _finish_reason(request) if self.params.include_output_tokens else "prompt"}
        if self.resets:
            metadata["cache_resets"] = ",".join(map(str, self.resets))
        columns = mask_columns(self.params.loss_mask, self.start, stop, request.num_prompt_tokens)
        return SampleFinish(request.request_id, tuple(request.all_token_ids[self.start : stop]), metadata, columns)


def refused_sample(req_id: str, namespace: str, sample_id: str, tags: Mapping[str, str]) -> SampleOpen:
    """The beginning of a sample that will have no row: it is aborted at once, so that the server knows why."""
    return SampleOpen(req_id, namespace, sample_id, 0, 1, False, tags)


def _finish_reason(request: Request) -> str:
    finished = request.get_finished_reason()  # Compared with None: the first of its values, a stop, counts as false.
    reason = "" if finished is None else str(finished)
    return "stop_or_abort" if reason == "abort" else reason


Due = tuple[str, CapturedRequest, int, int]
"""A request's id and capture, and how far its tokens are computed before and after the step that is planned."""
