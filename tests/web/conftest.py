"""One server with tokens and samples for all tests of the page."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.ingest_client import IngestClient
from support.secure import bearer, entry, token, write_tokens
from support.server import ServerProcess
from support.synthetic import SyntheticSample
from support.web import Visitor, WebProcess
from support.web_samples import FAILED, LONG, ODD


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """alice reads a, bob reads b, root may all of it. `odd`, `long`, `s` and `failed` are in a, another `s` in b."""
    directory = tmp_path_factory.mktemp("page")
    tokens = write_tokens(
        directory / "tokens.toml",
        entry("alice", ["a"], "read"),
        entry("bob", ["b"], "read"),
        entry("sender", ["a"], "ingest"),
        entry("root", ["*"], "ingest", "read", "admin"),
    )
    options = ("--tokens", str(tokens), "--metrics", "127.0.0.1:0")
    with ServerProcess(directory / "data", *options, token=token("root")) as server:
        with IngestClient(server.address, metadata=bearer("root")) as sender:
            sender.store(ODD, LONG, SyntheticSample("s", namespace="a"), SyntheticSample("s", namespace="b"))
            sender.fail(FAILED, "SLOT_MISMATCH", "<i>slots</i> do not match")
        yield server


@pytest.fixture(scope="session")
def page(store: ServerProcess) -> Iterator[WebProcess]:
    with WebProcess(store.address) as running:
        yield running


@pytest.fixture
def alice(page: WebProcess) -> Visitor:
    return Visitor(page.url).log_in("alice")
