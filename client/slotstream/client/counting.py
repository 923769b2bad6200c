"""Tells the server of reads that it does not count itself: behind the caller's back, many in a call."""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence

from slotstream.client.info import SampleInfo
from slotstream.v1 import samples_pb2
from slotstream.wire.errors import DeadlineExceeded, ServerUnavailable, SlotStreamError
from slotstream.wire.names import READS_IN_CALL_MAX

_log = logging.getLogger(__name__)
_LINGER_S = 0.25  # For others to come: a call costs as much for one as for a hundred.
_CLOSE_S = 2.0


class ReadCounter:
    """Thread safe. A read that cannot be told does not count: the rows are here all the same.

    Its thread ends when it has told all, and a process waits for it at its end.
    """

    def __init__(self, call: Callable[[samples_pb2.CountReadRequest], None]) -> None:
        self._call = call
        self._begin()

    def _begin(self) -> None:
        self._pid = os.getpid()
        self._reads: deque[tuple[SampleInfo, bool]] = deque()
        self._lock = threading.Lock()  # Guards whether there is a thread.
        self._thread: threading.Thread | None = None
        self._hurry = threading.Event()

    def add(self, info: SampleInfo, together: bool) -> None:
        """A reader has every row of a sample. `together`: the server takes several reads in a call."""
        if self._pid != os.getpid():
            self._begin()  # In a process that was forked. What waited then is its parent's to tell.
        self._reads.append((info, together))
        with self._lock:
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, name="slotstream-count-reads")
                self._thread.start()

    def close(self) -> None:
        """Tell what is left, for two seconds at most."""
        if self._pid != os.getpid():
            return
        self._hurry.set()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(_CLOSE_S)

    def _run(self) -> None:
        while True:
            self._hurry.wait(_LINGER_S)
            reads = [self._reads.popleft() for _ in range(min(len(self._reads), READS_IN_CALL_MAX))]
            parts = [[info for info, together in reads if together], *([info] for info, together in reads if not together)]
            if not all(self._tell(part) for part in parts):  # Ends with the first: a process does not wait for a server.
                self._reads.clear()
            with self._lock:
                if not self._reads:
                    self._thread = None
                    return

    def _tell(self, infos: Sequence[SampleInfo]) -> bool:
        """Whether there is a server to tell."""
        if not infos:
            return True
        request, *more = (
            samples_pb2.CountReadRequest(
                namespace=info.namespace, sample_id=info.sample_id, committed_unix_ns=info.committed_unix_ns or 0
            )
            for info in infos
        )
        request.more.extend(more)
        try:
            self._call(request)
        except (SlotStreamError, ValueError) as error:  # ValueError: the client was closed meanwhile.
            what = f"{request.namespace}/{request.sample_id}{' and others' if more else ''}"
            _log.warning("the server did not count a read of %s: %s", what, error)
            return not isinstance(error, ServerUnavailable | DeadlineExceeded)
        return True
