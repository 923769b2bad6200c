"""Certificates and tokens of the tests' own."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import grpc
import trustme
from grpc_health.v1 import health_pb2, health_pb2_grpc

from slotstream.server.access.tokens import digest_of, entry_of
from slotstream.wire.access import Access


def token(name: str) -> str:
    """A token of the test's own, always the same for a name."""
    return f"token-of-{name}".ljust(24, "x")


def entry(name: str, namespaces: Sequence[str], *rights: str) -> str:
    """Lines of a tokens file."""
    return entry_of(name, digest_of(token(name)), list(namespaces), list(rights))


def write_tokens(path: Path, *entries: str) -> Path:
    """The tokens file with these entries, replaced in one step, readable for its owner only."""
    new = path.with_name(path.name + ".new")
    new.write_text("\n".join(entries) + "\n")
    new.chmod(0o600)
    new.rename(path)
    return path


def bearer(name: str) -> tuple[tuple[str, str], ...]:
    return Access(token=token(name)).call_metadata()


class Authority:
    """A certificate authority, and certificates for 127.0.0.1 that it signs."""

    def __init__(self, directory: Path, name: str = "ca") -> None:
        self._ca = trustme.CA()
        self._directory = directory
        directory.mkdir(exist_ok=True)
        self.path = directory / f"{name}.pem"
        self._ca.cert_pem.write_to_path(str(self.path))

    def issue(
        self, name: str, common_name: str | None = None, not_after: datetime | None = None, *, numbers: bool = True
    ) -> Pair:
        """A certificate and its key as files, replaced if they are there. `numbers`: also for 127.0.0.1, not localhost only."""
        names = ["127.0.0.1", "localhost"] if numbers else ["localhost"]
        issued = self._ca.issue_cert(*names, common_name=common_name, not_after=not_after)
        pair = Pair(self._directory / f"{name}-cert.pem", self._directory / f"{name}-key.pem")
        _replace(pair.cert, b"".join(part.bytes() for part in issued.cert_chain_pems))
        _replace(pair.key, issued.private_key_pem.bytes())
        return pair


def _replace(path: Path, content: bytes) -> None:
    new = path.with_name(path.name + ".new")
    new.write_bytes(content)
    new.rename(path)


@dataclass(frozen=True)
class Pair:
    cert: Path
    key: Path

    def access(self, authority: Authority) -> Access:
        return Access(os.fspath(authority.path), os.fspath(self.cert), os.fspath(self.key))


def health_of(address: str, access: Access) -> int | grpc.StatusCode:
    """What the health service says to a new connection: a status, or with what the call failed."""
    files = access.tls_files()
    options = (("grpc.use_local_subchannel_pool", 1),)
    channel = (
        grpc.insecure_channel(address, options=options)
        if files is None
        else grpc.secure_channel(address, grpc.ssl_channel_credentials(*files), options=options)
    )
    with channel:
        try:
            reply = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=60.0)
        except grpc.RpcError as error:
            return error.code()
        return int(reply.status)
