"""Plays kubelet: runs the pod of a rendered manifest as processes of this machine, by its own order, probes and ends.

It knows what these tests are about: init containers that restart, startup and liveness probes over HTTP, restarts, preStop,
SIGTERM, the grace period, and volumes. It does not know users, namespaces and limits: podman proves those.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from slotstream.demo.processes import free_port

_TICK_S = 0.05
_ENOUGH_S = 480.0  # For a start.


def address_of_this_host() -> str:
    """An address that is not loopback: what listens on 127.0.0.1 alone is not found there, as in a pod."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # Nothing is sent.
        found = str(probe.getsockname()[0])
    assert not found.startswith("127."), "this machine has no address but loopback"
    return found


@dataclass(slots=True)
class Node:
    """What pods run on: `commands` stand in for images, `secrets` and `configs` are files by object and name."""

    directory: Path
    commands: Mapping[str, Sequence[str]]
    secrets: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    configs: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    ports: dict[int, int] = field(
        default_factory=dict
    )  # The container's -> this machine's; the same for each start of the pod.

    def port(self, port: int) -> int:
        return self.ports.setdefault(port, free_port())


class Pod:
    """The pod `name`-0 of a StatefulSet, from `with` to its deletion. `events`: (container, what happened), in order."""

    def __init__(self, workload: Any, node: Node) -> None:
        self.node = node
        self.name = f"{workload['metadata']['name']}-0"
        self.spec = workload["spec"]["template"]["spec"]
        self.events: list[tuple[str, str]] = []
        self.ip = address_of_this_host()
        self.ending = threading.Event()
        self._own = node.directory / "pod"  # Of this pod alone: it ends with it.
        self._own.mkdir()
        claims = [claim["metadata"]["name"] for claim in workload["spec"].get("volumeClaimTemplates", ())]
        volumes = {volume["name"]: self._volume(volume) for volume in self.spec.get("volumes", ())}
        for claim in claims:
            volumes[claim] = node.directory / "claims" / f"{claim}-{self.name}"
            volumes[claim].mkdir(parents=True, exist_ok=True)
        self._sidecars = [Container(self, spec, volumes) for spec in self.spec.get("initContainers", ())]
        self._mains = [Container(self, spec, volumes) for spec in self.spec["containers"]]
        assert all(sidecar.spec.get("restartPolicy") == "Always" for sidecar in self._sidecars), "no other kind is played here"
        self.containers = {container.name: container for container in (*self._sidecars, *self._mains)}

    def _volume(self, volume: Any) -> Path:
        path: Path = self._own / volume["name"]
        path.mkdir()
        if (secret := volume.get("secret")) is not None:
            for name, text in self.node.secrets[secret["secretName"]].items():
                (path / name).write_text(text)
                (path / name).chmod(secret["defaultMode"])
        elif (config := volume.get("configMap")) is not None:
            for name, text in self.node.configs[config["name"]].items():
                (path / name).write_text(text)
        else:
            assert "emptyDir" in volume, volume
        return path

    def start(self) -> Self:
        """Returns once every container has started, by its startup probe: each sidecar before the next container begins."""
        for container in (*self._sidecars, *self._mains):
            container.begin()
            if container in self._sidecars or container is self._mains[-1]:
                container.wait_started()
        return self

    def delete(self) -> None:
        """As on a pod's deletion: the containers, then the sidecars from the last to the first, all within the grace period."""
        self.ending.set()
        deadline = time.monotonic() + self.spec["terminationGracePeriodSeconds"]
        for container in self._mains:
            container.end(deadline)
        for container in reversed(self._sidecars):
            container.end(deadline)
        shutil.rmtree(self._own)

    def __enter__(self) -> Self:
        try:
            return self.start()
        except BaseException:
            self.kill()
            raise

    def __exit__(self, *_: object) -> None:
        self.kill()

    def kill(self) -> None:
        """All that still runs; for a test that failed."""
        self.ending.set()
        for container in self.containers.values():
            container.kill()
        shutil.rmtree(self._own, ignore_errors=True)

    def url(self, port: int, path: str) -> str:
        return f"http://{self.ip}:{self.node.port(port)}{path}"


class Container:
    """One container of a pod, run by a thread of its own until the pod ends."""

    def __init__(self, pod: Pod, spec: Any, volumes: Mapping[str, Path]) -> None:
        self.spec = spec
        self.name: str = spec["name"]
        self.process: subprocess.Popen[bytes] | None = None
        self.log = pod.node.directory / f"{self.name}.log"
        self.verdicts: list[bool] = []  # Of the liveness probe, since the last start.
        self._pod = pod
        # This machine has a /tmp and a /dev/shm of its own.
        mounts = [mount for mount in spec.get("volumeMounts", ()) if mount["mountPath"] not in ("/tmp", "/dev/shm")]
        self._paths = {mount["mountPath"]: volumes[mount["name"]] for mount in mounts}
        self._ports = {port["name"]: port["containerPort"] for port in spec.get("ports", ())}
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"kubelet-{self.name}", daemon=True)

    def begin(self) -> None:
        self._thread.start()

    def wait_started(self) -> None:
        assert self._started.wait(_ENOUGH_S), f"{self.name} did not start:\n{self.log.read_text()[-4000:]}"

    def _say(self, event: str) -> None:
        self._pod.events.append((self.name, event))

    def _run(self) -> None:
        while not self._pod.ending.is_set():
            self._spawn()
            if self._probed("startupProbe") and not self._pod.ending.is_set():
                self._say("started")
                self._started.set()
                self._live()
            if self._pod.ending.is_set():
                return  # The pod's deletion ends what runs.
            self._stop_for_restart()

    def _live(self) -> None:
        """Returns when the process has ended, the liveness probe has failed, or the pod ends."""
        probe = self.spec.get("livenessProbe")
        self.verdicts = []
        failures, due = 0, time.monotonic() + (probe or {}).get("periodSeconds", 10)
        while not self._is_over():
            time.sleep(_TICK_S)
            if probe is None or time.monotonic() < due:
                continue
            due += probe.get("periodSeconds", 10)
            self.verdicts.append(self._ask(probe))
            failures = 0 if self.verdicts[-1] else failures + 1
            if failures == probe.get("failureThreshold", 3):
                self._say("liveness probe failed")
                return

    def _probed(self, name: str) -> bool:
        """Whether the probe succeeded, or there is none; False once it failed for good or the process ended."""
        probe = self.spec.get(name)
        for _ in range(0 if probe is None else probe.get("failureThreshold", 3)):
            if self._ask(probe):
                return True
            until = time.monotonic() + probe.get("periodSeconds", 10)
            while time.monotonic() < until:
                if self._is_over():
                    return False
                time.sleep(_TICK_S)
        return probe is None

    def _ask(self, probe: Any) -> bool:
        asked = probe["httpGet"]
        port = self._ports.get(asked["port"], asked["port"])
        try:
            with urllib.request.urlopen(self._pod.url(port, asked["path"]), timeout=probe.get("timeoutSeconds", 1)) as answer:
                return bool(200 <= answer.status < 400)
        except (OSError, urllib.error.URLError):
            return False

    def _is_over(self) -> bool:
        assert self.process is not None
        return self._pod.ending.is_set() or self.process.poll() is not None

    def _spawn(self) -> None:
        own = {item["name"]: self._here(item["value"]) for item in self.spec.get("env", ())}
        said = [self._here(argument) for argument in (*self.spec.get("command", ()), *self.spec["args"])]
        command = [*self._pod.node.commands[self.name], *said]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                command,
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                env={**os.environ, **own, **self._pod.node.env},
                start_new_session=True,
            )
        self._say("spawned")

    def _here(self, text: str) -> str:
        """The argument with this machine's paths and ports in place of the pod's."""
        mounts = "|".join(re.escape(mount) for mount in sorted(self._paths, key=len, reverse=True))
        if mounts:
            text = re.sub(rf"(?<![\w.-])({mounts})(?=[/\"]|$)", lambda found: str(self._paths[found[1]]), text)
        for port in self._ports.values():
            text = re.sub(rf"(0\.0\.0\.0:|--port=){port}$", rf"\g<1>{self._pod.node.port(port)}", text)
        return text

    def _stop_for_restart(self) -> None:
        assert self.process is not None
        if self.process.poll() is None:
            grace = self.spec.get("livenessProbe", {}).get("terminationGracePeriodSeconds")
            self._terminate(time.monotonic() + (self._pod.spec["terminationGracePeriodSeconds"] if grace is None else grace))
        self._say(f"ended with {self.process.returncode}")
        self.kill()  # What it left behind of its own.

    def end(self, deadline: float) -> None:
        """The pod is deleted: preStop, SIGTERM, and SIGKILL at the deadline."""
        assert self.process is not None
        self._thread.join()
        hook = self.spec.get("lifecycle", {}).get("preStop")
        if hook is not None and self.process.poll() is None:
            subprocess.run(hook["exec"]["command"], timeout=max(0.0, deadline - time.monotonic()), check=True)
        if self.process.poll() is None:
            self._terminate(deadline)
        self._say(f"ended with {self.process.returncode}")
        self.kill()

    def _terminate(self, deadline: float) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(max(2.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._say("killed: its grace period was over")
            self.kill()

    def kill(self) -> None:
        """SIGKILL, for the process and all that it started."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
