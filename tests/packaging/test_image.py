"""The server's image, built on a Debian root and run as the rendered pod says: user, capabilities, read-only root, volumes.

Wants podman and mmdebstrap (`make packages`), root, and Debian's archive. vLLM's image is only parsed,
in test_deploy.py: it cannot be pulled everywhere, and needs a GPU.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from server.server_kit import Peer, Reader, Sample
from server.test_server_probes import ask
from support.manifests import ROOT, containers_of, helm, one, pod_of
from support.secure import bearer, entry, write_tokens
from support.waiting import wait_until

from slotstream.demo.processes import free_port

pytestmark = [pytest.mark.extended, pytest.mark.timeout(1800)]

IMAGE, BASE = "localhost/slotstream:test", "localhost/debian-python:test"
ADDED_BYTES_MAX = 80_000_000
# No cgroups: there is no systemd here that would hand them out.
_RUN = "mount -t tmpfs none /sys/fs/cgroup && exec podman run --rm --cgroups disabled --network host --ulimit nofile=1024:1024 "
_RUN += "--ulimit nproc=512:512 --no-healthcheck "


def _podman(*arguments: str) -> str:
    done = subprocess.run(["podman", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Built on a Debian root, with packages that were fetched before: the build itself asks no index."""
    for name in ("podman", "mmdebstrap"):
        assert shutil.which(name), f"{name} is not here: run `make packages` as root"
    work = tmp_path_factory.mktemp("image")
    packages = "--include=python3,python3-venv,python3-pip"
    subprocess.run(["mmdebstrap", "--quiet", "--variant=minbase", packages, "bookworm", str(work / "base.tar")], check=True)
    _podman("import", "--quiet", str(work / "base.tar"), BASE)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wanted = [*project["project"]["dependencies"], *project["build-system"]["requires"]]
    fetch = [sys.executable, "-m", "pip", "download", "--quiet", "--only-binary=:all:", "--python-version=3.11"]
    subprocess.run([*fetch, f"--dest={work / 'wheels'}", *wanted], check=True)
    (work / "pip.conf").write_text("[global]\nno-index = true\nfind-links = /wheelhouse\n")
    mounts = [f"--volume={work / 'wheels'}:/wheelhouse:ro", f"--volume={work / 'pip.conf'}:/etc/pip.conf:ro"]
    base = f"--build-arg=BASE={BASE}"
    options = ["--isolation=chroot", "--network=host", "--format=docker", "--file=deploy/Dockerfile", f"--tag={IMAGE}"]
    _podman("build", "--quiet", *options, *mounts, base, ".")
    yield IMAGE
    _podman("rmi", "--force", IMAGE, BASE)


def test_what_we_add_is_small_and_has_no_pip(image: str) -> None:
    size, base = (int(_podman("image", "inspect", "--format={{.Size}}", name)) for name in (image, BASE))
    assert 0 < size - base <= ADDED_BYTES_MAX
    assert _podman("image", "inspect", "--format={{.Config.User}}", image) == "10001:10001\n"
    assert "/readyz" in _podman("image", "inspect", "--format={{.Config.Healthcheck}}", image)
    listed = _run_once(image, ["--entrypoint=/opt/slotstream/bin/python"], ["-m", "pip", "--version"])
    assert "No module named pip" in listed
    # What a scanner reads to list what is in the image.
    names = _run_once(
        image,
        ["--entrypoint=/opt/slotstream/bin/python"],
        ["-c", "import importlib.metadata as m; print(sorted(d.name for d in m.distributions()))"],
    )
    assert "slotstream" in names
    assert "grpcio" in names


def _as_the_pod_says() -> tuple[list[str], list[str], Any]:
    """podman's options for the rendered pod's security, the container's arguments, and its mounts."""
    pod = pod_of(one(helm("--set", "server.freeBytesMin=4194304"), "StatefulSet"))
    (container,) = containers_of(pod)
    whole, own = pod["securityContext"], container["securityContext"]
    options = [f"--user={whole['runAsUser']}:{whole['runAsGroup']}"]
    options += [f"--cap-drop={name}" for name in own["capabilities"]["drop"]]
    options += ["--read-only", "--read-only-tmpfs=false"] if own["readOnlyRootFilesystem"] else []
    options += [] if own["allowPrivilegeEscalation"] else ["--security-opt=no-new-privileges"]
    return options, container["args"], {mount["name"]: mount for mount in container["volumeMounts"]}


def _run_once(image: str, options: list[str], arguments: list[str]) -> str:
    command = ["unshare", "-m", "bash", "-c", _RUN + '"$@"', "run", *options, image, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    return done.stdout + done.stderr


@contextmanager
def _running(image: str, options: list[str], arguments: list[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    command = ["unshare", "-m", "bash", "-c", _RUN + '"$@"', "run", "--name=slotstream-test", *options, image, *arguments]
    with log.open("wb") as out, subprocess.Popen(command, stdout=out, stderr=out) as process:
        try:
            yield process
        finally:
            subprocess.run(["podman", "rm", "--force", "slotstream-test"], capture_output=True, check=False)
            process.wait(60)


def test_the_pods_user_capabilities_root_and_volumes(image: str, tmp_path: Path) -> None:
    options, arguments, mounts = _as_the_pod_says()
    refused = _run_once(image, [*options, "--entrypoint=/opt/slotstream/bin/python"], ["-c", "open('/opt/slotstream/x', 'w')"])
    assert "Read-only file system" in refused
    owner = int(options[0].partition("=")[2].partition(":")[0])
    for name in ("data", "tmp", "tokens"):
        (tmp_path / name).mkdir(mode=0o700)
    write_tokens(tmp_path / "tokens" / "tokens.toml", entry("engine", ["default"], "ingest", "read"))
    for path in (*tmp_path.iterdir(), tmp_path / "tokens" / "tokens.toml"):
        shutil.chown(path, owner, owner)  # As the kubelet does with fsGroup.
    tmp_path.chmod(0o755)
    for name, mount in mounts.items():
        ro = ":ro" if mount.get("readOnly") else ""
        options.append(f"--volume={tmp_path / name}:{mount['mountPath']}{ro}")
    ports = {name: free_port() for name in ("50151", "9464", "9465")}
    arguments = [re.sub(r"(?<=0\.0\.0\.0:)\d+$", lambda found: str(ports[found[0]]), word) for word in arguments]
    probes, grpc = f"127.0.0.1:{ports['9465']}", f"127.0.0.1:{ports['50151']}"
    log = tmp_path / "log"
    with _running(image, options, arguments, log) as process:
        wait_until(lambda: "listening on" in log.read_text(errors="replace"), "the start")
        assert ask(probes, "/readyz") == ask(probes, "/livez") == (200, "ok")
        with Peer(grpc, metadata=bearer("engine")) as peer, Reader(grpc, metadata=bearer("engine")) as reader:
            peer.put(Sample(), 1)
            assert reader.read("s")[1] == Sample().data
        inside = int(_podman("inspect", "--format={{.State.Pid}}", "slotstream-test"))
        status = Path(f"/proc/{inside}/status").read_text()
        found = dict(re.findall(r"^(Uid|Gid|CapEff|CapBnd|NoNewPrivs|Seccomp):\s+(\w+)", status, re.M))
        assert found == {
            "Uid": str(owner),
            "Gid": str(owner),
            "CapEff": "0" * 16,
            "CapBnd": "0" * 16,
            "NoNewPrivs": "1",
            "Seccomp": "2",
        }
        _podman("kill", "--signal=TERM", "slotstream-test")
        assert process.wait(60) == 0, log.read_text(errors="replace")
    assert Sample().key.path(tmp_path / "data").exists()
