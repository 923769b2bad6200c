"""The server's certificates, read again for new connections when their files changed; connections that are up stay up."""

from __future__ import annotations

import logging
import threading

import grpc

from slotstream.server.config import ServerConfig
from slotstream.wire.access import check_ca, read_pair, read_pem
from slotstream.wire.errors import ConfigError

_log = logging.getLogger(__name__)
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


def _configuration(material: _Material) -> grpc.ServerCertificateConfiguration:
    chain, key, authorities = material
    return grpc.ssl_server_certificate_configuration([(key, chain)], root_certificates=authorities)
