"""A stand-in for the Samples service that answers as scripted: for what a sound server never does."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from concurrent import futures
from typing import Any

import grpc

from slotstream.v1 import sample_pb2, samples_pb2
from slotstream.wire.frames import encode_rows
from support.synthetic import SyntheticSample

Handler = Callable[[Any, grpc.ServicerContext], Any]

_REQUESTS: dict[str, Any] = {
    "Read": samples_pb2.ReadRequest,
    "ReadMany": samples_pb2.ReadManyRequest,
    "Stat": samples_pb2.StatRequest,
    "CountRead": samples_pb2.CountReadRequest,
    "List": samples_pb2.ListRequest,
    "Status": samples_pb2.StatusRequest,
    "Delete": samples_pb2.DeleteRequest,
    "Verify": samples_pb2.VerifyRequest,
}


class FakeSamples(grpc.GenericRpcHandler):  # type: ignore[type-arg]
    """`handlers` by method name; each returns a reply, or for Read and Verify an iterator of replies (bytes or messages)."""

    def __init__(self, **handlers: Handler) -> None:
        self._handlers = handlers

    def service(self, handler_call_details: Any) -> Any:
        name = handler_call_details.method.removeprefix("/slotstream.v1.Samples/")
        if name not in self._handlers:
            return None
        make = (
            grpc.unary_stream_rpc_method_handler
            if name in ("Read", "ReadMany", "Verify")
            else grpc.unary_unary_rpc_method_handler
        )
        return make(
            self._handlers[name],
            request_deserializer=_REQUESTS[name].FromString,
            response_serializer=lambda reply: reply if isinstance(reply, bytes) else reply.SerializeToString(),
        )


@contextlib.contextmanager
def serving(listen: str = "127.0.0.1:0", /, **handlers: Handler) -> Iterator[str]:
    """A fake server; its address."""
    server = grpc.server(futures.ThreadPoolExecutor(4), handlers=[FakeSamples(**handlers)])
    port = server.add_insecure_port(listen)
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(grace=None).wait()


def failing(status: grpc.StatusCode, message: str, **trailers: str) -> Handler:
    """A handler that ends every call with this status, and `slotstream_code="X"` as trailing metadata `slotstream-code: X`."""

    def handler(request: Any, context: grpc.ServicerContext) -> Any:
        context.set_trailing_metadata(tuple((key.replace("_", "-"), value) for key, value in trailers.items()))
        context.abort(status, message)

    return handler


def info_of(sample: SyntheticSample) -> sample_pb2.SampleInfo:
    return sample_pb2.SampleInfo(
        namespace=sample.namespace,
        sample_id=sample.sample_id,
        state=sample_pb2.SAMPLE_STATE_COMMITTED,
        model=sample.model,
        dtype=sample.dtype,
        layer_ids=sample.layer_ids,
        hidden_size=sample.hidden_size,
        num_tokens=sample.num_tokens,
        file_bytes=1,
        created_unix_ns=1_700_000_000_000_000_000,
        committed_unix_ns=1_700_000_001_000_000_000,
        tags=sample.tags,
        metadata=sample.metadata,
    )


def read_header(sample: SyntheticSample, **changes: Any) -> samples_pb2.ReadReply:
    """The header of a whole read, with the named fields changed."""
    header = samples_pb2.ReadHeader(info=info_of(sample), layer_ids=sample.layer_ids, start=0, stop=sample.num_tokens)
    header.token_ids.extend(sample.token_ids)
    for name, value in changes.items():
        header.ClearField(name)
        header.MergeFrom(samples_pb2.ReadHeader(**{name: value}))
    return samples_pb2.ReadReply(header=header)


def read_rows(sample: SyntheticSample, start: int, stop: int, *, first_row: int | None = None) -> bytes:
    """One frame of rows; `first_row` claims another place for them."""
    claimed = start if first_row is None else first_row
    return encode_rows(samples_pb2.RowsHeader(first_row=claimed, rows=stop - start), [sample.rows(start, stop)])
