from slotstream.v1 import sample_pb2 as _sample_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ReadRequest(_message.Message):
    __slots__ = ("namespace", "sample_id", "start", "stop", "layer_ids", "wait_s")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_ID_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    LAYER_IDS_FIELD_NUMBER: _ClassVar[int]
    WAIT_S_FIELD_NUMBER: _ClassVar[int]
    namespace: str
    sample_id: str
    start: int
    stop: int
    layer_ids: _containers.RepeatedScalarFieldContainer[int]
    wait_s: float
    def __init__(self, namespace: _Optional[str] = ..., sample_id: _Optional[str] = ..., start: _Optional[int] = ..., stop: _Optional[int] = ..., layer_ids: _Optional[_Iterable[int]] = ..., wait_s: _Optional[float] = ...) -> None: ...

class ReadReply(_message.Message):
    __slots__ = ("header", "rows", "data")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    header: ReadHeader
    rows: RowsHeader
    data: bytes
    def __init__(self, header: _Optional[_Union[ReadHeader, _Mapping]] = ..., rows: _Optional[_Union[RowsHeader, _Mapping]] = ..., data: _Optional[bytes] = ...) -> None: ...

class ReadHeader(_message.Message):
    __slots__ = ("info", "layer_ids", "start", "stop", "token_ids")
    INFO_FIELD_NUMBER: _ClassVar[int]
    LAYER_IDS_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    info: _sample_pb2.SampleInfo
    layer_ids: _containers.RepeatedScalarFieldContainer[int]
    start: int
    stop: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, info: _Optional[_Union[_sample_pb2.SampleInfo, _Mapping]] = ..., layer_ids: _Optional[_Iterable[int]] = ..., start: _Optional[int] = ..., stop: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

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
    __slots__ = ("namespace", "model", "state", "created_from_unix_ns", "created_until_unix_ns", "tags", "page_size", "page_token")
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
    namespace: str
    model: str
    state: _sample_pb2.SampleState
    created_from_unix_ns: int
    created_until_unix_ns: int
    tags: _containers.ScalarMap[str, str]
    page_size: int
    page_token: str
    def __init__(self, namespace: _Optional[str] = ..., model: _Optional[str] = ..., state: _Optional[_Union[_sample_pb2.SampleState, str]] = ..., created_from_unix_ns: _Optional[int] = ..., created_until_unix_ns: _Optional[int] = ..., tags: _Optional[_Mapping[str, str]] = ..., page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class ListReply(_message.Message):
    __slots__ = ("samples", "next_page_token")
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    samples: _containers.RepeatedCompositeFieldContainer[_sample_pb2.SampleInfo]
    next_page_token: str
    def __init__(self, samples: _Optional[_Iterable[_Union[_sample_pb2.SampleInfo, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class DeleteRequest(_message.Message):
    __slots__ = ("namespace", "sample_id")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_ID_FIELD_NUMBER: _ClassVar[int]
    namespace: str
    sample_id: str
    def __init__(self, namespace: _Optional[str] = ..., sample_id: _Optional[str] = ...) -> None: ...

class DeleteReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class VerifyRequest(_message.Message):
    __slots__ = ("namespace", "sample_id")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_ID_FIELD_NUMBER: _ClassVar[int]
    namespace: str
    sample_id: str
    def __init__(self, namespace: _Optional[str] = ..., sample_id: _Optional[str] = ...) -> None: ...

class VerifyReply(_message.Message):
    __slots__ = ("namespace", "sample_id", "damage", "message", "bytes")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_ID_FIELD_NUMBER: _ClassVar[int]
    DAMAGE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    namespace: str
    sample_id: str
    damage: str
    message: str
    bytes: int
    def __init__(self, namespace: _Optional[str] = ..., sample_id: _Optional[str] = ..., damage: _Optional[str] = ..., message: _Optional[str] = ..., bytes: _Optional[int] = ...) -> None: ...
