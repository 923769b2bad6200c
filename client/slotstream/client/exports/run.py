"""An export: which samples, what each of them must have, and their files, several at a time."""

from __future__ import annotations

import queue
import threading
from array import array
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slotstream.client.client import Client
from slotstream.client.exports import index
from slotstream.client.exports.files import Rows, sync
from slotstream.client.exports.formats import FORMATS, Format, layers_of
from slotstream.client.exports.manifest import Entry, Manifest, load, locked, missing, save
from slotstream.client.info import SampleInfo
from slotstream.client.members import Filters, nothing_there
from slotstream.client.reading import RowReader
from slotstream.v1 import samples_pb2
from slotstream.wire.columns import LOSS_MASK, further_columns
from slotstream.wire.errors import BadLayers, BadParams, ConfigError, SampleNotFound, SlotStreamError
from slotstream.wire.names import check_namespace, check_sample_id

ALL, OUTPUT = "all", "output"
FILLS = (ALL, OUTPUT)
_ROWS_FOLDER = "hidden_states"  # Where speculators looks for the rows of a data set.
_REPLACED = "it is no longer the sample that was committed when the export began"


@dataclass(frozen=True, slots=True)
class Options:
    """What an export was asked for.

    layers: those wanted, beside the one that stands for the last; None: all. loss_mask: of samples without one: "all", "output"
    or None. index_only: speculators' index alone. jobs: files that are written at a time, each with its sample in memory.
    """

    format: str
    layers: tuple[int | str, ...] | None
    filters: Filters
    loss_mask: str | None = None
    index_only: bool = False
    jobs: int = 8
    retry_s: float = 60.0

    def __post_init__(self) -> None:
        """Raises ConfigError."""
        if self.format not in FORMATS:
            raise ConfigError(f"format {self.format!r} is not one of {sorted(FORMATS)}")
        if self.loss_mask is not None and self.loss_mask not in FILLS:
            raise ConfigError(f"loss_mask {self.loss_mask!r} is not one of {list(FILLS)}")
        if self.index_only and self.format != "speculators":
            raise ConfigError("only speculators has an index: index_only is of that format")
        if self.jobs < 1 or self.retry_s < 0:
            raise ConfigError("jobs is 1 or more, and retry_s 0 seconds or more")

    @property
    def kind(self) -> Format:
        return FORMATS[self.format]

    def deciding(self) -> dict[str, Any]:
        """What another run must have alike, as JSON values. Not the times: `--since 15m` is another moment each time."""
        layers = None if self.layers is None else list(self.layers)
        kept = {"format": self.format, "layers": layers, "loss_mask": self.loss_mask, "index_only": self.index_only}
        return {**kept, "namespace": self.filters.namespace, "model": self.filters.model, "tags": dict(self.filters.tags)}


@dataclass(frozen=True, slots=True)
class Failure:
    """A sample that was not exported, and why."""

    name: str
    error: SlotStreamError


@dataclass(frozen=True, slots=True)
class Result:
    """The samples of the export, those written now, and those that are not there."""

    manifest: Manifest
    written: int
    failures: tuple[Failure, ...]


def export(client: Client, to: Path, options: Options, progress: Callable[[int, int], None] = lambda done, of: None) -> Result:
    """Writes the samples to the folder `to`, or what is missing there of an export of the same options.

    progress: told how many of how many files are there, each time one is. No file is written before each sample was found to
    have what the format takes. Raises ConfigError, SampleNotFound where there is no sample, BadLayers and BadParams where one
    lacks a layer or a mask, and what reading raises once the server has been away for `retry_s`.
    """
    if options.format == "speculators":
        index.require_datasets()
    with locked(to):
        manifest = load(to, options.deciding())
        if manifest is None:
            manifest = _planned(client, options)
            save(to, manifest)
        todo = missing(to, manifest.entries)
        done = len(manifest.entries) - len(todo)
        failures: list[Failure] = []
        written = 0
        for outcome in _written(client, to, options, todo):
            if isinstance(outcome, Failure):
                failures.append(outcome)
                continue
            written += 1
            progress(done + written, len(manifest.entries))
        if options.format == "speculators" and not failures and not index.has_index(to):
            files = [to / entry.file for entry in manifest.entries if entry.file]
            for folder in {path.parent for path in files}:
                sync(folder)  # The index says that they are there.
            found = _ids_of(client, options, manifest.entries) if options.index_only else index.ids_and_masks(files)
            index.write_index(to, found)
        return Result(manifest, written, tuple(failures))


def _planned(client: Client, options: Options) -> Manifest:
    """All that was committed by now, oldest first, each checked. Raises as `export`."""
    until = client.moment(namespace=options.filters.namespace)
    infos = [info for info in options.filters.listed(client, until) if 0 < (info.committed_unix_ns or 0) <= until]
    if not infos:
        raise SampleNotFound(nothing_there(client, options.filters))
    infos.sort(key=lambda info: (info.committed_unix_ns or 0, info.namespace, info.sample_id))
    chosen = [layers_of(options.format, info, options.layers) for info in infos]
    layers = _same_layers(infos, chosen) if options.kind.bases else ()
    if options.kind.needs_mask:
        _check_masks(client, options, infos)
    entries = (_entry(options, number, info, ids) for number, (info, ids) in enumerate(zip(infos, chosen, strict=True)))
    return Manifest(options.deciding(), until, layers, tuple(entries))


def _entry(options: Options, number: int, info: SampleInfo, layers: tuple[int, ...]) -> Entry:
    # Checked: a path is made of what the server says.
    file: str | None = f"{check_namespace(info.namespace)}/{check_sample_id(info.sample_id)}{options.kind.suffix}"
    if options.format == "speculators":
        file = None if options.index_only else f"{_ROWS_FOLDER}/hs_{number}{options.kind.suffix}"
    committed = info.committed_unix_ns or 0
    return Entry(file, info.namespace, info.sample_id, info.model, info.num_tokens, layers, committed)


def _same_layers(infos: Sequence[SampleInfo], chosen: Sequence[tuple[int, ...]]) -> tuple[str, ...]:
    """The names of the layers of all. Raises BadLayers where two samples would differ: a trainer takes rows of one kind."""
    first = infos[0]
    for info, ids in zip(infos, chosen, strict=True):
        kind = ids, info.hidden_size, info.metadata.get("num_hidden_layers")
        if kind != (chosen[0], first.hidden_size, first.metadata.get("num_hidden_layers")):
            raise BadLayers(
                f"sample {info.namespace}/{info.sample_id} gives layers {list(ids)} of {info.hidden_size} elements, and "
                f"{first.namespace}/{first.sample_id} {list(chosen[0])} of {first.hidden_size}: choose the samples of one "
                "model, and name the layers"
            )
    names = dict(zip(first.layer_ids, first.layer_names, strict=True))
    return tuple(names[layer] for layer in chosen[0])


def _check_masks(client: Client, options: Options, infos: Sequence[SampleInfo]) -> None:
    """Raises BadParams where a sample has no mask, and none can be made for it."""
    if options.loss_mask == ALL:
        return
    asked = ((info, _read_of(info.namespace, info.sample_id, info.layer_ids[:1], stop=0)) for info in infos)
    answers = client.many(wait_s=0.0, retry_s=options.retry_s).answers(asked, lambda reader: LOSS_MASK in reader.columns)
    for info, has_mask in answers:
        if isinstance(has_mask, SlotStreamError):
            raise has_mask
        where = f"sample {info.namespace}/{info.sample_id}"
        if not has_mask and options.loss_mask is None:
            raise BadParams(
                f'{where} was stored without a loss mask, which {options.format} takes: "{ALL}" or "{OUTPUT}" as the loss mask '
                "makes one of such samples"
            )
        if not has_mask and _first_output(info) is None:
            raise BadParams(f"{where} does not say where its prompt ends, so it has no mask of the output")


def _first_output(info: SampleInfo) -> int | None:
    """The row of the first output token; None where the sample does not say."""
    try:
        return int(info.metadata["prompt_tokens"]) - int(info.metadata.get("token_start", "0"))
    except (KeyError, ValueError):
        return None


def mask_for(info: SampleInfo, rows: int, fill: str | None) -> bytes | None:
    """The mask of a sample that was stored without one, a byte a row."""
    if fill is None:
        return None
    first = 0 if fill == ALL else min(max(_first_output(info) or 0, 0), rows)
    return bytes(first) + b"\1" * (rows - first)


def _read_of(namespace: str, sample_id: str, layers: Sequence[int], stop: int | None = None) -> samples_pb2.ReadRequest:
    read = samples_pb2.ReadRequest(
        namespace=namespace, sample_id=sample_id, layer_ids=layers, columns=further_columns(), unverified=stop == 0
    )
    if stop is not None:
        read.stop = stop
    return read


def _written(client: Client, to: Path, options: Options, todo: Sequence[Entry]) -> Iterator[Entry | Failure]:
    """Each entry once its file is there, in no order; several at a time. Raises what ends all reads."""
    outcomes: queue.SimpleQueue[Entry | Failure | BaseException | None] = queue.SimpleQueue()
    stop = threading.Event()
    jobs = min(options.jobs, len(todo))

    def work(share: Sequence[Entry]) -> None:
        try:
            for outcome in _share(client, to, options, share):
                outcomes.put(outcome)
                if stop.is_set():
                    break
            outcomes.put(None)
        except BaseException as error:  # Raised where the others are waited for.
            outcomes.put(error)

    with ThreadPoolExecutor(max(jobs, 1)) as pool:
        for job in range(jobs):
            pool.submit(work, todo[job::jobs])
        try:
            while jobs:
                outcome = outcomes.get()
                if isinstance(outcome, BaseException):
                    raise outcome
                if outcome is None:
                    jobs -= 1
                else:
                    yield outcome
        finally:
            stop.set()


def _share(client: Client, to: Path, options: Options, share: Sequence[Entry]) -> Iterator[Entry | Failure]:
    """One thread's entries, each when its file is there."""
    expected = {(entry.namespace, entry.sample_id): entry.committed_unix_ns for entry in share}

    def receive(reader: RowReader) -> Rows | None:
        info = reader.info
        if info.committed_unix_ns != expected[info.namespace, info.sample_id]:
            return None
        return Rows.received(reader, mask_for(info, reader.num_rows, options.loss_mask))

    reads = ((entry, _read_of(entry.namespace, entry.sample_id, entry.layers)) for entry in share)
    for entry, rows in client.many(wait_s=0.0, retry_s=options.retry_s).answers(reads, receive):
        if rows is None:
            yield Failure(entry.name, SampleNotFound(_REPLACED))
        elif isinstance(rows, SlotStreamError):
            yield Failure(entry.name, rows)
        else:
            assert entry.file is not None, "rows that stay in the store have no file"
            path = to / entry.file
            path.parent.mkdir(parents=True, exist_ok=True)
            options.kind.write(rows, path)
            yield entry


def _ids_of(client: Client, options: Options, entries: Sequence[Entry]) -> Iterator[tuple[array[int], bytes]]:
    """Token ids and masks of samples whose rows stay in the store. Raises what reading raises."""
    for entry in entries:
        # The header has them: the call ends before the rows, of which it asks for the fewest.
        with client.read(
            entry.sample_id, namespace=entry.namespace, layers=entry.layers[:1], verify=False, wait_s=0.0
        ) as reader:
            if reader.info.committed_unix_ns != entry.committed_unix_ns:
                raise SampleNotFound(f"sample {entry.name}: {_REPLACED}")
            mask = reader.columns.get(LOSS_MASK) or mask_for(reader.info, reader.num_rows, options.loss_mask)
            yield reader.token_ids, mask or b""
