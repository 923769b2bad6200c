"""Pages of a list, one at a time, and one connection for several tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.ingest_client import IngestClient
from support.secure import bearer, entry, token, write_tokens
from support.server import ServerProcess
from support.synthetic import SyntheticSample

from slotstream.client import PermissionDenied, Unauthenticated, connect
from slotstream.wire.errors import BadPage, ConfigError


def test_pages_follow_each_other_and_read_no_sample_twice(server: ServerProcess, namespace: str) -> None:
    with IngestClient(server.address) as sender:
        sender.store(*(SyntheticSample(f"s{number}", namespace=namespace, num_tokens=1) for number in range(5)))
    with connect(server.address) as client:
        found: list[str] = []
        page = client.page(namespace=namespace, page_size=2)
        found += [info.sample_id for info in page.samples]
        while page.next_token:
            page = client.page(page.next_token, namespace=namespace, page_size=2)
            found += [info.sample_id for info in page.samples]
        assert found == [info.sample_id for info in client.list(namespace=namespace)] == ["s4", "s3", "s2", "s1", "s0"]
        first = client.page(namespace=namespace, page_size=2)
        with pytest.raises(BadPage):
            client.page(first.next_token, namespace=namespace, model="another", page_size=2)
        for size in (0, 1001):
            with pytest.raises(BadPage):
                client.page(page_size=size)


def test_one_connection_asks_for_several_people(tmp_path: Path) -> None:
    tokens = write_tokens(
        tmp_path / "tokens.toml", entry("alice", ["a"], "read"), entry("bob", ["b"], "read"), entry("root", ["*"], "ingest")
    )
    with ServerProcess(tmp_path / "data", "--tokens", str(tokens), token=token("root")) as server:
        with IngestClient(server.address, metadata=bearer("root")) as sender:
            sender.store(SyntheticSample("s", namespace="a"))
        with connect(server.address, token=token("root")) as client:
            alice, bob, nobody = client.with_token(token("alice")), client.with_token(token("bob")), client.with_token(None)
            assert alice.stat("s", namespace="a").num_tokens == 40
            with alice.read("s", namespace="a") as reader:
                assert b"".join(bytes(block.data) for block in reader) == SyntheticSample("s").rows()
            with pytest.raises(PermissionDenied):
                bob.stat("s", namespace="a")
            with pytest.raises(Unauthenticated):
                nobody.status()
            with pytest.raises(ConfigError):
                client.with_token("short")
            assert client.status().rights == ("ingest",)
        with pytest.raises(ValueError, match="closed"):
            alice.status()
