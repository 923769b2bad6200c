"""Whether the kernel lets one process read another's memory: on one host, in one PID namespace, as one user (CMA).

A sender shows a few random bytes and where they lie. A process that can read them there can read its staging too.
"""

from __future__ import annotations

import ctypes
import os
import secrets

CANARY_BYTES = 16


class Canary:
    """Random bytes of this process. They stay where they are for as long as this object does."""

    def __init__(self) -> None:
        self.content = secrets.token_bytes(CANARY_BYTES)
        self._buffer = ctypes.create_string_buffer(self.content, CANARY_BYTES)
        self.address = ctypes.addressof(self._buffer)
        self.pid = os.getpid()


class _Part(ctypes.Structure):
    """struct iovec."""

    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


def why_not_readable(pid: int, address: int, content: bytes) -> str:
    """ "" where this process can read `content` at `address` of process `pid`; else why not, in a few words."""
    if pid <= 0 or len(content) != CANARY_BYTES:
        return "the sender does not show its memory"
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "process_vm_readv"):
        return "this system has no process_vm_readv"
    libc.process_vm_readv.restype = ctypes.c_ssize_t
    found = ctypes.create_string_buffer(CANARY_BYTES)
    here = _Part(ctypes.cast(found, ctypes.c_void_p), CANARY_BYTES)
    there = _Part(ctypes.c_void_p(address), CANARY_BYTES)
    one, none = ctypes.c_ulong(1), ctypes.c_ulong(0)
    got = libc.process_vm_readv(ctypes.c_int(pid), ctypes.byref(here), one, ctypes.byref(there), one, none)
    if got < 0:
        return f"the kernel does not let this process read the sender's memory ({os.strerror(ctypes.get_errno())})"
    if got != CANARY_BYTES or not secrets.compare_digest(found.raw, content):
        return "the sender is in another PID namespace"
    return ""
