import ctypes
import mmap
import platform
import subprocess
import sys

import pytest

from slotstream.common.memory import map_memory

_BLOCKS = """
import resource, threading
from slotstream.common.memory import keep_freed_blocks

def come_and_go():
    for _ in range(100):
        first = bytearray(2 << 20)
        second = bytes(first)
        del first, second

keep_freed_blocks()
thread = threading.Thread(target=come_and_go)  # As gRPC's messages do: not on the main thread.
come_and_go()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
come_and_go()
thread.start()
thread.join()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.parametrize("nbytes", [1, 4096, (5 << 20) + 3])
def test_memory_is_zeroed_and_begins_on_a_page(nbytes: int) -> None:
    memory = map_memory(nbytes)
    assert len(memory) == nbytes
    assert not any(memory[:nbytes])
    memory[nbytes - 1] = 7
    assert ctypes.addressof(ctypes.c_char.from_buffer(memory)) % mmap.PAGESIZE == 0


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="no huge pages on this system")
def test_a_kernel_without_huge_pages_gives_small_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mmap, "MADV_HUGEPAGE", 9999)  # Advice that no kernel knows.
    with pytest.raises(OSError, match="argument"):
        mmap.mmap(-1, 4096).madvise(9999)
    assert map_memory(4096)[:] == bytes(4096)


def test_more_than_there_is_is_an_error() -> None:
    with pytest.raises((OSError, OverflowError)):
        map_memory(1 << 62)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library has other rules")
def test_freed_blocks_are_used_again() -> None:
    found = subprocess.run([sys.executable, "-c", _BLOCKS], capture_output=True, text=True, check=True, timeout=60)
    assert int(found.stdout) < 3000  # Not 1,024 for each of the 200 times.
