"""Copies that CUDA's driver makes for reads of row pages, on a stream of their own: torch has no call for many."""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from slotstream.connector.reading.page_reads import Copies
from slotstream.wire.errors import ConfigError

_FEW = 3  # So many copies, 6 us each, take the host no longer than one call for all, 20 us and 1 us each (H100's host).
_DEVICE_POINTER = 3  # CU_POINTER_ATTRIBUTE_DEVICE_POINTER
_HOST_POINTERS_DO = 91  # CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM
_IN_STREAM_ORDER = 1  # CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
_REFUSED = (1, 801)  # CUDA_ERROR_INVALID_VALUE and CUDA_ERROR_NOT_SUPPORTED: what one copy alone may not meet.
_BLACKWELL = 10  # Its major compute capability.
_EVENTS = 64  # Reads that the model's stream can wait for one by one: two steps' of the largest.


class _CopyAttributes(ctypes.Structure):
    """CUmemcpyAttributes: in which order sources are read; hints of places, and flags."""

    _fields_ = (
        ("order", ctypes.c_int),
        ("source_kind", ctypes.c_int),
        ("source_id", ctypes.c_int),
        ("to_kind", ctypes.c_int),
        ("to_id", ctypes.c_int),
        ("flags", ctypes.c_uint),
    )


def load_driver() -> Any:
    """libcuda. Raises ConfigError."""
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise ConfigError(f"rows of `layers` are read by NVIDIA's driver, which cannot be loaded here: {error}") from error


def takes_batches(cuda: Any, device: int, capability: int) -> bool:
    """Whether one call may start many copies on a device, by its number and its major compute capability.

    Not before CUDA 12.8. Not where pinned memory has other addresses on the device, as under WSL: the call takes the host's for
    the device's, and the fault ends the process (github.com/sgl-project/sglang/issues/40232). Not on Blackwell: it was seen to
    hang and to crash there (github.com/vllm-project/vllm/issues/49276, github.com/InternLM/lmdeploy/pull/4838).
    """
    if not hasattr(cuda, "cuMemcpyBatchAsync") or capability >= _BLACKWELL:
        return False
    handle, found = ctypes.c_int(), ctypes.c_int()
    error = cuda.cuDeviceGet(ctypes.byref(handle), ctypes.c_int(device)) or cuda.cuDeviceGetAttribute(
        ctypes.byref(found), ctypes.c_int(_HOST_POINTERS_DO), handle
    )
    return error == 0 and found.value == 1


class DriverCopies:
    """Copies to the host on one stream."""

    def __init__(self, cuda: Any, stream: int, *, batches: bool) -> None:
        """`cuda`: libcuda. `batches`: see `takes_batches`."""
        self._cuda = cuda
        self._stream = ctypes.c_void_p(stream)
        self._batch = cuda.cuMemcpyBatchAsync if batches else None  # CUDA 12.8's form; later drivers keep it.
        # All copies of a call have the same attributes, from the first on; which one failed is asked, and not used.
        how, first, failed = _CopyAttributes(order=_IN_STREAM_ORDER), ctypes.c_size_t(0), ctypes.c_size_t()
        self._how = ctypes.byref(how), ctypes.byref(first), ctypes.c_size_t(1), ctypes.byref(failed)

    def start(self, copies: Copies) -> int:
        """Start them; CUDA's error, 0 for none."""
        if self._batch is not None and copies.count > _FEW:
            count = ctypes.c_size_t(copies.count)
            error = int(self._batch(copies.to, copies.source, copies.nbytes, count, *self._how, self._stream))
            if error not in _REFUSED:
                return error
            self._batch = None  # Should some of them have begun, they are made twice.
        for at in range(copies.count):
            copy = ctypes.c_void_p(copies.to[at]), ctypes.c_uint64(copies.source[at]), ctypes.c_size_t(copies.nbytes[at])
            if error := int(self._cuda.cuMemcpyDtoHAsync_v2(*copy, self._stream)):
                return error
        return 0


class DoneWord:
    """The word of host memory where the number of the last read goes, behind all that a stream of `device` holds by then."""

    def __init__(self, cuda: Any, stream: int, device: torch.device) -> None:
        """`cuda`: libcuda."""
        self._cuda = cuda
        self._stream = ctypes.c_void_p(stream)
        self._device = device
        self._host = ctypes.c_void_p()
        self._of_device = ctypes.c_uint64()  # The same word: pinned host memory may have another address on the device.
        self._ways: tuple[torch.Tensor, torch.Tensor] | None = None  # Numbers on the host, and a word on the device.

    @property
    def is_copied(self) -> bool:
        """Whether numbers are copied there. Then that of the read `_EVENTS` before must be there: its place is used again."""
        return self._ways is not None

    def begin(self, address: int) -> int:
        """Find out how to write there, and write 0; CUDA's error, 0 for none.

        Where a stream cannot write to memory by itself, copies do: of a number in host memory, to the device and back.
        """
        self._host = ctypes.c_void_p(address)
        found = ctypes.byref(self._of_device)
        if error := int(self._cuda.cuPointerGetAttribute(found, _DEVICE_POINTER, ctypes.c_uint64(address))):
            return error
        if (error := self.write(0)) in _REFUSED:
            self._copy_from_now_on()
            error = self.write(0)
        return error

    def _copy_from_now_on(self) -> None:
        numbers = torch.zeros(_EVENTS, dtype=torch.int64, pin_memory=self._device.type == "cuda")
        self._ways = numbers, torch.zeros(1, dtype=torch.int64, device=self._device)

    def write(self, number: int) -> int:
        """Write it behind everything that the stream holds; CUDA's error, 0 for none."""
        if self._ways is None:
            return int(self._cuda.cuStreamWriteValue64_v2(self._stream, self._of_device, ctypes.c_uint64(number), 0))
        place = self._ways[0][number % _EVENTS]
        place.fill_(number)
        source, nbytes = ctypes.c_void_p(place.data_ptr()), ctypes.c_size_t(place.element_size())
        between = ctypes.c_uint64(self._ways[1].data_ptr())
        return int(
            self._cuda.cuMemcpyHtoDAsync_v2(between, source, nbytes, self._stream)
            or self._cuda.cuMemcpyDtoHAsync_v2(self._host, between, nbytes, self._stream)
        )


class CudaCopier:
    """A `Copier` for a CUDA device. Raises ConfigError."""

    def __init__(self, device: torch.device) -> None:
        cuda = load_driver()
        self._side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._reads = [torch.cuda.Event() for _ in range(_EVENTS)]  # type: ignore[no-untyped-call]
        self._number = 0
        self._device = device
        self._model = torch.cuda.current_stream(device)
        major, _ = torch.cuda.get_device_capability(device)
        self._copies = DriverCopies(cuda, self._side.cuda_stream, batches=takes_batches(cuda, device.index, major))
        self._done = DoneWord(cuda, self._side.cuda_stream, device)

    def prepare(self, done_word: int) -> None:
        """See `Copier`."""
        with torch.cuda.device(self._device):
            error = self._done.begin(done_word)
            self._side.synchronize()
        if error:
            raise ConfigError(f"a GPU that cannot write into host memory cannot be read: CUDA error {error}")

    def remember_stream(self) -> None:
        """See `Copier`."""
        if torch._C._cuda_getCurrentRawStream(self._device.index) != self._model.cuda_stream:
            self._model = torch.cuda.current_stream(self._device)

    def copy(self, rows: Copies, notes: Copies, number: int, *, behind_model: bool) -> None:
        """See `Copier`. Raises RuntimeError."""
        if behind_model:
            self._ready.record(self._model)
            self._ready.wait(self._side)
        if self._done.is_copied:
            self._reads[number % _EVENTS].synchronize()
        error = self._copies.start(rows) or self._copies.start(notes) or self._done.write(number)
        if error:
            raise RuntimeError(f"rows could not be copied to the host: CUDA error {error}")
        self._reads[number % _EVENTS].record(self._side)
        self._number = number

    def hold_model(self, number: int) -> None:
        """See `Copier`."""
        # The event of an older read was recorded again: the oldest that is left comes behind that read.
        event = self._reads[max(number, self._number - _EVENTS + 1) % _EVENTS]
        event.wait(torch.cuda.current_stream(self._device))

    def settle(self) -> None:
        """See `Copier`."""
        self._side.synchronize()
