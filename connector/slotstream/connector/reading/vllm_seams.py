"""Where we reach into vLLM beside its connector interface: one function a seam, each checked before it is used.

| seam | what for | seen in |
| --- | --- | --- |
| `WorkerWrapperBase.init_device` | to find the model runner before it loads its model | 0.32, 0.33 |
| runner `.load_model` | to choose layers, and put the capture into `forward`, once there is a model | 0.32, 0.33: V1, V2, CPU |
| runner `.initialize_kv_cache` | to cut the row pool into pages, once the KV cache is known | 0.32, 0.33: V1, V2, CPU |
| runner `._dummy_run` | to run the model once before it serves, where vLLM does not | 0.32: CPU |
| runner `.model_memory_usage` | to bill the row pool where vLLM's profiling sees it | 0.32, 0.33: V1, V2 |
| model `.set_aux_hidden_state_layers` | which layers the model gives beside its answer | 0.32, 0.33: `SupportsEagle3` |
| model `._maybe_add_hidden_state` | so that no layer it gives is overwritten later | 0.32, 0.33: `EagleModelMixin` |
| model `.forward` | to take them out of the answer | 0.32, 0.33 |
| `kv_transfer_utils.has_kv_transfer_group` | so that no layer calls a connector that wants nothing of it | 0.32, 0.33 |
| `ForwardContext.slot_mapping` | the slot of each row, as the device has it | 0.32, 0.33 |
| `VllmConfig.additional_config` | to tell the compile cache of the layers, and the start-up plan of the row pool | 0.32, 0.33 |
| `Request.skip_reading_prefix_cache` | so that a captured request computes all its tokens | 0.32, 0.33 |
| `Request.resumable` | to know a streaming input session before its first row | 0.32, 0.33 |
| `Request.from_engine_core_request` | to keep `external_req_id`, by which sequences are told (`caller_ids`) | 0.32, 0.33 |

Without the option `layers` none of them is used but the first, which checks the options before the model is loaded,
`.load_model`, `_maybe_add_hidden_state` and the last two. Without slotstream in vLLM's configuration none is, and nothing
raises. What is missing is said before the model is loaded; where the first is missing, by `WorkerBase.__init__`; where the last
is, in a warning, for the engine starts without it. Without `has_kv_transfer_group` it is only slower, and nothing is said.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from slotstream.connector.plan import StepPlan, TableUpdate
from slotstream.connector.reading import forward_capture
from slotstream.connector.reading.forward_capture import ForwardCapture
from slotstream.connector.reading.last_norm import describe_last_norm
from slotstream.connector.reading.row_pages import RowPages
from slotstream.connector.reading.row_write import write_rows
from slotstream.connector.reading.staging_plan import StagingPlan, step_tokens_max
from slotstream.connector.reading.vllm_checks import (
    WORKERS,
    attribute,
    check_connector,
    check_needed,
    check_own_layers,
    check_sessions,
    find,
    missing,
)
from slotstream.connector.row_pool import cache_group, pool_rows, pool_shape
from slotstream.connector.vllm_config import ConnectorConfig, known_vllm, logged_refusal, on_cpu
from slotstream.transport.logs import connector_logger
from slotstream.wire.errors import ConfigError

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = connector_logger(__name__)

CONFIG_KEY = "slotstream"
ConfigOf = Callable[["VllmConfig | None"], "ConnectorConfig | None"]


def install(config_of: ConfigOf) -> None:
    """Reach the model runner of every worker of this process. May be called twice.

    `config_of` says what our connector is told by a configuration, None where vLLM runs another or none. Raises ConfigError
    where this vLLM has no such place; each worker that would need it then refuses to start, where it still can.
    """
    try:
        wrapper = find(WORKERS, "WorkerWrapperBase", extraction=False)
        inner = getattr(wrapper, "init_device", None)
        if not callable(inner):
            raise missing("WorkerWrapperBase.init_device", extraction=False)
    except ConfigError as error:
        _refuse_in_workers(config_of, error)
        raise
    if getattr(inner, "slotstream", False):
        return

    @functools.wraps(inner)
    def init_device(self: Any, *args: Any, **kwargs: Any) -> Any:
        vllm_config = attribute(self, "vllm_config")
        with logged_refusal():
            config = config_of(vllm_config)
            if config is not None:
                _check(config, vllm_config)
        result = inner(self, *args, **kwargs)
        if config is None:
            return result
        runner = attribute(attribute(self, "worker"), "model_runner")
        if config.direct:
            attach(runner, vllm_config, config)
        else:
            attach_extraction(runner)
        return result

    init_device.slotstream = True  # type: ignore[attr-defined]
    setattr(wrapper, "init_device", init_device)  # noqa: B010  (mypy knows it as a method, or not at all)


def _refuse_in_workers(config_of: ConfigOf, error: ConfigError) -> None:
    """Have each worker say `error` when it is made, which is before it loads its model, if it will have our connector."""
    try:
        worker = find(WORKERS, "WorkerBase")
    except ConfigError:
        return
    inner = worker.__init__
    if getattr(inner, "slotstream", False):
        return

    @functools.wraps(inner)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        inner(self, *args, **kwargs)
        with logged_refusal():
            config = config_of(attribute(self, "vllm_config"))
            if config is not None:
                raise ConfigError(str(error))

    init.slotstream = True  # type: ignore[attr-defined]
    worker.__init__ = init


@known_vllm()
def _check(config: ConnectorConfig, vllm_config: VllmConfig) -> None:
    """All that can be said before there is a model. Raises ConfigError."""
    check_connector(vllm_config)
    StagingPlan.of(config, step_tokens_max(vllm_config))
    if config.direct:
        check_needed(config)
        tell_compile_cache(vllm_config, config)
    check_sessions()


def tell_compile_cache(vllm_config: VllmConfig, config: ConnectorConfig) -> None:
    """vLLM's compile cache knows nothing of auxiliary layers: two runs with other layers would share a compiled graph.

    Nor does its start-up plan know of the row pool: a start with a larger one would take the KV cache of a smaller one's.
    """
    additional = vllm_config.additional_config
    assert isinstance(additional, dict), "the configuration was checked"
    told = {
        "layers": list(config.options.layers or ()),
        "row_pool_bytes": pool_rows(config, vllm_config) * config.row_bytes,
        "version": config.metadata["slotstream_version"],
    }
    vllm_config.additional_config = {**additional, CONFIG_KEY: told}  # The user's own may be another engine's, too.


@logged_refusal()
@known_vllm()
def attach(runner: Any, vllm_config: VllmConfig, config: ConnectorConfig) -> None:
    """Wrap what a model runner does once: loading its model, and laying out the KV cache. Raises ConfigError."""
    for name in ("load_model", "initialize_kv_cache"):
        if not callable(getattr(runner, name, None)):
            raise missing(f"{type(runner).__name__}.{name}")
    first = next(iter(inspect.signature(runner.initialize_kv_cache).parameters), "")
    if first != "kv_cache_config":
        raise missing(f"{type(runner).__name__}.initialize_kv_cache(kv_cache_config, ...)")
    if on_cpu() and not callable(getattr(runner, "_dummy_run", None)):  # See try_out.
        raise missing(f"{type(runner).__name__}._dummy_run")
    load_model, initialize_kv_cache = runner.load_model, runner.initialize_kv_cache
    loaded: list[ForwardCapture] = []  # The last is that of this runner's model: other engines of this process have their own.

    @functools.wraps(load_model)
    def load(*args: Any, **kwargs: Any) -> Any:
        result = load_model(*args, **kwargs)
        loaded.append(put_capture(runner, vllm_config, config))
        forward_capture.captures[config.instance] = loaded[-1]
        return result

    @functools.wraps(initialize_kv_cache)
    def initialize(kv_cache_config: Any, *args: Any, **kwargs: Any) -> Any:
        if loaded:
            try_out(runner, loaded[-1])
            lay_out(loaded[-1], kv_cache_config, vllm_config)
        return initialize_kv_cache(kv_cache_config, *args, **kwargs)

    runner.load_model, runner.initialize_kv_cache = load, initialize
    spare_layers()


def spare_layers() -> None:
    """Have attention layers call a connector only where it wants to hear of them. May be called twice.

    Where no graph runs, each layer asks vLLM for its connector, looks up what it would tell it, and calls it twice
    (`maybe_transfer_kv_layer`): 20 calls a layer. With rows taken from the forward pass none of them does anything.
    """
    try:
        from vllm.distributed.kv_transfer import get_kv_transfer_group
        from vllm.model_executor.layers.attention import kv_transfer_utils
    except ImportError:
        return
    inner = getattr(kv_transfer_utils, "has_kv_transfer_group", None)
    if not callable(inner) or getattr(inner, "slotstream", False):
        return

    @functools.wraps(inner)
    def has_kv_transfer_group() -> bool:
        return inner() and getattr(get_kv_transfer_group(), "wants_layers", True)

    has_kv_transfer_group.slotstream = True  # type: ignore[attr-defined]
    setattr(kv_transfer_utils, "has_kv_transfer_group", has_kv_transfer_group)  # noqa: B010  (mypy: a function of another's)


@logged_refusal()
def attach_extraction(runner: Any) -> None:
    """Wrap the loading of a model whose layers vLLM extracts: also of those, none may be overwritten."""
    check_own_layers()
    load_model = getattr(runner, "load_model", None)
    if not callable(load_model):
        raise missing(f"{type(runner).__name__}.load_model", extraction=False)

    @functools.wraps(load_model)
    def load(*args: Any, **kwargs: Any) -> Any:
        result = load_model(*args, **kwargs)
        with logged_refusal():  # Not in own_layers: put_capture calls it too.
            own_layers(model_of(runner))
        return result

    runner.load_model = load


def model_of(runner: Any) -> torch.nn.Module:
    """The model that a runner has loaded. Raises ConfigError."""
    model = runner.get_model() if hasattr(runner, "get_model") else getattr(runner, "model", None)
    if not isinstance(model, torch.nn.Module):
        raise missing(f"{type(runner).__name__}.get_model")
    return model


def own_layers(model: torch.nn.Module) -> None:
    """Have the model give a copy of a layer that it would go on computing in. Raises ConfigError.

    Before the first layer there is no residual yet, and vLLM hands out the embedding itself; without compilation its CUDA norms
    add to it in place, and what was layer 0 ends as the last one (vLLM 0.32 and 0.33, `EagleModelMixin`).
    """
    check_own_layers()
    for module in model.modules():
        if callable(add := getattr(module, "_maybe_add_hidden_state", None)):
            setattr(module, "_maybe_add_hidden_state", _copying(add))  # noqa: B010  (mypy: a module has no such attribute)


def _copying(add: Callable[..., Any]) -> Callable[..., Any]:
    def add_own(aux_hidden_states: Any, layer_idx: int, hidden_states: Any, residual: Any) -> Any:
        count = len(aux_hidden_states)
        add(aux_hidden_states, layer_idx, hidden_states, residual)
        if residual is None and len(aux_hidden_states) > count:
            aux_hidden_states[-1] = hidden_states.clone()
        return aux_hidden_states

    return add_own


@logged_refusal()
@known_vllm()
def put_capture(runner: Any, vllm_config: VllmConfig, config: ConnectorConfig) -> ForwardCapture:
    """Choose the layers of a runner's model and put the capture into its forward pass. Raises ConfigError."""
    model = model_of(runner)
    ours = config.residual_layer_ids
    drafters = drafter_layers(runner, model)
    asked = tuple(sorted({*ours, *(drafters or ())}))
    if config.eagle3:
        check_eagle3(model, ours)
    if ours:
        choose_layers(model, asked, has_drafter=drafters is not None)
        own_layers(model)
        relay_layers(runner, model, vllm_config)
    rank_stores = _stores_rows()
    model_config = vllm_config.model_config
    dtype = model_config.dtype
    assert isinstance(dtype, torch.dtype), "vLLM resolves the dtype before it loads the model"
    pages = None
    if rank_stores:
        rows = pool_rows(config, vllm_config)
        pages = RowPages(rows, config.row_kind, config.hidden_size, dtype, torch.device(runner.device))
        bill(runner, vllm_config, pages)
    capture = ForwardCapture(
        type(model).__name__,
        asked,
        ours,
        drafters,
        final=config.wants_final,
        hidden=config.hidden_size,
        dtype=dtype,
        pages=pages,
    )
    capture.final_norm = describe_last_norm(model, model_config.get_total_num_hidden_layers())
    model.forward = capture.wrap(model.forward)
    return capture


def _stores_rows() -> bool:
    """Rows are the same on every tensor-parallel rank, and only the last rank of a pipeline has them all."""
    from vllm.distributed.parallel_state import get_pp_group, get_tensor_model_parallel_rank

    return bool(get_pp_group().is_last_rank) and get_tensor_model_parallel_rank() == 0


def drafter_layers(runner: Any, model: torch.nn.Module) -> tuple[int, ...] | None:
    """The layers that vLLM's drafter had the model give it, ascending; None where it wants none. Raises ConfigError."""
    if not getattr(runner, "use_aux_hidden_state_outputs", False):
        return None
    for module in model.modules():
        if ids := getattr(module, "aux_hidden_state_layers", ()):
            return tuple(sorted(set(ids)))
    raise ConfigError(
        f"the drafter wants layers of {type(model).__name__}, and which ones cannot be told: drop the speculative config, or "
        "capture with extract_hidden_states"
    )


def check_eagle3(model: torch.nn.Module, ours: Sequence[int]) -> None:
    """Raises ConfigError where "eagle3" was resolved from configs to other layers than this model gives an EAGLE-3 draft."""
    named = getattr(model, "get_eagle3_default_aux_hidden_state_layers", None)
    theirs = sorted({*named(), max(ours)}) if callable(named) else list(ours)
    if theirs != list(ours):
        raise ConfigError(
            f'"layers": "eagle3" is {list(ours)} by the config, but {type(model).__name__} gives an EAGLE-3 draft other ones: '
            f'write "layers": {theirs}'
        )


def choose_layers(model: torch.nn.Module, asked: Sequence[int], *, has_drafter: bool) -> None:
    """Have the model give these layers, ascending, beside its answer. Raises ConfigError."""
    from vllm.model_executor.models.interfaces import supports_eagle3

    name = type(model).__name__
    setter = getattr(model, "set_aux_hidden_state_layers", None)
    if not supports_eagle3(model) or not callable(setter):
        raise ConfigError(
            f'{name} does not offer its layers (vLLM\'s SupportsEagle3): only "layers": ["final"] can be captured of this model'
        )
    on_transformers = any(base.__module__.startswith("vllm.model_executor.models.transformers") for base in type(model).__mro__)
    if on_transformers and (0 in asked or has_drafter):
        what = "a drafter that wants layers of its own" if has_drafter else "layer 0"
        raise ConfigError(f"{name} runs on transformers' model code, which cannot give {what}: capture other layers")
    try:
        setter(tuple(asked))
    except Exception as error:
        raise ConfigError(f"{name} does not take the layers {list(asked)}: {type(error).__name__}: {error}") from error


def relay_layers(runner: Any, model: torch.nn.Module, vllm_config: VllmConfig) -> None:
    """With a pipeline, have each rank hand the layers on to the last, as vLLM does for EAGLE-3. Raises ConfigError."""
    if vllm_config.parallel_config.pipeline_parallel_size < 2:
        return
    try:
        from vllm.v1.worker.gpu.spec_decode.eagle import eagle3_utils
    except ImportError as error:
        raise missing("relay of auxiliary layers between the ranks of a pipeline") from error
    try:
        eagle3_utils.verify_supports_aux_hidden_states_over_pp(model, "capture of layers")
    except ValueError as error:
        raise ConfigError(f'{error}: drop --pipeline-parallel-size, or capture only "layers": ["final"]') from error
    eagle3_utils.reserve_aux_intermediate_tensor_slots(model)
    runner.pp_handler.configure_aux_hidden_state_relay(model)
    if not runner.is_first_pp_rank:  # Made while the model was loaded, without the layers.
        runner.intermediate_tensors = model.make_empty_intermediate_tensors(  # type: ignore[operator]
            batch_size=runner.max_num_tokens, dtype=vllm_config.model_config.dtype, device=runner.device
        )


def bill(runner: Any, vllm_config: VllmConfig, pages: RowPages) -> None:
    """Add the row pool to what vLLM counts as the model's, so that gpu_memory_utilization holds."""
    usage = getattr(runner, "model_memory_usage", None)
    if usage is not None:
        runner.model_memory_usage = usage + pages.nbytes
    elif pages.device.type == "cuda":
        raise missing(f"{type(runner).__name__}.model_memory_usage")
    logger.info(
        "slotstream: the row pool takes %d MiB of device memory (%d rows)%s",
        math.ceil(pages.nbytes / (1 << 20)),
        pages.pool.shape[0],
        ", beside the KV cache's --kv-cache-memory-bytes" if vllm_config.cache_config.kv_cache_memory_bytes else "",
    )


def try_out(runner: Any, capture: ForwardCapture) -> None:
    """See that the model has run once, with its layers, before it serves. Raises ConfigError where it does not give them.

    vLLM's profiling does so, but for a CPU without compilation whose KV cache has a size that somebody chose.
    """
    if capture.tried:
        return
    runner._dummy_run(1)


@logged_refusal()
@known_vllm()
def lay_out(capture: ForwardCapture, kv_cache_config: Any, vllm_config: VllmConfig) -> None:
    """Cut the row pool for this KV cache, and compile the kernels by launches that change nothing. Raises ConfigError."""
    pages = capture.pages
    if pages is None:
        return
    group = cache_group(kv_cache_config, vllm_config.model_config.get_total_num_hidden_layers())
    if not group.layer:
        raise ConfigError("the last rank of the pipeline has no attention layer: its slots cannot name the rows")
    pages.cut(pool_shape(pages.pool.shape[0], group.block_size), kv_cache_config.num_blocks * group.block_size)
    capture.layer = group.layer
    padding = torch.full((1,), -1, dtype=torch.int64, device=pages.device)
    row = pages.pool[0, 0].new_zeros((1, pages.pool.shape[2]))
    try:
        for _ in range(2):  # Once compiled, a kernel is launched in another way.
            write_rows(pages, [row] * pages.pool.shape[1], padding)
            pages.begin_step(StepPlan(table=TableUpdate(0, {}, clear=True, live=0)))
    except Exception as error:
        raise ConfigError(f"the kernels that write rows do not run here: {type(error).__name__}: {error}") from error
