"""The slotstream connector with a clock around each of its hooks: what of the engine's thread is ours (online_watch.py)."""

from __future__ import annotations

import inspect

from online_watch import timed

from slotstream.connector.facade import SlotStreamConnector
from slotstream.connector.reading.forward_capture import ForwardCapture

_ONCE = ("register_kv_caches", "restore_kv_caches", "shutdown")
_EACH_LAYER = ("wait_for_layer_load", "save_kv_layer")  # They do nothing with `layers`; clocks would cost more than they do.


class TimedConnector(SlotStreamConnector):
    """See the module."""


for _name, _hook in vars(SlotStreamConnector).items():
    if inspect.isfunction(_hook) and not _name.startswith("_") and _name not in (*_ONCE, *_EACH_LAYER):
        setattr(TimedConnector, _name, timed(_name, _hook))
# No hook of vLLM's, but ours on its thread too: where no graph runs, the rows are written from Python.
setattr(ForwardCapture, "take", timed("take", ForwardCapture.take))  # noqa: B010  (mypy: a method is not assigned)
