"""Connector options, read once from `kv_connector_extra_config`; a wrong one stops vLLM at start, in one sentence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Self

from slotstream.common.checks import check_number
from slotstream.wire.access import Access, token_from_environment
from slotstream.wire.address import check_addresses
from slotstream.wire.errors import BadNamespace, ConfigError
from slotstream.wire.layers import DRAFT, EAGLE3
from slotstream.wire.names import CHUNK_BYTES_MAX, DEFAULT_ADDRESS, DEFAULT_NAMESPACE, FINAL, LAYERS_MAX, check_namespace
from slotstream.wire.nixl import check_transport

ON_FULL = ("wait", "fail_sample")
TRANSPORTS = ("auto", "grpc", "nixl")
BAD_ROWS = ("mark", "fail")
SENDERS = ("auto", "thread", "process")
STREAMS_MAX = 16


@dataclass(frozen=True, slots=True)
class ConnectorOptions:
    """`kv_connector_extra_config`, checked. docs/reference.md's table of options is made of these fields."""

    server: str | tuple[str, ...] = field(
        default=DEFAULT_ADDRESS,
        metadata={
            "help": "storage server: host:port or unix:/path; or a list of up to 16, or a name with several DNS records, "
            "tried in random order (docs/outages.md)"
        },
    )
    transport: str = field(
        default="auto",
        metadata={"help": "how rows travel: nixl, grpc, or auto: nixl where it is there and pays (docs/transports.md)"},
    )
    streams: int = field(
        default=1,
        metadata={
            "help": "streams to the server, up to 16, each with its own samples; more than one pays where the server has "
            "`--workers`, and then as many as that (docs/costs.md)"
        },
    )
    layers: tuple[int | str, ...] | None = field(
        default=None,
        metadata={
            "help": "layers to capture directly: whole numbers from 0 (the residual stream after so many layers) and "
            '"final" (the output of the last norm). "eagle3": 2, L//2, L-3 and L, the number of layers. '
            '{"draft": "PATH or id"}: what that draft\'s config asks for, and L. null: what extract_hidden_states caches'
        },
    )
    row_pool_bytes: int | None = field(
        default=None,
        metadata={"help": "GPU memory for rows of `layers`; null: a step's rows and the output rows that wait, up to 2 GiB"},
    )
    namespace: str = field(default=DEFAULT_NAMESPACE, metadata={"help": "namespace of requests that name none"})
    capture: bool = field(default=True, metadata={"help": "capture requests that do not say; false: only those that ask"})
    include_output_tokens: bool = field(default=False, metadata={"help": "capture output rows of requests that do not say"})
    staging_bytes: int | None = field(
        default=None,
        metadata={
            "help": "host memory for rows on their way, allocated once; null: three steps' rows or more, 512 MiB to 2 GiB"
        },
    )
    chunk_bytes: int = field(
        default=2 << 20, metadata={"help": "bytes of rows that a message carries; a row that is larger goes alone"}
    )
    sender: str = field(
        default="auto",
        metadata={
            "help": "what hashes and sends rows: a thread of vLLM's worker, a process beside it, or auto: a process for layers "
            "captured on a GPU, else a thread (docs/transports.md)"
        },
    )
    response_handle: bool = field(
        default=False,
        metadata={"help": "answers also have handle, as namespace/sample_id, beside slotstream: for trainers that look for it"},
    )
    on_full: str = field(
        default="wait", metadata={"help": "when staging is full: wait (up to wait_s_max a step) or fail_sample at once"}
    )
    wait_s_max: float = field(default=2.0, metadata={"help": "longest an engine step waits for staging, then samples fail"})
    ack_timeout_s: float = field(default=30.0, metadata={"help": "without any answer for so long, the stream is given up"})
    output_rows_per_chunk: int | None = field(
        default=None,
        metadata={
            "help": "output rows collected before they are read and sent; half as many go along when others are read; "
            "null: 192 while the row pool has room for them, else 48"
        },
    )
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
        servers = check_addresses(self.server)
        try:
            check_namespace(self.namespace)
        except BadNamespace as error:
            raise ConfigError(f"connector option namespace: {error}") from error
        try:
            self._check_numbers()
        except ValueError as error:
            raise ConfigError(f"connector option {error}") from error
        spool_dir = self.spool_dir
        if spool_dir is not None and not (isinstance(spool_dir, str) and Path(spool_dir).is_absolute()):
            raise ConfigError(f"connector option spool_dir must be an absolute path or null, not {spool_dir!r}")
        for name in ("capture", "include_output_tokens", "response_handle"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"connector option {name} must be true or false, not {getattr(self, name)!r}")
        for name, choices in (
            ("on_full", ON_FULL),
            ("bad_rows", BAD_ROWS),
            ("sender", SENDERS),
            ("transport", TRANSPORTS),
        ):
            if getattr(self, name) not in choices:
                raise ConfigError(f"connector option {name} must be one of {list(choices)}, not {getattr(self, name)!r}")
        check_transport("connector option transport", self.transport)
        for name in ("tls_ca", "tls_cert", "tls_key", "token_file"):
            if not isinstance(getattr(self, name), str | None):
                raise ConfigError(f"connector option {name} must be the path of a file, not {getattr(self, name)!r}")
        try:
            for server in servers:
                self.access.check(server)
        except ConfigError as error:
            raise ConfigError(f"connector option {error}") from error
        if self.staging_bytes is not None and self.chunk_bytes * 8 > self.staging_bytes:
            raise ConfigError("connector option staging_bytes must be at least eight times chunk_bytes")
        _check_layers(self.layers)
        if self.row_pool_bytes is not None and self.layers is None:
            raise ConfigError("connector option row_pool_bytes needs layers: nothing else is kept in a row pool")

    def _check_numbers(self) -> None:
        """Raises ValueError."""
        if self.staging_bytes is not None:
            check_number("staging_bytes", self.staging_bytes, 1 << 20, 1 << 40, whole=True)
        if self.row_pool_bytes is not None:
            check_number("row_pool_bytes", self.row_pool_bytes, 1 << 16, 1 << 40, whole=True)
        check_number("streams", self.streams, 1, STREAMS_MAX, whole=True)
        check_number("chunk_bytes", self.chunk_bytes, 4096, CHUNK_BYTES_MAX, whole=True)
        check_number("wait_s_max", self.wait_s_max, 0.0, 600.0)
        check_number("ack_timeout_s", self.ack_timeout_s, 0.1, 3600.0)
        if self.output_rows_per_chunk is not None:
            check_number("output_rows_per_chunk", self.output_rows_per_chunk, 1, 1 << 16, whole=True)
        check_number("outage_s_max", self.outage_s_max, 0.0, 1e9)
        check_number("spool_bytes_max", self.spool_bytes_max, 1 << 16, 1 << 50, whole=True)

    @property
    def servers(self) -> tuple[str, ...]:
        """The addresses of the storage servers, one or more."""
        return check_addresses(self.server)

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
        chosen = dict(extra)
        if "layers" in chosen:
            chosen["layers"] = _frozen(chosen["layers"])
        if isinstance(chosen.get("server"), list):
            chosen["server"] = tuple(chosen["server"])
        return cls(**chosen)

    @property
    def named_layers(self) -> str | dict[str, str] | None:
        """What `layers` names instead of listing them; only a model's and a draft's config say which they are."""
        match self.layers:
            case ("eagle3",):
                return EAGLE3
            case ("draft", str(name)):
                return {DRAFT: name}
        return None


def _frozen(layers: object) -> object:
    """`layers` as a tuple: a list's, ("eagle3",) or ("draft", PATH or id). What is none of these stays, and is refused."""
    match layers:
        case list() if EAGLE3 not in layers and DRAFT not in layers:
            return tuple(layers)
        case "eagle3":
            return (EAGLE3,)
        case {"draft": str(name), **rest} if name and not rest:
            return (DRAFT, name)
    return layers


def _check_layers(layers: object) -> None:
    if layers is None:
        return
    if isinstance(layers, tuple) and layers[:1] in ((EAGLE3,), (DRAFT,)):
        return
    shown = list(layers) if isinstance(layers, tuple) else layers
    if not isinstance(layers, tuple) or not layers or not all(_is_layer(layer) for layer in layers):
        raise ConfigError(
            f'connector option layers must be a list of whole numbers from 0 on and "{FINAL}", or "{EAGLE3}", or '
            f'{{"{DRAFT}": "PATH or id"}}, not {shown!r}'
        )
    if len(set(layers)) != len(layers):
        raise ConfigError(f"connector option layers must not name a layer twice: {shown!r}")
    if len(layers) > LAYERS_MAX:
        raise ConfigError(f"connector option layers names {len(layers)} layers, more than the {LAYERS_MAX} allowed")


def _is_layer(layer: object) -> bool:
    return layer == FINAL or (isinstance(layer, int) and not isinstance(layer, bool) and layer >= 0)
