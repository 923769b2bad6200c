"""NIXL as both ends use it: imported when it is first needed, set up in one way, its many errors made one.

What is relied on was seen in NIXL 1.5.1 over UCX: the owner of memory that is read needs to know nothing of the reader, but
over TCP it has to poll; a peer that was killed is an error within a second, one that was stopped never is; a transfer
that was released, and even one whose peer was removed, may still write its bytes when the peer comes back to life.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import logging
import os
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from slotstream.wire.errors import ConfigError

NAME_BYTES_MAX = 128
METADATA_BYTES_MAX = 64 << 10
SLOTS_MAX = 1 << 18
ANNOUNCEMENTS_MAX = 256  # In one message.
INSTALL = "pip install 'slotstream[nixl]'"

# The wheels of one CUDA version each, then the name of a build of one's own. `nixl` from PyPI brings both wheels.
_PACKAGES = ("nixl_cu13", "nixl_cu12", "nixl")
_BACKEND = "UCX"
# UCX cuts what goes over TCP into pieces of 8 KiB by default: with 1 MiB on both ends it is three times as fast.
_UCX_SETTINGS = {"TCP_TX_SEG_SIZE": "1m", "TCP_RX_SEG_SIZE": "1m"}
_said: set[str] = set()


class NixlFault(Exception):
    """NIXL is not there, does not work here, or failed. `str(error)` is one sentence."""


def check_transport(option: str, transport: str) -> None:
    """Raises ConfigError where `option` demands NIXL and it is not installed. Imports nothing."""
    if transport == "nixl" and not is_installed():
        raise ConfigError(f"{option} is nixl, which is not installed: {INSTALL}, or choose auto or grpc")


def is_installed() -> bool:
    """Whether a NIXL package can be found; only `NixlAgent` knows whether it works."""
    return any(importlib.util.find_spec(package) is not None for package in _PACKAGES)


def try_out() -> None:
    """Set NIXL up and register memory with it, for a process that does nothing else. Raises NixlFault."""
    memory = bytearray(1 << 16)
    agent = NixlAgent(lambda line: None)
    agent.register(memory_address(memoryview(memory)), len(memory))
    agent.progress()


def has_rdma() -> bool:
    """Whether this machine has an RDMA device, as the kernel lists them."""
    return any(Path("/sys/class/infiniband").glob("*"))


def _api() -> Any:
    problem = f"NIXL is not installed: {INSTALL}"
    for package in _PACKAGES:
        try:
            api = importlib.import_module(f"{package}._api")
        except ImportError as error:
            if error.name not in (package, f"{package}._api"):
                problem = f"{package} cannot be imported: {error}"
            continue
        if "NIXL_LOG_LEVEL" not in os.environ:
            logging.getLogger("nixl").setLevel(logging.WARNING)  # It prints its progress to stdout otherwise.
        return api
    raise NixlFault(problem)


def _settings(log: Callable[[str], None]) -> str:
    """UCX settings for the agent alone: the process's environment stays as it is, and what it says goes first."""
    chosen = {name: value for name, value in _UCX_SETTINGS.items() if f"UCX_{name}" not in os.environ}
    users = sorted(f"{name}={value}" for name, value in os.environ.items() if name.startswith("UCX_"))
    text = ", ".join([*(f"{name}={value}" for name, value in chosen.items()), *users])
    if text not in _said:
        _said.add(text)
        log(f"NIXL over UCX with {text}; variables UCX_* change that")
    return ",".join(f"{name}={value}" for name, value in chosen.items())


def memory_address(memory: memoryview) -> int:
    """Where a writable buffer begins."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


class NixlAgent:
    """One agent under a new name that nobody can guess. One thread makes it, uses it and releases it.

    It has no thread of its own, which would take a whole core: call `progress` while a peer may want something.
    """

    def __init__(self, log: Callable[[str], None]) -> None:
        """`log` gets one line about the settings, once a process. Raises NixlFault."""
        api = _api()
        self.name = f"slotstream-{uuid.uuid4().hex}"
        try:
            # A plug-in that is listed need not work: making the back end is what tells.
            self._agent = api.nixl_agent(self.name, api.nixl_agent_config(enable_prog_thread=False, backends=[]))
            self._agent.create_backend(_BACKEND, {"engine_config": _settings(log)})
        except Exception as error:
            raise NixlFault(f"NIXL does not work here: {_sentence(error)}") from error

    def register(self, address: int, nbytes: int) -> bytes:
        """Make memory known to NIXL; it must stay mapped until the agent is gone. What a peer needs to read it."""
        try:
            descriptors = self._agent.register_memory([(address, nbytes, 0, "")], "DRAM", backends=[_BACKEND])
            return bytes(self._agent.get_partial_agent_metadata(descriptors, True, [_BACKEND]))
        except Exception as error:
            raise NixlFault(f"NIXL cannot register {nbytes} bytes of memory: {_sentence(error)}") from error

    def add_peer(self, metadata: bytes) -> str:
        """Make a peer known; the name that it says it has. Raises NixlFault."""
        try:
            name = self._agent.add_remote_agent(metadata)
        except Exception as error:
            raise NixlFault(f"NIXL refuses the peer's metadata: {_sentence(error)}") from error
        return name.decode(errors="replace") if isinstance(name, bytes) else str(name)

    def remove_peer(self, name: str) -> None:
        """Forget a peer, and hang up. All its transfers must have been released."""
        try:
            self._agent.remove_remote_agent(name)
        except Exception as error:
            raise NixlFault(f"NIXL cannot remove a peer: {_sentence(error)}") from error

    def read(self, peer: str, remote: int, local: int, nbytes: int) -> Any:
        """A handle that reads `nbytes` at `remote` of a peer to `local`, as often as it is posted. Raises NixlFault."""
        try:
            to = self._agent.get_xfer_descs([(local, nbytes, 0)], "DRAM")
            source = self._agent.get_xfer_descs([(remote, nbytes, 0)], "DRAM")
            return self._agent.initialize_xfer("READ", to, source, peer, backends=[_BACKEND])
        except Exception as error:
            raise NixlFault(f"NIXL refuses a transfer: {_sentence(error)}") from error

    def post(self, handle: Any) -> bool:
        """Start a transfer; whether it is over already. On one host it usually is. Raises NixlFault."""
        return self._is_over(self._agent.transfer, handle)

    def is_over(self, handle: Any) -> bool:
        """Whether a posted transfer is over. Raises NixlFault where it failed: it is over then, too."""
        return self._is_over(self._agent.check_xfer_state, handle)

    def _is_over(self, ask: Callable[[Any], str], handle: Any) -> bool:
        try:
            state = ask(handle)
        except Exception as error:
            raise NixlFault(f"a transfer failed: {_sentence(error)}") from error
        if state == "ERR":
            raise NixlFault("a transfer failed")
        return state == "DONE"

    def release(self, handle: Any) -> None:
        """Release a handle whose transfer is over."""
        try:
            self._agent.release_xfer_handle(handle)
        except Exception as error:
            raise NixlFault(f"NIXL cannot release a transfer: {_sentence(error)}") from error

    def progress(self) -> None:
        """Serve what peers want now. Raises NixlFault."""
        try:
            self._agent.get_new_notifs()
        except Exception as error:
            raise NixlFault(f"NIXL fails: {_sentence(error)}") from error


def _sentence(error: Exception) -> str:
    return str(error) or type(error).__name__
