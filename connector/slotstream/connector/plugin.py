"""What vLLM loads in each of its processes (entry point group `vllm.general_plugins`), before any model is loaded.

It does nothing unless vLLM runs our connector: see `reading/vllm_seams.py` for what it does then.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from slotstream.connector.vllm_config import ConnectorConfig

_WORKERS = "vllm.v1.worker.worker_base"


def register() -> None:
    """Called by vLLM, perhaps more than once. Processes that will have no workers import none for us."""
    if _WORKERS in sys.modules:
        install()


def install() -> None:
    """Reach the workers of this process. Raises ConfigError where this vLLM is not as we know it."""
    from slotstream.connector.reading import vllm_seams

    vllm_seams.install(config_of)


def config_of(vllm_config: VllmConfig) -> ConnectorConfig | None:
    """What our connector is told, alone or among those of MultiConnector; None without it. Raises ConfigError."""
    transfer = vllm_config.kv_transfer_config
    if transfer is None or transfer.kv_connector is None:
        return None
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector

    from slotstream.connector.vllm_config import ConnectorConfig

    kind = KVConnectorFactory.get_connector_class(transfer)
    children = [(kind, vllm_config)]
    if issubclass(kind, MultiConnector):
        children = list(kind._get_connector_classes_and_configs(vllm_config))
    for child, config in children:
        if getattr(child, "is_slotstream", False):
            return ConnectorConfig.from_vllm(config)
    return None
