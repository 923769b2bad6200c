"""Where the program listens and for whom, the socket's mode, and a log without secrets."""

from __future__ import annotations

import logging
import os
import re
import stat
import urllib.request
from pathlib import Path
from typing import Any

import grpc
import pytest
from server.server_kit import Peer, Reader, RunningServer, Sample, hello
from support.secure import Authority, bearer, entry, health_of, token, write_tokens
from support.server import ServerProcess, run_cli

from slotstream.client import Unauthenticated, connect
from slotstream.demo.processes import free_port
from slotstream.server.config import ServerConfig
from slotstream.v1 import ingest_pb2 as pb
from slotstream.v1 import samples_pb2 as read_pb
from slotstream.wire.access import Access
from slotstream.wire.errors import ConfigError

CERT = {"tls_cert": Path("c"), "tls_key": Path("k")}


@pytest.mark.parametrize(
    ("listen", "private"),
    [
        ("127.0.0.1:1", True),
        ("127.9.8.7:1", True),
        ("[::1]:1", True),
        ("localhost:1", True),
        ("unix:/s", True),
        ("0.0.0.0:1", False),
        ("[::]:1", False),
        ("10.0.0.1:1", False),
        ("[fe80::1]:1", False),
        ("example.org:1", False),
        ("localhost.example.org:1", False),
    ],
)
def test_an_address_that_others_reach_needs_a_way_to_tell_them_apart(listen: str, private: bool) -> None:
    assert ServerConfig(data_dir=Path("d"), listen=listen, allow_anonymous=True).is_private == private
    ways: list[dict[str, Any]] = [{"tokens_file": Path("t")}, {"allow_anonymous": True}]
    ways += [] if listen.startswith("unix:") else [{**CERT, "tls_client_ca": Path("a")}]
    for way in ways:
        ServerConfig(data_dir=Path("d"), listen=listen, **way)
    if private:
        ServerConfig(data_dir=Path("d"), listen=listen)
        return
    for none in ({}, CERT):  # A certificate of ours says nothing of who calls.
        with pytest.raises(ConfigError, match=r"^--listen: .* --tokens or --tls-client-ca, or --allow-anonymous"):
            ServerConfig(data_dir=Path("d"), listen=listen, **none)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"tls_cert": Path("c")}, "--tls-cert and --tls-key"),
        ({"tls_key": Path("k")}, "--tls-cert and --tls-key"),
        ({"tls_client_ca": Path("a")}, "--tls-client-ca"),
        ({"listen": "unix:/s", **CERT}, "--tls-cert"),
        ({"allow_anonymous": True, "tokens_file": Path("t")}, "--allow-anonymous"),
        ({"allow_anonymous": True, "tls_client_ca": Path("a"), **CERT}, "--allow-anonymous"),
        ({"socket_mode": 0o1777}, "--socket-mode"),
        ({"socket_mode": -1}, "--socket-mode"),
        ({"peer_streams_max": 0}, "--peer-streams-max"),
        ({"hello_s": 0}, "--hello-s"),
        ({"read_stall_s": float("nan")}, "--read-stall-s"),
    ],
)
def test_what_contradicts_itself_is_named(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=f"^{named}"):
        ServerConfig(data_dir=Path("d"), **options)


def test_it_serves_strangers_only_when_told_to(tmp_path: Path) -> None:
    done = run_cli("serve", "--data", str(tmp_path / "data"), "--listen", "0.0.0.0:0")
    assert done.returncode == 2
    assert "--allow-anonymous" in done.stderr
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "data").exists()
    (tmp_path / "tokens.toml").write_text("tokens = 7\n")
    done = run_cli("serve", "--data", str(tmp_path / "data"), "--tokens", str(tmp_path / "tokens.toml"))
    assert done.returncode == 1
    assert "tokens must be a list of tables" in done.stderr
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize(
    ("option", "mode"), [((), 0o600), (("--socket-mode", "0666"), 0o666), (("--socket-mode", "660"), 0o660)]
)
def test_the_socket_has_its_mode_and_the_umask_is_as_before(tmp_path: Path, option: tuple[str, ...], mode: int) -> None:
    before = os.umask(0o022)  # The child's too: it must not make the socket any more private, or public, than asked.
    try:
        with ServerProcess(tmp_path / "data", *option) as server:
            path = Path(server.address.removeprefix("unix:"))
            assert stat.S_IMODE(path.stat().st_mode) == mode
            with Peer(server.address) as peer:
                peer.put(Sample(), 1)
            assert stat.S_IMODE(Sample().key.path(tmp_path / "data").stat().st_mode) == 0o640
    finally:
        os.umask(before)


MARKED_IDS = [9_871_230_000_000 + row for row in range(40)]


def test_metrics_name_no_namespace(tmp_path: Path) -> None:
    with RunningServer(tmp_path / "data", metrics_listen="127.0.0.1:0") as running, Peer(running.address) as peer:
        peer.put(Sample(namespace="SECRETPROJECT"), 1)
        with urllib.request.urlopen(f"http://{running.server.metrics_address}/metrics", timeout=30) as answer:
            text = answer.read().decode()
    assert "slotstream_stored_bytes" in text
    assert "SECRETPROJECT" not in text


def test_neither_logs_nor_metrics_hold_prompts_ids_or_secrets(tmp_path: Path) -> None:
    tokens = write_tokens(tmp_path / "tokens.toml", entry("engine", ["default"], "ingest", "read"))
    marked = Sample(tags={"prompt": "PROMPTMARK"}, metadata={"text": "PROMPTMARK"})
    spy = _Spy()
    options = ("--tokens", str(tokens), "--log-level", "debug", "--metrics", "127.0.0.1:0")
    with ServerProcess(tmp_path / "data", *options) as server:
        with (
            Peer(server.address, metadata=bearer("engine")) as peer,
            Reader(server.address, metadata=bearer("engine")) as reader,
        ):
            peer.say(marked.open(1), marked.chunk(1, 1, 0, 40), marked.commit(1, token_ids=MARKED_IDS))
            peer.committed()
            wrongs: tuple[dict[str, Any], ...] = (
                {"token_ids": [*MARKED_IDS[:-1], 1 << 63]},
                {"token_ids": MARKED_IDS[:-1]},
                {"metadata": {"PROMPTMARK": "x" * 17_000}},
            )
            for number, changes in enumerate(wrongs, 2):
                wrong = Sample(f"s{number}", tags=marked.tags)
                peer.say(wrong.open(number), wrong.chunk(number, number, 0, 40), wrong.commit(number, **changes))
                peer.failed()
            peer.say(Sample("bad", tags={"PROMPTMARK\n": "x"}).open(9), marked.open(10, dtype="PROMPTMARK"))
            verdicts = {failed.sample: failed.code for failed in (peer.failed(), peer.failed())}  # In either order.
            assert verdicts == {9: "BAD_TAGS", 10: "BAD_PARAMS"}
            reader.read("s")
            reader.list(read_pb.ListRequest(tags={"prompt": "PROMPTMARK"}))
            reader.refused(lambda: reader.list(read_pb.ListRequest(page_token="PROMPTMARK")))
        stranger = (("authorization", f"Bearer {token('stranger')}"),)
        with Reader(server.address, metadata=stranger) as reader:
            reader.refused(lambda: reader.list(read_pb.ListRequest()))
        for requests in ([hello(), pb.IngestRequest(data=b"PROMPTMARK")], [b"PROMPTMARK" * 5], [marked.open(1)]):
            with Peer(server.address, greet=False, metadata=bearer("engine")) as rude:
                rude.say(*requests)
                rude.ending()
        with Peer(server.address, metadata=bearer("engine")) as liar:
            abort = pb.AbortSample(sample=1, code="ABORTED", message="why\n2026-01-01 ERROR forged: line")
            liar.say(Sample("lie").open(1), pb.IngestRequest(abort=abort))
            liar.failed()
        tokens.write_text(tokens.read_text() + f'[[tokens]]\nname = "x"\ntoken = "{token("broken")}" oops\n')
        with Reader(server.address, metadata=bearer("engine")) as reader:
            reader.list(read_pb.ListRequest())
        (url,) = re.findall(r"metrics on (\S+)", server.log())
        with urllib.request.urlopen(url, timeout=60) as answer:
            scraped = answer.read().decode()
        server.stop()
        log = server.log()
    assert "engine at" in log  # It does say who.
    assert "stay in force" in log
    assert "DEBUG" in log
    assert 'slotstream_samples_total{code="BAD_TAGS",outcome="failed"} 1.0' in scraped
    assert not [line for line in log.splitlines() if line.startswith("2026-01-01")]
    for secret in ("PROMPTMARK", token("engine"), token("stranger"), token("broken"), "98712300000"):
        assert secret not in log
        assert secret not in scraped
        assert secret not in spy.text


class _Spy(logging.Handler):
    """Everything that this process logs, at any level."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.text = ""
        logging.getLogger().addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.text += self.format(record)


def test_a_socket_for_the_pods_engine_and_tls_for_readers_all_with_tokens(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    pair = authority.issue("server")
    tokens = write_tokens(
        tmp_path / "tokens.toml", entry("engine", ["default"], "ingest"), entry("reader", ["default"], "read")
    )
    tcp = f"127.0.0.1:{free_port()}"
    options = ("--listen", tcp, "--tokens", str(tokens), "--tls-cert", str(pair.cert), "--tls-key", str(pair.key))
    with ServerProcess(tmp_path / "data", *options, token=token("engine")) as server:
        said = [line.partition("slotstream ")[2] for line in server.log().splitlines() if "listening on" in line]
        version = said[0].partition(" ")[0]
        assert said == [
            f"{version} (TLS: no, token: yes) listening on {server.address}",
            f"{version} (TLS: yes, token: yes) listening on {tcp}",
        ]
        assert stat.S_IMODE(Path(server.address.removeprefix("unix:")).stat().st_mode) == 0o600
        with Peer(server.address, greet=False) as stranger:  # The socket wants a token as well.
            stranger.say(hello())
            assert stranger.ending()[1] == "UNAUTHENTICATED"
        with Peer(server.address, metadata=bearer("engine")) as peer:
            peer.put(Sample(), 1)
        with connect(tcp, tls_ca=authority.path, token=token("reader")) as client:
            assert [found.sample_id for found in client.list()] == ["s"]
        with connect(tcp, tls_ca=authority.path, connect_timeout_s=0) as client, pytest.raises(Unauthenticated):
            list(client.list())
        assert health_of(tcp, Access()) is grpc.StatusCode.UNAVAILABLE  # No TLS, no connection.


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"listen": "unix:/s", "also_listen": ("0.0.0.0:1",)}, "--listen: 0.0.0.0:1 can be reached"),
        ({"listen": "unix:/s", "also_listen": ("127.0.0.1:1",), "workers": 2}, "--workers: only one process"),
        ({"listen": "127.0.0.1:1", "also_listen": ("unix:/s",), "workers": 2}, "--workers: only one process"),
        ({"listen": "unix:/s", "also_listen": ("unix:/t",), **CERT}, "--tls-cert: a unix socket"),
        ({"listen": "unix:/s", "also_listen": ("unix:/s",)}, "--listen: unix:/s is given twice"),
        ({"also_listen": ("nowhere",)}, "--listen: address 'nowhere'"),
    ],
)
def test_of_several_addresses_each_is_looked_at(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=f"^{named}"):
        ServerConfig(data_dir=Path("d"), **options)


def test_several_processes_listen_on_several_ports(tmp_path: Path) -> None:
    with RunningServer(tmp_path / "data", also_listen=("127.0.0.1:0",), workers=2) as running:
        assert len(set(running.server.addresses)) == 2
        for number, address in enumerate(running.server.addresses * 4):
            with Peer(address) as peer, Reader(address) as reader:
                peer.put(Sample(f"s{number}"), 1)
                assert reader.read(f"s{number}")[1] == Sample().data


@pytest.mark.parametrize(("listen", "warned"), [("0.0.0.0:0", True), ("127.0.0.1:0", False)])
def test_a_server_that_lets_anybody_in_warns(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, listen: str, warned: bool
) -> None:
    with RunningServer(tmp_path / "data", listen=listen, allow_anonymous=True):
        pass
    told = [record for record in caplog.records if "--allow-anonymous" in record.getMessage()]
    assert [record.levelname for record in told] == ["WARNING"] * warned
    assert all("anybody who reaches 0.0.0.0:0 may read, store and delete" in record.getMessage() for record in told)
