"""Rows taken out of the sample's file: the same rows, the same errors, and the server's own where the file is not the one."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from support.fake_samples import serving
from support.ingest_client import IngestClient
from support.server import ServerProcess
from support.synthetic import SyntheticSample
from torch.utils.data import DataLoader

from slotstream.client import Client, Damaged, SampleNotFound, connect
from slotstream.client.dataset import SampleDataset
from slotstream.v1 import samples_pb2 as pb

LARGE = SyntheticSample("large", layer_ids=(1, 2, 4, 6), hidden_size=512, num_tokens=1200)  # Two hash groups, and a part.


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server whose files may be spoiled, and whose counters count these tests alone."""
    with ServerProcess(tmp_path_factory.mktemp("local"), "--metrics", "127.0.0.1:0") as server:
        with IngestClient(server.address) as sender:
            sender.store(LARGE)
        yield server


@pytest.fixture
def client(own: ServerProcess) -> Iterator[Client]:
    with connect(own.address, data_dir=own.data_dir) as connected:
        yield connected


def _bytes(rows: torch.Tensor) -> bytes:
    return rows.contiguous().view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("layers", [None, (6,), (4, 1), (6, 4, 2, 1)], ids=str)
@pytest.mark.parametrize(("start", "stop"), [(0, 1200), (0, 512), (511, 513), (300, 1100), (1199, 1200), (700, 700)])
def test_the_servers_rows_without_its_sending_them(
    own: ServerProcess, client: Client, start: int, stop: int, layers: tuple[int, ...] | None
) -> None:
    before = own.metric("slotstream_sent_bytes_total")
    got = client.get("large", start=start, stop=stop, layers=layers)
    assert _bytes(got.hidden_states) == LARGE.rows(start, stop, layers)
    assert got.token_ids.tolist() == LARGE.token_ids[start:stop]
    with client.read("large", start=start, stop=stop, layers=layers) as reader:
        assert b"".join(block.data for block in reader) == LARGE.rows(start, stop, layers)
    assert own.metric("slotstream_sent_bytes_total") - before < 2 * (stop - start) * 16 + 8192  # Headers and token ids.


@pytest.fixture
def stored(own: ServerProcess) -> Iterator[Path]:
    """The file of a sample `s`, which the test may do anything to."""
    with IngestClient(own.address) as sender:
        sender.store(SyntheticSample("s"))
    (path,) = (own.data_dir / "default").glob("*/s.safetensors")
    yield path
    with connect(own.address) as client:
        client.delete("s")


def test_damage_is_found(client: Client, stored: Path) -> None:
    raw = bytearray(stored.read_bytes())
    raw[-1000] ^= 1
    stored.write_bytes(raw)
    for layers in (None, [1]):
        with pytest.raises(Damaged, match="hash"):
            client.get("s", layers=layers)
    assert client.get("s", verify=False).hidden_states.shape == (40, 3, 16)


def test_a_file_cut_while_it_is_read_is_damage(client: Client, own: ServerProcess) -> None:
    (path,) = (own.data_dir / "default").glob("*/large.safetensors")
    whole = path.read_bytes()
    try:
        with client.read("large") as reader:
            next(reader)
            os.truncate(path, 3 << 20)
            with pytest.raises(Damaged, match="shorter"):
                list(reader)
    finally:
        path.write_bytes(whole)


def _elsewhere(path: Path) -> None:
    path.rename(path.with_suffix(".x"))
    path.symlink_to(path.with_suffix(".x"))


def _a_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _another(path: Path) -> None:
    shutil.copy(next(path.parents[1].glob("*/large.safetensors")), path)


@pytest.mark.parametrize("replace", [Path.unlink, _elsewhere, _a_pipe, _another, lambda path: path.write_bytes(b"")])
def test_what_is_not_the_samples_file_is_not_read(
    own: ServerProcess, stored: Path, tmp_path: Path, replace: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    """In a copy of the directory, so that the server still has the rows: it is asked for them, and the log says so once."""
    copy = tmp_path / "data"
    shutil.copytree(own.data_dir, copy)
    replace(copy / stored.relative_to(own.data_dir))
    with connect(own.address, data_dir=copy) as client:
        for _ in range(2):
            assert _bytes(client.get("s").hidden_states) == SyntheticSample("s").rows()
    (said,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert "rows come from the server" in said


@pytest.mark.parametrize(
    ("told", "is_read"),
    [
        pytest.param(None, True, id="an older server"),
        pytest.param({}, True, id="as it is"),
        pytest.param({"header_bytes": 1 << 30}, False, id="no header is as long"),
        pytest.param({"header_bytes": 4095}, False, id="another header"),
        pytest.param({"hash_rows": 0}, False, id="no groups"),
        pytest.param({"hash_rows": 1}, False, id="more groups than hashes"),
    ],
)
def test_a_server_says_where_a_file_has_its_rows(own: ServerProcess, told: dict[str, Any] | None, is_read: bool) -> None:
    """Or leaves it to the file's header. What cannot be sizes no buffer, and the rows are sent."""
    asked: list[bool] = []

    def read(request: pb.ReadRequest, context: grpc.ServicerContext) -> Iterator[Any]:
        asked.append(request.in_place)
        request.all_in_place = False  # A server that does not know it.
        with grpc.insecure_channel(own.address) as channel:
            for frame in channel.unary_stream(
                "/slotstream.v1.Samples/Read", pb.ReadRequest.SerializeToString, pb.ReadReply.FromString
            )(request):
                if told is None:
                    frame.header.ClearField("file")
                elif frame.header.HasField("file"):
                    assert frame.header.file.header_bytes > 4095
                    frame.header.file.MergeFrom(pb.FilePlaces(**told))
                    frame.header.file.hash_rows = told.get("hash_rows", frame.header.file.hash_rows)
                yield frame

    with (
        serving(Read=read, CountRead=lambda request, context: pb.CountReadReply()) as address,
        connect(address, data_dir=own.data_dir) as client,
    ):
        assert _bytes(client.get("large").hidden_states) == LARGE.rows()
    assert asked == ([True] if is_read else [True, False])


def test_a_sample_deleted_after_it_was_opened_is_read_to_its_end(client: Client, own: ServerProcess) -> None:
    sample = SyntheticSample("gone", num_tokens=2000, hidden_size=256)
    with IngestClient(own.address) as sender:
        sender.store(sample)
    with client.read("gone") as reader:
        first = next(reader)
        client.delete("gone")
        assert bytes(first.data) + b"".join(block.data for block in reader) == sample.rows()
    with pytest.raises(SampleNotFound):
        client.get("gone", wait_s=0)


def test_the_workers_of_a_dataset_read_in_place_too(client: Client, own: ServerProcess) -> None:
    before = own.metric("slotstream_sent_bytes_total")
    (sample,) = DataLoader(SampleDataset(client, namespace="default"), batch_size=None, num_workers=1)
    assert _bytes(sample.hidden_states) == LARGE.rows()
    assert own.metric("slotstream_sent_bytes_total") - before < 2 * 1200 * 16


def test_a_reader_that_nobody_holds_any_more_keeps_no_file(client: Client) -> None:
    def held() -> int:
        links = [path.readlink() for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
        return sum(link.name == "large.safetensors" for link in links)

    for layers in (None, [4]):
        reader = client.read("large", layers=layers)
        next(reader)
        assert held() == 1
        del reader
        assert held() == 0


def test_a_server_that_is_gone_at_the_end_does_not_count_the_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with ServerProcess(tmp_path / "data") as server, connect(server.address, data_dir=server.data_dir) as client:
        with IngestClient(server.address) as sender:
            sender.store(SyntheticSample("s"))
        with client.read("s") as reader:
            server.stop()
            assert b"".join(block.data for block in reader) == SyntheticSample("s").rows()
    assert "did not count a read of default/s" in caplog.text
