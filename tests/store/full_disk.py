"""A store on a disk of a few MiB that its own samples fill: a process of its own, which is killed.

    python full_disk.py DIR fill|serve

fill    stores samples until the disk is full, then has thousands of fat ones refused and aborted, and dies
serve   opens the same directory, reads everything, deletes everything but one sample, and stores another
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from store.store_kit import Sample, read_all

from slotstream.store.catalogue.queries import ListQuery
from slotstream.store.records import Failure, State
from slotstream.store.samples import SampleStore
from slotstream.wire.errors import StoreFull

ROWS = 3000  # 192 KB of rows.
FAT = {f"key{n}": "v" * 250 for n in range(32)}
METADATA = {"m": "x" * 16_000}


def fill(store: SampleStore) -> dict[str, object]:
    stored = 0
    while True:
        try:
            Sample(f"s{stored}", rows=ROWS, seed=stored).put(store, [(0, ROWS)])
        except StoreFull:
            break
        stored += 1
    full_at = store.free_bytes()
    for number in range(int(os.environ.get("REFUSALS", "3000"))):
        spec = Sample(f"fat{number}", rows=ROWS, tags=FAT, metadata=METADATA).spec()
        try:
            store.open_upload(spec, "peer").abort(Failure("ABORTED", "no"))
        except StoreFull:
            continue
    return {"stored": stored, "full_at": full_at, "free": store.free_bytes()}


def serve(store: SampleStore) -> dict[str, object]:
    was_full = store.is_full
    names = []
    token = ""
    while True:
        page, token = store.list_page(ListQuery(state=State.COMMITTED, page_token=token))
        names += [record.sample_id for record in page]
        if not token:
            break
    sound = sum(read_all(store, Sample(name).key)[0] == Sample(name, rows=ROWS, seed=int(name[1:])).data for name in names)
    for name in names[1:]:
        store.delete(Sample(name).key)
    again = Sample("again", rows=ROWS, seed=5).put(store, [(0, ROWS)])
    return {"was_full": was_full, "sound": sound, "again": again, "free": store.free_bytes()}


if __name__ == "__main__":
    opened = SampleStore.open(sys.argv[1])
    print(json.dumps({"fill": fill, "serve": serve}[sys.argv[2]](opened)), flush=True)
    if sys.argv[2] == "fill":
        os._exit(9)
    opened.close()
