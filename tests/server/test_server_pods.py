"""The pod that the chart makes, played on this machine: its probes, its restarts, its drain, and its claim."""

from __future__ import annotations

import math
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from server.server_kit import Peer, Sample
from support.kubelet import Node, Pod
from support.manifests import helm, one
from support.secure import bearer, entry, token
from support.waiting import wait_until

from slotstream.client import connect
from slotstream.server.pulse import BOUND_S

pytestmark = [pytest.mark.extended, pytest.mark.timeout(600)]

TOKENS = entry("engine", ["default"], "ingest", "read")
LAUNCHER = Path(__file__).with_name("hangs_on_signal.py")


@pytest.fixture
def node() -> Iterator[Node]:
    # Not in the test's own directory: a socket's path may be 107 bytes long.
    with tempfile.TemporaryDirectory(prefix="node-") as directory:
        yield Node(
            Path(directory),
            {"slotstream": [sys.executable, str(LAUNCHER)]},
            {"slotstream-tokens": {"tokens.toml": TOKENS}},
        )


def _workload() -> Any:
    return one(helm("--set", "server.freeBytesMin=4194304"), "StatefulSet")


def _address(pod: Pod) -> str:
    return f"{pod.ip}:{pod.node.port(50151)}"


def test_an_event_loop_that_hangs_is_restarted_by_its_probes_verdict_and_goes_on_with_its_claim(node: Node) -> None:
    with Pod(_workload(), node) as pod:
        server = pod.containers["slotstream"]
        with Peer(_address(pod), metadata=bearer("engine")) as peer:
            peer.put(Sample("before"), 1)
        wait_until(lambda: len(server.verdicts) >= 1, "a first verdict")
        probe = server.spec["livenessProbe"]
        assert server.process is not None
        first, asked = server.process, len(server.verdicts)
        first.send_signal(signal.SIGUSR2)
        heard = server.verdicts
        wait_until(lambda: ("slotstream", "liveness probe failed") in pod.events, "the verdict")
        # Its bound: BOUND_S, in which the probe may still be told that all is well, and then the threshold.
        told = heard[asked:]
        assert told[-probe["failureThreshold"] :] == [False] * probe["failureThreshold"]
        assert len(told) <= 1 + math.ceil(BOUND_S / probe["periodSeconds"]) + probe["failureThreshold"]
        wait_until(lambda: pod.events.count(("slotstream", "started")) == 2, "the restart")
        assert ("slotstream", "killed: its grace period was over") in pod.events  # It could not drain.
        assert server.process is not first
        with connect(_address(pod), token=token("engine")) as client, Peer(_address(pod), metadata=bearer("engine")) as peer:
            assert client.stat("before").state == "COMMITTED"
            peer.put(Sample("after"), 1)


def test_a_disk_that_is_gone_restarts_nothing(node: Node) -> None:
    with Pod(_workload(), node) as pod:
        server = pod.containers["slotstream"]
        claim = node.directory / "claims" / "data-slotstream-0"
        claim.rename(claim.with_name("away"))
        wait_until(lambda: server.verdicts[-4:] == [True] * 4, "four verdicts")
        assert pod.events == [("slotstream", "spawned"), ("slotstream", "started")]
        claim.with_name("away").rename(claim)


def test_a_pod_that_is_deleted_while_samples_arrive_loses_nothing_that_was_acknowledged(node: Node) -> None:
    stored: list[str] = []
    for life in range(5):
        with Pod(_workload(), node) as pod:
            with Peer(_address(pod), metadata=bearer("engine")) as peer:
                for number in range(1, 20):
                    peer.put(Sample(name := f"{life}-{number}"), number)
                    stored.append(name)
                under_way = Sample(f"{life}-last")
                peer.say(under_way.open(99), under_way.chunk(99, 9901, 0, 20))
                peer.acks(1)
                assert pod.containers["slotstream"].process is not None
                pod.containers["slotstream"].process.send_signal(signal.SIGTERM)  # What the deletion says first.
                peer.hear_until("draining")
                peer.say(under_way.chunk(99, 9902, 20, 40), under_way.commit(99))
                peer.committed()
                stored.append(under_way.sample_id)
            pod.delete()
            assert pod.events[-1] == ("slotstream", "ended with 0")
    with Pod(_workload(), node) as pod, connect(_address(pod), token=token("engine")) as client:
        assert sorted(info.sample_id for info in client.list() if info.state == "COMMITTED") == sorted(stored)
