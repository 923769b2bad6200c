"""What the connector has to know of its engine, read once from vLLM's configuration and checked."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from slotstream.connector.options import ConnectorOptions
from slotstream.transport.logs import connector_logger
from slotstream.wire.columns import RowFormat
from slotstream.wire.errors import ConfigError
from slotstream.wire.names import FINAL, LAYER_NAMES_KEY, LAYERS_MAX

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = connector_logger(__name__)


@contextlib.contextmanager
def known_vllm() -> Iterator[None]:
    """Turn what goes wrong inside because vLLM is not as we know it into a ConfigError of one sentence. Also a decorator."""
    try:
        yield
    except (AssertionError, AttributeError, ImportError, LookupError, TypeError) as error:
        said = str(error).partition("\n")[0].partition(" (/")[0]  # An import's says where the file is, too.
        raise ConfigError(
            f"vLLM {vllm_version()} is not as slotstream knows it ({type(error).__name__}: {said}): use vLLM 0.32 or 0.33"
        ) from error


@dataclass(frozen=True, slots=True)
class RowKind:
    """What rows are: which engine computes them, their layer ids in order, and their dtype ("BF16", "F16" or "F32").

    `engine` is `ConnectorConfig.instance`.
    """

    engine: str
    layer_ids: tuple[int, ...]
    dtype: str

    def __str__(self) -> str:
        return f"layers {list(self.layer_ids)} in {self.dtype} of engine {self.engine}"


@dataclass(frozen=True, slots=True)
class ConnectorConfig:
    """Everything the connector needs to know of its engine, checked. `layer_ids` are in the order of the rows.

    `final` of the option `layers` is the last id then, the number of the model's layers + 1.
    `instance` names the engine within this process; two engines may have been given the same `engine_id`.
    """

    options: ConnectorOptions
    engine_id: str
    model: str
    layer_ids: tuple[int, ...]
    row_format: RowFormat
    metadata: Mapping[str, str]
    on_accelerator: bool = False
    instance: str = ""

    @classmethod
    @known_vllm()
    def from_vllm(cls, vllm_config: VllmConfig) -> Self:
        """Read and check vLLM's configuration. Raises ConfigError, in one sentence that says what to change."""
        transfer = vllm_config.kv_transfer_config
        assert transfer is not None, "vLLM makes no connector without a kv_transfer_config"
        options = ConnectorOptions.from_extra(transfer.kv_connector_extra_config or {})
        if not transfer.is_kv_producer:
            raise ConfigError(f'slotstream only sends: set "kv_role": "kv_producer", not {transfer.kv_role!r}')
        model_config = vllm_config.model_config
        layer_ids = _layer_ids(vllm_config, options)
        if options.layers is None:
            _check_extraction(vllm_config)
        else:
            _check_direct(vllm_config, options)
        parallel = vllm_config.parallel_config
        for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
            if getattr(parallel, name, 1) > 1:
                raise ConfigError(f"{name} must be 1: with context parallelism no worker holds all rows of a sample")
        model = model_config.served_model_name
        metadata = {
            "engine_id": str(transfer.engine_id),
            "vllm_version": vllm_version(),
            "slotstream_version": importlib.metadata.version("slotstream"),
            "model_path": str(model_config.model)[:1024],
            "model_revision": str(model_config.revision or ""),
            "num_hidden_layers": str(model_config.get_total_num_hidden_layers()),
        }
        if options.layers is None:
            metadata["final_norm_applied"] = "false"
        else:
            names = [str(layer_id) for layer_id in layer_ids]
            metadata[LAYER_NAMES_KEY] = json.dumps([*names[:-1], FINAL] if FINAL in options.layers else names)
        return cls(
            options=options,
            engine_id=str(transfer.engine_id),
            model=str(model if isinstance(model, str) else model_config.model)[:1024],
            layer_ids=layer_ids,
            row_format=RowFormat.of(_dtype_name(model_config.dtype), len(layer_ids), model_config.get_hidden_size()),
            metadata=metadata,
            on_accelerator=not on_cpu(),
            instance=instance_of(vllm_config),
        )

    @property
    def row_bytes(self) -> int:
        """Bytes of one row: every captured layer of one token."""
        return self.row_format.row_bytes

    @property
    def dtype(self) -> str:
        """Of the rows, in safetensors' spelling."""
        return self.row_format.dtype

    @property
    def hidden_size(self) -> int:
        """Elements of one layer of a row."""
        return self.row_format.hidden_size

    @property
    def row_kind(self) -> RowKind:
        """What the rows of this engine are."""
        return RowKind(self.instance, self.layer_ids, self.dtype)

    @property
    def direct(self) -> bool:
        """Whether rows are captured in row pages, and not read out of what `extract_hidden_states` caches."""
        return self.options.layers is not None

    @property
    def sends_in_process(self) -> bool:
        """Whether rows are sent by a process beside the worker: its thread would compete with a full CUDA graph's decode."""
        if self.options.sender == "auto":
            return self.direct and self.on_accelerator
        return self.options.sender == "process"

    @property
    def residual_layer_ids(self) -> tuple[int, ...]:
        """The layer ids but for that of `final`: what the model is asked for, ascending."""
        return self.layer_ids[:-1] if self.wants_final else self.layer_ids

    @property
    def wants_final(self) -> bool:
        """Whether the output of the model's last norm is captured, as the last layer of each row."""
        return self.options.layers is not None and FINAL in self.options.layers


def _check_extraction(vllm_config: VllmConfig) -> None:
    """Raises ConfigError where vLLM's `extract_hidden_states` gives no rows, or wrong ones."""
    model_config = vllm_config.model_config
    if model_config.runner_type == "pooling":
        # The model runner returns before the draft forward, and so never calls wait_for_save.
        raise ConfigError(
            "a pooling model cannot be captured: vLLM extracts no hidden states from requests that are pooled; "
            "connector option layers captures it"
        )
    if model_config.is_multimodal_model and model_config.using_transformers_backend():
        # vLLM records the layers of the outermost module, and only the language model inside it offers them: what vLLM
        # then unpacks is not there, at the first request.
        raise ConfigError(
            f"{model_config.architecture} cannot be captured: with images or other media and transformers' model code "
            "instead of its own, vLLM extracts no hidden states and ends at the first request"
        )
    if model_config.enable_prompt_embeds and not vllm_config.use_v2_model_runner:
        # ExtractHiddenStatesProposer.prepare_next_token_ids_padded asks for token ids that such a prompt does not have.
        raise ConfigError(
            "drop --enable-prompt-embeds: with model runner V1, a prompt of embeddings kills a vLLM that extracts"
        )
    if vllm_config.scheduler_config.async_scheduling and not vllm_config.use_v2_model_runner and not on_cpu():
        # https://github.com/vllm-project/vllm/issues/56417; tests/gpu/decode.py shows it, vLLM's own connector included.
        raise ConfigError(
            "add --no-async-scheduling, or use model runner V2: with V1 on a GPU, vLLM loses track of the text after an "
            "accepted draft token (vLLM issue 56417), and its hidden states are wrong from there on"
        )


def _check_direct(vllm_config: VllmConfig, options: ConnectorOptions) -> None:
    """Raises ConfigError where rows cannot be captured inside the model's forward pass."""
    if vllm_config.model_config.runner_type == "pooling" and not options.capture:
        raise ConfigError(
            "leave connector option capture true: requests to a pooling model carry no parameters that could ask for a capture"
        )
    parallel = vllm_config.parallel_config
    compilation = vllm_config.compilation_config
    if parallel.pipeline_parallel_size > 1 and not vllm_config.use_v2_model_runner:
        raise ConfigError(
            "layers with pipeline parallelism need model runner V2 (VLLM_USE_V2_MODEL_RUNNER=1): V1 relays no layers"
        )
    if getattr(parallel, "use_ubatching", False):
        raise ConfigError(
            "drop --enable-dbo and --ubatch-size: layers are not captured from a step that is cut into micro-batches"
        )
    if getattr(compilation.mode, "name", "") == "STOCK_TORCH_COMPILE":
        raise ConfigError("layers cannot be captured with compilation mode STOCK_TORCH_COMPILE: use vLLM's own, or none")
    if getattr(vllm_config.cache_config, "kv_sharing_fast_prefill", False):
        raise ConfigError("drop --kv-sharing-fast-prefill: with it some layers do not see every token of a prompt")
    if not isinstance(vllm_config.additional_config, dict):
        raise ConfigError(
            "layers need an additional_config that is a JSON object: vLLM's compile cache learns of the layers through it"
        )


def on_cpu() -> bool:
    """Whether this vLLM computes on the processor."""
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


@contextlib.contextmanager
def logged_refusal() -> Iterator[None]:
    """Log a ConfigError that passes, in one line, once: vLLM buries it in a page of traceback. Also a decorator."""
    try:
        yield
    except ConfigError as error:
        if not hasattr(error, "logged"):
            logger.error("slotstream cannot start: %s", error)
            error.logged = True  # type: ignore[attr-defined]
        raise


def instance_of(vllm_config: VllmConfig) -> str:
    """vLLM's own name of an engine's configuration: that of MultiConnector's children is the same."""
    return str(getattr(vllm_config, "instance_id", ""))


def current_config() -> VllmConfig | None:
    """The configuration that vLLM works with at the moment, the outermost one; None where it does not say."""
    try:
        from vllm.config import get_current_vllm_config_or_none
    except ImportError:
        return None
    return get_current_vllm_config_or_none()


def vllm_version() -> str:
    """The version of the vLLM that is running, from any distribution."""
    import vllm

    return str(getattr(vllm, "__version__", "(of an unknown version)"))


def _layer_ids(vllm_config: VllmConfig, options: ConnectorOptions) -> tuple[int, ...]:
    speculative = vllm_config.speculative_config
    extracts = speculative is not None and speculative.method == "extract_hidden_states"
    num_layers = vllm_config.model_config.get_total_num_hidden_layers()
    if options.layers is not None:
        if extracts:
            raise ConfigError(
                "connector option layers and the speculative method extract_hidden_states are two ways to the same rows: "
                "drop the speculative config"
            )
        ids = tuple(num_layers + 1 if layer == FINAL else int(layer) for layer in options.layers)
        if any(layer != FINAL and int(layer) > num_layers for layer in options.layers):
            raise ConfigError(
                f"connector option layers {list(options.layers)} must be layer ids from 0 to {num_layers}, the number of this "
                f'model\'s layers, and "{FINAL}"'
            )
        return tuple(sorted(ids))
    if not extracts:
        raise ConfigError(
            f'name the layers to capture: add "layers": [{num_layers // 2}, "{FINAL}"] to kv_connector_extra_config '
            f'(layer ids from 0 to {num_layers}, and "{FINAL}")'
        )
    assert speculative is not None
    found = getattr(speculative.draft_model_config.hf_config, "eagle_aux_hidden_state_layer_ids", None)
    if not found:
        raise ConfigError(
            "no layers to extract: set eagle_aux_hidden_state_layer_ids in the speculative config's "
            f"draft_model_config.hf_config to layer ids from 0 to {num_layers}"
        )
    if len(set(found)) != len(found) or not all(isinstance(i, int) and 0 <= i <= num_layers for i in found):
        raise ConfigError(
            f"eagle_aux_hidden_state_layer_ids {list(found)} must be different layer ids from 0 to {num_layers}, "
            "the number of this model's layers"
        )
    if len(found) > LAYERS_MAX:
        raise ConfigError(f"{len(found)} layer ids are more than the {LAYERS_MAX} allowed")
    # vLLM captures layers in the order the model runs them, whatever the order they were given in.
    return tuple(sorted(found))


def _dtype_name(dtype: object) -> str:
    names = {"torch.bfloat16": "BF16", "torch.float16": "F16", "torch.float32": "F32"}
    if str(dtype) not in names:
        raise ConfigError(f"hidden states of dtype {dtype} cannot be stored; run the model in bfloat16, float16 or float32")
    return names[str(dtype)]
