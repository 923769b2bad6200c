"""Why nothing that speaks slotstream answers at an address: one connection of our own, after gRPC's failed.

gRPC says what its library met ("Ssl handshake failed: TSI_PROTOCOL_FAILURE"), and not what to change.
"""

from __future__ import annotations

import socket
import ssl
from dataclasses import dataclass

from slotstream.wire.access import Access

_WAIT_S = 2.0
# What an HTTP/2 client says first: the preface of RFC 9113, section 3.4, and empty settings.
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
_FRAME_HEAD, _SETTINGS = 9, 4
_TLS_ALERT = 0x15
_HOSTNAME_MISMATCH, _IP_MISMATCH, _EXPIRED = 62, 64, 10  # X509_V_ERR_... of OpenSSL.


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """`what` is wrong: a stable word; `sentence`: what that means and what to change."""

    what: str  # unreachable, no_tls, wants_tls, certificate, wants_certificate, hung_up, no_slotstream
    sentence: str


def diagnose(address: str, access: Access) -> Diagnosis | None:
    """Why there is no connection; None where there is one, or nothing can be told. Raises nothing; takes seconds at most."""
    try:
        with _connected(address) as plain:
            return _spoken(plain, address, access) if access.tls_ca is None else _secured(plain, address, access)
    except (OSError, ValueError) as error:
        return Diagnosis("unreachable", getattr(error, "strerror", None) or str(error))


def _secured(plain: socket.socket, address: str, access: Access) -> Diagnosis | None:
    try:
        with _context(access).wrap_socket(plain, server_hostname=_host(address)) as secured:
            return _spoken(secured, address, access)
    except ssl.SSLCertVerificationError as error:
        return _certificate(error, address, access)
    except (ssl.SSLEOFError, ConnectionError):  # In answer to a handshake.
        with _connected(address) as plain:
            if _answered(plain):
                return Diagnosis("no_tls", "this server speaks no TLS: leave tls_ca out, or ask for another port")
        return Diagnosis("hung_up", "it hung up at once: it takes no more connections now, or this server speaks no TLS")
    except ssl.SSLError as error:
        if error.reason and "ALERT" in error.reason:
            return _wants_certificate()
        return Diagnosis("no_tls", "this server speaks no TLS: leave tls_ca out, or ask for another port")
    except TimeoutError:
        return Diagnosis("no_tls", "this server speaks no TLS, or hung up before it did")


def certificate_expires(address: str, access: Access) -> float | None:
    """When the server's certificate expires, in Unix seconds; None where that cannot be seen. Raises nothing."""
    try:
        with _connected(address) as plain, _context(access).wrap_socket(plain, server_hostname=_host(address)) as secured:
            told = (secured.getpeercert() or {}).get("notAfter")
            return ssl.cert_time_to_seconds(told) if isinstance(told, str) else None
    except (OSError, ValueError):
        return None


def _host(address: str) -> str:
    return address.rpartition(":")[0].strip("[]")


def _connected(address: str) -> socket.socket:
    if not address.startswith("unix:"):
        return socket.create_connection((_host(address), int(address.rpartition(":")[2])), timeout=_WAIT_S)
    plain = socket.socket(socket.AF_UNIX)
    plain.settimeout(_WAIT_S)
    try:
        plain.connect(address.removeprefix("unix:"))
    except BaseException:
        plain.close()
        raise
    return plain


def _context(access: Access) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT  # gRPC does not ask for that either.
    context.load_verify_locations(access.tls_ca)
    context.set_alpn_protocols(["h2"])
    if access.tls_cert is not None:
        context.load_cert_chain(access.tls_cert, access.tls_key, password="")
    return context


def _certificate(error: ssl.SSLCertVerificationError, address: str, access: Access) -> Diagnosis:
    if error.verify_code in (_HOSTNAME_MISMATCH, _IP_MISMATCH):
        sentence = f"the certificate is not for {_host(address)}: it must name that host (subjectAltName)"
    elif error.verify_code == _EXPIRED:
        sentence = "the certificate has expired"
    else:
        sentence = f"the certificate is not signed by {access.tls_ca}"
    return Diagnosis("certificate", f"{sentence} ({error.reason})")


def _wants_certificate() -> Diagnosis:
    return Diagnosis("wants_certificate", "it wants a certificate of yours that its authorities signed (tls_cert, tls_key)")


def _hung_up(address: str, access: Access) -> Diagnosis:
    """Why the peer ended a connection without a word: by another one.

    TLS 1.3 ends the client's part of the handshake before the server has looked at the certificate, TLS 1.2 ends it after that.
    """
    secured = access.tls_ca is not None
    context = _context(access) if secured else _trusting()
    context.maximum_version = ssl.TLSVersion.TLSv1_2 if secured else ssl.TLSVersion.MAXIMUM_SUPPORTED
    try:
        with _connected(address) as plain, context.wrap_socket(plain, server_hostname=_host(address)):
            speaks = True
    except (OSError, ValueError):
        speaks = False
    if secured and not speaks:
        return _wants_certificate()
    if speaks and not secured:
        return Diagnosis("wants_tls", "it hung up at once: does it want TLS (tls_ca)?")
    return Diagnosis("hung_up", "it hung up at once: it takes no more connections now, or no more of yours")


def _trusting() -> ssl.SSLContext:
    """Nothing is said over it: does somebody there speak TLS?"""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    return context


def _spoken(peer: socket.socket, address: str, access: Access) -> Diagnosis | None:
    """What the peer answers to the first words of HTTP/2."""
    answer = _answered(peer)
    if answer is None:
        return Diagnosis("no_slotstream", "this is no slotstream port: it took the connection, and says nothing")
    if len(answer) == _FRAME_HEAD and answer[3] == _SETTINGS and not any(answer[5:]):
        return None
    if not answer or answer[0] == _TLS_ALERT:
        return _hung_up(address, access)
    return Diagnosis("no_slotstream", "this is no slotstream port: what answers there speaks no HTTP/2")


def _answered(peer: socket.socket) -> bytes | None:
    """The head of the first frame, or less; "" from a peer that hung up, None from one that says nothing."""
    answer = b""
    try:
        peer.sendall(_PREFACE)
        while len(answer) < _FRAME_HEAD and (more := peer.recv(_FRAME_HEAD - len(answer))):
            answer += more
    except TimeoutError:
        return None
    except (ConnectionError, ssl.SSLError):
        return b""
    return answer
