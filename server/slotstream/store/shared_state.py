"""What several servers share, as one of them sees it; said by its metrics and its status."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AttemptCounts:
    """Uploads of all servers that are no samples, or not yet."""

    arriving: int = 0
    ended: int = 0  # Their objects are removed in time.
    late: int = 0  # Of both: the leader should have done with them long ago.


@dataclass(frozen=True, slots=True)
class SharedState:
    """All of it but `leads` may be some seconds old."""

    bucket: str  # As its log lines name it, without a password; and so the catalogue.
    catalogue: str
    trouble: str  # Which of both is away, in a sentence; "" where neither is.
    leads: bool
    scratch_bytes: int  # Of samples that arrive at this server.
    attempts: AttemptCounts
