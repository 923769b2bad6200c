"""How a peer shows who it is, and knows whom it speaks to: a bearer token and TLS files. No grpc here: both ends use it."""

from __future__ import annotations

import os
import re
import ssl
from dataclasses import dataclass, field
from pathlib import Path

from slotstream.wire.errors import ConfigError, Unauthenticated

AUTHORIZATION_KEY = "authorization"
TOKEN_CHARS_MIN = 16
TOKEN_VARIABLE = "SLOTSTREAM_TOKEN"
_TOKEN = re.compile(r"[A-Za-z0-9._~+/=-]{16,512}")  # RFC 6750's b64token, at the lengths that make sense.
_TOKEN_FILE_BYTES_MAX = 4096
_PEM_BYTES_MAX = 1 << 20


def check_token(text: str, where: str) -> str:
    """`text` without the white space around it, if it can be a token. Raises ConfigError, which never shows the token."""
    token = text.strip()
    if not _TOKEN.fullmatch(token):
        raise ConfigError(f"{where} holds no token: {TOKEN_CHARS_MIN} to 512 characters of [A-Za-z0-9._~+/=-]")
    return token


def bearer_token(value: str) -> str | None:
    """The token of an authorization header's value; None when it is of another scheme."""
    scheme, _, token = value.partition(" ")
    return token.strip() if scheme.lower() == "bearer" else None


def _shown(path: str | Path) -> str:
    """A path, for a message: as it is where it can be printed, else quoted, as bytes that are no text have no other form."""
    text = str(path)
    return text if text.isprintable() else repr(text)


def read_pem(path: str | Path, what: str) -> bytes:
    """The bytes of a certificate or key file. Raises ConfigError naming `what`."""
    try:
        with Path(path).open("rb") as file:
            pem = file.read(_PEM_BYTES_MAX)
    except (OSError, ValueError) as error:  # ValueError: a name that no file can have.
        raise ConfigError(f"{what}: cannot read {_shown(path)}: {getattr(error, 'strerror', None) or error}") from error
    if b"-----BEGIN " not in pem:
        raise ConfigError(f"{what}: {_shown(path)} is not a PEM file")
    return pem


def read_pair(cert: str | Path, key: str | Path, cert_what: str, key_what: str) -> tuple[bytes, bytes]:
    """(certificate chain, private key), checked to belong together. Raises ConfigError.

    Files that are being replaced right now are an error too: a caller that can wait reads them again.
    """
    pair = read_pem(cert, cert_what), read_pem(key, key_what)
    try:
        # An encrypted key would make OpenSSL ask on the terminal; with a password given it says that it does not fit.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key, password="")
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError.
        reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or error
        raise ConfigError(f"{cert_what} and {key_what}: {cert} and {key} are no certificate and its key: {reason}") from error
    if pair != (read_pem(cert, cert_what), read_pem(key, key_what)):
        raise ConfigError(f"{cert_what} and {key_what}: {cert} and {key} changed while they were read")
    return pair


def check_ca(pem: bytes, path: str | Path, what: str) -> bytes:
    """`pem`, if it holds certificates. Raises ConfigError."""
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=pem.decode("ascii"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{what}: {path} holds no certificate that can be read") from error
    return pem


@dataclass(frozen=True, slots=True)
class Access:
    """A client's side of it; paths are read again for every connection, the token for every call, so both may be replaced.

    tls_ca: PEM of the authorities that may have signed the server's certificate; None: no TLS. tls_cert, tls_key: this
    client's own certificate, for servers that want one. token, token_file: the bearer token, or a file with it.
    """

    tls_ca: str | None = None
    tls_cert: str | None = None
    tls_key: str | None = None
    token: str | None = field(default=None, repr=False)
    token_file: str | None = None

    def check(self, address: str) -> Access:
        """Itself, if everything is there and fits. Raises ConfigError, naming the option."""
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ConfigError("tls_cert and tls_key belong together: give both, or neither")
        if self.tls_cert is not None and self.tls_ca is None:
            raise ConfigError("tls_cert needs tls_ca: without it the connection is not encrypted")
        if self.tls_ca is not None and address.startswith("unix:"):
            raise ConfigError(f"tls_ca: {address} is a unix socket, which has no TLS")
        if self.token is not None and self.token_file is not None:
            raise ConfigError("token and token_file: give one of them")
        if self.token is not None:
            check_token(self.token, f"token (or ${TOKEN_VARIABLE})")
        if self.token_file is not None:
            self._read_token()
        self.tls_files()
        return self

    def tls_files(self) -> tuple[bytes, bytes | None, bytes | None] | None:
        """(authorities, private key, certificate chain) as they are now; None without TLS. Raises ConfigError."""
        if self.tls_ca is None:
            return None
        roots = check_ca(read_pem(self.tls_ca, "tls_ca"), self.tls_ca, "tls_ca")
        if self.tls_cert is None or self.tls_key is None:
            return roots, None, None
        chain, key = read_pair(self.tls_cert, self.tls_key, "tls_cert", "tls_key")
        return roots, key, chain

    def call_metadata(self) -> tuple[tuple[str, str], ...]:
        """The metadata that a call carries now. Raises Unauthenticated when the token file cannot be read any more."""
        try:
            token = self.token.strip() if self.token is not None else self._read_token()
        except ConfigError as error:
            raise Unauthenticated(str(error)) from error
        return () if token is None else ((AUTHORIZATION_KEY, f"Bearer {token}"),)

    def _read_token(self) -> str | None:
        if self.token_file is None:
            return None
        try:
            with Path(self.token_file).open(encoding="utf-8", errors="replace") as file:
                return check_token(file.read(_TOKEN_FILE_BYTES_MAX), f"token_file {_shown(self.token_file)}")
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"token_file: cannot read {_shown(self.token_file)}: {getattr(error, 'strerror', None) or error}"
            ) from error


def token_from_environment() -> str | None:
    """$SLOTSTREAM_TOKEN; None where it is not set, or empty."""
    return os.environ.get(TOKEN_VARIABLE) or None
