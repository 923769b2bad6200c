"""`slotstream copy`: the samples of a data directory go into a bucket and its catalogue, where several servers share them."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import TYPE_CHECKING

from slotstream.cli.common import note, size_text, time_text
from slotstream.cli.rebuild import add_pair_arguments, pair_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from slotstream.store.catalogue.base import Questions
    from slotstream.store.cluster.copying import Copied

_TOLD_EVERY_S = 10.0
_NAMESPACES = 1000  # In one look.


def add_copy_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--data", metavar="DIR", type=Path, required=True, help="the data directory; its server may run (required)"
    )
    add_pair_arguments(parser)
    parser.add_argument("--namespace", metavar="NAME", default="", help="only samples of this namespace (default: all)")
    parser.epilog = """\
Committed samples are copied with their ids, tags, metadata, times, reads and acks; leases and failed samples are not. The
directory is only read. Run it again for what is new since: what is there already is not sent twice. Each file is checked before
it is sent, each part when it arrives, and the object's header after that. What did not go is printed, one a line, and why.

exit codes: 0 all are there; 1 some did not go

examples:
  slotstream copy --data /var/lib/slotstream --store s3://bucket/samples --catalogue postgresql://slotstream@db.example/slotstream
"""


def run_copy(arguments: argparse.Namespace) -> int:
    store, catalogue = pair_of(arguments)
    from slotstream.store.cluster.copying import Copy
    from slotstream.store.cluster.opening import opened_pair
    from slotstream.store.directory.looking import opened_to_read

    with opened_to_read(arguments.data) as source, opened_pair(store, catalogue) as (blobs, rows):
        samples, nbytes = _whole(source, arguments.namespace)
        note(f"{samples} samples, {size_text(nbytes)}.")
        copied = Copy(source, arguments.data, rows, blobs).run(arguments.namespace, _told(samples, nbytes))
    for name, why in copied.left:
        print(f"{name}: {why}", flush=True)
    gone = f", {copied.gone} were deleted meanwhile" if copied.gone else ""
    note(
        f"{copied.copied} samples were copied ({size_text(copied.nbytes)}), {copied.same} were there already{gone}, "
        f"{len(copied.left)} did not go."
    )
    return 1 if copied.left else 0


def _whole(source: Questions, namespace: str) -> tuple[int, int]:
    """How many committed samples and bytes there are to look at."""
    usages = [source.usage(namespace)] if namespace else source.usages("", _NAMESPACES)
    return sum(one.samples for one in usages), sum(one.bytes for one in usages)


def _told(samples: int, nbytes: int) -> Callable[[Copied], None]:
    """Says every ten seconds how far it is."""
    began = last = time.monotonic()

    def tell(copied: Copied) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last < _TOLD_EVERY_S:
            return
        last = now
        done = copied.copied + copied.same + copied.gone + len(copied.left)
        left_s = (now - began) / max(1, done) * max(0, samples - done)
        size = f"{size_text(copied.nbytes)} of {size_text(nbytes)} sent"
        note(f"{done} of {samples} samples, {size}; about {time_text(left_s)} more")

    return tell
