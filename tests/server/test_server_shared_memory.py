"""`--transport shared`: rows are read out of a sender's memory where the kernel lets the server, else they come over gRPC."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.server import ServerProcess

from slotstream.common.shared_memory import CANARY_BYTES, Canary, why_not_readable
from slotstream.wire.nixl import is_installed

needs_nixl = pytest.mark.skipif(not is_installed(), reason="NIXL is not installed")
TESTS = Path(__file__).resolve().parents[1]
SAMPLES = 6  # What support.shared_sender sends.
SHARED = ("--transport", "shared", "--metrics", "127.0.0.1:0")


def test_a_canary_is_seen_by_who_can_read_it() -> None:
    canary = Canary()
    assert why_not_readable(canary.pid, canary.address, canary.content) == ""
    other = bytes(CANARY_BYTES)
    assert "another PID namespace" in why_not_readable(canary.pid, canary.address, other)
    assert "does not let" in why_not_readable(canary.pid, 4096, canary.content)
    assert "does not show" in why_not_readable(0, canary.address, canary.content)
    assert "does not show" in why_not_readable(canary.pid, canary.address, b"")
    with subprocess.Popen([sys.executable, "-c", ""]) as gone:
        gone.wait()
    assert "does not let" in why_not_readable(gone.pid, canary.address, canary.content)


def _chunks(server: ServerProcess) -> dict[str, float]:
    return {name: server.metric("slotstream_chunks_total", transport=name) for name in ("nixl", "grpc")}


@needs_nixl
def test_rows_of_a_sender_on_this_host_are_read_out_of_its_memory(tmp_path: Path) -> None:
    with ServerProcess(tmp_path, *SHARED) as server:
        command = [sys.executable, "-m", "support.shared_sender", server.address]
        sent = subprocess.run(command, capture_output=True, text=True, cwd=TESTS, timeout=120, check=False)
        assert sent.stdout == f"{SAMPLES}\n", sent.stderr
        assert _chunks(server)["grpc"] == 0
        assert _chunks(server)["nixl"] >= SAMPLES


# What a container runtime does for each container of a pod: its own IPC namespace and /dev/shm, one user, no capabilities. The
# Python that runs this may lie where only root may look: then it is bound to where everybody may.
_CONTAINER = """
set -e
mount -t tmpfs none /dev/shm
if [ "${PYTHON_HOME#/root/}" != "$PYTHON_HOME" ]; then
  mkdir -p "$SCRATCH/python" && mount --bind "$PYTHON_HOME" "$SCRATCH/python"
  mount -t tmpfs -o mode=755 none /root && mkdir -p "$PYTHON_HOME" && mount --bind "$SCRATCH/python" "$PYTHON_HOME"
fi
exec setpriv --reuid 10001 --regid 10001 --clear-groups --inh-caps=-all --bounding-set=-all --no-new-privs "$@"
"""
# A pod of two containers: the server, and the engine once the server's socket is there. APART: each with PIDs of its own.
_POD = """
unshare $APART -i -m bash -c "$CONTAINER" server $PYTHON -m slotstream.cli.main serve --data $SCRATCH/data \
  --listen unix:$SCRATCH/s --transport shared --metrics 127.0.0.1:0 --log-level info > $SCRATCH/server.log 2>&1 &
for _ in $(seq 300); do [ -S $SCRATCH/s ] && break; sleep 0.2; done
unshare $APART -i -m bash -c "$CONTAINER" engine $PYTHON -m support.shared_sender unix:$SCRATCH/s 2> $SCRATCH/engine.log
PORT=$(sed -n 's#.*metrics on http://127.0.0.1:\\([0-9]*\\)/.*#\\1#p' $SCRATCH/server.log)
$PYTHON -c "import urllib.request as r; print(r.urlopen('http://127.0.0.1:$PORT/metrics').read().decode())" > $SCRATCH/metrics
kill %1
"""


@needs_nixl
@pytest.mark.extended
@pytest.mark.skipif(os.geteuid() != 0, reason="namespaces and another user need root")
@pytest.mark.parametrize("apart", [False, True])
def test_two_containers_of_a_pod(tmp_path: Path, apart: bool) -> None:
    """With one PID namespace and one user the server reads the engine's memory; else it says why not, once, and gets frames."""
    scratch = Path(
        f"/tmp/slotstream-pod-{os.getpid()}-{int(apart)}"
    )  # Where another user may look, and short: a socket's path.
    scratch.mkdir(mode=0o777)
    scratch.chmod(0o777)
    environment = {
        **os.environ,
        "SCRATCH": str(scratch),
        "HOME": str(scratch),
        "PYTHON": sys.executable,
        "PYTHON_HOME": sys.base_prefix,
        "PYTHONPATH": str(TESTS),
        "CONTAINER": _CONTAINER,
        "APART": "--pid --fork --mount-proc" if apart else "",
    }
    try:
        command = ["unshare", "--pid", "--fork", "--mount-proc", "bash", "-c", _POD]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=TESTS, timeout=240, check=False)
        said = {name: (scratch / f"{name}.log").read_text() for name in ("server", "engine")}
        assert done.stdout == f"{SAMPLES}\n", (done.stderr, said)
        counted = dict(
            re.findall(r'^slotstream_chunks_total\{transport="(\w+)"\} (\d+)', (scratch / "metrics").read_text(), re.M)
        )
        over, not_over = ("grpc", "nixl") if apart else ("nixl", "grpc")
        assert int(counted[over]) >= SAMPLES
        assert int(counted[not_over]) == 0
        assert said["server"].count("rows of this stream come over gRPC") == int(apart)
        assert said["engine"].count("rows go over gRPC: the server does not take NIXL") == int(apart)
    finally:
        subprocess.run(["rm", "-rf", str(scratch)], check=True)
