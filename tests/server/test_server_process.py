"""The program: how it starts, what it says when it cannot, how it ends, and what it costs."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from server.server_kit import COMMITTED, FAILED, Peer, Reader, Sample, hello
from support.files import files_below

from slotstream.v1 import ingest_pb2 as pb
from slotstream.wire.frames import encode_chunk
from slotstream.wire.hashing import xxh3

SERVICES = ("", "slotstream.v1.Ingest", "slotstream.v1.Samples")
SERVING = health_pb2.HealthCheckResponse.SERVING


class Process:
    """`slotstream serve` on a free port, up."""

    def __init__(self, data_dir: Path, *options: str, listen: str = "127.0.0.1:0", **environment: str) -> None:
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "SLOTSTREAM_"))}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "slotstream.cli.main", "serve", "--data", str(data_dir), "--listen", listen, *options],
            stderr=subprocess.PIPE,
            text=True,
            env=clean | environment,
        )
        assert self.process.stderr is not None
        self._stderr = self.process.stderr
        self.lines: list[str] = []
        self.address = self._logged(r"listening on (\S+?)\"?[,}]?$")
        self._rest = threading.Thread(target=lambda: self.lines.extend(self._stderr), daemon=True)
        self._rest.start()

    def _logged(self, pattern: str) -> str:
        for line in self._stderr:
            self.lines.append(line)
            if found := re.search(pattern, line):
                return found[1]
        raise AssertionError("".join(self.lines))

    def signal(self, number: signal.Signals = signal.SIGTERM) -> None:
        self.process.send_signal(number)

    def wait(self) -> int:
        code = self.process.wait(60)
        self._rest.join()
        return code

    def resident_bytes(self, which: str = "VmRSS") -> int:
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        (kib,) = re.findall(rf"{which}:\s+(\d+) kB", status)
        return int(kib) << 10

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.wait()


def _refused(data_dir: Path | str, *options: str) -> str:
    """The one sentence that a server which cannot start ends with."""
    command = [sys.executable, "-m", "slotstream.cli.main", "serve", "--data", str(data_dir), *options]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode in (1, 2), ended.stderr  # 2: the command line itself is wrong.
    assert "Traceback" not in ended.stderr
    said = [line for line in ended.stderr.splitlines() if " INFO " not in line]
    assert len(said) == 1, ended.stderr
    assert said[0].startswith("slotstream serve: ")
    return said[0]


def _health(address: str, service: str = "") -> int:
    with grpc.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        status: int = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=30).status
        return status


def _scrape(process: Process) -> str:
    (url,) = [found[1] for line in process.lines if (found := re.search(r"metrics on (\S+)", line))]
    with urllib.request.urlopen(url, timeout=30) as answer:
        return str(answer.read().decode())


def test_a_life(tmp_path: Path) -> None:
    with Process(tmp_path / "new" / "data", "--metrics", "127.0.0.1:0", "--drain-s", "120") as server:
        assert [_health(server.address, service) for service in SERVICES] == [SERVING] * 3
        with Peer(server.address) as peer:
            peer.put(Sample(), 1)
            late = Sample("late")
            peer.say(late.open(2), late.chunk(2, 1, 0, 20), Sample("bad").open(3, dtype="X"))
            peer.failed()
            scraped = _scrape(server)
            assert 'slotstream_samples_total{code="",outcome="committed"} 1.0' in scraped
            assert 'slotstream_samples_total{code="BAD_PARAMS",outcome="failed"} 1.0' in scraped
            assert 'slotstream_stored_samples{state="committed"} 1.0' in scraped
            assert re.search(r"^slotstream_free_bytes [0-9.e+]+$", scraped, re.MULTILINE)
            server.signal()
            peer.hear_until("draining")
            # Probes see it; readers and the sample that is under way do not.
            assert _health(server.address) == health_pb2.HealthCheckResponse.NOT_SERVING
            with Reader(server.address) as reader:
                assert reader.read("s")[1] == Sample().data
            peer.say(late.chunk(2, 2, 20, 40), late.commit(2))
            peer.committed()
            assert peer.ending() == (grpc.StatusCode.UNAVAILABLE, "SERVER_DRAINING")
        assert server.wait() == 0
    assert not [line for line in server.lines if "Traceback" in line or " ERROR " in line]
    assert sum("listening on" in line for line in server.lines) == 1


def test_a_file_and_variables_set_what_no_flag_says(tmp_path: Path) -> None:
    (tmp_path / "serve.toml").write_text('data = "not here"\nmetrics = "127.0.0.1:0"\nlog_format = "text"\n')
    environment = {"SLOTSTREAM_SERVE_CONFIG": str(tmp_path / "serve.toml"), "SLOTSTREAM_SERVE_LOG_FORMAT": "json"}
    with Process(tmp_path / "data", **environment) as server:
        assert _health(server.address) == SERVING
        server.signal()
        assert server.wait() == 0
    said = [json.loads(line)["message"] for line in server.lines]
    assert [line for line in said if line.startswith("metrics on http://127.0.0.1:")]
    assert {path.name for path in tmp_path.iterdir()} == {"data", "serve.toml"}


def test_a_second_signal_ends_the_drain(tmp_path: Path) -> None:
    with Process(tmp_path, "--drain-s", "3600") as server, Peer(server.address) as peer:
        peer.say(Sample().open(1), Sample().chunk(1, 1, 0, 20))
        peer.hear_until("ack")
        server.signal(signal.SIGINT)
        peer.hear_until("draining")
        server.signal(signal.SIGTERM)
        assert peer.failed().code == "SERVER_DRAINING"
        assert server.wait() == 0
    assert not files_below(tmp_path, ".partial")


def test_a_killed_server_keeps_what_it_committed(tmp_path: Path) -> None:
    with Process(tmp_path) as server, Peer(server.address) as peer:
        peer.put(Sample("done"), 1)
        peer.say(Sample("open").open(2), Sample("open").chunk(2, 1, 0, 20))
        peer.hear_until("ack")
        server.signal(signal.SIGKILL)
        assert peer.ending()[0] is grpc.StatusCode.UNAVAILABLE
        server.wait()
    assert files_below(tmp_path, ".partial")
    with Process(tmp_path) as server, Reader(server.address) as reader:
        assert reader.state("done") == (COMMITTED, "")
        assert reader.state("open") == (FAILED, "INTERRUPTED")
        assert reader.read("done")[1] == Sample().data
        assert not files_below(tmp_path, ".partial")


def test_unix_sockets(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with Process(tmp_path / "data", listen=f"unix:{path}") as server:
        assert server.address == f"unix:{path}"
        assert _health(server.address) == SERVING
        assert f"another server is listening on {path}" in _refused(tmp_path / "other", "--listen", f"unix:{path}")
        assert _health(server.address) == SERVING
        server.signal(signal.SIGKILL)
        server.wait()
    assert path.is_socket()
    with Process(tmp_path / "data", listen=f"unix:{path}") as server:  # The dead server's socket is replaced.
        assert _health(server.address) == SERVING


def test_what_keeps_it_from_starting_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("precious")
    with Process(tmp_path / "data") as server, socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert "another server is using" in _refused(tmp_path / "data", "--listen", "127.0.0.1:0")
        for options, sentence in (
            (("--listen", server.address), "Address already in use"),
            (("--listen", f"127.0.0.1:{port}"), "Address already in use"),
            (("--listen", "nonsense"), "--listen: address 'nonsense'"),
            (("--listen", "192.0.2.1:5000", "--allow-anonymous"), "Cannot assign requested address"),
            (("--listen", f"unix:{tmp_path}/none/s"), "No such file or directory"),
            (("--listen", f"unix:{tmp_path}/file"), "is not a socket"),
            (("--listen", "127.0.0.1:0", "--metrics", f"127.0.0.1:{port}"), "--metrics: cannot listen"),
            (("--listen", "127.0.0.1:0", "--drain-s", "nan"), "--drain-s"),
            (("--listen", "127.0.0.1:0", "--window-bytes", "1"), "--window-bytes must be a number of at least"),
        ):
            assert sentence in _refused(tmp_path / "data2", *options)
        for directory in (tmp_path / "file" / "below", Path("/proc/slotstream")):
            assert "as the data directory" in _refused(directory, "--listen", "127.0.0.1:0")
    assert (tmp_path / "file").read_text() == "precious"


@contextlib.contextmanager
def _tiny_disk(path: Path) -> Iterator[Path]:
    path.mkdir()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"tmpfs", os.fsencode(path), b"tmpfs", 0, b"size=12m") != 0:
        pytest.skip("may not mount a file system here")
    try:
        yield path
    finally:
        libc.umount2(os.fsencode(path), 2)


def _mebibytes(sample_id: str, number: int, count: int, *, exact: bool) -> Iterator[pb.IngestRequest | bytes]:
    """A sample of `count` rows of 1 MiB each, one a chunk."""
    data = bytes(1 << 20)
    yield pb.IngestRequest(
        open=pb.OpenSample(
            sample=number,
            namespace="default",
            sample_id=sample_id,
            dtype="F32",
            layer_ids=[0, 1, 2, 3],
            hidden_size=1 << 16,
            rows_max=count,
            rows_exact=exact,
        )
    )
    for row in range(count):
        yield encode_chunk(
            pb.ChunkHeader(sample=number, chunk=number * 1000 + row, first_row=row, rows=1, xxh3=xxh3(data)), data
        )
    yield pb.IngestRequest(commit=pb.CommitSample(sample=number, row_count=count, token_ids=range(count)))


def test_a_really_full_disk(tmp_path: Path) -> None:
    with _tiny_disk(tmp_path / "disk") as disk:
        with Process(disk, "--free-bytes-min", "0") as server, Peer(server.address) as peer, Reader(server.address) as reader:
            peer.say(*_mebibytes("kept", 1, 2, exact=True))
            peer.committed()
            for number, exact in ((2, True), (3, False)):
                peer.say(*_mebibytes(f"large{number}", number, 30, exact=exact))
                failed = peer.failed()
                assert (failed.code, failed.retryable) == ("STORE_FULL", True)
            assert len(reader.read("kept")[1]) == 2 << 20
            peer.say(*_mebibytes("fits", 4, 3, exact=True))
            peer.committed()
            server.signal()
            assert server.wait() == 0
        assert not files_below(disk, ".partial")
        (disk / "ballast").write_bytes(bytes(shutil.disk_usage(disk).free))
        assert "is full" in _refused(disk, "--listen", "127.0.0.1:0")


def test_json_logs(tmp_path: Path) -> None:
    with Process(tmp_path, "--log-format", "json", "--log-level", "debug") as server:
        with Peer(server.address) as peer:
            peer.put(Sample(), 1)
            peer.say(Sample("bad").open(2, dtype="X"))
            peer.failed()
        server.signal()
        assert server.wait() == 0
    logged = [json.loads(line) for line in server.lines]
    assert {"time", "level", "logger", "message"} <= logged[0].keys()
    assert any(line["level"] == "WARNING" and "default/bad failed: BAD_PARAMS" in line["message"] for line in logged)


def test_a_peer_that_left_is_no_fault_of_ours(tmp_path: Path) -> None:
    script = """
import logging
from pathlib import Path
from slotstream.server.config import ServerConfig
from slotstream.server.logs import configure_logging

class ExecuteBatchError(Exception):  # As in grpc._cython.cygrpc, where it cannot be had on demand.
    pass

configure_logging(ServerConfig(data_dir=Path(".")))
for error in (ExecuteBatchError("left"), KeyError("broken")):
    try:
        raise error
    except Exception:
        logging.getLogger("grpc._cython.cygrpc").exception("raised by a method")
"""
    logged = subprocess.run([sys.executable, "-c", script], stderr=subprocess.PIPE, text=True, check=True).stderr
    assert logged.count("Traceback") == 1
    assert "KeyError: 'broken'" in logged


def _malloc_settings(server: Process) -> dict[str, str]:
    raw = Path(f"/proc/{server.process.pid}/environ").read_bytes().decode()
    entries = dict(entry.split("=", 1) for entry in raw.split("\0") if "=" in entry)
    return {name: value for name, value in entries.items() if name.startswith("MALLOC_")}


@pytest.mark.parametrize(
    ("options", "environment", "tuned"),
    [
        pytest.param((), {}, True, id="default"),
        pytest.param(("--no-malloc-tuning",), {}, False, id="not wanted"),
        pytest.param((), {"MALLOC_ARENA_MAX": "2"}, False, id="set by the user"),
        pytest.param((), {"SLOTSTREAM_MALLOC_TUNED": "1"}, False, id="done before"),
    ],
)
def test_malloc_settings(tmp_path: Path, options: tuple[str, ...], environment: dict[str, str], tuned: bool) -> None:
    with Process(tmp_path, *options, **environment) as server:
        assert ("MALLOC_TOP_PAD_" in _malloc_settings(server)) == tuned
        assert _health(server.address) == SERVING


def test_memory_does_not_grow_with_what_is_stored(tmp_path: Path) -> None:
    def send(peer: Peer, first: int, stop: int) -> None:
        window: list[int] = []
        for number in range(first, stop):
            peer.say(*_mebibytes(f"s{number}", number, 1, exact=True))
            window.append(number)
            if len(window) == 8:
                peer.committed()
                window.pop(0)
        for _ in window:
            peer.committed()

    with Process(tmp_path / "data") as server, Peer(server.address) as peer:
        send(peer, 1, 300)
        early = server.resident_bytes()
        send(peer, 300, 1001)
        assert server.resident_bytes("VmHWM") < 300 << 20
        assert server.resident_bytes() < early + (48 << 20)
    shutil.rmtree(tmp_path / "data")


def test_two_streams_of_different_peers_are_told_apart(tmp_path: Path) -> None:
    with Process(tmp_path) as server, Peer(server.address, greet=False) as first, Peer(server.address) as second:
        second.put(Sample("a"), 1)
        first.say(hello())
        assert first.hear().HasField("welcome")
        first.put(Sample("b"), 1)
