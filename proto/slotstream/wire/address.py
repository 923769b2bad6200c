"""Server addresses: `host:port`, `[ipv6]:port` or `unix:/path`, checked once, where a person typed them."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence

from slotstream.wire.errors import ConfigError
from slotstream.wire.names import DEFAULT_ADDRESS

_HOST_PORT = re.compile(r"(?P<host>\[[0-9A-Fa-f:.%]+\]|[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?):(?P<port>[0-9]{1,5})")
DEFAULT_PORT = int(DEFAULT_ADDRESS.rpartition(":")[2])
ADDRESSES_MAX = 16
_UNIX_PATH_BYTES_MAX = 107  # sockaddr_un.sun_path on Linux, less its NUL.


def check_address(address: object, *, any_port: bool = False, usual_port: int = DEFAULT_PORT) -> str:
    """`address` as a gRPC target. Raises ConfigError, which names what was probably meant: a host alone has `usual_port`.

    `any_port` also allows port 0, which only a listener can use.
    """
    if isinstance(address, str) and address.startswith("unix:"):
        path = address.removeprefix("unix:")
        # What cannot be printed cannot be a target either: NUL ends a path, a lone surrogate (a byte of argv that is no
        # text) has no UTF-8.
        if not path.startswith("/") or not path.isprintable() or len(path.encode()) > _UNIX_PATH_BYTES_MAX:
            raise ConfigError(
                f"address {address!r} must be unix: and an absolute, printable path of at most {_UNIX_PATH_BYTES_MAX} bytes"
            )
        return address
    match = _HOST_PORT.fullmatch(address) if isinstance(address, str) else None
    if match is None or not (0 if any_port else 1) <= int(match["port"]) <= 65535:
        if isinstance(address, str) and (meant := _meant(address, usual_port)):
            raise ConfigError(f"address {address!r} is not host:port; did you mean {meant}?")
        raise ConfigError(f"address {address!r} is neither host:port (port 1 to 65535) nor unix:/absolute/path")
    return match.group()


def check_addresses(addresses: object) -> tuple[str, ...]:
    """One server address or several, as text with commas between them or as a list, 1 to 16, as gRPC targets.

    Raises ConfigError, which names the one that is wrong, or is there twice. A socket's path that has a comma needs a list.
    """
    given = addresses.split(",") if isinstance(addresses, str) else addresses
    if not isinstance(given, list | tuple):
        raise ConfigError(f"server must be an address or a list of addresses, not {addresses!r}")
    if not given:
        raise ConfigError("the list of server addresses is empty: name at least one")
    if len(given) > ADDRESSES_MAX:
        raise ConfigError(f"{len(given)} server addresses are more than the {ADDRESSES_MAX} allowed")
    # Spaces around commas are how people write lists; alone, or in a list, they are a mistake that is named.
    checked = [check_address(one.strip(" ") if isinstance(addresses, str) and len(given) > 1 else one) for one in given]
    for at, address in enumerate(checked):
        if address in checked[:at]:
            raise ConfigError(f"address {address!r} is named twice")
    return tuple(checked)


def shown_addresses(addresses: Sequence[str]) -> str:
    """Addresses for a sentence about one of them: "a:1", "a:1 or b:1"."""
    return " or ".join(addresses)


def _meant(address: str, usual_port: int) -> str:
    """The address inside a URL, or a host with the port that it lacks; "" where it is neither."""
    host = re.sub(r"^[a-z]+:/{2,3}", "", address.strip()).partition("/")[0]
    if host.count(":") > 1 and "[" not in host:
        host = f"[{host}]"
    for candidate in (host, f"{host}:{usual_port}"):
        match = _HOST_PORT.fullmatch(candidate)
        if match and 1 <= int(match["port"]) <= 65535 and not match["host"].isdecimal():
            return candidate
    return ""


def is_socket(address: str) -> bool:
    """Whether it is a unix socket's."""
    return address.startswith("unix:")


def is_local(address: str) -> bool:
    """Whether only this machine can be meant, or reach it: a unix socket, or loopback by its number or as localhost."""
    if is_socket(address):
        return True
    host = address.rpartition(":")[0].strip("[]")
    try:
        return host.lower() == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False  # A name: where it leads can change.
