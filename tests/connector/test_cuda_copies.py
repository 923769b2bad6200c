"""What CUDA's driver is asked for, with C's own types, by a driver that copies within the host's memory."""

from __future__ import annotations

import contextlib
import ctypes
from typing import Any

import numpy as np
import pytest
import torch

from slotstream.connector.reading.cuda_copies import CudaCopier, DoneWord, DriverCopies, takes_batches
from slotstream.connector.reading.page_reads import Copies
from slotstream.wire.errors import ConfigError

CPU = torch.device("cpu")


class _Cuda:
    """As much of libcuda as copies need, with C's own types; rows lie in the host's memory on both sides."""

    def __init__(self, *, host_pointers_do: int = 1, refuses: int = 0, has_batches: bool = True, writes: int = 0) -> None:
        """`refuses`: an error of every call for many copies, of which it makes half. `writes`: one of a stream's own writes."""
        self.asked: list[str] = []
        self.error = 0
        numbers, size, address = ctypes.POINTER(ctypes.c_uint64), ctypes.c_size_t, ctypes.c_void_p

        def batch(to: Any, source: Any, nbytes: Any, count: int, how: int, first: int, hows: int, _: int, stream: int) -> int:
            self.asked.append("batch")
            order, begin = ctypes.c_int.from_address(how).value, size.from_address(first).value
            assert (order, begin, hows, stream) == (1, 0, 1, 77)
            for at in range(count // 2 if refuses or self.error else count):
                ctypes.memmove(to[at], source[at], nbytes[at])
            return self.error or refuses

        def one(to: int, source: int, nbytes: int, stream: int) -> int:
            self.asked.append("one")
            assert stream == 77
            ctypes.memmove(to, source, nbytes)
            return self.error

        def device(handle: Any, number: int) -> int:
            handle[0] = 10 + number
            return 0 if number < 4 else 101

        def attribute(value: Any, which: int, handle: int) -> int:
            assert (which, handle) == (91, 12)
            value[0] = host_pointers_do
            return 0

        def pointer(value: Any, which: int, of: int) -> int:
            assert which == 3
            value[0] = of + 1000  # As if the device knew it by another address.
            return self.error

        def write(stream: int, to: int, value: int, flags: int) -> int:
            self.asked.append("write")
            assert (stream, flags) == (77, 0)
            if not writes:
                ctypes.c_uint64.from_address(to - 1000).value = value
            return writes

        whole = ctypes.POINTER(ctypes.c_int)
        kinds: tuple[Any, ...] = (numbers, ctypes.c_int, ctypes.c_uint64)
        self.cuPointerGetAttribute = ctypes.CFUNCTYPE(ctypes.c_int, *kinds)(pointer)
        kinds = (address, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint)
        self.cuStreamWriteValue64_v2 = ctypes.CFUNCTYPE(ctypes.c_int, *kinds)(write)
        self.cuMemcpyHtoDAsync_v2 = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_uint64, address, size, address)(one)
        if has_batches:
            kinds = (numbers, numbers, numbers, size, address, address, size, address, address)
            self.cuMemcpyBatchAsync = ctypes.CFUNCTYPE(ctypes.c_int, *kinds)(batch)
        self.cuMemcpyDtoHAsync_v2 = ctypes.CFUNCTYPE(ctypes.c_int, address, ctypes.c_uint64, size, address)(one)
        self.cuDeviceGet = ctypes.CFUNCTYPE(ctypes.c_int, whole, ctypes.c_int)(device)
        self.cuDeviceGetAttribute = ctypes.CFUNCTYPE(ctypes.c_int, whole, ctypes.c_int, ctypes.c_int)(attribute)


def _copies(count: int) -> tuple[Copies, np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Of so many pieces of 1 to 9 bytes each, back to front."""
    source, target = np.arange(200, dtype=np.uint8), np.zeros(200, np.uint8)
    copies = Copies(40)
    for at in range(count):
        copies.to[at], copies.source[at] = target.ctypes.data + 10 * (count - 1 - at), source.ctypes.data + 10 * at
        copies.nbytes[at] = at % 9 + 1
    copies.count = count
    return copies, source, target


@pytest.mark.parametrize("count", [0, 1, 3, 4, 19])
@pytest.mark.parametrize(
    ("cuda", "batches"),
    [
        pytest.param(_Cuda(), True, id="at once"),
        pytest.param(_Cuda(), False, id="one by one"),
        pytest.param(_Cuda(has_batches=False), False, id="an older driver"),
        pytest.param(_Cuda(refuses=801), True, id="a driver that has the call and cannot do it"),
        pytest.param(_Cuda(refuses=1), True, id="a driver that does not like the addresses"),
    ],
)
def test_copies_arrive_however_they_are_started(cuda: _Cuda, batches: bool, count: int) -> None:
    cuda.asked.clear()
    driver = DriverCopies(cuda, 77, batches=batches)
    for _ in range(2):
        copies, source, target = _copies(count)
        assert driver.start(copies) == 0
        for at in range(count):
            to, nbytes = 10 * (count - 1 - at), at % 9 + 1
            assert target[to : to + nbytes].tolist() == source[10 * at : 10 * at + nbytes].tolist()
        assert np.count_nonzero(target) == sum(at % 9 + 1 for at in range(count)) - (count > 0)  # One of the bytes is 0.
    assert cuda.asked.count("batch") <= 2
    if batches and count > 3 and "one" in cuda.asked:
        assert cuda.asked == ["batch", *["one"] * (2 * count)]  # It is asked no second time.


def test_an_error_of_a_copy_is_told() -> None:
    for count, batches in ((5, True), (5, False), (1, True)):
        cuda = _Cuda()
        cuda.error = 700
        assert DriverCopies(cuda, 77, batches=batches).start(_copies(count)[0]) == 700


def test_many_copies_are_started_at_once_only_where_that_is_safe() -> None:
    assert takes_batches(_Cuda(), 2, 9)
    assert takes_batches(_Cuda(), 2, 8)
    assert not takes_batches(_Cuda(), 2, 10)
    assert not takes_batches(_Cuda(), 2, 12)
    assert not takes_batches(_Cuda(host_pointers_do=0), 2, 9)
    assert not takes_batches(_Cuda(has_batches=False), 2, 9)
    assert not takes_batches(_Cuda(), 4, 9)  # No such device.


@pytest.mark.parametrize(
    ("writes", "asked"),
    [
        pytest.param(0, ["write"] * 202, id="by the stream"),
        pytest.param(801, ["write", *["one", "one"] * 202], id="by copies"),
    ],
)
def test_numbers_arrive_however_they_are_written(writes: int, asked: list[str]) -> None:
    word = np.full(3, 5, np.int64)
    cuda = _Cuda(writes=writes)
    done = DoneWord(cuda, 77, CPU)
    assert done.begin(word.ctypes.data + 8) == 0
    assert word.tolist() == [5, 0, 5]
    assert done.is_copied == bool(writes)
    for number in (*range(1, 201), 1 << 40):
        assert done.write(number) == 0
        assert word.tolist() == [5, number, 5]
    assert cuda.asked == asked


def test_a_machine_without_the_driver_is_told_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the GPU is another maker's: torch calls it a CUDA device all the same."""

    def missing(name: str) -> None:
        raise OSError(f"{name}: no such file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    with pytest.raises(ConfigError, match=r"NVIDIA's driver, which cannot be loaded here: libcuda\.so\.1: no such file"):
        CudaCopier(torch.device("cuda", 0))


def test_a_word_that_cannot_be_written_is_told() -> None:
    word = np.zeros(1, np.int64)
    assert DoneWord(_Cuda(writes=700), 77, CPU).begin(word.ctypes.data) == 700
    cuda = _Cuda(writes=801)
    cuda.error = 1
    assert DoneWord(cuda, 77, CPU).begin(word.ctypes.data) == 1


class _Stream:
    cuda_stream = 77

    def __init__(self, *_: object) -> None:
        """As torch's."""

    def synchronize(self) -> None:
        """All is done at once here."""


class _Event:
    def __init__(self) -> None:
        self.calls: list[str] = []

    def record(self, _: object) -> None:
        self.calls.append("record")

    def wait(self, _: object) -> None:
        self.calls.append("wait")

    def synchronize(self) -> None:
        self.calls.append("synchronize")


@pytest.fixture(params=[{}, {"writes": 801, "refuses": 801}, {"host_pointers_do": 0}])
def copier(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> CudaCopier:
    """One on device 2, as far as torch is told."""
    cuda = _Cuda(**request.param)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: {"libcuda.so.1": cuda}[name])
    monkeypatch.setattr(torch.cuda, "Stream", _Stream)
    monkeypatch.setattr(torch.cuda, "Event", _Event)
    monkeypatch.setattr(torch.cuda, "current_stream", _Stream)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda number: {2: 77}[number], raising=False)
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda size, dtype, **_: zeros(size, dtype=dtype))  # Neither pinned nor on a device.
    return CudaCopier(torch.device("cuda", 2))


def test_only_a_read_behind_the_model_waits_for_its_stream(copier: CudaCopier) -> None:
    copier.prepare(np.zeros(1, np.int64).ctypes.data)
    waits = []
    for behind_model in (True, False, True):
        copier.copy(_copies(2)[0], _copies(1)[0], 1, behind_model=behind_model)
        waits.append(list(copier._ready.calls))  # type: ignore[attr-defined]
    assert waits == [["record", "wait"], ["record", "wait"], ["record", "wait"] * 2]


def test_a_read_waits_for_the_stream_that_was_current_where_it_was_remembered(
    copier: CudaCopier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread reads, whose current stream is another one."""
    copier.prepare(np.zeros(1, np.int64).ctypes.data)
    recorded: list[Any] = []
    monkeypatch.setattr(copier._ready, "record", recorded.append)
    copier._model.cuda_stream = 0  # Another one than is current now.
    copier.remember_stream()
    model = copier._model
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: pytest.fail("of the thread that reads"))
    copier.copy(_copies(2)[0], _copies(1)[0], 1, behind_model=True)
    assert recorded == [model]
    assert model.cuda_stream == 77


def test_a_read_is_its_copies_and_its_number(copier: CudaCopier) -> None:
    word = np.full(1, 5, np.int64)
    copier.prepare(word.ctypes.data)
    assert word.tolist() == [0]
    for number in range(1, 200):
        rows, source, target = _copies(19)
        notes, _, noted = _copies(2)
        copier.copy(rows, notes, number, behind_model=True)
        assert word.tolist() == [number]
        assert target[180] == source[0]
        assert target[:2].tolist() == [180, 0]
        assert np.count_nonzero(noted)
    # A number's place is used again once what it told has arrived.
    ways = ["synchronize", "record"] if copier._done.is_copied else ["record"]
    assert [event.calls for event in copier._reads[1:3]] == [ways * 4, ways * 4]  # type: ignore[attr-defined]
    copier.hold_model(1)
    copier.hold_model(199)
    copier.settle()
