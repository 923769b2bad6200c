"""Which directories hold other files than the catalogue says, found without a look at each file.

Each directory has a sum: of its files' names, less the names that its committed rows stand for. Where it is nothing, these are
the same names, and there is nothing to do. A name counts as 128 bits of a hash under a key that each start makes for
itself, so nobody can choose names whose sums agree. Memory grows with directories, and not with samples.
"""

from __future__ import annotations

import secrets
from collections import defaultdict
from collections.abc import Iterable
from hashlib import blake2b

from slotstream.store.records import SampleKey
from slotstream.wire.layout import FILE_SUFFIX, shard_of

_HASH_BYTES = 16


class NameSums:
    """Of one start. A place is a directory's path below the data directory."""

    def __init__(self) -> None:
        self._key = secrets.token_hex(_HASH_BYTES).encode()
        self._sums: defaultdict[str, int] = defaultdict(int)

    def add_file(self, place: str, name: str) -> None:
        """There is a file `name` in `place`."""
        self._sums[place] += self._hashed(name.encode(errors="surrogateescape"))

    def take_rows(self, names: Iterable[tuple[str, str]]) -> None:
        """There are committed rows of (namespace, sample_id)."""
        for namespace, sample_id in names:
            self._sums[f"{namespace}/{shard_of(sample_id)}"] -= self._hashed((sample_id + FILE_SUFFIX).encode())

    def places(self, *, differing: bool = True) -> set[str]:
        """Where files and rows are not the same; or every place that has either."""
        return {place for place, total in self._sums.items() if total or not differing}

    def _hashed(self, name: bytes) -> int:
        return int.from_bytes(blake2b(self._key + name, digest_size=_HASH_BYTES).digest(), "big")


def place_of(key: SampleKey) -> str:
    """Where the file of a sample is."""
    return f"{key.namespace}/{key.shard}"
