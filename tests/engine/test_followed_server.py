"""The engine core watches the server that the worker's stream came up to: it is told in a step. No engine runs."""

from __future__ import annotations

import signal
from contextlib import ExitStack, closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.outage_rig import Engine, Restarting
from support.plan_rig import PlanRig
from support.waiting import wait_until

from slotstream.connector.hook_guard import HookGuard
from slotstream.connector.planning.server_health import ServerHealth
from slotstream.transport.targets import Target, Targets

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]


def test_the_watch_follows_the_stream_from_server_to_server(tmp_path: Path) -> None:
    from slotstream.connector.facade import SlotStreamConnector, SlotStreamWorkerMetadata
    from slotstream.connector.worker_side import WorkerSide

    with ExitStack() as stack:
        pair = [stack.enter_context(Restarting(tmp_path / name)) for name in ("a", "b")]
        engine = stack.enter_context(closing(Engine.start(",".join(server.address for server in pair))))
        # The address that the watch begins with is not the stream's: it knows no more than that.
        sender = engine.rig.worker._sender
        wait_until(lambda: sender.server is not None)
        first, second = sorted(pair, key=lambda server: server.address != sender.server.address)
        watch = stack.enter_context(closing(ServerHealth(Targets((first.address, second.address)))))
        watch.follow(Target(second.address, second.address))
        wait_until(lambda: watch.watched == Target(second.address, second.address) and watch._reached)

        worker, core = object.__new__(SlotStreamConnector), object.__new__(SlotStreamConnector)
        side = object.__new__(WorkerSide)
        side.half, side._guard = engine.rig.worker, HookGuard(lambda: None)
        worker._side = side
        core._scheduler, core._watch, core._guard = PlanRig().half, watch, HookGuard(lambda: None)

        def step() -> Target | None:
            told = worker.build_connector_worker_meta()
            assert told is None or isinstance(told, SlotStreamWorkerMetadata)
            if told is None:
                return None
            output: Any = SimpleNamespace(kv_connector_worker_meta=SlotStreamWorkerMetadata([]).aggregate(told))
            core.update_connector_output(output)
            return told.server

        assert step() == Target(first.address, first.address)
        wait_until(lambda: watch.watched == Target(first.address, first.address) and watch.problem() is None)
        assert step() is None  # It is told once.
        first.stop(signal.SIGKILL)
        wait_until(lambda: sender.server.address == second.address)
        assert step() == Target(second.address, second.address)
        wait_until(lambda: watch.watched == Target(second.address, second.address) and watch.problem() is None)
