"""Exports: what each format's files hold, what they refuse, and a run that is gone on with. By the formats alone."""

from __future__ import annotations

import errno
import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import numpy
import pytest
import torch
from safetensors.torch import load_file
from support.ingest_client import IngestClient
from support.server import ServerProcess, run_cli
from support.synthetic import SyntheticSample
from support.waiting import wait_until

from slotstream.client import BadLayers, Client, ConfigError, SampleNotFound, connect
from slotstream.client.exports.files import Rows
from slotstream.client.exports.formats import FORMATS
from slotstream.client.exports.manifest import MANIFEST, load
from slotstream.client.exports.run import Options, Result, export
from slotstream.client.members import Filters
from slotstream.wire.errors import BadParams

LAST, FINAL_ID = 8, 9
LAYERS = (2, 4, 5, LAST, FINAL_ID)
_NAMES = json.dumps(["2", "4", "5", str(LAST), "final"])


def sample(sample_id: str, namespace: str, layer_ids: tuple[int, ...] = LAYERS, **more: Any) -> SyntheticSample:
    """As a connector with `layers` would send it of a model of 8 layers; half of the rows are the prompt's."""
    metadata = {"num_hidden_layers": str(LAST), "prompt_tokens": "10", "token_start": "0"}
    if layer_ids[-1] == FINAL_ID:
        metadata["layer_names"] = json.dumps([*map(str, layer_ids[:-1]), "final"])
    chosen = {"num_tokens": 20, "metadata": metadata, **more}
    return SyntheticSample(sample_id, namespace=namespace, layer_ids=layer_ids, **chosen)


def store(ingest: IngestClient, one: SyntheticSample, mask: bytes | None = None) -> None:
    number = ingest.open(one, columns=[] if mask is None else ["loss_mask"])
    ingest.send_rows(number, one)
    ingest.commit(number, one, columns={} if mask is None else {"loss_mask": mask})


def mask_of(one: SyntheticSample) -> bytes:
    return bytes(row % 3 == 0 for row in range(one.num_tokens))


def plane(one: SyntheticSample, *layers: int) -> torch.Tensor:
    """[rows, layers * hidden] of what was stored."""
    rows = [[one.value(r, i, k) for i in layers for k in range(one.hidden_size)] for r in range(one.num_tokens)]
    return torch.tensor(rows)


@pytest.fixture
def client(server: ServerProcess) -> Iterator[Client]:
    with connect(server.address) as connected:
        yield connected


def exported(client: Client, to: Path, namespace: str, kind: str, **more: Any) -> Result:
    return export(client, to, Options(kind, more.pop("layers", None), Filters(namespace), **more))


@pytest.fixture
def samples(ingest: IngestClient, namespace: str) -> list[SyntheticSample]:
    """Three, with masks."""
    made = [
        sample(f"s{i}", namespace, num_tokens=10 + 7 * i, seed=i, dtype=kind) for i, kind in enumerate(("BF16", "F16", "F32"))
    ]
    for one in made:
        store(ingest, one, mask_of(one))
    return made


def test_specforge_takes_the_row_after_the_norm(
    client: Client, samples: list[SyntheticSample], namespace: str, tmp_path: Path
) -> None:
    exported(client, tmp_path, namespace, "specforge")
    for one in samples:
        held = torch.load(tmp_path / namespace / f"{one.sample_id}.ckpt", weights_only=True)
        assert held.keys() == {"input_ids", "loss_mask", "hidden_state", "aux_hidden_state"}
        assert held["input_ids"].tolist() == one.token_ids
        assert held["loss_mask"].tolist() == list(mask_of(one))
        assert held["hidden_state"].shape == (1, one.num_tokens, 16)
        assert held["hidden_state"].dtype == {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}[one.dtype]
        assert torch.equal(held["hidden_state"][0].float(), plane(one, FINAL_ID))
        assert torch.equal(held["aux_hidden_state"][0].float(), plane(one, 2, 4, 5))


def test_modelopt_is_told_whether_the_norm_is_still_to_come(
    client: Client, samples: list[SyntheticSample], ingest: IngestClient, namespace: str, tmp_path: Path
) -> None:
    exported(client, tmp_path / "a", namespace, "modelopt")
    unnormed = sample("u", f"{namespace}-b", (2, 4, 5, LAST))
    store(ingest, unnormed, mask_of(unnormed))
    exported(client, tmp_path / "b", f"{namespace}-b", "modelopt")
    for one, folder, base in ((samples[0], "a", FINAL_ID), (unnormed, "b", LAST)):
        held = torch.load(tmp_path / folder / one.namespace / f"{one.sample_id}.pt", weights_only=True)
        assert held["hidden_states_prenorm"] is (base == LAST)
        assert torch.equal(held["hidden_states"].float(), plane(one, base))
        assert torch.equal(held["aux_hidden_states"].float(), plane(one, 2, 4, 5))
        assert (held["input_ids"].tolist(), held["loss_mask"].tolist()) == (one.token_ids, list(mask_of(one)))


def test_speculators_takes_the_row_before_the_norm_and_finds_it_by_its_index(
    client: Client, samples: list[SyntheticSample], namespace: str, tmp_path: Path
) -> None:
    result = exported(client, tmp_path, namespace, "speculators", layers=(5, 2))
    assert result.manifest.layers == ("5", "2", "8")
    table = datasets.load_from_disk(str(tmp_path))
    assert len(table) == 3
    for number, one in enumerate(samples):
        held = load_file(tmp_path / "hidden_states" / f"hs_{number}.safetensors")
        assert held["hidden_states"].shape == (one.num_tokens, 3, 16)
        assert torch.equal(held["hidden_states"].flatten(1).float(), plane(one, 5, 2, LAST))
        assert held["token_ids"].tolist() == one.token_ids
        row = table[number]
        assert torch.equal(row["input_ids"], held["token_ids"])
        assert row["loss_mask"].tolist() == list(mask_of(one))
        assert row["loss_mask"].dtype is torch.int64
        assert int(row["seq_len"]) == one.num_tokens


def test_an_index_is_on_the_disk_before_it_says_that_it_is_whole(
    client: Client, samples: list[SyntheticSample], namespace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a loss of power leaves a data set without its rows, with which an export would not go on."""
    done: list[tuple[str, int, str]] = []  # What became of which inode, under which name.
    fsync, replace_file = os.fsync, os.replace

    def synced(descriptor: int) -> None:
        fsync(descriptor)
        done.append(("synced", os.fstat(descriptor).st_ino, ""))

    def replaced(source: Path, target: Path) -> None:
        replace_file(source, target)
        done.append(("named", Path(target).stat().st_ino, os.path.relpath(target, tmp_path / "out")))

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", replaced)
    exported(client, tmp_path / "out", namespace, "speculators")
    named = {name: at for at, (what, _, name) in enumerate(done) if what == "named"}
    assert {"manifest.jsonl", "hidden_states/hs_0.safetensors", "dataset_info.json", "state.json"} <= named.keys()
    for name, at in named.items():
        assert ("synced", done[at][1], "") in done[:at], f"{name} is named, and its bytes may be nowhere"
    out, rows = (("synced", (tmp_path / "out" / name).stat().st_ino, "") for name in (".", "hidden_states"))
    whole = named["state.json"]
    assert rows in done[max(at for name, at in named.items() if name.startswith("hidden_states")) : whole]
    assert out in done[max(at for at in named.values() if at != whole) : whole]
    assert out in done[whole:]


def test_an_index_alone_names_the_samples_in_its_order(
    client: Client, samples: list[SyntheticSample], namespace: str, tmp_path: Path
) -> None:
    exported(client, tmp_path / "whole", namespace, "speculators")
    exported(client, tmp_path / "index", namespace, "speculators", index_only=True)
    assert not (tmp_path / "index" / "hidden_states").exists()
    whole, alone = (datasets.load_from_disk(str(tmp_path / name)) for name in ("whole", "index"))
    assert [row["input_ids"].tolist() for row in alone] == [row["input_ids"].tolist() for row in whole]
    assert [row["loss_mask"].tolist() for row in alone] == [row["loss_mask"].tolist() for row in whole]
    manifest = load(tmp_path / "index")
    assert manifest is not None
    assert [(entry.sample_id, entry.layers, entry.file) for entry in manifest.entries] == [
        (one.sample_id, (2, 4, 5, LAST), None) for one in samples
    ]
    with pytest.raises(ConfigError, match="only speculators has an index"):
        exported(client, tmp_path / "other", namespace, "npz", index_only=True)


def test_safetensors_is_what_get_writes_and_npz_is_float32(
    client: Client, samples: list[SyntheticSample], server: ServerProcess, namespace: str, tmp_path: Path
) -> None:
    exported(client, tmp_path / "st", namespace, "safetensors", layers=("final", 2))
    exported(client, tmp_path / "npz", namespace, "npz")
    for one in samples:
        written = tmp_path / "st" / namespace / f"{one.sample_id}.safetensors"
        got = tmp_path / f"{one.sample_id}.safetensors"
        words = ["get", one.sample_id, "--namespace", namespace, "-o", str(got), "--layers", "final,2"]
        assert run_cli(*words, "--server", server.address).returncode == 0
        assert written.read_bytes() == got.read_bytes()
        with numpy.load(tmp_path / "npz" / namespace / f"{one.sample_id}.npz") as held:
            assert held["hidden_states"].dtype == numpy.float32
            assert numpy.array_equal(held["hidden_states"].reshape(one.num_tokens, -1), plane(one, *LAYERS).numpy())
            assert held["token_ids"].tolist() == one.token_ids
            assert held["layer_names"].tolist() == json.loads(_NAMES)
            assert held["loss_mask"].tolist() == [bool(byte) for byte in mask_of(one)]


def test_a_mask_is_made_for_samples_without_one_only(
    client: Client, ingest: IngestClient, namespace: str, tmp_path: Path
) -> None:
    own, bare = sample("own", namespace), sample("bare", namespace)
    late = sample("late", namespace, metadata={**bare.metadata, "token_start": "7"})
    store(ingest, own, mask_of(own))
    store(ingest, bare)
    store(ingest, late)
    for fill, of_bare, of_late in (("all", [1] * 20, [1] * 20), ("output", [0] * 10 + [1] * 10, [0] * 3 + [1] * 17)):
        exported(client, tmp_path / fill, namespace, "specforge", loss_mask=fill)
        for one, mask in ((own, list(mask_of(own))), (bare, of_bare), (late, of_late)):
            held = torch.load(tmp_path / fill / namespace / f"{one.sample_id}.ckpt", weights_only=True)
            assert held["loss_mask"].tolist() == mask
    exported(client, tmp_path / "plain", namespace, "npz")
    with numpy.load(tmp_path / "plain" / namespace / "bare.npz") as held:
        assert "loss_mask" not in held


def _without(**removed: None) -> Mapping[str, str]:
    kept = dict(sample("x", "n").metadata)
    return {key: value for key, value in kept.items() if key not in removed}


@pytest.mark.parametrize(
    ("kind", "layer_ids", "more", "error", "sentence"),
    [
        (
            "speculators",
            (2, 4, 5, FINAL_ID),
            {},
            BadLayers,
            "has no layer 8 (the row before the last norm), which speculators takes",
        ),
        (
            "specforge",
            (2, 4, 5, LAST),
            {},
            BadLayers,
            "has no layer final (the row after the last norm), which specforge takes",
        ),
        ("modelopt", (2, 4, 5), {}, BadLayers, "has no layer final (the row after the last norm) nor 8 (the row before"),
        ("specforge", (2, 4, LAST, FINAL_ID), {}, BadLayers, "has 2 layers beside that, and specforge takes 3: name them"),
        ("modelopt", (1, 2, 4, 5, LAST), {}, BadLayers, "has 4 layers beside that, and modelopt takes 3: name them"),
        ("speculators", (LAST,), {}, BadLayers, "has 0 layers beside that, and speculators takes one or more"),
        ("specforge", LAYERS, {"layers": (2, 3, 5)}, BadLayers, "has no layer 3: its layers are 2, 4, 5, 8, final"),
        ("npz", (2, 4), {"layers": ("final",)}, BadLayers, "has no layer final: its layers are 2, 4"),
        ("specforge", LAYERS, {"mask": None}, BadParams, "was stored without a loss mask, which specforge takes"),
        ("speculators", LAYERS, {"mask": None, "index_only": True}, BadParams, "was stored without a loss mask"),
        (
            "modelopt",
            LAYERS,
            {"mask": None, "loss_mask": "output", "metadata": _without(prompt_tokens=None)},
            BadParams,
            "does not say where its prompt ends",
        ),
        ("modelopt", (2, 4, 5), {"metadata": _without(num_hidden_layers=None)}, BadLayers, "does not say how many layers"),
    ],
)
def test_what_a_sample_lacks_is_refused_before_a_file_is_written(
    client: Client,
    ingest: IngestClient,
    namespace: str,
    tmp_path: Path,
    kind: str,
    layer_ids: tuple[int, ...],
    more: dict[str, Any],
    error: type[Exception],
    sentence: str,
) -> None:
    options = {name: more[name] for name in ("layers", "loss_mask", "index_only") if name in more}
    given = {"metadata": more["metadata"]} if "metadata" in more else {}
    bad, good = sample("bad", namespace, layer_ids, **given), sample("good", namespace)
    for one in (bad, good):
        store(ingest, one, more.get("mask", mask_of(one)) if one is bad else mask_of(one))
    with pytest.raises(error) as caught:
        exported(client, tmp_path / "to", namespace, kind, **options)
    assert f"sample {namespace}/bad {sentence}" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert list((tmp_path / "to").iterdir()) == []


def test_samples_of_several_kinds_are_not_mixed(client: Client, ingest: IngestClient, namespace: str, tmp_path: Path) -> None:
    for one in (sample("a", namespace), sample("b", namespace, (2, 3, 5, LAST, FINAL_ID))):
        store(ingest, one, mask_of(one))
    with pytest.raises(BadLayers, match=r"b gives layers \[2, 3, 5, 9\] .*/a \[2, 4, 5, 9\]"):
        exported(client, tmp_path, namespace, "specforge")
    exported(client, tmp_path, namespace, "specforge", layers=(2, 5, LAST))
    held = torch.load(tmp_path / namespace / "b.ckpt", weights_only=True)
    assert held["aux_hidden_state"].shape == (1, 20, 48)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.mark.parametrize("kind", ["speculators", "specforge", "modelopt", "safetensors", "npz"])
def test_a_run_that_ended_is_gone_on_with_and_gives_the_same_files(
    client: Client, ingest: IngestClient, namespace: str, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for i in range(7):
        one = sample(f"s{i}", namespace, seed=i)
        store(ingest, one, mask_of(one))
    exported(client, tmp_path / "whole", namespace, kind, jobs=1)
    options = Options(kind, None, Filters(namespace), jobs=3)

    room = itertools.count(-3)

    def write(rows: Rows, path: Path) -> None:
        if next(room) >= 0:
            raise OSError(errno.ENOSPC, "no room", str(path))
        known.write(rows, path)

    known = FORMATS[kind]
    with monkeypatch.context() as full:
        full.setitem(FORMATS, kind, replace(known, write=write))
        with pytest.raises(OSError, match="no room"):
            export(client, tmp_path / "cut", options)
    before = {path: path.stat().st_ino for path in (tmp_path / "cut").rglob("s*.*") if path.is_file()}
    assert len(before) == 3 if kind != "speculators" else len(contents(tmp_path / "cut")) == 4
    store(ingest, sample("later", namespace), mask_of(sample("later", namespace)))  # It is of no export that began before.
    result = export(client, tmp_path / "cut", options)
    assert result.written == 4
    whole, cut = contents(tmp_path / "whole"), contents(tmp_path / "cut")
    first = [json.loads(files.pop(MANIFEST).splitlines()[0]) for files in (whole, cut)]
    assert first[0].pop("as_of") < first[1].pop("as_of")
    assert first[0] == first[1]
    assert whole == cut
    assert all(path.stat().st_ino == number for path, number in before.items())  # Not written again.
    assert export(client, tmp_path / "cut", options).written == 0


def _has(folder: Path, files: int) -> bool:
    return len(list(folder.glob("*.ckpt"))) >= files


def test_a_killed_process_leaves_whole_files(
    ingest: IngestClient, server: ServerProcess, namespace: str, tmp_path: Path
) -> None:
    for i in range(40):
        one = sample(f"s{i:02}", namespace, seed=i)
        store(ingest, one, mask_of(one))
    words = ["export", "--format", "specforge", "--namespace", namespace, "--server", server.address, "-j", "2"]
    command = [sys.executable, "-m", "slotstream.cli.main", *words]
    assert subprocess.run([*command, "--to", str(tmp_path / "whole")], check=False).returncode == 0
    for at in (1, 9, 25):
        process = subprocess.Popen([*command, "--to", str(tmp_path / "cut")])
        wait_until(partial(_has, tmp_path / "cut" / namespace, at), "files of the export")
        process.send_signal(signal.SIGKILL)
        process.wait()
    done = run_cli(*words, "--to", str(tmp_path / "cut"), "--server", server.address)
    assert done.returncode == 0, done.stderr
    assert "40 of 40 samples as specforge" in done.stdout
    whole, cut = contents(tmp_path / "whole"), contents(tmp_path / "cut")
    del whole[MANIFEST], cut[MANIFEST]
    assert whole == cut


def test_a_folder_is_of_one_export(client: Client, samples: list[SyntheticSample], namespace: str, tmp_path: Path) -> None:
    exported(client, tmp_path / "a", namespace, "npz")
    with pytest.raises(ConfigError, match="holds an export with format 'npz', and this one has 'safetensors'"):
        exported(client, tmp_path / "a", namespace, "safetensors")
    with pytest.raises(ConfigError, match="holds an export with layers None"):
        exported(client, tmp_path / "a", namespace, "npz", layers=(2,))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("mine")
    with pytest.raises(ConfigError, match="holds other files, and no export"):
        exported(client, tmp_path / "mine", namespace, "npz")
    for damage in ("", "nothing", "{}\n", '{"version":2,"options":{},"as_of":1,"layers":[]}\n'):
        (tmp_path / "a" / MANIFEST).write_text(damage)
        with pytest.raises(ConfigError, match=r"manifest\.jsonl is "):
            exported(client, tmp_path / "a", namespace, "npz")
    with pytest.raises(SampleNotFound, match="these hold samples"):
        exported(client, tmp_path / "none", f"{namespace}-none", "npz")


def test_two_exports_do_not_write_to_one_folder(
    client: Client, samples: list[SyntheticSample], namespace: str, tmp_path: Path
) -> None:
    options = Options("npz", None, Filters(namespace))

    def another(done: int, of: int) -> None:
        with pytest.raises(ConfigError, match="another export is writing to"):
            export(client, tmp_path, options)

    assert export(client, tmp_path, options, another).written == 3


def test_a_sample_that_is_gone_or_another_is_told_and_the_others_are_written(
    client: Client, ingest: IngestClient, samples: list[SyntheticSample], server: ServerProcess, namespace: str, tmp_path: Path
) -> None:
    exported(client, tmp_path, namespace, "specforge")
    for name in ("s1", "s2"):
        (tmp_path / namespace / f"{name}.ckpt").unlink()
    client.delete("s1", namespace=namespace)
    client.delete("s2", namespace=namespace)
    again = sample("s2", namespace, seed=7)
    store(ingest, again, mask_of(again))
    words = ["export", "--format", "specforge", "--namespace", namespace, "--to", str(tmp_path)]
    done = run_cli(*words, "--server", server.address)
    assert done.returncode == 1
    assert f"{namespace}/s1: " in done.stderr
    assert "(NOT_FOUND)" in done.stderr
    assert f"{namespace}/s2: it is no longer the sample that was committed when the export began" in done.stderr
    assert "1 of 3 samples as specforge, 0 written now" in done.stdout
    assert not (tmp_path / namespace / "s2.ckpt").exists()


def test_the_command_says_what_it_did_and_refuses_in_one_sentence(
    samples: list[SyntheticSample], ingest: IngestClient, server: ServerProcess, namespace: str, tmp_path: Path
) -> None:
    words = ["export", "--format", "npz", "--namespace", namespace]
    in_place = ["--data", str(server.data_dir)]
    done = run_cli(*words, "--to", str(tmp_path / "a"), *in_place, "--server", server.address)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"{tmp_path / 'a'}: 3 of 3 samples as npz, 3 written now; 51 rows\n"
    store(ingest, sample("bare", namespace))
    done = run_cli(*words[:1], "--format", "modelopt", *words[3:], "--to", str(tmp_path / "b"), "--server", server.address)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert f"slotstream export: sample {namespace}/bare was stored without a loss mask" in done.stderr
    done = run_cli(*words, "--to", str(tmp_path / "c"), "-j", "0", "--server", server.address)
    assert done.returncode == 2


def test_rows_and_numbers_come_without_torch(
    samples: list[SyntheticSample], server: ServerProcess, namespace: str, tmp_path: Path
) -> None:
    script = (
        "import sys; sys.modules['torch'] = None\n"
        "from pathlib import Path\n"
        "from slotstream.cli.main import main\n"
        "for kind in ('npz', 'safetensors'):\n"
        f"    words = ['export', '--format', kind, '--namespace', {namespace!r}, '--server', {server.address!r}]\n"
        f"    assert main([*words, '--to', {str(tmp_path)!r} + '/' + kind]) == 0\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, env=dict(os.environ))
    assert (done.returncode, done.stderr) == (0, "")
    assert len(list(itertools.chain(tmp_path.glob(f"npz/{namespace}/*"), tmp_path.glob(f"safetensors/{namespace}/*")))) == 6
