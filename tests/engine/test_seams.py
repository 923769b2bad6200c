"""Where the connector reaches into vLLM: what it says where a seam is missing, or a model cannot give its layers."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.worker_rig import config

from slotstream.connector.plan import StepPlan
from slotstream.connector.reading import vllm_seams
from slotstream.connector.row_pool import cache_group
from slotstream.wire.errors import ConfigError

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]


class _Runner:
    def load_model(self) -> None: ...

    def initialize_kv_cache(self, kv_cache_config: Any, is_profiling: bool = False) -> None: ...


def test_every_seam_is_there_in_this_vllm() -> None:
    """By signature, of every runner that this installation has."""
    import inspect

    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.model_executor.models.interfaces import SupportsEagle3
    from vllm.v1.request import Request
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner as V2
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner as V1
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    for runner in (V1, V2):
        assert next(iter(list(inspect.signature(runner.initialize_kv_cache).parameters)[1:])) == "kv_cache_config"
        assert callable(runner.load_model)
        assert callable(runner.get_model)
    assert callable(WorkerWrapperBase.init_device)
    assert callable(SupportsEagle3.set_aux_hidden_state_layers)
    assert "slot_mapping" in ForwardContext.__dataclass_fields__
    assert "additional_config" in VllmConfig.__dataclass_fields__
    assert "skip_reading_prefix_cache" in inspect.getsource(Request.__init__)


@pytest.mark.parametrize(
    ("runner", "seam"),
    [
        pytest.param(None, "NoneType.load_model", id="no runner"),
        pytest.param(
            SimpleNamespace(load_model=lambda: None), "SimpleNamespace.initialize_kv_cache", id="a seam that was renamed"
        ),
        pytest.param(
            SimpleNamespace(load_model=lambda: None, initialize_kv_cache=lambda other: None),
            "SimpleNamespace.initialize_kv_cache(kv_cache_config, ...)",
            id="another signature",
        ),
        pytest.param(
            SimpleNamespace(load_model=lambda: None, initialize_kv_cache=lambda kv_cache_config: None),
            "SimpleNamespace._dummy_run",
            id="no way to try the model out",
        ),
    ],
)
def test_a_missing_seam_is_named_with_the_version_and_what_to_do(runner: Any, seam: str) -> None:
    with pytest.raises(ConfigError) as caught:
        vllm_seams.attach(runner, SimpleNamespace(), config(layers=[1]))
    said = str(caught.value)
    assert f"has no {seam} as slotstream knows it" in said
    assert said.startswith("vLLM ")
    assert "extract_hidden_states instead of connector option layers" in said
    assert "\n" not in said


def test_a_model_without_its_layers_is_refused() -> None:
    with pytest.raises(ConfigError, match=r'Linear does not offer its layers .*only "layers": \["final"\] can be captured'):
        vllm_seams.choose_layers(torch.nn.Linear(2, 2), [1], has_drafter=False)


def test_a_drafters_layers_that_cannot_be_told_are_refused() -> None:
    runner = SimpleNamespace(use_aux_hidden_state_outputs=True)
    with pytest.raises(ConfigError, match="the drafter wants layers of Linear, and which ones cannot be told"):
        vllm_seams.drafter_layers(runner, torch.nn.Linear(2, 2))
    inner: Any = torch.nn.Linear(2, 2)
    inner.aux_hidden_state_layers = (5, 2)
    model = torch.nn.Sequential(inner)
    assert vllm_seams.drafter_layers(runner, model) == (2, 5)
    assert vllm_seams.drafter_layers(SimpleNamespace(), model) is None


def test_the_compile_cache_hears_of_the_layers() -> None:
    """vLLM's hash of a configuration covers additional_config, and so differs where the layers do."""
    from vllm.config import VllmConfig

    hashes = set()
    for layers in ([1], [1, 2], [1, "final"]):
        found = VllmConfig()
        chosen = config(layers=layers)
        object.__setattr__(chosen, "metadata", {"slotstream_version": "1"})
        vllm_seams.tell_compile_cache(found, chosen)
        hashes.add(found.compute_hash())
    assert len(hashes | {VllmConfig().compute_hash()}) == 4


def test_what_the_user_gave_stays_as_it_is() -> None:
    """Two engines may be made of the same arguments."""
    from vllm.config import VllmConfig

    given: dict[str, Any] = {"mine": 1}
    found, chosen = VllmConfig(additional_config=given), config(layers=[1])
    object.__setattr__(chosen, "metadata", {"slotstream_version": "1"})
    vllm_seams.tell_compile_cache(found, chosen)
    assert given == {"mine": 1}
    assert found.additional_config["mine"] == 1
    assert vllm_seams.CONFIG_KEY in found.additional_config


def test_a_start_up_plan_counts_for_the_same_row_pool_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM keeps the size of a KV cache for the next start (VLLM_ENABLE_STARTUP_PLAN): what the pool takes must be the same."""
    from vllm.config import VllmConfig
    from vllm.platforms import current_platform
    from vllm.v1.worker.startup_plan import compute_plan_fingerprint

    monkeypatch.setattr(type(current_platform), "get_device_total_memory", lambda *args: 1 << 36)

    def fingerprint(**options: object) -> str:
        found = VllmConfig()
        if options:
            chosen = config(**options)
            object.__setattr__(chosen, "metadata", {"slotstream_version": "1"})
            vllm_seams.tell_compile_cache(found, chosen)
        return str(compute_plan_fingerprint(found, 0, 1))

    pools: list[dict[str, Any]] = [
        {"layers": [1]},
        {"layers": [1], "row_pool_bytes": 1 << 20},
        {"layers": [1], "output_rows_per_chunk": 16},
    ]
    assert len({fingerprint(), *(fingerprint(**options) for options in pools)}) == 4
    assert fingerprint(**pools[0]) == fingerprint(**pools[0])


def test_the_plug_in_imports_no_worker_and_may_be_called_twice() -> None:
    code = (
        "import sys\n"
        "from importlib.metadata import entry_points\n"
        "(ours,) = [e for e in entry_points(group='vllm.general_plugins') if e.name == 'slotstream']\n"
        "register = ours.load()\n"
        "register(); register()\n"
        "assert not [m for m in sys.modules if m.startswith(('vllm', 'torch'))], 'imported too much'\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_layers_call_a_connector_only_where_it_wants_to_hear_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.distributed.kv_transfer import kv_transfer_state
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
    from vllm.model_executor.layers.attention import kv_transfer_utils

    from slotstream.connector.facade import SlotStreamConnector, SlotStreamMetadata

    class Extended(SlotStreamConnector):
        def save_kv_layer(self, *args: Any, **kwargs: Any) -> None: ...

    def asked(connector: Any) -> bool:
        monkeypatch.setattr(kv_transfer_state, "_KV_CONNECTOR_AGENT", connector)
        return bool(kv_transfer_utils.has_kv_transfer_group())

    monkeypatch.setattr(kv_transfer_utils, "has_kv_transfer_group", kv_transfer_state.has_kv_transfer_group)
    vllm_seams.spare_layers()
    once = kv_transfer_utils.has_kv_transfer_group
    vllm_seams.spare_layers()
    assert kv_transfer_utils.has_kv_transfer_group is once
    assert not asked(None)
    assert asked(object()), "another's connector may load and save layers"
    for kind in (SlotStreamConnector, Extended):
        connector = object.__new__(kind)
        assert asked(connector)
        steps = {
            name: SimpleNamespace(wants_layers=name == "extracts", bind=lambda plan: None) for name in ("layers", "extracts")
        }
        connector._sides = steps  # type: ignore[assignment]
        for name in ("layers", "extracts", "layers"):
            connector.bind_connector_metadata(SlotStreamMetadata(StepPlan(), name))
            assert asked(connector) is (name == "extracts" or kind is Extended)
        connector.bind_connector_metadata(KVConnectorMetadata())
        assert asked(connector) is (kind is Extended)


def test_a_vllm_whose_layers_cannot_be_spared_is_only_slower(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.model_executor.layers.attention import kv_transfer_utils

    monkeypatch.delattr(kv_transfer_utils, "has_kv_transfer_group")
    vllm_seams.spare_layers()
    assert not hasattr(kv_transfer_utils, "has_kv_transfer_group")


def test_every_step_says_what_planning_asks_it() -> None:
    """Fields of vLLM's own, which are read in each step."""
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
    from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput

    step = {"num_scheduled_tokens", "total_num_scheduled_tokens", "scheduled_spec_decode_tokens", "scheduled_new_reqs"}
    step |= {"scheduled_cached_reqs", "preempted_req_ids", "kv_cache_block_copies", "kv_connector_block_state"}
    assert step <= SchedulerOutput.__dataclass_fields__.keys()
    cached = {"req_ids", "resumed_req_ids", "num_computed_tokens", "new_block_ids", "num_output_tokens"}
    assert cached <= CachedRequestData.__dataclass_fields__.keys()
    assert callable(KVConnectorBase_V1.has_pending_push_work)


def _group(layers: list[str], spec: Any) -> Any:
    from vllm.v1.kv_cache_interface import KVCacheGroupSpec

    return KVCacheGroupSpec(layers, spec)


def test_slots_are_those_of_the_target_models_full_attention() -> None:
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec, RSWASpec, SlidingWindowSpec

    common: dict[str, Any] = {"block_size": 16, "num_kv_heads": 1, "head_size": 8, "dtype": torch.bfloat16}
    sliding = _group(["model.layers.0.self_attn.attn"], SlidingWindowSpec(**common, sliding_window=64))
    full = _group(["model.layers.1.self_attn.attn"], FullAttentionSpec(**common))
    drafter = _group(["model.layers.6.self_attn.attn"], FullAttentionSpec(**common))
    draft_model = _group(["draft_model.layers.0.self_attn.attn"], FullAttentionSpec(**common))
    state = _group(["model.layers.2.mamba"], MambaSpec(block_size=64, shapes=((1,),), dtypes=(torch.float32,)))

    def chosen(*groups: Any) -> Any:
        return cache_group(SimpleNamespace(kv_cache_groups=list(groups)), 6)

    assert chosen(state, sliding, full).index == 2
    assert chosen(drafter, draft_model, sliding).index == 2
    assert chosen(state, full).layer == "model.layers.1.self_attn.attn"
    assert chosen(full).block_size == 16
    # Blocks in the middle of a request's table may go to others.
    gaps = _group(["model.layers.1.self_attn.attn"], RSWASpec(**common, rswa_window=64))
    assert [chosen(group).keeps_blocks for group in (full, sliding, gaps)] == [True, False, False]
    with pytest.raises(ConfigError, match="this model has no decoder self-attention"):
        chosen(state)
