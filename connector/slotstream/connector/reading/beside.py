"""A thread beside the engine's: it does what a step leaves to it, while the engine's thread waits for the device.

A step that only decodes is launched in a part of the time that the device takes for it, and then its thread waits. What is done
meanwhile costs nobody anything, though the interpreter is one for all threads.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

import torch


class Beside:
    """One piece of work at a time. It asks CUDA for this `device`.

    The thread starts with the first piece. All methods are called from the engine's thread. What the work raises, `finish`
    raises: what a fault asks of the device is asked in the model's stream.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._work: Callable[[], None] | None = None  # Until it is done.
        self._raised: Exception | None = None
        self._working = threading.Lock()
        self._calls: queue.SimpleQueue[bool] = queue.SimpleQueue()  # One for each piece; False: it was the last.
        self._thread: threading.Thread | None = None

    def hand_over(self, work: Callable[[], None]) -> None:
        """Have it done soon. What was handed over before is finished."""
        assert self._work is None, "one piece at a time"
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="slotstream-reader", daemon=True)
            thread.start()
            self._thread = thread
        self._work = work
        self._calls.put(True)

    def finish(self) -> None:
        """Return once it is done. Where the thread has not begun, the caller does it. Raises what it raised."""
        if self._work is not None:
            self._do()
        if self._raised is not None:
            raised, self._raised = self._raised, None
            raise raised

    def close(self, timeout_s: float) -> None:
        """Stop, and finish. Work that still runs after so long, in a driver that hangs, is left alone."""
        if self._thread is not None:
            self._calls.put(False)  # What there is comes before it.
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                return
            self._thread = None
        self.finish()

    def _run(self) -> None:
        # Each thread has a device and a mode of its own. vLLM runs its own in this one: its tensors are written in no other.
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        with torch.inference_mode():
            while self._calls.get():
                self._do()

    def _do(self) -> None:
        with self._working:
            if self._work is None:
                return  # The other thread was first.
            try:
                self._work()
            except Exception as error:
                self._raised = error
            self._work = None
