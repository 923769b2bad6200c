"""Files that earlier versions wrote are read, and the same input gives the same bytes again."""

from __future__ import annotations

import logging
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from golden import golden_kit as kit
from golden.golden_kit import SAMPLES, SPOOLED, GoldenSample, SpooledRequest
from support.server import ServerProcess
from support.waiting import wait_until

from slotstream.client import Client, SampleState, connect
from slotstream.connector.sending.spool import files as spool_files
from slotstream.connector.sending.spool.files import OwnedDir, SpooledSample, SpoolFile
from slotstream.store.directory.looking import verify_directory
from slotstream.store.records import State
from slotstream.store.samples import SampleStore
from slotstream.wire.hashing import xxh3
from slotstream.wire.layout import file_path

_by_id = [pytest.param(sample, id=sample.sample_id) for sample in SAMPLES]
_spooled_by_id = [pytest.param(number, request, id=request.sample_id) for number, request in enumerate(SPOOLED, 1)]
_STORE_KEYS = {"created_unix_ns", "committed_unix_ns", "hash_rows", "hashes", "token_ids_xxh3"}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A copy of the golden data directory."""
    return Path(shutil.copytree(kit.DATA, tmp_path / "golden"))


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data directory that this version has written from the same input."""
    directory = tmp_path_factory.mktemp("written")
    kit.write_data(directory)
    return directory


@pytest.fixture(scope="module")
def spooled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An owner's directory of a spool that this version has written from the same input."""
    return kit.write_spool(tmp_path_factory.mktemp("written-spool") / "spool")


def _stored_metadata(sample: GoldenSample) -> dict[str, str]:
    chunks = {"chunks": str(len(sample.chunks)), "first_chunk_unix_ns": str(kit.FIRST_CHUNK_NS)}
    return {**sample.metadata, **sample.commit_metadata, **chunks}


def _check(store: SampleStore) -> None:
    for number, sample in enumerate(SAMPLES):
        record = store.stat(sample.key)
        assert record is not None
        assert record.state is State.COMMITTED
        assert (record.model, record.dtype, record.layer_ids) == (sample.model, sample.dtype, sample.layer_ids)
        assert (record.hidden_size, record.num_tokens) == (sample.hidden_size, sample.rows)
        assert (record.tags, record.metadata) == (sample.tags, _stored_metadata(sample))
        created = kit.START_NS + number * 10**10
        assert (record.created_unix_ns, record.committed_unix_ns) == (created, created + 10**9)
        with store.reader(sample.key) as reader:
            rows = b"".join(bytes(piece) for block in reader.blocks(0, sample.rows) for piece in block.data)
            assert (rows, list(reader.token_ids(0, sample.rows))) == (sample.data, sample.token_ids)


def test_a_data_directory_is_opened_and_read(data: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        store = SampleStore.open(data, wall=lambda: kit.END_NS)
    assert "looked at partials only" in caplog.text  # As it was stopped cleanly.
    _check(store)
    failed = store.stat(kit.FAILED.key)
    assert failed is not None
    assert (failed.state, failed.error_code, failed.tags) == (State.FAILED, kit.FAILURE.code, kit.FAILED.tags)
    assert store.lifetimes.standing(kit.ACKED).acked_unix_ns
    assert store.lifetimes.standing(kit.LEASED).leased_until_unix_ns == kit.END_NS + int(kit.LEASE_S * 10**9)
    assert store.lifetimes.standing(kit.READ).reads == kit.READS
    store.close()


def test_the_files_alone_are_enough(data: Path) -> None:
    (data / "catalog.sqlite").unlink()
    (data / "catalog.sqlite.seal").unlink()
    store = SampleStore.open(data)
    _check(store)
    store.close()
    assert {v.damage for v in verify_directory(data)} == {""}


def test_the_same_content_sent_again_is_a_duplicate(data: Path) -> None:
    store = SampleStore.open(data)
    for sample in SAMPLES:
        upload = store.open_upload(sample.spec())
        rows = memoryview(sample.data)
        for start in range(sample.rows):
            part = rows[start * sample.row_bytes : (start + 1) * sample.row_bytes]
            upload.write_chunk(start, 1, part, xxh3(part))
        assert upload.commit(sample.rows, sample.token_ids)
    store.close()


@pytest.mark.parametrize("sample", _by_id)
def test_the_same_sample_is_the_same_file(sample: GoldenSample, written: Path) -> None:
    name = file_path(sample.namespace, sample.sample_id)
    assert (written / name).read_bytes() == (kit.DATA / name).read_bytes()


def test_the_same_samples_have_the_same_rows_in_the_catalogue(written: Path, data: Path) -> None:
    SampleStore.open(data).close()  # Brought forward, if tables have changed.
    assert _catalogue_rows(written) == _catalogue_rows(data)


def _catalogue_rows(directory: Path) -> list[dict[str, object]]:
    with closing(sqlite3.connect(directory / "catalog.sqlite")) as db:
        db.row_factory = sqlite3.Row
        rows = [dict(row) for row in db.execute("SELECT * FROM samples ORDER BY namespace, sample_id")]
        tags = [dict(row) for row in db.execute("SELECT key, value, created_unix_ns FROM tags ORDER BY key, value, 3")]
    for row in rows:
        row.pop("id")
    return rows + tags


def test_other_readers_of_safetensors_open_the_files() -> None:
    torch = pytest.importorskip("torch")
    safetensors = pytest.importorskip("safetensors")
    for sample in SAMPLES:
        with safetensors.safe_open(kit.DATA / file_path(sample.namespace, sample.sample_id), "pt") as file:
            assert set(file.keys()) == {"hidden_states", "token_ids"}
            rows = file.get_tensor("hidden_states")
            assert rows.shape == (sample.rows, len(sample.layer_ids), sample.hidden_size)
            assert rows.contiguous().view(torch.uint8).numpy().tobytes() == sample.data
            assert file.get_tensor("token_ids").tolist() == sample.token_ids
            assert set(file.metadata()) - set(_stored_metadata(sample)) == _STORE_KEYS | {
                *("format", "sample_id", "namespace", "model", "layer_ids", "tags")
            }


@pytest.mark.parametrize("in_place", [False, True], ids=["sent", "in place"])
def test_a_client_reads_them(data: Path, in_place: bool) -> None:
    torch = pytest.importorskip("torch")
    with ServerProcess(data) as server, connect(server.address, data_dir=data if in_place else None) as client:
        for sample in SAMPLES:
            found = client.get(sample.sample_id, namespace=sample.namespace)
            assert found.hidden_states.contiguous().view(torch.uint8).numpy().tobytes() == sample.data
            assert found.token_ids.tolist() == sample.token_ids
            assert found.layer_ids == sample.layer_ids
            assert found.tags == sample.tags
            assert found.metadata.items() >= _stored_metadata(sample).items()


def _file(number: int, request: SpooledRequest, directory: Path) -> SpoolFile:
    return SpoolFile(number, request.namespace, request.sample_id, OwnedDir(directory, -1))


def _rows(file: SpoolFile, found: SpooledSample) -> bytes:
    parts = []
    for _, place in sorted((header.first_row, place) for header, place in found.chunks):
        into = memoryview(bytearray(place.nbytes))
        assert spool_files.read_data(file, place, into)
        parts.append(bytes(into))
    return b"".join(parts)


@pytest.mark.parametrize(("number", "request_"), _spooled_by_id)
def test_a_spool_file_is_read(number: int, request_: SpooledRequest) -> None:
    file = _file(number, request_, kit.SPOOL / kit.OWNER)
    _check_spooled(file, request_)


def _check_spooled(file: SpoolFile, request: SpooledRequest) -> None:
    found = spool_files.read_index(file)
    opened = request.opened
    if request.end not in (None, "commit"):  # A report holds no more of a sample than its failure needs.
        opened.ClearField("tags")
        opened.ClearField("metadata")
        opened.rows_exact = False
    assert (found.opened, found.commit, found.damaged) == (opened, request.commit, False)
    if request.end in (None, "commit"):
        assert found.abort is None
        assert _rows(file, found) == request.data
    else:
        assert found.abort is not None
        assert (found.abort.code, found.chunks) == (request.end, [])


@pytest.mark.parametrize(("number", "request_"), _spooled_by_id)
def test_the_same_sample_is_the_same_spool_file(number: int, request_: SpooledRequest, spooled: Path) -> None:
    file, golden = _file(number, request_, spooled), _file(number, request_, kit.SPOOL / kit.OWNER)
    _check_spooled(file, request_)
    assert file.path.stat().st_size == golden.path.stat().st_size
    if request_.same_bytes:
        assert file.path.read_bytes() == golden.path.read_bytes()


def test_every_way_to_end_has_a_spool_file_whose_bytes_are_compared() -> None:
    assert {request.end for request in SPOOLED if request.same_bytes} == {"commit", None, "ABORTED"}


def test_a_spool_that_an_earlier_version_left_is_sent(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from support.outage_rig import Engine

    spool = Path(shutil.copytree(kit.SPOOL, tmp_path / "spool"))
    with ServerProcess(tmp_path / "data") as server:
        engine = Engine.start(server.address, spool_dir=str(spool))
        with connect(server.address) as client:
            wait_until(lambda: all(_is_known(client, request) for request in SPOOLED), "the spool's samples")
            for request in SPOOLED:
                info = client.stat(request.sample_id, namespace=request.namespace)
                if request.end != "commit":
                    assert (info.state, info.error_code) == (SampleState.FAILED, request.end or "INTERRUPTED")
                    continue
                found = client.get(request.sample_id, namespace=request.namespace)
                assert found.hidden_states.contiguous().view(torch.uint8).numpy().tobytes() == request.data
                assert found.token_ids.tolist() == request.token_ids
                assert found.tags == request.tags
                assert found.metadata.items() >= {**request.metadata, **request.commit_metadata}.items()
        engine.close()
    assert not list(spool.iterdir())


def _is_known(client: Client, request: SpooledRequest) -> bool:
    found = client.list(namespace=request.namespace)
    return any(info.sample_id == request.sample_id and info.state is not SampleState.ARRIVING for info in found)
