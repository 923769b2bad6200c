"""Telling vLLM that it may free the blocks that it holds for us: of each request once, and by the right workers.

vLLM counts the workers' reports of a request and frees its blocks at the last of them. How many it waits for,
`get_finished_count` says: 1 where slotstream is alone, for only one worker sends rows. Under MultiConnector all siblings share
one number, and where one of them leaves it to vLLM (None), that is every worker: then each of ours has to report too, those
that send nothing as well, or blocks would never be freed. Facts about vLLM are those of 0.32 and 0.33.
"""

from __future__ import annotations

from slotstream.connector.plan import StepPlan


class Releases:
    """Requests of the plans' `releases`, each handed out once, in a step after the one whose plan had it.

    Not in the same step: vLLM may ask before that step's rows are read, and all workers must have read theirs.
    """

    def __init__(self) -> None:
        self.now: set[str] = set()
        """What `take` hands out."""
        self._next: set[str] = set()

    def bind(self, plan: StepPlan) -> None:
        """A step begins."""
        if self._next or plan.releases:
            self.now |= self._next
            self._next = set(plan.releases)

    def give_up(self, plan: StepPlan) -> None:
        """A fault in this step: nothing will be read of `plan`, whether or not `bind` saw it."""
        # Unless `bind` took them: vLLM does not survive hearing of a release twice.
        self.now |= set(plan.releases) - self._next

    def take(self) -> set[str]:
        """Requests whose last rows were read in an earlier step: vLLM may free their blocks."""
        taken, self.now = self.now, set()
        return taken


def every_worker_reports() -> bool:
    """Whether vLLM waits for every worker's report of a request. Asked in a worker, once vLLM has made its connectors."""
    from vllm.distributed.kv_transfer.kv_transfer_state import get_kv_transfer_group, has_kv_transfer_group

    # vLLM itself asks the outermost connector, in the engine core; this is the same one in the worker.
    return has_kv_transfer_group() and get_kv_transfer_group().get_finished_count() is None
