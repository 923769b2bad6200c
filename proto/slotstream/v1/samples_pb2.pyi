from slotstream.v1 import ingest_pb2 as _ingest_pb2
from slotstream.v1 import sample_pb2 as _sample_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ReadCounting(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    READ_COUNTING_SENT: _ClassVar[ReadCounting]
    READ_COUNTING_CALLED: _ClassVar[ReadCounting]
    READ_COUNTING_NOT: _ClassVar[ReadCounting]
READ_COUNTING_SENT: ReadCounting
READ_COUNTING_CALLED: ReadCounting
READ_COUNTING_NOT: ReadCounting

class ReadRequest(_message.Message):
    __slots__ = ("namespace", "sample_id", "start", "stop", "layer_ids", "wait_s", "unverified", "in_place", "columns", "counting", "all_in_place")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_ID_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    LAYER_IDS_FIELD_NUMBER: _ClassVar[int]
    WAIT_S_FIELD_NUMBER: _ClassVar[int]
    UNVERIFIED_FIELD_NUMBER: _ClassVar[int]
    IN_PLACE_FIELD_NUMBER: _ClassVar[int]
    COLUMNS_FIELD_NUMBER: _ClassVar[int]
    COUNTING_FIELD_NUMBER: _ClassVar[int]
    ALL_IN_PLACE_FIELD_NUMBER: _ClassVar[int]
    namespace: str
    sample_id: str
    start: int
    stop: int
    layer_ids: _containers.RepeatedScalarFieldContainer[int]
    wait_s: float
    unverified: bool
    in_place: bool
    columns: _containers.RepeatedScalarFieldContainer[str]
    counting: ReadCounting
    all_in_place: bool
    def __init__(self, namespace: _Optional[str] = ..., sample_id: _Optional[str] = ..., start: _Optional[int] = ..., stop: _Optional[int] = ..., layer_ids: _Optional[_Iterable[int]] = ..., wait_s: _Optional[float] = ..., unverified: bool = ..., in_place: bool = ..., columns: _Optional[_Iterable[str]] = ..., counting: _Optional[_Union[ReadCounting, str]] = ..., all_in_place: bool = ...) -> None: ...

class ReadManyRequest(_message.Message):
    __slots__ = ("reads", "batches", "files")
    READS_FIELD_NUMBER: _ClassVar[int]
    BATCHES_FIELD_NUMBER: _ClassVar[int]
    FILES_FIELD_NUMBER: _ClassVar[int]
    reads: _containers.RepeatedCompositeFieldContainer[ReadRequest]
    batches: bool
    files: bool
    def __init__(self, reads: _Optional[_Iterable[_Union[ReadRequest, _Mapping]]] = ..., batches: bool = ..., files: bool = ...) -> None: ...

class ReadReply(_message.Message):
    __slots__ = ("header", "rows", "error", "batch", "data")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    BATCH_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    header: ReadHeader
    rows: RowsHeader
    error: ReadError
    batch: ReadReplyBatch
    data: bytes
    def __init__(self, header: _Optional[_Union[ReadHeader, _Mapping]] = ..., rows: _Optional[_Union[RowsHeader, _Mapping]] = ..., error: _Optional[_Union[ReadError, _Mapping]] = ..., batch: _Optional[_Union[ReadReplyBatch, _Mapping]] = ..., data: _Optional[bytes] = ...) -> None: ...

class ReadHeader(_message.Message):
    __slots__ = ("info", "layer_ids", "start", "stop", "token_ids", "header_xxh3", "columns", "counted_by_call", "file", "all_in_place", "has_file")
    INFO_FIELD_NUMBER: _ClassVar[int]
    LAYER_IDS_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    HEADER_XXH3_FIELD_NUMBER: _ClassVar[int]
    COLUMNS_FIELD_NUMBER: _ClassVar[int]
    COUNTED_BY_CALL_FIELD_NUMBER: _ClassVar[int]
    FILE_FIELD_NUMBER: _ClassVar[int]
    ALL_IN_PLACE_FIELD_NUMBER: _ClassVar[int]
    HAS_FILE_FIELD_NUMBER: _ClassVar[int]
    info: _sample_pb2.SampleInfo
    layer_ids: _containers.RepeatedScalarFieldContainer[int]
    start: int
    stop: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    header_xxh3: int
    columns: _containers.RepeatedCompositeFieldContainer[_sample_pb2.ColumnData]
    counted_by_call: bool
    file: FilePlaces
    all_in_place: bool
    has_file: bool
    def __init__(self, info: _Optional[_Union[_sample_pb2.SampleInfo, _Mapping]] = ..., layer_ids: _Optional[_Iterable[int]] = ..., start: _Optional[int] = ..., stop: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., header_xxh3: _Optional[int] = ..., columns: _Optional[_Iterable[_Union[_sample_pb2.ColumnData, _Mapping]]] = ..., counted_by_call: bool = ..., file: _Optional[_Union[FilePlaces, _Mapping]] = ..., all_in_place: bool = ..., has_file: bool = ...) -> None: ...

class FilePlaces(_message.Message):
    __slots__ = ("header_bytes", "hash_rows", "row_xxh3")
    HEADER_BYTES_FIELD_NUMBER: _ClassVar[int]
    HASH_ROWS_FIELD_NUMBER: _ClassVar[int]
    ROW_XXH3_FIELD_NUMBER: _ClassVar[int]
    header_bytes: int
    hash_rows: int
    row_xxh3: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, header_bytes: _Optional[int] = ..., hash_rows: _Optional[int] = ..., row_xxh3: _Optional[_Iterable[int]] = ...) -> None: ...

class ReadReplyBatch(_message.Message):
    __slots__ = ("replies",)
    REPLIES_FIELD_NUMBER: _ClassVar[int]
    replies: _containers.RepeatedCompositeFieldContainer[ReadReply]
    def __init__(self, replies: _Optional[_Iterable[_Union[ReadReply, _Mapping]]] = ...) -> None: ...

class ReadError(_message.Message):
    __slots__ = ("read", "code", "message", "reason")
    READ_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    read: int
    code: str
    message: str
    reason: str
    def __init__(self, read: _Optional[int] = ..., code: _Optional[str] = ..., message: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class RowsHeader(_message.Message):
    __slots__ = ("first_row", "rows")
    FIRST_ROW_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    first_row: int
    rows: int
    def __init__(self, first_row: _Optional[int] = ..., rows: _Optional[int] = ...) -> None: ...

class StatRequest(_message.Message):
    __slots__ = ("namespace", "sample_id")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_ID_FIELD_NUMBER: _ClassVar[int]
    namespace: str
    sample_id: str
    def __init__(self, namespace: _Optional[str] = ..., sample_id: _Optional[str] = ...) -> None: ...

class ListRequest(_message.Message):
    __slots__ = ("namespace", "model", "state", "created_from_unix_ns", "created_until_unix_ns", "tags", "page_size", "page_token", "request_id", "settle")
    class TagsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    CREATED_FROM_UNIX_NS_FIELD_NUMBER: _ClassVar[int]
    CREATED_UNTIL_UNIX_NS_FIELD_NUMBER: _ClassVar[int]
    TAGS_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    SETTLE_FIELD_NUMBER: _ClassVar[int]
    namespace: str
    model: str
    state: _sample_pb2.SampleState
    created_from_unix_ns: int
    created_until_unix_ns: int
    tags: _containers.ScalarMap[str, str]
    page_size: int
    page_token: str
    request_id: str
    settle: bool
    def __init__(self, namespace: _Optional[str] = ..., model: _Optional[str] = ..., state: _Optional[_Union[_sample_pb2.SampleState, str]] = ..., created_from_unix_ns: _Optional[int] = ..., created_until_unix_ns: _Optional[int] = ..., tags: _Optional[_Mapping[str, str]] = ..., page_size: _Optional[int] = ..., page_token: _Optional[str] = ..., request_id: _Optional[str] = ..., settle: bool = ...) -> None: ...

class ListReply(_message.Message):
    __slots__ = ("samples", "next_page_token", "as_of_unix_ns", "of_request")
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    AS_OF_UNIX_NS_FIELD_NUMBER: _ClassVar[int]
    OF_REQUEST_FIELD_NUMBER: _ClassVar[int]
    samples: _containers.RepeatedCompositeFieldContainer[_sample_pb2.SampleInfo]
    next_page_token: str
    as_of_unix_ns: int
    of_request: bool
    def __init__(self, samples: _Optional[_Iterable[_Union[_sample_pb2.SampleInfo, _Mapping]]] = ..., next_page_token: _Optional[str] = ..., as_of_unix_ns: _Optional[int] = ..., of_request: bool = ...) -> None: ...

class DeleteRequest(_message.Message):
    __slots__ = ("namespace", "sample_id", "created_unix_ns")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_ID_FIELD_NUMBER: _ClassVar[int]
    CREATED_UNIX_NS_FIELD_NUMBER: _ClassVar[int]
    namespace: str
    sample_id: str
    created_unix_ns: int
    def __init__(self, namespace: _Optional[str] = ..., sample_id: _Optional[str] = ..., created_unix_ns: _Optional[int] = ...) -> None: ...

class DeleteReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class VerifyRequest(_message.Message):
    __slots__ = ("namespace", "sample_id", "quarantine")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_ID_FIELD_NUMBER: _ClassVar[int]
    QUARANTINE_FIELD_NUMBER: _ClassVar[int]
    namespace: str
    sample_id: str
    quarantine: bool
    def __init__(self, namespace: _Optional[str] = ..., sample_id: _Optional[str] = ..., quarantine: bool = ...) -> None: ...

class VerifyReply(_message.Message):
    __slots__ = ("namespace", "sample_id", "damage", "message", "bytes", "quarantined")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_ID_FIELD_NUMBER: _ClassVar[int]
    DAMAGE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    QUARANTINED_FIELD_NUMBER: _ClassVar[int]
    namespace: str
    sample_id: str
    damage: str
    message: str
    bytes: int
    quarantined: bool
    def __init__(self, namespace: _Optional[str] = ..., sample_id: _Optional[str] = ..., damage: _Optional[str] = ..., message: _Optional[str] = ..., bytes: _Optional[int] = ..., quarantined: bool = ...) -> None: ...

class RestoreRequest(_message.Message):
    __slots__ = ("namespace", "sample_id")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_ID_FIELD_NUMBER: _ClassVar[int]
    namespace: str
    sample_id: str
    def __init__(self, namespace: _Optional[str] = ..., sample_id: _Optional[str] = ...) -> None: ...

class RestoreReply(_message.Message):
    __slots__ = ("namespace", "sample_id", "file", "restored", "damage", "message", "bytes")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_ID_FIELD_NUMBER: _ClassVar[int]
    FILE_FIELD_NUMBER: _ClassVar[int]
    RESTORED_FIELD_NUMBER: _ClassVar[int]
    DAMAGE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    namespace: str
    sample_id: str
    file: str
    restored: bool
    damage: str
    message: str
    bytes: int
    def __init__(self, namespace: _Optional[str] = ..., sample_id: _Optional[str] = ..., file: _Optional[str] = ..., restored: bool = ..., damage: _Optional[str] = ..., message: _Optional[str] = ..., bytes: _Optional[int] = ...) -> None: ...

class AckRequest(_message.Message):
    __slots__ = ("namespace", "sample_id")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_ID_FIELD_NUMBER: _ClassVar[int]
    namespace: str
    sample_id: str
    def __init__(self, namespace: _Optional[str] = ..., sample_id: _Optional[str] = ...) -> None: ...

class AckReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class CountReadRequest(_message.Message):
    __slots__ = ("namespace", "sample_id", "committed_unix_ns", "more")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_ID_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_UNIX_NS_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    namespace: str
    sample_id: str
    committed_unix_ns: int
    more: _containers.RepeatedCompositeFieldContainer[CountReadRequest]
    def __init__(self, namespace: _Optional[str] = ..., sample_id: _Optional[str] = ..., committed_unix_ns: _Optional[int] = ..., more: _Optional[_Iterable[_Union[CountReadRequest, _Mapping]]] = ...) -> None: ...

class CountReadReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class LeaseRequest(_message.Message):
    __slots__ = ("namespace", "sample_id", "holder", "seconds")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_ID_FIELD_NUMBER: _ClassVar[int]
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    namespace: str
    sample_id: str
    holder: str
    seconds: float
    def __init__(self, namespace: _Optional[str] = ..., sample_id: _Optional[str] = ..., holder: _Optional[str] = ..., seconds: _Optional[float] = ...) -> None: ...

class LeaseReply(_message.Message):
    __slots__ = ("leased_until_unix_ns",)
    LEASED_UNTIL_UNIX_NS_FIELD_NUMBER: _ClassVar[int]
    leased_until_unix_ns: int
    def __init__(self, leased_until_unix_ns: _Optional[int] = ...) -> None: ...

class UsageRequest(_message.Message):
    __slots__ = ("namespace", "page_token")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    namespace: str
    page_token: str
    def __init__(self, namespace: _Optional[str] = ..., page_token: _Optional[str] = ...) -> None: ...

class RetentionRequest(_message.Message):
    __slots__ = ("namespace", "rules", "accept")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    RULES_FIELD_NUMBER: _ClassVar[int]
    ACCEPT_FIELD_NUMBER: _ClassVar[int]
    namespace: str
    rules: str
    accept: bool
    def __init__(self, namespace: _Optional[str] = ..., rules: _Optional[str] = ..., accept: bool = ...) -> None: ...

class RetentionReply(_message.Message):
    __slots__ = ("namespace", "key", "samples", "bytes", "stored", "held", "age_held")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    STORED_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    AGE_HELD_FIELD_NUMBER: _ClassVar[int]
    namespace: str
    key: str
    samples: int
    bytes: int
    stored: int
    held: bool
    age_held: bool
    def __init__(self, namespace: _Optional[str] = ..., key: _Optional[str] = ..., samples: _Optional[int] = ..., bytes: _Optional[int] = ..., stored: _Optional[int] = ..., held: bool = ..., age_held: bool = ...) -> None: ...

class NamespaceUsage(_message.Message):
    __slots__ = ("namespace", "samples", "bytes", "failed", "limits")
    class LimitsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    namespace: str
    samples: int
    bytes: int
    failed: int
    limits: _containers.ScalarMap[str, str]
    def __init__(self, namespace: _Optional[str] = ..., samples: _Optional[int] = ..., bytes: _Optional[int] = ..., failed: _Optional[int] = ..., limits: _Optional[_Mapping[str, str]] = ...) -> None: ...

class ScrubProgress(_message.Message):
    __slots__ = ("every_s", "begun_unix_ns", "ended_unix_ns", "samples", "damaged")
    EVERY_S_FIELD_NUMBER: _ClassVar[int]
    BEGUN_UNIX_NS_FIELD_NUMBER: _ClassVar[int]
    ENDED_UNIX_NS_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    DAMAGED_FIELD_NUMBER: _ClassVar[int]
    every_s: float
    begun_unix_ns: int
    ended_unix_ns: int
    samples: int
    damaged: int
    def __init__(self, every_s: _Optional[float] = ..., begun_unix_ns: _Optional[int] = ..., ended_unix_ns: _Optional[int] = ..., samples: _Optional[int] = ..., damaged: _Optional[int] = ...) -> None: ...

class UsageReply(_message.Message):
    __slots__ = ("namespaces", "next_page_token", "free_bytes", "free_bytes_target", "quarantined_files", "quarantined_bytes", "scrub", "clock", "age_held", "rules_held", "whole", "rules_wait_s")
    NAMESPACES_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    FREE_BYTES_FIELD_NUMBER: _ClassVar[int]
    FREE_BYTES_TARGET_FIELD_NUMBER: _ClassVar[int]
    QUARANTINED_FILES_FIELD_NUMBER: _ClassVar[int]
    QUARANTINED_BYTES_FIELD_NUMBER: _ClassVar[int]
    SCRUB_FIELD_NUMBER: _ClassVar[int]
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    AGE_HELD_FIELD_NUMBER: _ClassVar[int]
    RULES_HELD_FIELD_NUMBER: _ClassVar[int]
    WHOLE_FIELD_NUMBER: _ClassVar[int]
    RULES_WAIT_S_FIELD_NUMBER: _ClassVar[int]
    namespaces: _containers.RepeatedCompositeFieldContainer[NamespaceUsage]
    next_page_token: str
    free_bytes: int
    free_bytes_target: int
    quarantined_files: int
    quarantined_bytes: int
    scrub: ScrubProgress
    clock: str
    age_held: _containers.RepeatedScalarFieldContainer[str]
    rules_held: _containers.RepeatedScalarFieldContainer[str]
    whole: bool
    rules_wait_s: float
    def __init__(self, namespaces: _Optional[_Iterable[_Union[NamespaceUsage, _Mapping]]] = ..., next_page_token: _Optional[str] = ..., free_bytes: _Optional[int] = ..., free_bytes_target: _Optional[int] = ..., quarantined_files: _Optional[int] = ..., quarantined_bytes: _Optional[int] = ..., scrub: _Optional[_Union[ScrubProgress, _Mapping]] = ..., clock: _Optional[str] = ..., age_held: _Optional[_Iterable[str]] = ..., rules_held: _Optional[_Iterable[str]] = ..., whole: bool = ..., rules_wait_s: _Optional[float] = ...) -> None: ...

class StatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatusReply(_message.Message):
    __slots__ = ("version", "health", "now_unix_ns", "rights", "covers", "namespaces", "server", "namespaces_unknown", "namespaces_left_out")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    HEALTH_FIELD_NUMBER: _ClassVar[int]
    NOW_UNIX_NS_FIELD_NUMBER: _ClassVar[int]
    RIGHTS_FIELD_NUMBER: _ClassVar[int]
    COVERS_FIELD_NUMBER: _ClassVar[int]
    NAMESPACES_FIELD_NUMBER: _ClassVar[int]
    SERVER_FIELD_NUMBER: _ClassVar[int]
    NAMESPACES_UNKNOWN_FIELD_NUMBER: _ClassVar[int]
    NAMESPACES_LEFT_OUT_FIELD_NUMBER: _ClassVar[int]
    version: str
    health: str
    now_unix_ns: int
    rights: _containers.RepeatedScalarFieldContainer[str]
    covers: _containers.RepeatedScalarFieldContainer[str]
    namespaces: _containers.RepeatedCompositeFieldContainer[NamespaceUsage]
    server: ServerStatus
    namespaces_unknown: bool
    namespaces_left_out: bool
    def __init__(self, version: _Optional[str] = ..., health: _Optional[str] = ..., now_unix_ns: _Optional[int] = ..., rights: _Optional[_Iterable[str]] = ..., covers: _Optional[_Iterable[str]] = ..., namespaces: _Optional[_Iterable[_Union[NamespaceUsage, _Mapping]]] = ..., server: _Optional[_Union[ServerStatus, _Mapping]] = ..., namespaces_unknown: bool = ..., namespaces_left_out: bool = ...) -> None: ...

class ServerStatus(_message.Message):
    __slots__ = ("uptime_s", "tls", "certificate_expires_unix_s", "tokens", "processes", "processes_wanted", "nixl", "engines", "engines_left_out", "open_samples", "rates_s", "samples_per_s", "received_bytes_per_s", "sent_bytes_per_s", "counted_s", "failed", "hours_until_full", "free_bytes", "disk_bytes", "free_bytes_min", "reads", "waiting_reads", "clock", "age_held", "rules_held", "rules_wait_s", "damaged", "catalogue_behind", "shared")
    class FailedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    UPTIME_S_FIELD_NUMBER: _ClassVar[int]
    TLS_FIELD_NUMBER: _ClassVar[int]
    CERTIFICATE_EXPIRES_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROCESSES_FIELD_NUMBER: _ClassVar[int]
    PROCESSES_WANTED_FIELD_NUMBER: _ClassVar[int]
    NIXL_FIELD_NUMBER: _ClassVar[int]
    ENGINES_FIELD_NUMBER: _ClassVar[int]
    ENGINES_LEFT_OUT_FIELD_NUMBER: _ClassVar[int]
    OPEN_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    RATES_S_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_PER_S_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    SENT_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    COUNTED_S_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    HOURS_UNTIL_FULL_FIELD_NUMBER: _ClassVar[int]
    FREE_BYTES_FIELD_NUMBER: _ClassVar[int]
    DISK_BYTES_FIELD_NUMBER: _ClassVar[int]
    FREE_BYTES_MIN_FIELD_NUMBER: _ClassVar[int]
    READS_FIELD_NUMBER: _ClassVar[int]
    WAITING_READS_FIELD_NUMBER: _ClassVar[int]
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    AGE_HELD_FIELD_NUMBER: _ClassVar[int]
    RULES_HELD_FIELD_NUMBER: _ClassVar[int]
    RULES_WAIT_S_FIELD_NUMBER: _ClassVar[int]
    DAMAGED_FIELD_NUMBER: _ClassVar[int]
    CATALOGUE_BEHIND_FIELD_NUMBER: _ClassVar[int]
    SHARED_FIELD_NUMBER: _ClassVar[int]
    uptime_s: float
    tls: bool
    certificate_expires_unix_s: int
    tokens: bool
    processes: int
    processes_wanted: int
    nixl: bool
    engines: _containers.RepeatedCompositeFieldContainer[EngineStatus]
    engines_left_out: int
    open_samples: int
    rates_s: float
    samples_per_s: float
    received_bytes_per_s: float
    sent_bytes_per_s: float
    counted_s: float
    failed: _containers.ScalarMap[str, int]
    hours_until_full: float
    free_bytes: int
    disk_bytes: int
    free_bytes_min: int
    reads: int
    waiting_reads: int
    clock: str
    age_held: _containers.RepeatedScalarFieldContainer[str]
    rules_held: _containers.RepeatedScalarFieldContainer[str]
    rules_wait_s: float
    damaged: int
    catalogue_behind: bool
    shared: SharedStore
    def __init__(self, uptime_s: _Optional[float] = ..., tls: bool = ..., certificate_expires_unix_s: _Optional[int] = ..., tokens: bool = ..., processes: _Optional[int] = ..., processes_wanted: _Optional[int] = ..., nixl: bool = ..., engines: _Optional[_Iterable[_Union[EngineStatus, _Mapping]]] = ..., engines_left_out: _Optional[int] = ..., open_samples: _Optional[int] = ..., rates_s: _Optional[float] = ..., samples_per_s: _Optional[float] = ..., received_bytes_per_s: _Optional[float] = ..., sent_bytes_per_s: _Optional[float] = ..., counted_s: _Optional[float] = ..., failed: _Optional[_Mapping[str, int]] = ..., hours_until_full: _Optional[float] = ..., free_bytes: _Optional[int] = ..., disk_bytes: _Optional[int] = ..., free_bytes_min: _Optional[int] = ..., reads: _Optional[int] = ..., waiting_reads: _Optional[int] = ..., clock: _Optional[str] = ..., age_held: _Optional[_Iterable[str]] = ..., rules_held: _Optional[_Iterable[str]] = ..., rules_wait_s: _Optional[float] = ..., damaged: _Optional[int] = ..., catalogue_behind: bool = ..., shared: _Optional[_Union[SharedStore, _Mapping]] = ...) -> None: ...

class SharedStore(_message.Message):
    __slots__ = ("bucket", "catalogue", "trouble", "leads", "scratch_bytes", "attempts_arriving", "attempts_ended", "attempts_late")
    BUCKET_FIELD_NUMBER: _ClassVar[int]
    CATALOGUE_FIELD_NUMBER: _ClassVar[int]
    TROUBLE_FIELD_NUMBER: _ClassVar[int]
    LEADS_FIELD_NUMBER: _ClassVar[int]
    SCRATCH_BYTES_FIELD_NUMBER: _ClassVar[int]
    ATTEMPTS_ARRIVING_FIELD_NUMBER: _ClassVar[int]
    ATTEMPTS_ENDED_FIELD_NUMBER: _ClassVar[int]
    ATTEMPTS_LATE_FIELD_NUMBER: _ClassVar[int]
    bucket: str
    catalogue: str
    trouble: str
    leads: bool
    scratch_bytes: int
    attempts_arriving: int
    attempts_ended: int
    attempts_late: int
    def __init__(self, bucket: _Optional[str] = ..., catalogue: _Optional[str] = ..., trouble: _Optional[str] = ..., leads: bool = ..., scratch_bytes: _Optional[int] = ..., attempts_arriving: _Optional[int] = ..., attempts_ended: _Optional[int] = ..., attempts_late: _Optional[int] = ...) -> None: ...

class EngineStatus(_message.Message):
    __slots__ = ("engine_id", "rank", "peer", "address", "vllm_version", "slotstream_version", "transport", "connected", "since_s", "streams", "open_samples", "last_sample", "last_sample_s", "report", "report_s")
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    PEER_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    VLLM_VERSION_FIELD_NUMBER: _ClassVar[int]
    SLOTSTREAM_VERSION_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    CONNECTED_FIELD_NUMBER: _ClassVar[int]
    SINCE_S_FIELD_NUMBER: _ClassVar[int]
    STREAMS_FIELD_NUMBER: _ClassVar[int]
    OPEN_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    LAST_SAMPLE_FIELD_NUMBER: _ClassVar[int]
    LAST_SAMPLE_S_FIELD_NUMBER: _ClassVar[int]
    REPORT_FIELD_NUMBER: _ClassVar[int]
    REPORT_S_FIELD_NUMBER: _ClassVar[int]
    engine_id: str
    rank: int
    peer: str
    address: str
    vllm_version: str
    slotstream_version: str
    transport: str
    connected: bool
    since_s: float
    streams: int
    open_samples: int
    last_sample: str
    last_sample_s: float
    report: _ingest_pb2.EngineReport
    report_s: float
    def __init__(self, engine_id: _Optional[str] = ..., rank: _Optional[int] = ..., peer: _Optional[str] = ..., address: _Optional[str] = ..., vllm_version: _Optional[str] = ..., slotstream_version: _Optional[str] = ..., transport: _Optional[str] = ..., connected: bool = ..., since_s: _Optional[float] = ..., streams: _Optional[int] = ..., open_samples: _Optional[int] = ..., last_sample: _Optional[str] = ..., last_sample_s: _Optional[float] = ..., report: _Optional[_Union[_ingest_pb2.EngineReport, _Mapping]] = ..., report_s: _Optional[float] = ...) -> None: ...
