"""What the operator said, checked: a wrong word ends the start, in one sentence."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slotstream.client.client import SERVER_VARIABLE, TLS_VARIABLES
from slotstream.wire.access import Access, read_pair
from slotstream.wire.address import check_address, check_addresses, is_local, is_socket
from slotstream.wire.errors import ConfigError
from slotstream.wire.names import DEFAULT_ADDRESS

_NAME = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?)(:[0-9]{1,5})?")
_HOSTS_MAX = 64
_EVERY_ADDRESS = ("0.0.0.0", "[::]")


@dataclass(frozen=True, slots=True)
class WebSettings:
    """Made by `from_arguments`, with the options of `slotstream.cli.web`."""

    listen: str
    server: str  # Of several with the same samples all of them, with commas between.
    access: Access  # To the server, without a token: visitors bring theirs.
    hosts: tuple[str, ...] = ()  # Beside the address itself: what browsers call it, NAME or NAME:PORT.
    https_cert: str | None = None
    https_key: str | None = None
    tokenizers: Mapping[str, Path] = field(default_factory=dict)
    allow_anonymous: bool = False

    def __post_init__(self) -> None:
        """Raises ConfigError."""
        if is_socket(check_address(self.listen, any_port=True)):
            raise ConfigError(f"--listen {self.listen}: a browser reaches host:port alone, and no unix socket")
        for server in check_addresses(self.server):
            self.access.check(server)
        if (self.https_cert is None) != (self.https_key is None):
            raise ConfigError("--https-cert and --https-key belong together: give both, or neither")
        if self.https_cert is not None and self.https_key is not None:
            read_pair(self.https_cert, self.https_key, "--https-cert", "--https-key")
        elif not is_local(self.listen):
            raise ConfigError(
                f"--listen {self.listen} can be reached from other machines: give --https-cert and --https-key, "
                "or listen on 127.0.0.1 behind a proxy that has them"
            )
        if not self.hosts and self.listen.rpartition(":")[0] in _EVERY_ADDRESS:
            raise ConfigError(f"--listen {self.listen} is every address of this machine: say with --host what browsers call it")
        if wrong := [name for name in self.hosts if not _NAME.fullmatch(name)]:
            raise ConfigError(f"--host {wrong[0]!r} is not a name such as samples.example.org, or name:port")
        if len(self.hosts) > _HOSTS_MAX:
            raise ConfigError(f"--host: at most {_HOSTS_MAX} names")

    @classmethod
    def from_arguments(cls, arguments: Any) -> WebSettings:
        """Of parsed options, and of the environment as all commands take it, but for the token. Raises ConfigError."""
        tls: tuple[str | None, ...] = (arguments.tls_ca, arguments.tls_cert, arguments.tls_key)
        if not any(tls):
            tls = tuple(os.environ.get(name) or None for name in TLS_VARIABLES)
        return cls(
            listen=arguments.listen,
            server=arguments.server or os.environ.get(SERVER_VARIABLE) or DEFAULT_ADDRESS,
            access=Access(*tls),
            hosts=tuple(name.lower() for name in arguments.host),
            https_cert=arguments.https_cert,
            https_key=arguments.https_key,
            tokenizers=_tokenizers(arguments.tokenizer),
            allow_anonymous=arguments.allow_anonymous,
        )

    @property
    def https(self) -> bool:
        return self.https_cert is not None

    @property
    def takes_anonymous(self) -> bool:
        """Whether visitors may come in without a token where the server wants none.

        Only where that gives nobody more than they have: everybody who reaches this page can reach the server, too. A unix
        socket and a certificate of ours open more doors.
        """
        open_to_all = all(is_local(server) and not is_socket(server) for server in check_addresses(self.server))
        alike = is_local(self.listen) and open_to_all and self.access.tls_cert is None
        return self.allow_anonymous or alike

    def names(self, port: int) -> frozenset[str]:
        """What a request's Host may be, in lower case, when the page listens on `port`."""
        host = self.listen.rpartition(":")[0].lower()
        local = ("localhost", "127.0.0.1", "[::1]") if is_local(self.listen) else ()
        usual = 443 if self.https else 80
        of_itself = {f"{name}:{port}" for name in (host, *local)} | ({host, *local} if port == usual else set[str]())
        # Behind a proxy the port is the proxy's; a name without one stands for it at any port.
        return frozenset(of_itself | set(self.hosts))


def _tokenizers(words: Sequence[str]) -> dict[str, Path]:
    found: dict[str, Path] = {}
    for word in words:
        model, equals, folder = word.rpartition("=")
        if not equals or not model or not folder:
            raise ConfigError(f"--tokenizer {word!r} is not MODEL=DIR")
        file = Path(folder) / "tokenizer.json"
        if not file.is_file():
            raise ConfigError(f"--tokenizer {model}: there is no file {file}")
        found[model] = file
    return found
