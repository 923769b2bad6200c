"""Connector options, read once from vLLM's configuration; whatever is wrong stops vLLM at start, in one sentence."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from slotstream.wire.access import Access, token_from_environment
from slotstream.wire.address import check_address
from slotstream.wire.errors import BadNamespace, ConfigError
from slotstream.wire.names import CHUNK_BYTES_MAX, DEFAULT_ADDRESS, DEFAULT_NAMESPACE, LAYERS_MAX, check_namespace
from slotstream.wire.nixl import check_transport

if TYPE_CHECKING:
    from vllm.config import VllmConfig

ON_FULL = ("wait", "fail_sample")
TRANSPORTS = ("auto", "grpc", "nixl")
STAGING = ("host",)
BAD_ROWS = ("mark", "fail")
SENDERS = ("thread", "process")


@dataclass(frozen=True, slots=True)
class ConnectorOptions:
    """`kv_connector_extra_config`, checked. The README's table of options is made of these fields."""

    server: str = field(default=DEFAULT_ADDRESS, metadata={"help": "storage server: host:port or unix:/path"})
    transport: str = field(
        default="auto",
        metadata={"help": "how rows travel: nixl, grpc, or auto: nixl where it is there and pays (docs/transports.md)"},
    )
    namespace: str = field(default=DEFAULT_NAMESPACE, metadata={"help": "namespace of requests that name none"})
    capture: bool = field(default=True, metadata={"help": "capture requests that do not say; false: only those that ask"})
    include_output_tokens: bool = field(default=False, metadata={"help": "capture output rows of requests that do not say"})
    staging: str = field(default="host", metadata={"help": "where rows wait: host memory only (docs/transports.md)"})
    staging_bytes: int | None = field(
        default=None,
        metadata={
            "help": "host memory for rows on their way, allocated once; null: three steps' rows or more, 512 MiB to 2 GiB"
        },
    )
    chunk_bytes: int = field(default=2 << 20, metadata={"help": "most bytes of rows a message carries"})
    sender: str = field(
        default="thread",
        metadata={
            "help": "what hashes and sends rows: a thread of vLLM's worker, or a process beside it, not yet run on a GPU "
            "(docs/transports.md)"
        },
    )
    on_full: str = field(
        default="wait", metadata={"help": "when staging is full: wait (up to wait_s_max a step) or fail_sample at once"}
    )
    wait_s_max: float = field(default=2.0, metadata={"help": "longest an engine step waits for staging, then samples fail"})
    ack_timeout_s: float = field(default=30.0, metadata={"help": "without any answer for so long, the stream is given up"})
    output_rows_per_chunk: int = field(default=32, metadata={"help": "output rows collected before they are read and sent"})
    bad_rows: str = field(
        default="mark",
        metadata={"help": "rows of zeros, NaN or infinities: mark (in the sample's metadata) or fail the sample"},
    )
    outage_s_max: float = field(
        default=3600.0,
        metadata={"help": "server away for longer: requests are not captured, which the answer says; 0: at once"},
    )
    spool_dir: str | None = field(
        default=None, metadata={"help": "directory on the engine's host for rows that the server cannot take now; null: none"}
    )
    spool_bytes_max: int = field(default=64 << 30, metadata={"help": "most bytes that one worker keeps in spool_dir"})
    tls_ca: str | None = field(
        default=None, metadata={"help": "PEM file: authorities of the server's certificate; turns TLS on"}
    )
    tls_cert: str | None = field(default=None, metadata={"help": "PEM file: our certificate, for a server that wants one"})
    tls_key: str | None = field(default=None, metadata={"help": "PEM file: its private key"})
    token_file: str | None = field(
        default=None, metadata={"help": "file with the bearer token (else $SLOTSTREAM_TOKEN), read again for each connection"}
    )

    def __post_init__(self) -> None:
        check_address(self.server)
        try:
            check_namespace(self.namespace)
        except BadNamespace as error:
            raise ConfigError(f"connector option namespace: {error}") from error
        if self.staging == "device":
            raise ConfigError(
                'connector option staging must be "host": UCX would emulate reading GPU memory, which is slower, and rows are '
                "hashed, spooled and sent again out of host memory (docs/transports.md)"
            )
        if self.staging_bytes is not None:
            _check_number("staging_bytes", self.staging_bytes, int, 1 << 20, 1 << 40)
        _check_number("chunk_bytes", self.chunk_bytes, int, 4096, CHUNK_BYTES_MAX)
        _check_number("wait_s_max", self.wait_s_max, float, 0.0, 600.0)
        _check_number("ack_timeout_s", self.ack_timeout_s, float, 0.1, 3600.0)
        _check_number("output_rows_per_chunk", self.output_rows_per_chunk, int, 1, 1 << 16)
        _check_number("outage_s_max", self.outage_s_max, float, 0.0, 1e9)
        _check_number("spool_bytes_max", self.spool_bytes_max, int, 1 << 16, 1 << 50)
        spool_dir = self.spool_dir
        if spool_dir is not None and not (isinstance(spool_dir, str) and Path(spool_dir).is_absolute()):
            raise ConfigError(f"connector option spool_dir must be an absolute path or null, not {spool_dir!r}")
        for name in ("capture", "include_output_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"connector option {name} must be true or false, not {getattr(self, name)!r}")
        for name, choices in (
            ("on_full", ON_FULL),
            ("bad_rows", BAD_ROWS),
            ("sender", SENDERS),
            ("staging", STAGING),
            ("transport", TRANSPORTS),
        ):
            if getattr(self, name) not in choices:
                raise ConfigError(f"connector option {name} must be one of {list(choices)}, not {getattr(self, name)!r}")
        check_transport("connector option transport", self.transport)
        for name in ("tls_ca", "tls_cert", "tls_key", "token_file"):
            if not isinstance(getattr(self, name), str | None):
                raise ConfigError(f"connector option {name} must be the path of a file, not {getattr(self, name)!r}")
        try:
            self.access.check(self.server)
        except ConfigError as error:
            raise ConfigError(f"connector option {error}") from error
        if self.staging_bytes is not None and self.chunk_bytes * 4 > self.staging_bytes:
            raise ConfigError("connector option staging_bytes must be at least four times chunk_bytes")

    @property
    def access(self) -> Access:
        """How to show the server who we are. The token itself is no option: it would show in `ps`."""
        token = token_from_environment() if self.token_file is None else None
        return Access(self.tls_ca, self.tls_cert, self.tls_key, token, self.token_file)

    @classmethod
    def from_extra(cls, extra: Mapping[str, Any]) -> Self:
        """Read `kv_connector_extra_config`. Raises ConfigError, naming what is unknown or malformed."""
        known = [f.name for f in fields(cls)]
        if unknown := sorted(extra.keys() - set(known)):
            raise ConfigError(f"unknown connector options {unknown}; known: {sorted(known)}")
        return cls(**extra)


def _check_number(name: str, value: object, kind: type, low: float, high: float) -> None:
    accepted = (int,) if kind is int else (int, float)
    if not isinstance(value, accepted) or isinstance(value, bool) or not low <= value <= high:
        what = "a whole number" if kind is int else "a number"
        raise ConfigError(f"connector option {name} must be {what} from {low} to {high}, not {value!r}")


@dataclass(frozen=True, slots=True)
class ConnectorConfig:
    """Everything the connector needs to know of its engine, checked. `layer_ids` are in the order of the rows."""

    options: ConnectorOptions
    engine_id: str
    model: str
    layer_ids: tuple[int, ...]
    hidden_size: int
    dtype: str
    metadata: Mapping[str, str]

    @classmethod
    def from_vllm(cls, vllm_config: VllmConfig) -> Self:
        """Read and check vLLM's configuration. Raises ConfigError, in one sentence that says what to change."""
        transfer = vllm_config.kv_transfer_config
        assert transfer is not None, "vLLM makes no connector without a kv_transfer_config"
        options = ConnectorOptions.from_extra(transfer.kv_connector_extra_config or {})
        if not transfer.is_kv_producer:
            raise ConfigError(f'slotstream only sends: set "kv_role": "kv_producer", not {transfer.kv_role!r}')
        model_config = vllm_config.model_config
        layer_ids = _layer_ids(vllm_config)
        if model_config.runner_type == "pooling":
            # The model runner returns before the draft forward, and so never calls wait_for_save.
            raise ConfigError(
                "a pooling model cannot be captured: vLLM extracts no hidden states from requests that are pooled"
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
        if vllm_config.scheduler_config.async_scheduling and not vllm_config.use_v2_model_runner and not _on_cpu():
            # https://github.com/vllm-project/vllm/issues/56417; tests/gpu/decode.py shows it, vLLM's own connector included.
            raise ConfigError(
                "add --no-async-scheduling, or use model runner V2: with V1 on a GPU, vLLM loses track of the text after an "
                "accepted draft token (vLLM issue 56417), and its hidden states are wrong from there on"
            )
        parallel = vllm_config.parallel_config
        for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
            if getattr(parallel, name, 1) > 1:
                raise ConfigError(f"{name} must be 1: with context parallelism no worker holds all rows of a sample")
        model = model_config.served_model_name
        return cls(
            options=options,
            engine_id=str(transfer.engine_id),
            model=str(model if isinstance(model, str) else model_config.model)[:1024],
            layer_ids=layer_ids,
            hidden_size=model_config.get_hidden_size(),
            dtype=_dtype_name(model_config.dtype),
            metadata={
                "engine_id": str(transfer.engine_id),
                "vllm_version": vllm_version(),
                "slotstream_version": importlib.metadata.version("slotstream"),
                "model_path": str(model_config.model)[:1024],
                "model_revision": str(model_config.revision or ""),
                "num_hidden_layers": str(model_config.get_total_num_hidden_layers()),
                "final_norm_applied": "false",
            },
        )


def _on_cpu() -> bool:
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


def vllm_version() -> str:
    """The version of the vLLM that is running, whichever distribution brought it."""
    import vllm

    return str(vllm.__version__)


def _layer_ids(vllm_config: VllmConfig) -> tuple[int, ...]:
    speculative = vllm_config.speculative_config
    if speculative is None or speculative.method != "extract_hidden_states":
        raise ConfigError(
            "slotstream needs vLLM to extract hidden states: add --speculative-config "
            '\'{"method": "extract_hidden_states", "num_speculative_tokens": 1, '
            '"draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}}}\''
        )
    ids = getattr(speculative.draft_model_config.hf_config, "eagle_aux_hidden_state_layer_ids", None)
    num_layers = vllm_config.model_config.get_total_num_hidden_layers()
    if not ids:
        raise ConfigError(
            "no layers to extract: set eagle_aux_hidden_state_layer_ids in the speculative config's "
            f"draft_model_config.hf_config to layer ids from 0 to {num_layers}"
        )
    if len(set(ids)) != len(ids) or not all(isinstance(i, int) and 0 <= i <= num_layers for i in ids):
        raise ConfigError(
            f"eagle_aux_hidden_state_layer_ids {list(ids)} must be different layer ids from 0 to {num_layers}, "
            "the number of this model's layers"
        )
    if len(ids) > LAYERS_MAX:
        raise ConfigError(f"{len(ids)} layer ids are more than the {LAYERS_MAX} allowed")
    # vLLM captures layers in the order the model runs them, whatever the order they were given in.
    return tuple(sorted(ids))


def _dtype_name(dtype: object) -> str:
    names = {"torch.bfloat16": "BF16", "torch.float16": "F16", "torch.float32": "F32"}
    if str(dtype) not in names:
        raise ConfigError(f"hidden states of dtype {dtype} cannot be stored; run the model in bfloat16, float16 or float32")
    return names[str(dtype)]
