"""What rules would delete of a data directory, without a server."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from slotstream.store.catalogue.base import CatalogueUnreadable
from slotstream.store.catalogue.sqlite.read_only import ReadOnlyCatalogue
from slotstream.store.disk.clock import Clock
from slotstream.store.disk.directory import CATALOGUE_NAME
from slotstream.store.disk.files import Files, store_error
from slotstream.store.upkeep.clock_watch import ClockWatch
from slotstream.store.upkeep.preview import Imagined, Preview, preview
from slotstream.store.upkeep.retention import Policy
from slotstream.wire.errors import ConfigError


def preview_directory(data_dir: Path, policy: Policy, wall: Callable[[], int] = time.time_ns) -> Preview:
    """What `policy` would delete of a data directory. Takes no lock and writes nothing, also beside a running server.

    Nobody is known to read a sample there; leases count. Raises ConfigError where there is no catalogue that can be read.
    """
    data_dir = Path(data_dir).absolute()
    files = Files()
    try:
        if not (data_dir / CATALOGUE_NAME).exists():
            raise ConfigError(f"there is no catalogue {data_dir / CATALOGUE_NAME}")
        files.confine(data_dir)
        now = wall()
        with closing(ReadOnlyCatalogue(data_dir / CATALOGUE_NAME, lambda: now)) as catalogue:
            clock = Clock(catalogue.latest_stamp(), lambda: now)
            store = Imagined(catalogue, now, ClockWatch(clock, catalogue.get_meta, _forget).trouble)
            return preview(store, policy, lambda: files.free_bytes(data_dir))
    except CatalogueUnreadable as error:
        raise ConfigError(f"the catalogue of {data_dir} cannot be read: {error}") from error
    except OSError as error:
        raise ConfigError(str(store_error(error, f"reading {data_dir}"))) from error


def _forget(name: str, value: str) -> None:
    """This looks at the clock, and changes nothing of what the store remembers of it."""
