from slotstream.v1 import sample_pb2 as _sample_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class IngestRequest(_message.Message):
    __slots__ = ("hello", "open", "chunk", "commit", "abort", "announcements", "batch", "report", "data")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    ABORT_FIELD_NUMBER: _ClassVar[int]
    ANNOUNCEMENTS_FIELD_NUMBER: _ClassVar[int]
    BATCH_FIELD_NUMBER: _ClassVar[int]
    REPORT_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    open: OpenSample
    chunk: ChunkHeader
    commit: CommitSample
    abort: AbortSample
    announcements: Announcements
    batch: RequestBatch
    report: EngineReport
    data: bytes
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., open: _Optional[_Union[OpenSample, _Mapping]] = ..., chunk: _Optional[_Union[ChunkHeader, _Mapping]] = ..., commit: _Optional[_Union[CommitSample, _Mapping]] = ..., abort: _Optional[_Union[AbortSample, _Mapping]] = ..., announcements: _Optional[_Union[Announcements, _Mapping]] = ..., batch: _Optional[_Union[RequestBatch, _Mapping]] = ..., report: _Optional[_Union[EngineReport, _Mapping]] = ..., data: _Optional[bytes] = ...) -> None: ...

class RequestBatch(_message.Message):
    __slots__ = ("requests",)
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    requests: _containers.RepeatedCompositeFieldContainer[IngestRequest]
    def __init__(self, requests: _Optional[_Iterable[_Union[IngestRequest, _Mapping]]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("protocol", "engine_id", "worker_rank", "vllm_version", "slotstream_version", "nixl", "batches")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    WORKER_RANK_FIELD_NUMBER: _ClassVar[int]
    VLLM_VERSION_FIELD_NUMBER: _ClassVar[int]
    SLOTSTREAM_VERSION_FIELD_NUMBER: _ClassVar[int]
    NIXL_FIELD_NUMBER: _ClassVar[int]
    BATCHES_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    engine_id: str
    worker_rank: int
    vllm_version: str
    slotstream_version: str
    nixl: NixlOffer
    batches: bool
    def __init__(self, protocol: _Optional[int] = ..., engine_id: _Optional[str] = ..., worker_rank: _Optional[int] = ..., vllm_version: _Optional[str] = ..., slotstream_version: _Optional[str] = ..., nixl: _Optional[_Union[NixlOffer, _Mapping]] = ..., batches: bool = ...) -> None: ...

class NixlOffer(_message.Message):
    __slots__ = ("agent", "metadata", "address", "slot_bytes", "slots", "pid", "canary_address", "canary")
    AGENT_FIELD_NUMBER: _ClassVar[int]
    METADATA_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    SLOT_BYTES_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    CANARY_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    CANARY_FIELD_NUMBER: _ClassVar[int]
    agent: str
    metadata: bytes
    address: int
    slot_bytes: int
    slots: int
    pid: int
    canary_address: int
    canary: bytes
    def __init__(self, agent: _Optional[str] = ..., metadata: _Optional[bytes] = ..., address: _Optional[int] = ..., slot_bytes: _Optional[int] = ..., slots: _Optional[int] = ..., pid: _Optional[int] = ..., canary_address: _Optional[int] = ..., canary: _Optional[bytes] = ...) -> None: ...

class Announcements(_message.Message):
    __slots__ = ("chunks",)
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    chunks: _containers.RepeatedCompositeFieldContainer[Announce]
    def __init__(self, chunks: _Optional[_Iterable[_Union[Announce, _Mapping]]] = ...) -> None: ...

class Announce(_message.Message):
    __slots__ = ("header", "slot", "generation", "address", "length")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    header: ChunkHeader
    slot: int
    generation: int
    address: int
    length: int
    def __init__(self, header: _Optional[_Union[ChunkHeader, _Mapping]] = ..., slot: _Optional[int] = ..., generation: _Optional[int] = ..., address: _Optional[int] = ..., length: _Optional[int] = ...) -> None: ...

class OpenSample(_message.Message):
    __slots__ = ("sample", "namespace", "sample_id", "model", "dtype", "layer_ids", "hidden_size", "rows_max", "rows_exact", "tags", "metadata", "columns")
    class TagsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    class MetadataEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    SAMPLE_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    LAYER_IDS_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_SIZE_FIELD_NUMBER: _ClassVar[int]
    ROWS_MAX_FIELD_NUMBER: _ClassVar[int]
    ROWS_EXACT_FIELD_NUMBER: _ClassVar[int]
    TAGS_FIELD_NUMBER: _ClassVar[int]
    METADATA_FIELD_NUMBER: _ClassVar[int]
    COLUMNS_FIELD_NUMBER: _ClassVar[int]
    sample: int
    namespace: str
    sample_id: str
    model: str
    dtype: str
    layer_ids: _containers.RepeatedScalarFieldContainer[int]
    hidden_size: int
    rows_max: int
    rows_exact: bool
    tags: _containers.ScalarMap[str, str]
    metadata: _containers.ScalarMap[str, str]
    columns: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, sample: _Optional[int] = ..., namespace: _Optional[str] = ..., sample_id: _Optional[str] = ..., model: _Optional[str] = ..., dtype: _Optional[str] = ..., layer_ids: _Optional[_Iterable[int]] = ..., hidden_size: _Optional[int] = ..., rows_max: _Optional[int] = ..., rows_exact: bool = ..., tags: _Optional[_Mapping[str, str]] = ..., metadata: _Optional[_Mapping[str, str]] = ..., columns: _Optional[_Iterable[str]] = ...) -> None: ...

class ChunkHeader(_message.Message):
    __slots__ = ("sample", "chunk", "first_row", "rows", "xxh3")
    SAMPLE_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    FIRST_ROW_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    XXH3_FIELD_NUMBER: _ClassVar[int]
    sample: int
    chunk: int
    first_row: int
    rows: int
    xxh3: int
    def __init__(self, sample: _Optional[int] = ..., chunk: _Optional[int] = ..., first_row: _Optional[int] = ..., rows: _Optional[int] = ..., xxh3: _Optional[int] = ...) -> None: ...

class CommitSample(_message.Message):
    __slots__ = ("sample", "row_count", "token_ids", "metadata", "columns")
    class MetadataEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    SAMPLE_FIELD_NUMBER: _ClassVar[int]
    ROW_COUNT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    METADATA_FIELD_NUMBER: _ClassVar[int]
    COLUMNS_FIELD_NUMBER: _ClassVar[int]
    sample: int
    row_count: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    metadata: _containers.ScalarMap[str, str]
    columns: _containers.RepeatedCompositeFieldContainer[_sample_pb2.ColumnData]
    def __init__(self, sample: _Optional[int] = ..., row_count: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., metadata: _Optional[_Mapping[str, str]] = ..., columns: _Optional[_Iterable[_Union[_sample_pb2.ColumnData, _Mapping]]] = ...) -> None: ...

class AbortSample(_message.Message):
    __slots__ = ("sample", "code", "message")
    SAMPLE_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    sample: int
    code: str
    message: str
    def __init__(self, sample: _Optional[int] = ..., code: _Optional[str] = ..., message: _Optional[str] = ...) -> None: ...

class EngineReport(_message.Message):
    __slots__ = ("host", "layer_ids", "has_final", "staging_bytes", "staging_bytes_in_use", "spool_bytes_in_use", "samples_in_flight", "links_lost")
    HOST_FIELD_NUMBER: _ClassVar[int]
    LAYER_IDS_FIELD_NUMBER: _ClassVar[int]
    HAS_FINAL_FIELD_NUMBER: _ClassVar[int]
    STAGING_BYTES_FIELD_NUMBER: _ClassVar[int]
    STAGING_BYTES_IN_USE_FIELD_NUMBER: _ClassVar[int]
    SPOOL_BYTES_IN_USE_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    LINKS_LOST_FIELD_NUMBER: _ClassVar[int]
    host: str
    layer_ids: _containers.RepeatedScalarFieldContainer[int]
    has_final: bool
    staging_bytes: int
    staging_bytes_in_use: int
    spool_bytes_in_use: int
    samples_in_flight: int
    links_lost: int
    def __init__(self, host: _Optional[str] = ..., layer_ids: _Optional[_Iterable[int]] = ..., has_final: bool = ..., staging_bytes: _Optional[int] = ..., staging_bytes_in_use: _Optional[int] = ..., spool_bytes_in_use: _Optional[int] = ..., samples_in_flight: _Optional[int] = ..., links_lost: _Optional[int] = ...) -> None: ...

class IngestReply(_message.Message):
    __slots__ = ("welcome", "ack", "committed", "failed", "draining", "resend", "batch")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    ACK_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    RESEND_FIELD_NUMBER: _ClassVar[int]
    BATCH_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    ack: Ack
    committed: Committed
    failed: Failed
    draining: Draining
    resend: Resend
    batch: ReplyBatch
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., ack: _Optional[_Union[Ack, _Mapping]] = ..., committed: _Optional[_Union[Committed, _Mapping]] = ..., failed: _Optional[_Union[Failed, _Mapping]] = ..., draining: _Optional[_Union[Draining, _Mapping]] = ..., resend: _Optional[_Union[Resend, _Mapping]] = ..., batch: _Optional[_Union[ReplyBatch, _Mapping]] = ...) -> None: ...

class ReplyBatch(_message.Message):
    __slots__ = ("replies",)
    REPLIES_FIELD_NUMBER: _ClassVar[int]
    replies: _containers.RepeatedCompositeFieldContainer[IngestReply]
    def __init__(self, replies: _Optional[_Iterable[_Union[IngestReply, _Mapping]]] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("protocol", "server_version", "window_bytes", "chunk_bytes_max", "nixl", "batches", "columns", "reports", "processes", "process")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    SERVER_VERSION_FIELD_NUMBER: _ClassVar[int]
    WINDOW_BYTES_FIELD_NUMBER: _ClassVar[int]
    CHUNK_BYTES_MAX_FIELD_NUMBER: _ClassVar[int]
    NIXL_FIELD_NUMBER: _ClassVar[int]
    BATCHES_FIELD_NUMBER: _ClassVar[int]
    COLUMNS_FIELD_NUMBER: _ClassVar[int]
    REPORTS_FIELD_NUMBER: _ClassVar[int]
    PROCESSES_FIELD_NUMBER: _ClassVar[int]
    PROCESS_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    server_version: str
    window_bytes: int
    chunk_bytes_max: int
    nixl: bool
    batches: bool
    columns: _containers.RepeatedScalarFieldContainer[str]
    reports: bool
    processes: int
    process: int
    def __init__(self, protocol: _Optional[int] = ..., server_version: _Optional[str] = ..., window_bytes: _Optional[int] = ..., chunk_bytes_max: _Optional[int] = ..., nixl: bool = ..., batches: bool = ..., columns: _Optional[_Iterable[str]] = ..., reports: bool = ..., processes: _Optional[int] = ..., process: _Optional[int] = ...) -> None: ...

class Ack(_message.Message):
    __slots__ = ("chunks",)
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    chunks: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, chunks: _Optional[_Iterable[int]] = ...) -> None: ...

class Resend(_message.Message):
    __slots__ = ("chunks",)
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    chunks: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, chunks: _Optional[_Iterable[int]] = ...) -> None: ...

class Committed(_message.Message):
    __slots__ = ("sample", "duplicate")
    SAMPLE_FIELD_NUMBER: _ClassVar[int]
    DUPLICATE_FIELD_NUMBER: _ClassVar[int]
    sample: int
    duplicate: bool
    def __init__(self, sample: _Optional[int] = ..., duplicate: bool = ...) -> None: ...

class Failed(_message.Message):
    __slots__ = ("sample", "code", "message", "retryable")
    SAMPLE_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    RETRYABLE_FIELD_NUMBER: _ClassVar[int]
    sample: int
    code: str
    message: str
    retryable: bool
    def __init__(self, sample: _Optional[int] = ..., code: _Optional[str] = ..., message: _Optional[str] = ..., retryable: bool = ...) -> None: ...

class Draining(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
