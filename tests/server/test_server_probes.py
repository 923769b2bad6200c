"""What a kubelet is told: /livez sees an event loop that hangs and no disk, /readyz a drain and a disk that is gone."""

from __future__ import annotations

import re
import signal
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from server.server_kit import Peer, Reader, RunningServer, Sample
from support.secure import Authority, bearer, entry, token, write_tokens
from support.server import ServerProcess, run_cli
from support.waiting import WAIT_S, wait_until

from slotstream.demo.processes import free_port
from slotstream.server import http, pulse
from slotstream.server.health import probes
from slotstream.server.health.probes import Probes, serve_probes
from slotstream.server.pulse import Pulse
from slotstream.store.disk.files import Files
from slotstream.store.samples import SampleStore
from slotstream.wire.hashing import Buffer

PROBES = ("--probes", "127.0.0.1:0")
OK = (200, "ok")


def ask(address: str, path: str, method: str = "GET") -> tuple[int, str]:
    """Status and body, asked without TLS and without a token."""
    request = urllib.request.Request(f"http://{address}{path}", method=method)
    try:
        with urllib.request.urlopen(request, timeout=WAIT_S) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def _probes_of(server: ServerProcess) -> str:
    (found,) = re.findall(r"probes on http://(\S+)/livez", server.log())
    return str(found)


def test_a_life_where_all_else_wants_tls_and_a_token(tmp_path: Path) -> None:
    pair = Authority(tmp_path).issue("server")
    tokens = write_tokens(tmp_path / "tokens.toml", entry("engine", ["default"], "ingest"))
    tcp = f"127.0.0.1:{free_port()}"
    options = ("--listen", tcp, "--tls-cert", str(pair.cert), "--tls-key", str(pair.key), "--tokens", str(tokens))
    with ServerProcess(tmp_path / "data", *options, *PROBES, "--drain-s", "300", token=token("engine")) as server:
        address = _probes_of(server)
        assert ask(address, "/livez") == ask(address, "/readyz") == OK
        assert ask(address, "/readyz", "HEAD") == (200, "")
        for method, path in (("GET", "/"), ("GET", "/metrics"), ("GET", "/livez/"), ("POST", "/livez"), ("DELETE", "/readyz")):
            assert ask(address, path, method)[0] == 404, (method, path)
        with Peer(server.address, metadata=bearer("engine")) as peer:
            peer.say(Sample().open(1), Sample().chunk(1, 1, 0, 20))
            peer.acks(1)
            server.process.send_signal(signal.SIGTERM)
            peer.hear_until("draining")
            assert ask(address, "/readyz") == (503, "draining")
            assert ask(address, "/livez") == OK
            peer.say(Sample().chunk(1, 2, 20, 40), Sample().commit(1))
            peer.committed()
        assert server.process.wait(WAIT_S) == 0


def test_a_directory_that_is_gone_is_not_ready_and_lives(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with ServerProcess(data, *PROBES) as server:
        address = _probes_of(server)
        data.rename(tmp_path / "away")
        wait_until(lambda: ask(address, "/readyz") == (503, "disk"))
        assert ask(address, "/livez") == OK
        (tmp_path / "away").rename(data)
        wait_until(lambda: ask(address, "/readyz") == OK)


def test_a_full_disk_stays_ready_for_it_can_still_be_read_and_deleted_from(tmp_path: Path) -> None:
    with ServerProcess(tmp_path / "data") as server, Peer(server.address) as peer:
        peer.put(Sample(), 1)
    with ServerProcess(tmp_path / "data", *PROBES, "--free-bytes-min", str(1 << 60)) as server:
        assert ask(_probes_of(server), "/readyz") == (200, "full")
        with Reader(server.address) as reader:
            assert reader.read("s")[1] == Sample().data
        assert run_cli("rm", "s", "--yes", "--server", server.address).returncode == 0


class _Disk(Files):
    """Answers nothing while `goes_on` is not set."""

    def __init__(self) -> None:
        self.goes_on = threading.Event()
        self.goes_on.set()
        self.stuck_in: set[str] = set()

    def _wait(self) -> None:
        if not self.goes_on.is_set():
            self.stuck_in.add(threading.current_thread().name)
        assert self.goes_on.wait(4 * WAIT_S)

    def pwrite(self, fd: int, data: Buffer, at: int) -> None:
        self._wait()
        super().pwrite(fd, data, at)

    def path_identity(self, path: Path) -> tuple[int, int] | None:
        self._wait()
        return super().path_identity(path)


@contextmanager
def _served(tmp_path: Path, disk: _Disk, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[RunningServer, str]]:
    """A server in this process, with bounds that a test can wait for."""
    monkeypatch.setattr(pulse, "BEAT_S", 0.05)
    monkeypatch.setattr(pulse, "BOUND_S", 2.0)
    monkeypatch.setattr(probes, "DISK_S", 1.0)
    store = SampleStore.open(tmp_path / "data", files=disk)
    with RunningServer(tmp_path / "data", store=store, probes_listen="127.0.0.1:0") as running:
        try:
            assert running.server.probes_address is not None
            yield running, running.server.probes_address
        finally:
            disk.goes_on.set()


def test_a_disk_that_hangs_is_not_ready_and_lives_even_where_the_event_loop_waits_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = _Disk()
    monkeypatch.setattr("slotstream.server.disk_threads._CHUNK_THREADS_MAX", 1)  # Then the event loop writes chunks itself.
    with _served(tmp_path, disk, monkeypatch) as (running, address), Peer(running.address) as peer:
        peer.say(Sample().open(1), Sample().chunk(1, 1, 0, 20))
        peer.acks(1)
        disk.goes_on.clear()
        peer.say(Sample().chunk(1, 2, 20, 40))
        wait_until(lambda: {running._thread.name, "retention", "probe-disk"} <= disk.stuck_in)
        wait_until(lambda: ask(address, "/readyz") == (503, "disk"))
        held = running.server._disk_threads.loop
        wait_until(lambda: held._clock() - held._beat_at > pulse.BOUND_S)
        assert ask(address, "/livez") == OK
        disk.goes_on.set()
        wait_until(lambda: ask(address, "/readyz") == OK)
        peer.say(Sample().commit(1))
        peer.committed()


def test_an_event_loop_that_hangs_does_not_live(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    goes_on = threading.Event()
    with _served(tmp_path, _Disk(), monkeypatch) as (running, address):
        assert ask(address, "/livez") == OK
        running._loop.call_soon_threadsafe(goes_on.wait, WAIT_S)
        try:
            wait_until(lambda: ask(address, "/livez") == (503, "hung"))
            assert ask(address, "/readyz") == OK  # It says what the disk does, and no more.
        finally:
            goes_on.set()
        wait_until(lambda: ask(address, "/livez") == OK)


def test_a_thread_that_ended_does_not_live(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with _served(tmp_path, _Disk(), monkeypatch) as (running, address):
        names = {found.name for found in running.server._probes.pulses}
        assert names == {"event loop", "retention", "scrub", "catalogue"}
        running.server._housekeeping._stopping.set()
        running.server._housekeeping._wake.set()
        wait_until(lambda: ask(address, "/livez") == (503, "hung"))


def test_a_pulse_is_excused_only_while_it_says_so() -> None:
    now = 0.0
    found = Pulse("a", clock=lambda: now)
    now = pulse.BOUND_S
    assert not found.is_stuck
    now += 0.1
    assert found.is_stuck
    with found.excused():
        assert not found.is_stuck
        now += 1000 * pulse.BOUND_S
        assert not found.is_stuck
    assert not found.is_stuck
    now += 1.1 * pulse.BOUND_S
    assert found.is_stuck
    found.beat()
    assert not found.is_stuck


def test_a_crowd_that_asks_nothing_keeps_nobody_from_an_answer() -> None:
    address, stop = serve_probes(Probes(), "127.0.0.1:0")
    host, _, port = address.rpartition(":")
    with ExitStack() as crowd:
        crowd.callback(stop)
        for _ in range(3 * http._CALLERS_MAX):
            crowd.enter_context(socket.create_connection((host, int(port)))).sendall(b"GET /li")
        assert ask(address, "/readyz") == (503, "starting")
        assert ask(address, "/livez") == OK


@pytest.mark.parametrize(
    ("probes_listen", "why"),
    [
        ("unix:/s", "takes host:port; a kubelet cannot reach"),
        ("9465", "is neither host:port"),
        ("127.0.0.1:{}", "cannot listen"),
    ],
)
def test_an_address_that_cannot_be_is_said_at_start(tmp_path: Path, probes_listen: str, why: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = probes_listen.format(taken.getsockname()[1])
        done = run_cli("serve", "--data", str(tmp_path / "data"), "--probes", listen)
    assert done.returncode
    (said,) = [line for line in done.stderr.splitlines() if " INFO " not in line]
    assert said.startswith("slotstream serve: --probes")
    assert why in said
