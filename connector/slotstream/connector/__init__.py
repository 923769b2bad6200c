"""The KV connector that vLLM loads as `SlotStreamConnector` of the module path `slotstream.connector`.

The class is resolved on first use, so that the modules beside it that need no vLLM can be imported without it.
"""

from __future__ import annotations

from typing import Any

__all__ = ["SlotStreamConnector"]


def __getattr__(name: str) -> Any:
    if name == "SlotStreamConnector":
        import vllm  # noqa: F401  (where it is not installed, that is all there is to say)

        from slotstream.connector.vllm_config import known_vllm, logged_refusal

        with logged_refusal(), known_vllm():
            from slotstream.connector.facade import SlotStreamConnector

        return SlotStreamConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
