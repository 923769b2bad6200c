from slotstream.v1 import ingest_pb2 as _ingest_pb2
from slotstream.v1 import samples_pb2 as _samples_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class WorkerReport(_message.Message):
    __slots__ = ("worker", "metrics", "engines")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    ENGINES_FIELD_NUMBER: _ClassVar[int]
    worker: int
    metrics: _containers.RepeatedCompositeFieldContainer[MetricValue]
    engines: _containers.RepeatedCompositeFieldContainer[_samples_pb2.EngineStatus]
    def __init__(self, worker: _Optional[int] = ..., metrics: _Optional[_Iterable[_Union[MetricValue, _Mapping]]] = ..., engines: _Optional[_Iterable[_Union[_samples_pb2.EngineStatus, _Mapping]]] = ...) -> None: ...

class MetricValue(_message.Message):
    __slots__ = ("name", "labels", "value")
    class LabelsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    name: str
    labels: _containers.ScalarMap[str, str]
    value: float
    def __init__(self, name: _Optional[str] = ..., labels: _Optional[_Mapping[str, str]] = ..., value: _Optional[float] = ...) -> None: ...

class WorkerOrder(_message.Message):
    __slots__ = ("kind",)
    class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        UNKNOWN: _ClassVar[WorkerOrder.Kind]
        DRAIN: _ClassVar[WorkerOrder.Kind]
        END_STREAMS: _ClassVar[WorkerOrder.Kind]
        NOT_SERVING: _ClassVar[WorkerOrder.Kind]
        SERVING: _ClassVar[WorkerOrder.Kind]
    UNKNOWN: WorkerOrder.Kind
    DRAIN: WorkerOrder.Kind
    END_STREAMS: WorkerOrder.Kind
    NOT_SERVING: WorkerOrder.Kind
    SERVING: WorkerOrder.Kind
    KIND_FIELD_NUMBER: _ClassVar[int]
    kind: WorkerOrder.Kind
    def __init__(self, kind: _Optional[_Union[WorkerOrder.Kind, str]] = ...) -> None: ...

class UploadFailure(_message.Message):
    __slots__ = ("code", "message", "retryable")
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    RETRYABLE_FIELD_NUMBER: _ClassVar[int]
    code: str
    message: str
    retryable: bool
    def __init__(self, code: _Optional[str] = ..., message: _Optional[str] = ..., retryable: bool = ...) -> None: ...

class BeginUpload(_message.Message):
    __slots__ = ("worker", "sample", "peer")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_FIELD_NUMBER: _ClassVar[int]
    PEER_FIELD_NUMBER: _ClassVar[int]
    worker: int
    sample: _ingest_pb2.OpenSample
    peer: str
    def __init__(self, worker: _Optional[int] = ..., sample: _Optional[_Union[_ingest_pb2.OpenSample, _Mapping]] = ..., peer: _Optional[str] = ...) -> None: ...

class UploadBegun(_message.Message):
    __slots__ = ("upload", "partial", "failure", "created_unix_ns")
    UPLOAD_FIELD_NUMBER: _ClassVar[int]
    PARTIAL_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    CREATED_UNIX_NS_FIELD_NUMBER: _ClassVar[int]
    upload: int
    partial: str
    failure: UploadFailure
    created_unix_ns: int
    def __init__(self, upload: _Optional[int] = ..., partial: _Optional[str] = ..., failure: _Optional[_Union[UploadFailure, _Mapping]] = ..., created_unix_ns: _Optional[int] = ...) -> None: ...

class PublishUpload(_message.Message):
    __slots__ = ("upload", "num_tokens", "file_bytes", "created_unix_ns", "committed_unix_ns", "metadata", "header_xxh3", "hash_rows", "hashes", "late_xxh3")
    class MetadataEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    class LateXxh3Entry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    UPLOAD_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FILE_BYTES_FIELD_NUMBER: _ClassVar[int]
    CREATED_UNIX_NS_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_UNIX_NS_FIELD_NUMBER: _ClassVar[int]
    METADATA_FIELD_NUMBER: _ClassVar[int]
    HEADER_XXH3_FIELD_NUMBER: _ClassVar[int]
    HASH_ROWS_FIELD_NUMBER: _ClassVar[int]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    LATE_XXH3_FIELD_NUMBER: _ClassVar[int]
    upload: int
    num_tokens: int
    file_bytes: int
    created_unix_ns: int
    committed_unix_ns: int
    metadata: _containers.ScalarMap[str, str]
    header_xxh3: str
    hash_rows: int
    hashes: _containers.RepeatedScalarFieldContainer[int]
    late_xxh3: _containers.ScalarMap[str, str]
    def __init__(self, upload: _Optional[int] = ..., num_tokens: _Optional[int] = ..., file_bytes: _Optional[int] = ..., created_unix_ns: _Optional[int] = ..., committed_unix_ns: _Optional[int] = ..., metadata: _Optional[_Mapping[str, str]] = ..., header_xxh3: _Optional[str] = ..., hash_rows: _Optional[int] = ..., hashes: _Optional[_Iterable[int]] = ..., late_xxh3: _Optional[_Mapping[str, str]] = ...) -> None: ...

class FailUpload(_message.Message):
    __slots__ = ("upload", "failure")
    UPLOAD_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    upload: int
    failure: UploadFailure
    def __init__(self, upload: _Optional[int] = ..., failure: _Optional[_Union[UploadFailure, _Mapping]] = ...) -> None: ...

class RefuseUpload(_message.Message):
    __slots__ = ("namespace", "sample_id", "model", "created_unix_ns", "failure", "peer")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    CREATED_UNIX_NS_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    PEER_FIELD_NUMBER: _ClassVar[int]
    namespace: str
    sample_id: str
    model: str
    created_unix_ns: int
    failure: UploadFailure
    peer: str
    def __init__(self, namespace: _Optional[str] = ..., sample_id: _Optional[str] = ..., model: _Optional[str] = ..., created_unix_ns: _Optional[int] = ..., failure: _Optional[_Union[UploadFailure, _Mapping]] = ..., peer: _Optional[str] = ...) -> None: ...

class UploadEnded(_message.Message):
    __slots__ = ("duplicate", "failure")
    DUPLICATE_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    duplicate: bool
    failure: UploadFailure
    def __init__(self, duplicate: bool = ..., failure: _Optional[_Union[UploadFailure, _Mapping]] = ...) -> None: ...
