"""The server's certificates, read again for new connections when their files changed; connections that are up stay up."""

from __future__ import annotations

import logging
import ssl
import threading
from datetime import UTC, datetime

import grpc

from slotstream.server.config import ServerConfig
from slotstream.wire.access import check_ca, read_pair, read_pem
from slotstream.wire.errors import ConfigError

_log = logging.getLogger(__name__)
_PEM_END = b"-----END CERTIFICATE-----"
_VERSION = 0xA0  # A tag of DER: the field that may be left out.
_UTC_TIME = 0x17
_Material = tuple[bytes, bytes, bytes | None]  # Certificate chain, private key, authorities of client certificates.


class Certificates:
    """What the TLS options name. gRPC asks for it on each new connection, from threads of its own."""

    def __init__(self, config: ServerConfig) -> None:
        """Raises ConfigError when the files are not there or do not fit together."""
        self._config = config
        self._lock = threading.Lock()
        self._complaint = ""
        self._material = self._read()

    def credentials(self) -> grpc.ServerCredentials:
        """For `add_secure_port`. With --tls-client-ca a peer without a certificate signed by it gets no connection."""
        return grpc.dynamic_ssl_server_credentials(
            _configuration(self._material),
            self._changed,  # type: ignore[arg-type]  # None is allowed: see the documentation of the function.
            require_client_authentication=self._config.tls_client_ca is not None,
        )

    def expires_unix_s(self) -> float:
        """When the certificate in use expires, in Unix seconds; 0 where that cannot be read."""
        return expiry_unix_s(self._material[0])

    def _changed(self) -> grpc.ServerCertificateConfiguration | None:
        """What to use from now on; None where nothing changed, or what is there now cannot be used."""
        with self._lock:
            try:
                material = self._read()
            except ConfigError as error:
                # Once: gRPC asks again on the next connection.
                if str(error) != self._complaint:
                    self._complaint = str(error)
                    _log.error("the certificate of before stays in use: %s", error)
                return None
            self._complaint = ""
            if material == self._material:
                return None
            self._material = material
            _log.info("new certificates from %s", self._config.tls_cert)
            return _configuration(material)

    def _read(self) -> _Material:
        config = self._config
        assert config.tls_cert is not None
        assert config.tls_key is not None
        chain, key = read_pair(config.tls_cert, config.tls_key, "--tls-cert", "--tls-key")
        if config.tls_client_ca is None:
            return chain, key, None
        return chain, key, check_ca(read_pem(config.tls_client_ca, "--tls-client-ca"), config.tls_client_ca, "--tls-client-ca")


def expiry_unix_s(chain: bytes) -> float:
    """When the first certificate of a PEM chain expires, in Unix seconds; 0 where that cannot be read."""
    try:
        begin = chain.index(b"-----BEGIN CERTIFICATE-----")
        der = ssl.PEM_cert_to_DER_cert(chain[begin : chain.index(_PEM_END, begin) + len(_PEM_END)].decode())
        fields = _contents(_contents(_contents(der)[0][1])[0][1])
        # [version], serial number, signature, issuer, validity, ...: RFC 5280, 4.1.
        validity = fields[4 if fields[0][0] == _VERSION else 3][1]
        kind, until = _contents(validity)[1]
        form = "%y%m%d%H%M%SZ" if kind == _UTC_TIME else "%Y%m%d%H%M%SZ"
        return datetime.strptime(until.decode(), form).replace(tzinfo=UTC).timestamp()
    except (ValueError, IndexError):
        return 0.0


def _contents(der: bytes) -> list[tuple[int, bytes]]:
    """Tag and content of each value in a row of DER. Raises ValueError and IndexError."""
    found, at = [], 0
    while at < len(der):
        tag, length, at = der[at], der[at + 1], at + 2
        if length >= 0x80:
            size = length & 0x7F
            length, at = int.from_bytes(der[at : at + size]), at + size
        if at + length > len(der):
            raise ValueError("a value ends behind its certificate")
        found.append((tag, der[at : at + length]))
        at += length
    return found


def _configuration(material: _Material) -> grpc.ServerCertificateConfiguration:
    chain, key, authorities = material
    return grpc.ssl_server_certificate_configuration([(key, chain)], root_certificates=authorities)
