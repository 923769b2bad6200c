from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class SampleState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SAMPLE_STATE_UNSPECIFIED: _ClassVar[SampleState]
    SAMPLE_STATE_ARRIVING: _ClassVar[SampleState]
    SAMPLE_STATE_COMMITTED: _ClassVar[SampleState]
    SAMPLE_STATE_FAILED: _ClassVar[SampleState]
SAMPLE_STATE_UNSPECIFIED: SampleState
SAMPLE_STATE_ARRIVING: SampleState
SAMPLE_STATE_COMMITTED: SampleState
SAMPLE_STATE_FAILED: SampleState

class ColumnData(_message.Message):
    __slots__ = ("name", "data")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    name: str
    data: bytes
    def __init__(self, name: _Optional[str] = ..., data: _Optional[bytes] = ...) -> None: ...

class SampleInfo(_message.Message):
    __slots__ = ("namespace", "sample_id", "state", "model", "dtype", "layer_ids", "hidden_size", "num_tokens", "file_bytes", "created_unix_ns", "committed_unix_ns", "error_code", "error_message", "tags", "metadata", "reads", "acked_unix_ns", "leased_until_unix_ns", "expires_unix_ns", "refused", "header_xxh3")
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
    class RefusedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    LAYER_IDS_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FILE_BYTES_FIELD_NUMBER: _ClassVar[int]
    CREATED_UNIX_NS_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_UNIX_NS_FIELD_NUMBER: _ClassVar[int]
    ERROR_CODE_FIELD_NUMBER: _ClassVar[int]
    ERROR_MESSAGE_FIELD_NUMBER: _ClassVar[int]
    TAGS_FIELD_NUMBER: _ClassVar[int]
    METADATA_FIELD_NUMBER: _ClassVar[int]
    READS_FIELD_NUMBER: _ClassVar[int]
    ACKED_UNIX_NS_FIELD_NUMBER: _ClassVar[int]
    LEASED_UNTIL_UNIX_NS_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_UNIX_NS_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    HEADER_XXH3_FIELD_NUMBER: _ClassVar[int]
    namespace: str
    sample_id: str
    state: SampleState
    model: str
    dtype: str
    layer_ids: _containers.RepeatedScalarFieldContainer[int]
    hidden_size: int
    num_tokens: int
    file_bytes: int
    created_unix_ns: int
    committed_unix_ns: int
    error_code: str
    error_message: str
    tags: _containers.ScalarMap[str, str]
    metadata: _containers.ScalarMap[str, str]
    reads: int
    acked_unix_ns: int
    leased_until_unix_ns: int
    expires_unix_ns: int
    refused: _containers.ScalarMap[str, int]
    header_xxh3: int
    def __init__(self, namespace: _Optional[str] = ..., sample_id: _Optional[str] = ..., state: _Optional[_Union[SampleState, str]] = ..., model: _Optional[str] = ..., dtype: _Optional[str] = ..., layer_ids: _Optional[_Iterable[int]] = ..., hidden_size: _Optional[int] = ..., num_tokens: _Optional[int] = ..., file_bytes: _Optional[int] = ..., created_unix_ns: _Optional[int] = ..., committed_unix_ns: _Optional[int] = ..., error_code: _Optional[str] = ..., error_message: _Optional[str] = ..., tags: _Optional[_Mapping[str, str]] = ..., metadata: _Optional[_Mapping[str, str]] = ..., reads: _Optional[int] = ..., acked_unix_ns: _Optional[int] = ..., leased_until_unix_ns: _Optional[int] = ..., expires_unix_ns: _Optional[int] = ..., refused: _Optional[_Mapping[str, int]] = ..., header_xxh3: _Optional[int] = ...) -> None: ...
