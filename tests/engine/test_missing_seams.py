"""A vLLM that lacks what we reach into: without slotstream nothing of ours raises; with `layers` one sentence names it."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support import offline

from slotstream.connector import plugin
from slotstream.connector.reading import vllm_checks
from slotstream.connector.row_sources import check_capture
from slotstream.connector.vllm_config import ConnectorConfig
from slotstream.wire.errors import ConfigError

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

_WORKER_BASE = "vllm.v1.worker.worker_base"
_FACTORY = "vllm.distributed.kv_transfer.kv_connector.factory"
_BASE = "vllm.distributed.kv_transfer.kv_connector.v1.base"
_INTERFACES = "vllm.model_executor.models.interfaces"
# What is looked for before the model is loaded. Only the last part may be missing.
_SEAMS = [
    *(f"{module}.{name}" for module, name in vllm_checks.NEEDED),
    f"{_INTERFACES}.supports_eagle3",
    f"{_INTERFACES}.EagleModelMixin",
    f"{_INTERFACES}.EagleModelMixin._maybe_add_hidden_state",
    "vllm.forward_context.ForwardContext",
    "vllm.v1.request.Request",
]
_OTHERS = [
    f"{_FACTORY}.KVConnectorFactory",
    f"{_FACTORY}.KVConnectorFactory.get_connector_class",
    "vllm.distributed.kv_transfer.kv_connector.v1.multi_connector.MultiConnector",
    "vllm.distributed.kv_transfer.kv_connector.v1.multi_connector.MultiConnector._get_connector_classes_and_configs",
    "vllm.distributed.kv_transfer.kv_transfer_state.has_kv_transfer_group",
    "vllm.config.get_current_vllm_config_or_none",
    f"{_BASE}.SupportsHMA",
    f"{_WORKER_BASE}.WorkerBase",
]


def _owner(path: str) -> tuple[Any, str]:
    """What has the last part of a dotted path, and that part."""
    above, _, name = path.rpartition(".")
    try:
        return importlib.import_module(above), name
    except ImportError:
        module, _, inner = above.rpartition(".")
        return getattr(importlib.import_module(module), inner), name


def _remove(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, name = _owner(path)
    monkeypatch.delattr(owner, name)


class _Wrapper:
    """vLLM's wrapper of a worker, as `init_device` sees it."""

    def __init__(self, vllm_config: Any) -> None:
        self.vllm_config = vllm_config
        self.worker = SimpleNamespace(model_runner=None)


@pytest.fixture
def inits(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The wrappers whose own `init_device` ran; vLLM's workers are as before we reached them, and are again afterwards."""
    from vllm.v1.worker.worker_base import WorkerBase, WorkerWrapperBase

    seen: list[Any] = []

    def init_device(self: Any) -> str:
        seen.append(self)
        return "done"

    monkeypatch.setattr(WorkerWrapperBase, "init_device", init_device)
    monkeypatch.setattr(WorkerBase, "__init__", lambda self, vllm_config: setattr(self, "vllm_config", vllm_config))
    return seen


def _transfer(name: str, path: str | None = None, **extra: Any) -> Any:
    from vllm.config import KVTransferConfig

    return KVTransferConfig(
        kv_connector=name, kv_connector_module_path=path, kv_role="kv_both", kv_connector_extra_config=extra
    )


_CHILDREN = [
    {"kv_connector": "PretendLoader", "kv_connector_module_path": "support.siblings", "kv_role": "kv_both"},
    {"kv_connector": "ExampleConnector", "kv_role": "kv_both"},
]


@pytest.fixture(
    params=[
        pytest.param(lambda: SimpleNamespace(kv_transfer_config=None), id="no connector"),
        pytest.param(SimpleNamespace, id="a configuration unlike any"),
        pytest.param(lambda: None, id="none"),
        pytest.param(lambda: SimpleNamespace(kv_transfer_config=SimpleNamespace(connector="x")), id="a transfer unlike any"),
        pytest.param(lambda: SimpleNamespace(kv_transfer_config=_transfer("ExampleConnector")), id="another connector"),
        pytest.param(lambda: SimpleNamespace(kv_transfer_config=_transfer("Nobody", "no.such.module")), id="an unknown one"),
        pytest.param(
            lambda: SimpleNamespace(kv_transfer_config=_transfer("MultiConnector", connectors=_CHILDREN)), id="several"
        ),
        pytest.param(
            lambda: SimpleNamespace(kv_transfer_config=_transfer("MultiConnector", connectors=[{"x": 1}, 5, None])),
            id="children unlike any",
        ),
        pytest.param(
            lambda: SimpleNamespace(kv_transfer_config=_transfer("MultiConnector", connectors="x")), id="no list of children"
        ),
    ]
)
def without(request: pytest.FixtureRequest) -> Any:
    """A configuration without slotstream."""
    return request.param()


@pytest.mark.parametrize("seam", [None, *_SEAMS, *_OTHERS])
def test_without_slotstream_a_vllm_that_lacks_a_seam_starts(
    seam: str | None, without: Any, inits: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    if seam is not None:
        _remove(seam, monkeypatch)
    plugin.register()
    plugin.register()
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    wrapper = _Wrapper(without)
    assert WorkerWrapperBase.init_device(wrapper) == "done"
    assert inits == [wrapper]
    assert plugin.config_of(without) is None


@pytest.mark.parametrize("seam", [f"{_WORKER_BASE}.WorkerWrapperBase", f"{_WORKER_BASE}.WorkerWrapperBase.init_device"])
def test_without_slotstream_a_vllm_whose_workers_cannot_be_reached_starts(
    seam: str, without: Any, inits: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    _remove(seam, monkeypatch)
    plugin.register()
    plugin.register()
    from vllm.v1.worker.worker_base import WorkerBase

    worker: Any = WorkerBase(without)
    assert worker.vllm_config is without


def test_without_slotstream_a_wrapper_unlike_any_starts(inits: list[Any]) -> None:
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    plugin.register()
    bare = object.__new__(WorkerWrapperBase)  # Whatever it is asked for, it asks itself for its worker.
    assert WorkerWrapperBase.init_device(bare) == "done"
    assert inits == [bare]


@pytest.mark.parametrize("broken", ["slotstream.connector.reading.vllm_seams", "torch", "vllm.v1.worker.worker_base"])
def test_an_import_that_fails_does_not_pass_register(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, broken, None)
    plugin.register()


@pytest.fixture(scope="module")
def layers(truth_models: dict[str, Path]) -> Any:
    """vLLM's configuration of an engine that captures layers."""
    from vllm.engine.arg_utils import EngineArgs

    transfer = _transfer("SlotStreamConnector", "slotstream.connector", layers=[0, 3, "final"])
    arguments = EngineArgs(model=str(truth_models["dense"]), max_model_len=1024, kv_transfer_config=transfer)
    return arguments.create_engine_config()


def _refusal(call: Callable[[], Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        call()
    said = str(caught.value)
    assert "\n" not in said
    assert "use vLLM 0.32 or 0.33" in said
    return said


@pytest.mark.parametrize("seam", _SEAMS)
def test_with_layers_a_missing_seam_is_named_before_the_model_is_loaded(
    seam: str, layers: Any, inits: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    _remove(seam, monkeypatch)
    plugin.register()
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    said = _refusal(lambda: WorkerWrapperBase.init_device(_Wrapper(layers)))
    assert seam.rpartition(".")[2] in said
    assert not inits


def test_with_layers_fields_that_were_renamed_are_named_too(
    layers: Any, inits: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.forward_context import ForwardContext
    from vllm.v1.request import Request
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    plugin.register()

    def said() -> str:
        return _refusal(lambda: WorkerWrapperBase.init_device(_Wrapper(layers)))

    with monkeypatch.context() as patched:
        patched.delitem(ForwardContext.__dataclass_fields__, "slot_mapping")
        assert "has no ForwardContext.slot_mapping" in said()
    monkeypatch.setattr(Request, "__init__", lambda self: None)
    assert "has no Request.skip_reading_prefix_cache" in said()
    monkeypatch.setattr(Request, "__init__", lambda self: setattr(self, "x", self.skip_reading_prefix_cache))
    assert "has no Request.resumable" in said()
    assert not inits


class _Without:
    """Another object without one of its attributes."""

    def __init__(self, whole: Any, name: str) -> None:
        self._whole, self._name = whole, name

    def __getattr__(self, name: str) -> Any:
        if name == self._name:
            raise AttributeError(f"no attribute {name!r}")
        return getattr(self._whole, name)


@pytest.mark.parametrize(
    "name", ["additional_config", "model_config", "parallel_config", "scheduler_config", "compilation_config", "cache_config"]
)
def test_with_layers_a_part_of_the_configuration_that_is_missing_is_named(name: str, layers: Any, inits: list[Any]) -> None:
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    plugin.register()
    wrapper: Any = _Wrapper(_Without(layers, name))
    assert f"(AttributeError: no attribute '{name}')" in _refusal(lambda: WorkerWrapperBase.init_device(wrapper))
    assert not inits


@pytest.mark.parametrize("seam", [f"{_WORKER_BASE}.WorkerWrapperBase", f"{_WORKER_BASE}.WorkerWrapperBase.init_device"])
def test_with_layers_workers_that_cannot_be_reached_say_so_when_they_are_made(
    seam: str, layers: Any, inits: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.v1.worker.worker_base import WorkerBase

    _remove(seam, monkeypatch)
    plugin.register()
    said = _refusal(lambda: WorkerBase(layers))
    assert f"has no {seam.removeprefix(_WORKER_BASE + '.')}" in said.replace(_WORKER_BASE + ".", "")


def test_with_layers_and_no_worker_left_the_connector_says_what_is_missing(
    layers: Any, inits: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    _remove(f"{_WORKER_BASE}.WorkerBase", monkeypatch)
    _remove(f"{_WORKER_BASE}.WorkerWrapperBase.init_device", monkeypatch)
    plugin.register()
    config = ConnectorConfig.from_vllm(layers)
    assert "has no WorkerWrapperBase.init_device" in _refusal(lambda: check_capture(config, plugin.install))


@pytest.mark.parametrize("seam", [f"{_BASE}.SupportsHMA", f"{_FACTORY}.KVConnectorFactory"])
def test_a_connector_that_cannot_be_loaded_says_why(seam: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    import slotstream.connector

    monkeypatch.delitem(sys.modules, "slotstream.connector.facade", raising=False)
    _remove(seam, monkeypatch)
    said = _refusal(lambda: slotstream.connector.SlotStreamConnector)
    assert seam.rpartition(".")[2] in said


_INIT_DEVICE = "vllm.v1.worker.worker_base:WorkerWrapperBase.init_device"


def _without_seams(*seams: str) -> dict[str, str | None]:
    """The environment of an engine whose vLLM lacks these, in each of its processes."""
    tests = Path(__file__).resolve().parents[1]
    paths = [str(tests / "support" / "without_seams"), str(tests), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(paths), "SLOTSTREAM_TEST_MISSING": ",".join(seams)}


@pytest.mark.extended
@pytest.mark.timeout(900)
@pytest.mark.parametrize("processes", ["0", "1"], ids=["one process", "several"])
def test_an_engine_without_slotstream_starts_and_one_with_layers_is_refused(
    processes: str, truth_models: dict[str, Path], tmp_path: Path
) -> None:
    env = {**_without_seams(_INIT_DEVICE), "VLLM_ENABLE_V1_MULTIPROCESSING": processes}
    env["VLLM_CACHE_ROOT"] = str(tmp_path / "cache")  # What this vLLM finds out of itself is for no other.
    found = offline.generate(tmp_path / "without", truth_models["dense"], [[5, 6, 7]], 4, env=env)
    assert len(found.texts[0]) == 4
    log = offline.refusal(tmp_path / "with", truth_models["dense"], env=env, **offline.capture("127.0.0.1:1", [0, 3]))
    assert "slotstream cannot start: vLLM" in log
    assert "has no WorkerWrapperBase.init_device as slotstream knows it" in log
    assert "Loading weights took" not in log
