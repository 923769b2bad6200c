"""The host memory that staging lies in: the engine's own, or shared with a process that sends what it holds."""

from __future__ import annotations

import os
import weakref

import torch

from slotstream.common.memory import map_memory
from slotstream.connector.sending.staging_area import StagingArea, control_bytes, control_offset
from slotstream.connector.sending.staging_pool import StagingShape
from slotstream.wire.errors import ConfigError

# One copy to the host. A GPU does its copies one after another, vLLM's sampled tokens too, which the next step waits for:
# behind a copy of 256 MiB they take 4.3 ms on an H200. In pieces of 2 MiB, 9 us each to begin with, a decode of 64 with 16
# layers went from 0.947 to 0.961 of no capture.
COPY_BYTES = 2 << 20


class StagingMemory:
    """The slots of `shape`, one after another, and what belongs to them: see `area`. Pinned where `device` is an accelerator.

    `memory`: the slots, uint8. `shared`: it has a descriptor (`fd`) by which another process can map it. Raises ConfigError
    where there is not so much memory, or it cannot be pinned.
    """

    def __init__(self, shape: StagingShape, device: torch.device, *, shared: bool = False) -> None:
        self.shape = shape
        self.fd = -1
        try:
            if shared:
                self.memory, control = self._shared(shape, device)
            else:
                # Two pieces: torch pins powers of two, which the slots fill.
                self.memory, control = _private(shape.nbytes, device), _private(control_bytes(shape), device)
        except (RuntimeError, OSError, MemoryError) as error:
            why = str(error).partition("\n")[0]
            raise ConfigError(
                f"{-(-shape.nbytes >> 20)} MiB of host memory for staging cannot be had: {why}; "
                "set connector option staging_bytes lower"
            ) from error
        self.area = StagingArea(_view(self.memory), _view(control), shape)
        self.area.done_word[0] = 0

    def tensor(self, slot: int, nbytes: int) -> torch.Tensor:
        """The first `nbytes` of a slot, uint8 [nbytes]; or of several, as far as they are next to each other."""
        at = slot * self.shape.slot_bytes
        return self.memory[at : at + nbytes]

    def _shared(self, shape: StagingShape, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        self.fd = os.memfd_create("slotstream-staging")
        weakref.finalize(self, os.close, self.fd)  # While it is open, the memory stays: an engine may end before its process.
        nbytes = control_offset(shape) + control_bytes(shape)
        os.ftruncate(self.fd, nbytes)
        memory = torch.frombuffer(map_memory(nbytes, self.fd), dtype=torch.uint8)
        if device.type != "cpu":
            _pin(memory, device)
            # Before the memory goes: what gets its addresses next would be taken for pinned, and copies would go astray.
            weakref.finalize(self, _unpin, memory.data_ptr(), device).atexit = False
        return memory[: shape.nbytes], memory[control_offset(shape) :]


def _view(memory: torch.Tensor) -> memoryview:
    return memoryview(memory.numpy())  # type: ignore[arg-type]


def _private(nbytes: int, device: torch.device) -> torch.Tensor:
    if device.type == "cpu":
        return torch.frombuffer(map_memory(nbytes), dtype=torch.uint8)
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)


def _pin(memory: torch.Tensor, device: torch.device) -> None:
    """Pin memory that torch did not allocate, as vLLM does (v1/simple_kv_offload/cuda_mem_ops.py)."""
    if device.type != "cuda":
        raise RuntimeError(f"memory that processes share cannot be pinned for a device of type {device.type}")
    with torch.cuda.device(device):
        error = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 0))  # type: ignore[no-untyped-call]
    if error != 0:
        raise RuntimeError(f"cudaHostRegister failed with CUDA error {error}")


def _unpin(address: int, device: torch.device) -> None:
    with torch.cuda.device(device):
        torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]
