"""A data directory checked without a server, also beside a running one: takes no lock and writes nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from slotstream.store.catalogue.base import CatalogueUnreadable, Questions
from slotstream.store.catalogue.sqlite.read_only import ReadOnlyCatalogue
from slotstream.store.disk.directory import CATALOGUE_NAME
from slotstream.store.disk.files import Files, store_error
from slotstream.store.disk.retrying import is_fact
from slotstream.store.records import PARTIAL_SUFFIX, SampleKey, State
from slotstream.store.sample.file import sample_file_at
from slotstream.store.upkeep.verifying import (
    FOREIGN,
    IO_ERROR,
    UNSUPPORTED,
    Verdict,
    foreign_files,
    key_of_path,
    tree_files,
    verify_record,
    verify_samples,
)
from slotstream.wire.errors import ConfigError, Damaged, SampleNotFound, UnsupportedFormat


def verify_directory(data_dir: Path, *, namespace: str = "", sample_id: str = "") -> Iterator[Verdict]:
    """One verdict a committed sample (of `namespace`, or the one named) and, unless a sample is named, one a foreign
    file. Without a readable catalogue every file is checked by its own header. Raises ConfigError when there is no such
    directory, SampleNotFound when the sample named is not committed there, and BadNamespace and BadSampleId.
    """
    data_dir = Path(data_dir).absolute()
    if not data_dir.is_dir():
        raise ConfigError(f"there is no data directory {data_dir}")
    wanted = SampleKey.checked(namespace or "default", sample_id) if sample_id else None
    if namespace:
        SampleKey.checked(namespace, "x")
    files = Files()
    files.confine(data_dir)
    try:
        with closing(ReadOnlyCatalogue(data_dir / CATALOGUE_NAME)) as catalogue:
            yield from _verify_catalogued(files, data_dir, catalogue, namespace, wanted)
    except (CatalogueUnreadable, OSError) as error:
        if (data_dir / CATALOGUE_NAME).exists():
            yield Verdict("", CATALOGUE_NAME, "UNREADABLE", f"the catalogue cannot be read: {error}")
        yield from _verify_files_alone(files, data_dir, namespace, wanted)


@contextmanager
def opened_to_read(data_dir: Path) -> Iterator[Questions]:
    """The catalogue of a data directory, also beside a running server. Raises ConfigError where it cannot be read."""
    data_dir = Path(data_dir).absolute()
    if not (data_dir / CATALOGUE_NAME).is_file():
        raise ConfigError(f"there is no data directory {data_dir}")
    try:
        with closing(ReadOnlyCatalogue(data_dir / CATALOGUE_NAME)) as catalogue:
            yield catalogue
    except (CatalogueUnreadable, OSError) as error:
        raise ConfigError(f"the catalogue of {data_dir} cannot be read: {error}") from error


def namespaces_of(data_dir: Path) -> list[str]:
    """The namespaces that have a folder in a data directory, sorted."""
    return sorted(path.name for path in Path(data_dir).iterdir() if path.is_dir() and not path.name.startswith("."))


def _verify_catalogued(
    files: Files, data_dir: Path, catalogue: Questions, namespace: str, wanted: SampleKey | None
) -> Iterator[Verdict]:
    if wanted is None:
        yield from verify_samples(files, data_dir, catalogue, namespace)
        yield from foreign_files(files, data_dir, catalogue, namespace)
        return
    record = catalogue.get(wanted)
    if record is None or record.state is not State.COMMITTED:
        raise SampleNotFound(f"{wanted} is not a committed sample of {data_dir}")
    yield verify_record(files, data_dir, record)


def _verify_files_alone(files: Files, data_dir: Path, namespace: str, wanted: SampleKey | None) -> Iterator[Verdict]:
    paths = tree_files(files, data_dir, namespace) if wanted is None else iter((wanted.path(data_dir),))
    for path in paths:
        key = key_of_path(data_dir, path)
        if path.name.endswith(PARTIAL_SUFFIX):
            continue
        if key is None:
            yield Verdict("", str(path.relative_to(data_dir)), FOREIGN, "not a file of a sample")
            continue
        try:
            file = sample_file_at(files, path)
            record = file.record()
        except FileNotFoundError:
            yield Verdict(key.namespace, key.sample_id, "MISSING", "the file is gone")
        except OSError as error:
            damage = "UNREADABLE" if is_fact(error) else IO_ERROR
            yield Verdict(key.namespace, key.sample_id, damage, str(store_error(error, "reading the file")))
        except UnsupportedFormat as error:
            yield Verdict(key.namespace, key.sample_id, UNSUPPORTED, str(error))
        except Damaged as error:
            yield Verdict(key.namespace, key.sample_id, "UNREADABLE", str(error))
        else:
            if file.key == key:
                yield verify_record(files, data_dir, record)
            else:
                yield Verdict(key.namespace, key.sample_id, "UNREADABLE", "the file is another sample's")
