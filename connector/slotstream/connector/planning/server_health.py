"""Whether a storage server takes samples, known at all times without asking: the standard health service, watched."""

from __future__ import annotations

import threading
import time
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from slotstream.transport.channel import open_channel
from slotstream.transport.logs import connector_logger
from slotstream.transport.targets import Target, Targets, as_targets
from slotstream.wire.access import Access
from slotstream.wire.address import shown_addresses
from slotstream.wire.errors import ServerDraining, ServerUnavailable, SlotStreamError

logger = connector_logger(__name__)

SERVICE = "slotstream.v1.Ingest"
_RETRY_S = 0.5
_DETAILS_CHARS = 300


class ServerHealth:
    """Follows one server's health on a thread of its own. Until the first answer the server counts as there.

    Of several servers it watches the one that the stream uses, once it was told; where that one is away, another that takes
    samples will do, for the stream goes there too. There is a problem while none does.

    `patient`: a server that was never there counts as one that is away. Else its absence is a problem at once: nobody knows
    whether there ever will be one, and an answer that promises a sample would promise too much.
    """

    def __init__(self, server: str | Targets, access: Access | None = None, *, patient: bool = False) -> None:
        self._targets = as_targets(server)
        self._access = access or Access()
        self._problem: SlotStreamError | None = None
        self._since = 0.0  # monotonic; when the problem began
        self._reached = patient
        self._changed = threading.Condition()  # Guards what is below.
        self._closed = False
        self._followed: Target | None = None  # Watch this one next.
        self._watched: Target | None = None
        self._call: Any = None
        self._thread = threading.Thread(target=self._run, name="slotstream-watch", daemon=True)
        self._thread.start()

    def problem(self, longer_than_s: float = 0.0) -> SlotStreamError | None:
        """Why no server takes samples now; None when one does, or none has done so for no longer than this."""
        problem = self._problem
        if problem is None or (self._reached and time.monotonic() - self._since < longer_than_s):
            return None
        return problem

    @property
    def watched(self) -> Target | None:
        """The server that is watched now."""
        return self._watched

    def follow(self, target: Target) -> None:
        """The stream came up to this server: watch it."""
        with self._changed:
            if target == self._watched:
                return
            self._followed = target
            self._changed.notify_all()
            if self._call is not None:
                self._call.cancel()

    def close(self, timeout_s: float = 1.0) -> None:
        """Stop watching, after at most `timeout_s`."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            if self._call is not None:
                self._call.cancel()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while not self._closed:
            with self._changed:
                if self._followed is not None:
                    self._targets.prefer(self._followed)
                    self._followed = None
            target = self._targets.next()
            served, problem = self._watch(target)
            with self._changed:
                self._call = self._watched = None
                moving = self._followed is not None
            self._targets.ended(up=served)
            if not moving and self._targets.all_tried:
                self._set(self._of_all(problem))
            pause_s = self._targets.pause_s(_RETRY_S, _RETRY_S)
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._followed is not None, timeout=pause_s)

    def _watch(self, target: Target) -> tuple[bool, SlotStreamError]:
        """One call, to its end. Whether the server took samples, and what is wrong with it now."""
        served = False
        try:
            channel = open_channel(target, self._access)
        except ServerUnavailable as error:
            return False, error
        try:
            call = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=SERVICE))
            with self._changed:
                self._call, self._watched = call, target
                if self._closed or self._followed is not None:  # Just now: nobody saw a call to cancel.
                    call.cancel()
            for reply in call:
                if reply.status == health_pb2.HealthCheckResponse.SERVING:
                    served = True
                    self._set(None)
                    continue
                problem = ServerDraining(f"the server at {target} is not taking samples now")
                if self._targets.several:
                    return served, problem
                self._set(problem)
            return served, ServerUnavailable(f"the server at {target} stopped answering")
        except grpc.RpcError as error:
            # What keeps two certificates apart is in the details; of a server that is not there the status says enough.
            details = error.details() or ""
            why = f": {details[:_DETAILS_CHARS]}" if "handshake" in details else ""
            return served, ServerUnavailable(f"no server at {target}: {error.code().name}{why}")
        finally:
            channel.close()

    def _of_all(self, last: SlotStreamError) -> SlotStreamError:
        """What to say when none takes samples: the last one's problem, and where there are several, that it is all of them."""
        if not self._targets.several:
            return last
        servers = shown_addresses(self._targets.servers)
        return type(last)(f"no server at {servers} takes samples now; the last one tried: {last}")

    def _set(self, problem: SlotStreamError | None) -> None:
        if self._problem is None:
            self._since = time.monotonic()
        self._reached |= problem is None
        before, self._problem = self._problem, problem
        if self._closed or (before is None) == (problem is None):
            return
        if problem is None:
            logger.info("slotstream: the server at %s takes samples again", self._watched)
        else:
            then = "captures wait for it as long as there is room" if self._reached else "nothing is captured until it is there"
            logger.warning("slotstream: %s; %s", problem, then)
