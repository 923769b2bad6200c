"""Whether the storage server takes samples, known at all times without asking: the standard health service, watched."""

from __future__ import annotations

import threading
import time
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from slotstream.transport.channel import open_channel
from slotstream.transport.logs import connector_logger
from slotstream.wire.access import Access
from slotstream.wire.errors import ServerDraining, ServerUnavailable, SlotStreamError

logger = connector_logger(__name__)

SERVICE = "slotstream.v1.Ingest"
_RETRY_S = 0.5
_DETAILS_CHARS = 300


class ServerHealth:
    """Follows one server's health on a thread of its own. Until the first answer the server counts as there.

    `patient`: a server that was never there counts as one that is away. Else its absence is a problem at once: nobody knows
    whether there ever will be one, and an answer that promises a sample would promise too much.
    """

    def __init__(self, target: str, access: Access | None = None, *, patient: bool = False) -> None:
        self._target = target
        self._access = access or Access()
        self._problem: SlotStreamError | None = None
        self._since = 0.0  # monotonic; when the problem began
        self._reached = patient
        self._closed = threading.Event()
        self._call: Any = None
        self._thread = threading.Thread(target=self._run, name="slotstream-watch", daemon=True)
        self._thread.start()

    def problem(self, longer_than_s: float = 0.0) -> SlotStreamError | None:
        """Why the server takes no samples now; None when it does, or has not done so for no longer than this."""
        problem = self._problem
        if problem is None or (self._reached and time.monotonic() - self._since < longer_than_s):
            return None
        return problem

    def close(self, timeout_s: float = 1.0) -> None:
        """Stop watching, after at most `timeout_s`."""
        self._closed.set()
        call = self._call
        if call is not None:
            call.cancel()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while not self._closed.is_set():
            self._watch()
            self._closed.wait(_RETRY_S)

    def _watch(self) -> None:
        """One call, to its end."""
        try:
            channel = open_channel(self._target, self._access)
        except ServerUnavailable as error:
            self._set(error)
            return
        try:
            self._call = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=SERVICE))
            for reply in self._call:
                self._take(reply.status)
            self._set(ServerUnavailable(f"the server at {self._target} stopped answering"))
        except grpc.RpcError as error:
            # What keeps two certificates apart is in the details; of a server that is not there the status says enough.
            details = error.details() or ""
            why = f": {details[:_DETAILS_CHARS]}" if "handshake" in details else ""
            self._set(ServerUnavailable(f"no server at {self._target}: {error.code().name}{why}"))
        finally:
            channel.close()

    def _take(self, status: int) -> None:
        if status == health_pb2.HealthCheckResponse.SERVING:
            self._set(None)
        else:
            self._set(ServerDraining(f"the server at {self._target} is not taking samples now"))

    def _set(self, problem: SlotStreamError | None) -> None:
        if self._problem is None:
            self._since = time.monotonic()
        self._reached |= problem is None
        before, self._problem = self._problem, problem
        if self._closed.is_set() or (before is None) == (problem is None):
            return
        if problem is None:
            logger.info("slotstream: the server at %s takes samples again", self._target)
        else:
            then = "captures wait for it as long as there is room" if self._reached else "nothing is captured until it is there"
            logger.warning("slotstream: %s; %s", problem, then)
