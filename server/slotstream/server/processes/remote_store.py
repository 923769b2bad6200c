"""The store as a worker process has it: files it writes itself, everything else it asks the primary process."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Any

import grpc

from slotstream.store.disk.files import Files
from slotstream.store.records import Failure, SampleRecord, SampleSpec
from slotstream.store.sample.upload import Draft, OpenSample, Upload, VerdictUnknown
from slotstream.v1 import ingest_pb2, workers_pb2, workers_pb2_grpc
from slotstream.wire.errors import SlotStreamError, error_from_code

_CALL_S = 120.0  # The primary waits for its disk meanwhile.


def failure_message(failure: Failure) -> workers_pb2.UploadFailure:
    return workers_pb2.UploadFailure(code=failure.code, message=failure.message, retryable=failure.retryable)


def failure_of(message: workers_pb2.UploadFailure) -> Failure:
    return Failure(message.code, message.message, message.retryable)


class _Stamps:
    """A sample's times: the first is the primary's, whose clock never goes back, the later ones never before it."""

    def __init__(self, created_unix_ns: int) -> None:
        self._created_unix_ns = created_unix_ns
        self._begun = time.monotonic_ns()
        self._first = True

    def __call__(self) -> int:
        if self._first:
            self._first = False
            return self._created_unix_ns
        return max(time.time_ns(), self._created_unix_ns + time.monotonic_ns() - self._begun)


class RemoteStore:
    """What writers need of a store. Thread safe; blocks for the disk and for the primary.

    Everything raises VerdictUnknown where the primary does not answer: it may be gone before it did what was asked, or after.
    """

    def __init__(self, channel: grpc.Channel, worker: int, data_dir: Path, free_bytes_min: int) -> None:
        self._stub: Any = workers_pb2_grpc.WorkersStub(channel)  # type: ignore[no-untyped-call]
        self._worker = worker
        self._data_dir = data_dir.absolute()
        self._files = Files()
        self._files.confine(self._data_dir)
        self._free_bytes_min = free_bytes_min

    def open_upload(self, spec: SampleSpec, peer: str) -> Upload:
        """Begin a sample of `peer`. Raises StoreFull and TooLarge; the sample is then recorded as failed."""
        begin = workers_pb2.BeginUpload(worker=self._worker, sample=_open_sample(spec), peer=peer)
        begun = self._ask(self._stub.Begin, begin)
        _raise_if_failed(begun.failure)
        try:
            return Upload(
                spec,
                self._data_dir,
                self._files,
                self._free_bytes_min,
                partial(self._publish, begun.upload),
                partial(self._ended, begun.upload),
                _Stamps(begun.created_unix_ns),
                begun.partial,
            )
        except SlotStreamError as error:
            self._fail(begun.upload, Failure.of(error))
            raise

    def record_failed(self, record: SampleRecord, failure: Failure, peer: str) -> None:
        """Let readers of the id know why there is no sample of `peer`."""
        refuse = workers_pb2.RefuseUpload(
            namespace=record.namespace,
            sample_id=record.sample_id,
            model=record.model,
            created_unix_ns=record.created_unix_ns,
            failure=failure_message(failure),
            peer=peer,
        )
        self._ask(self._stub.Refuse, refuse)

    def _publish(self, number: int, upload: OpenSample, draft: Draft) -> bool:
        record, content = upload.seal(draft), draft.content
        request = workers_pb2.PublishUpload(
            upload=number,
            num_tokens=record.num_tokens,
            file_bytes=record.file_bytes,
            created_unix_ns=record.created_unix_ns,
            committed_unix_ns=record.committed_unix_ns,
            metadata=record.metadata,
            header_xxh3=record.header_xxh3,
            hash_rows=content.hash_rows,
            hashes=content.hashes,
            late_xxh3=content.column_xxh3,
        )
        answer = self._ask(self._stub.Publish, request)
        _raise_if_failed(answer.failure)
        return bool(answer.duplicate)

    def _ended(self, number: int, upload: OpenSample, failure: Failure | None) -> None:
        if failure is not None:  # The primary knows of a commit, and of one that failed; being told again does nothing.
            self._fail(number, failure)

    def _fail(self, number: int, failure: Failure) -> None:
        self._ask(self._stub.Fail, workers_pb2.FailUpload(upload=number, failure=failure_message(failure)))

    def _ask(self, method: Any, request: object) -> Any:
        try:
            return method(request, timeout=_CALL_S)
        except grpc.RpcError as error:
            raise VerdictUnknown("the server's primary process does not answer") from error


def _raise_if_failed(failure: workers_pb2.UploadFailure) -> None:
    if failure.code:
        raise error_from_code(failure.code, failure.message)


def _open_sample(spec: SampleSpec) -> ingest_pb2.OpenSample:
    return ingest_pb2.OpenSample(
        namespace=spec.namespace,
        sample_id=spec.sample_id,
        model=spec.model,
        dtype=spec.row_format.dtype,
        layer_ids=spec.layer_ids,
        hidden_size=spec.row_format.hidden_size,
        rows_max=spec.rows_max,
        rows_exact=spec.rows_exact,
        tags=spec.tags,
        metadata=spec.metadata,
        columns=spec.row_format.names,
    )
