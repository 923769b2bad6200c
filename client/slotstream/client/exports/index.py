"""The folder that speculators finds samples by: a data set of token ids and masks, the i-th of which is of the i-th sample."""

from __future__ import annotations

import contextlib
import hashlib
import shutil
from array import array
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from slotstream.client.exports.files import sync
from slotstream.wire.columns import LOSS_MASK, TOKEN_IDS
from slotstream.wire.errors import ConfigError
from slotstream.wire.layout import decode_header, header_length

_PARTIAL = ".index.partial"
_STATE = "state.json"  # Without it the folder is no data set: so it comes last.


def require_datasets() -> Any:
    """Raises ConfigError with a sentence that names the extra."""
    try:
        import datasets
    except ImportError as error:
        raise ConfigError("speculators' index is a folder of `datasets`: pip install 'slotstream[export]'") from error
    return datasets


def write_index(folder: Path, samples: Iterable[tuple[array[int], bytes]]) -> None:
    """`input_ids`, `loss_mask` and `seq_len` of each sample, in this order, as `datasets.load_from_disk(folder)` reads them."""
    datasets = require_datasets()
    from datasets.arrow_writer import ArrowWriter

    partial = folder / _PARTIAL
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    numbers = datasets.Sequence(datasets.Value("int64"))
    features = datasets.Features({"input_ids": numbers, "loss_mask": numbers, "seq_len": datasets.Value("int64")})
    with ArrowWriter(path=str(partial / "rows.arrow"), features=features) as writer:
        for token_ids, mask in samples:
            writer.write({"input_ids": list(token_ids), "loss_mask": list(mask), "seq_len": len(token_ids)})
        writer.finalize()
    found = datasets.Dataset.from_file(str(partial / "rows.arrow"))
    # By its content, and not by chance: the same samples make the same files.
    with (partial / "rows.arrow").open("rb") as file:
        content = hashlib.file_digest(file, "sha256").hexdigest()[:16]
    made = datasets.Dataset(found.data, info=found.info, fingerprint=content).with_format("torch")
    with _quietly(datasets):
        made.save_to_disk(str(partial / "saved"))
    files = sorted((partial / "saved").iterdir(), key=lambda path: path.name == _STATE)
    for path in files:
        if path.name == _STATE:
            sync(folder)  # What it speaks for is there, also after a loss of power.
        sync(path)
        path.replace(folder / path.name)
    sync(folder)
    shutil.rmtree(partial)


@contextlib.contextmanager
def _quietly(datasets: Any) -> Iterator[None]:
    """Without a bar of progress, which a log would be full of."""
    shown = not datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if shown:
            datasets.enable_progress_bars()


def has_index(folder: Path) -> bool:
    return (folder / _STATE).exists()


def ids_and_masks(files: Iterable[Path]) -> Iterator[tuple[array[int], bytes]]:
    """Of samples' files that were exported with their masks."""
    for path in files:
        with path.open("rb") as file:
            first = file.read(8)
            header = decode_header(first + file.read(header_length(first) - len(first)))
            held = []
            for name in (TOKEN_IDS, LOSS_MASK):
                place = header.place_of(name)
                file.seek(place.begin)
                held.append(file.read(place.nbytes))
        token_ids = array("q")
        token_ids.frombytes(held[0])
        yield token_ids, held[1]
