"""What vLLM loads in each of its processes (entry point group `vllm.general_plugins`), before any model is loaded.

It does nothing unless vLLM runs our connector: see `reading/vllm_seams.py` for what it does then. Without our connector in the
configuration nothing here raises, also where this vLLM lacks something: it calls plug-ins unguarded.
"""

from __future__ import annotations

import contextlib
import copy
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from slotstream.connector.vllm_config import ConnectorConfig

_WORKERS = "vllm.v1.worker.worker_base"


def register() -> None:
    """Called by vLLM, perhaps more than once. Never raises. Processes that will have no workers import none for us."""
    if _WORKERS in sys.modules:
        with contextlib.suppress(Exception):  # `install` is asked again, and says why, where somebody needs the workers.
            install()


def install() -> None:
    """Reach the workers of this process. Raises ConfigError where this vLLM is not as we know it."""
    from slotstream.connector.reading import vllm_seams

    vllm_seams.install(config_of)


def keep_caller_ids() -> None:
    """Reach the requests of this process. Never raises: see `reading/caller_ids.py`."""
    from slotstream.connector.reading import caller_ids

    caller_ids.keep_caller_ids()


def config_of(vllm_config: VllmConfig | None) -> ConnectorConfig | None:
    """What our connector is told, alone or among those of MultiConnector; None without it.

    Raises ConfigError for wrong options, and for more than one slotstream. Without our connector it never raises.
    """
    ours = list(_slotstreams(vllm_config))
    if not ours:
        return None
    from slotstream.connector.vllm_config import ConnectorConfig
    from slotstream.wire.errors import ConfigError

    if len(ours) > 1:
        raise ConfigError(
            f"{len(ours)} slotstreams are configured, and an engine has one: keep one, and let it capture all the layers"
        )
    return ConnectorConfig.from_vllm(ours[0])


def _slotstreams(vllm_config: Any) -> Iterator[VllmConfig]:
    """The configuration of each connector of ours: this one, or those of MultiConnector's children, nested ones too."""
    transfer = _attribute(vllm_config, "kv_transfer_config")
    if _attribute(transfer, "kv_connector") is None:
        return
    if _is_slotstream(transfer):
        yield vllm_config
        return
    extra = _attribute(transfer, "kv_connector_extra_config")
    children = extra.get("connectors") if isinstance(extra, dict) else None
    for child in children if isinstance(children, list) else []:
        try:
            config = copy.copy(vllm_config)
            config.kv_transfer_config = type(transfer)(**{"engine_id": _attribute(transfer, "engine_id"), **child})
        except Exception:
            continue  # vLLM itself cannot make this child, and says so.
        yield from _slotstreams(config)


def _is_slotstream(transfer: Any) -> bool:
    """Whether vLLM would make our connector, or one that extends it. Raises ConfigError only where ours cannot be loaded."""
    from slotstream.wire.errors import ConfigError

    try:
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

        return bool(getattr(KVConnectorFactory.get_connector_class(transfer), "is_slotstream", False))
    except ConfigError:
        raise  # Only our own package raises it.
    except Exception:
        # It is vLLM's to say that it cannot load a class. Ours is known by its name, too.
        path = _attribute(transfer, "kv_connector_module_path")
        return _attribute(transfer, "kv_connector") == "SlotStreamConnector" or str(path).partition(".")[0] == "slotstream"


def _attribute(owner: Any, name: str) -> Any:
    """An attribute that a later vLLM may not have: None then."""
    try:
        return getattr(owner, name, None)
    except Exception:
        return None
