"""The announced chunks of one stream: which are awaited, and what the peer said after them, which waits for them."""

from __future__ import annotations

from slotstream.server.ingest.sample_writer import Abort, Commit
from slotstream.server.nixl.reader import ReadRequest
from slotstream.wire.errors import ProtocolViolation


class Announced:
    """Belongs to the event loop."""

    def __init__(self) -> None:
        self._expected: dict[int, set[int]] = {}  # sample -> chunks announced, and not with their writer yet
        self._parked: dict[int, list[tuple[Commit | Abort, int]]] = {}  # sample -> what was said after them, and its bytes
        self._resent: dict[int, int] = {}  # chunk asked for again -> its sample

    def expect(self, request: ReadRequest) -> None:
        """It is going to be pulled. Until `arrived`, its sample's later items are parked. Raises ProtocolViolation."""
        expected = self._expected.setdefault(request.sample, set())
        if request.chunk in expected:
            raise ProtocolViolation(f"chunk {request.chunk} was announced while it is being read")
        expected.add(request.chunk)

    def ask_again(self, request: ReadRequest) -> None:
        """The chunk will come in a frame, or never; until then it is waited for."""
        self._resent[request.chunk] = request.sample

    def never_to_come(self) -> set[int]:
        """The peer says no more: samples of chunks that it was asked for again."""
        return set(self._resent.values())

    def is_resent(self, sample: int, chunk: int) -> bool:
        """Whether a frame is one that was asked for; asked once a chunk."""
        if self._resent.get(chunk) != sample:
            return False
        del self._resent[chunk]
        return True

    def arrived(self, sample: int, chunk: int) -> list[tuple[Commit | Abort, int]]:
        """A chunk is with its writer, or never will be; what waited for the last one, in order."""
        expected = self._expected.get(sample)
        if expected is None:
            return []
        expected.discard(chunk)
        if expected:
            return []
        del self._expected[sample]
        return self._parked.pop(sample, [])

    def park(self, sample: int, item: Commit | Abort, nbytes: int) -> bool:
        """Whether `item` has to wait for announced chunks; if so, it is kept here."""
        if sample not in self._expected:
            return False
        self._parked.setdefault(sample, []).append((item, nbytes))
        return True

    def forget(self, sample: int) -> list[tuple[Commit | Abort, int]]:
        """The sample ended; what was parked for it."""
        for chunk in self._expected.pop(sample, ()):
            self._resent.pop(chunk, None)
        return self._parked.pop(sample, [])
