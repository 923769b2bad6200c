"""Tells the service manager, which is systemd where a unit has `Type=notify`, how far the server is: see sd_notify(3)."""

from __future__ import annotations

import logging
import os
import socket

_log = logging.getLogger(__name__)
VARIABLE = "NOTIFY_SOCKET"
_SEND_S = 1.0  # A manager that hangs holds the server up no longer than this.


def notify(*lines: str) -> None:
    """Send `lines`, such as READY=1, to the socket that NOTIFY_SOCKET names; nothing where it names none. Never raises."""
    path = os.environ.get(VARIABLE)
    if not path:
        return
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.settimeout(_SEND_S)
            sender.connect("\0" + path[1:] if path.startswith("@") else path)  # The former: in no directory.
            sender.send("\n".join(lines).encode())
    except (OSError, ValueError) as error:  # The latter: a name that can be no path.
        _log.warning("the service manager at %s=%r does not hear: %s", VARIABLE, path, error)
