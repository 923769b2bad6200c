"""`slotstream ...` whose main thread, which runs the event loop, stands still for good at SIGUSR2."""

from __future__ import annotations

import signal
import sys
import threading

from slotstream.cli.main import main

if __name__ == "__main__":
    signal.signal(signal.SIGUSR2, lambda *_: threading.Event().wait())
    sys.exit(main())
