"""The screen of one sample: what it shows, and how little it reads."""

from __future__ import annotations

import html
import re
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.ingest_client import IngestClient
from support.secure import bearer, entry, token, write_tokens
from support.server import ServerProcess
from support.synthetic import SyntheticSample
from support.web import Answer, Visitor, WebProcess
from support.web_samples import INF_ROW, LONG, MARKUP, NAN_ROW, ODD, ZERO_ROW

from slotstream.client import connect
from slotstream.client.info import SampleInfo, SampleState
from slotstream.web.measuring import Bad, measure
from slotstream.web.window import WINDOW_BYTES_MAX, WINDOW_CELLS_MAX, WINDOW_ROWS_MAX, bounds, rows_at_once
from slotstream.wire.errors import BadTokenRange, TooLarge


def _text(answer: Answer, pattern: str) -> list[str]:
    """What stands in the elements that match, as a reader sees it."""
    found = re.findall(pattern, answer.body, re.S)
    return [html.unescape(re.sub(r"<[^>]*>", "", part)).strip() for part in found]


def test_tokens_are_told_apart_and_bad_rows_are_marked(alice: Visitor) -> None:
    answer = alice.get("/samples/a/odd")
    assert answer.status == 200
    assert _text(answer, r'<h3 class="kind \w+">(.*?)</h3>') == ["prompt", "output"]
    prompt, output = (part.split() for part in _text(answer, r'<p class="tokens[^>]*>(.*?)</p>'))
    # The sample begins at the prompt's fifth token, of 24.
    assert (len(prompt), len(output)) == (20, 20)
    ids = list(map(str, ODD.token_ids))
    ids[ZERO_ROW] += "zero"
    ids[NAN_ROW] += "NaN"
    ids[INF_ROW] += "inf"
    assert prompt + output == ids
    assert _text(answer, r'<h2 id="bad">.*?<ul>(.*?)</ul>')[0].split("\n") != []
    listed = [" ".join(line.split()) for line in _text(answer, r"<li>(.*?)</li>")]
    assert listed == [
        f"row {ZERO_ROW}: all zeros in every layer",
        f"row {NAN_ROW}: NaN in layer 18",
        f"row {INF_ROW}: inf in layer 33",
    ]


def test_the_map_has_a_cell_for_each_token_and_layer(alice: Visitor) -> None:
    for view in ("norm", "cosine"):
        answer = alice.get(f"/samples/a/odd?view={view}")
        marks = _text(answer, r'<g class="bad \w+">.*?<text[^>]*>(.*?)</text></g>')
        assert sorted(marks) == ["0", "0", "0", "0", "N", "∞"]
        squares = sum(path.count("M") for path in re.findall(r'<path class="v\d" d="([^"]*)"', answer.body))
        none = sum(path.count("M") for path in re.findall(r'<path class="none" d="([^"]*)"', answer.body))
        cells = ODD.num_tokens * len(ODD.layer_ids) - len(marks)
        # The first layer has no cosine, but for the bad row; nor has what follows a NaN or an infinity.
        assert (squares, none) == ((cells, 0) if view == "norm" else (cells - 39 - 2, 39 + 2))
        assert len(re.findall(r'<a href="[^"]*row=\d+[^"#]*#token"[^>]*tabindex="-1">', answer.body)) == ODD.num_tokens
        assert "style=" not in answer.body
        assert not re.search(r"<style|<[^>]*\son\w+=|<script>", answer.body)


def _figures(answer: Answer) -> dict[str, list[str]]:
    rows = re.findall(r'<tr[^>]*><th scope="row">(.*?)</th>(.*?)</tr>', answer.body, re.S)
    return {re.sub(r"<[^>]*>", "", name).split()[0]: re.findall(r"<td>(.*?)</td>", cells) for name, cells in rows}


@pytest.mark.parametrize("row", [3, ZERO_ROW, NAN_ROW, INF_ROW])
def test_a_click_on_a_token_shows_its_figures(alice: Visitor, row: int) -> None:
    (link,) = set(re.findall(rf'href="([^"]*row={row})#token"', alice.get("/samples/a/odd").body))
    answer = alice.get(html.unescape(link))
    values = ODD.array()[row].astype(np.float64)
    shown = _figures(answer)
    assert list(shown) == ["2", "18", "33", "final"]
    for at, cells in enumerate(shown.values()):
        finite = values[at][np.isfinite(values[at])]
        norm = np.linalg.norm(values[at])
        cosine = np.nan
        if at and norm and np.isfinite(values[at - 1 : at + 1]).all():
            cosine = values[at] @ values[at - 1] / (norm * np.linalg.norm(values[at - 1]))
        told = [norm, cosine, finite.mean(), finite.std(), finite.min(), finite.max()]
        assert cells[:6] == ["-" if np.isnan(value) else f"{value:.4g}" for value in told]
        counts = [(values[at] == 0).sum(), np.isnan(values[at]).sum(), np.isinf(values[at]).sum()]
        assert cells[6:] == list(map(str, counts))
    assert f"token id {ODD.token_ids[row]}" in answer.body


def test_markup_of_others_shows_as_text(alice: Visitor) -> None:
    answer = alice.get("/samples/a/odd")
    assert html.escape(MARKUP) in answer.body.replace("&#34;", "&quot;")
    assert "&lt;b&gt;key&lt;/b&gt;" in answer.body
    assert "&lt;script&gt;engine&lt;/script&gt;" in answer.body
    assert not re.search(r"<img|<b>key|<script>", answer.body)
    failed = alice.get("/samples/a/failed")
    assert "SLOT_MISMATCH: &lt;i&gt;slots&lt;/i&gt; do not match" in failed.body


def test_windows_follow_each_other(alice: Visitor) -> None:
    seen: list[str] = []
    path: str | None = "/samples/a/long"
    while path:
        answer = alice.get(html.unescape(path))
        seen += _text(answer, r'<p class="tokens[^>]*>(.*?)</p>')[0].split()
        later = re.search(r'<a href="([^"]*)">later', answer.body)
        path = later[1] if later else None
    assert seen == list(map(str, LONG.token_ids))
    assert "rows 256 to 511 of 600" in alice.get("/samples/a/long?row=300").body
    assert re.search(r'<a href="/samples/a/long">← earlier', alice.get("/samples/a/long?start=256").body)
    assert re.search(r'<a href="/samples/a/long\?start=256">← earlier', alice.get("/samples/a/long?start=512").body)


@pytest.mark.parametrize(
    "query", ["start=x", "start=-1", "row=600", "start=600", "start=0&row=599", "row=1e3", "view=huge", f"row={'9' * 400}"]
)
def test_an_address_that_no_window_has_is_refused(alice: Visitor, query: str) -> None:
    assert alice.get(f"/samples/a/long?{query}").status == 400


def test_code_to_copy_reads_what_is_shown(store: ServerProcess, alice: Visitor, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = alice.get("/samples/a/long?start=256")
    python, shell = _text(answer, r"<pre[^>]*><code>(.*?)</code></pre>")
    monkeypatch.setenv("SLOTSTREAM_TOKEN", token("alice"))
    scope: dict[str, object] = {"print": lambda *_: None}
    exec(python, scope)
    sample = scope["sample"]
    assert sample.start == 256  # type: ignore[attr-defined]
    assert sample.hidden_states.numpy().tobytes() == LONG.rows(256, 512)  # type: ignore[attr-defined]
    assert shell.replace("\\\n", "").split() == [
        *("slotstream", "get", "long", "--namespace", "a", "--start", "256", "--stop", "512"),
        *("-o", "long.safetensors", "--server", store.address),
    ]


def test_a_request_reads_no_more_than_it_shows(store: ServerProcess, page: WebProcess, alice: Visitor) -> None:
    """Rows and bytes, as the server counts what it sends. Everything else is a header of a few bytes a token."""

    def sent() -> float:
        return store.metric("slotstream_sent_bytes_total")

    def reads(path: str) -> float:
        before = sent()
        assert alice.get(path).status < 500
        return sent() - before

    shown = {"/samples/a/odd": 40, "/samples/a/long": 256, "/samples/a/long?start=512": 88, "/samples/a/long?row=3": 256}
    for path, rows in shown.items():
        rest = reads(path) - rows * ODD.row_bytes
        assert 0 < rest < 1024 + 10 * rows, path
    nothing = (
        "/",
        "/?namespace=a",
        "/samples/a/failed",
        "/samples/a/absent",
        "/samples/b/s",
        "/samples/a/long?row=600",
        "/login",
    )
    assert {path: reads(path) for path in nothing} == dict.fromkeys(nothing, 0)
    before = sent()
    assert Visitor(page.url).get("/samples/a/odd").status == 303
    assert alice.get("/samples/a/odd", method="HEAD").status == 405
    assert sent() == before


def _info(layers: int, hidden: int, rows: int, dtype: str = "F32") -> SampleInfo:
    return SampleInfo(
        "a", "s", SampleState.COMMITTED, "m", dtype, tuple(range(layers)), hidden, rows, 1, 1, 1, None, None, {}, {}
    )


@pytest.mark.parametrize(
    ("layers", "hidden", "rows"),
    [(4, 64, 256), (4, 4096, 256), (33, 4096, 31), (1, 1 << 21, 2), (1024, 16, 16), (64, 16, 256), (1, 1 << 22, 1)],
)
def test_a_window_is_bounded(layers: int, hidden: int, rows: int) -> None:
    info = _info(layers, hidden, 100_000)
    assert rows_at_once(info) == rows
    assert rows * layers * hidden * 4 <= WINDOW_BYTES_MAX
    assert rows <= WINDOW_ROWS_MAX
    assert rows * layers <= max(WINDOW_CELLS_MAX, layers)
    assert bounds(info, None, None) == (0, rows)
    assert bounds(info, None, 77_777) == (77_777 - 77_777 % rows, 77_777 - 77_777 % rows + rows)
    assert bounds(info, 99_999, None) == (99_999, 100_000)


def test_a_row_that_is_too_long_and_a_row_that_is_not_there_are_refused() -> None:
    with pytest.raises(TooLarge):
        rows_at_once(_info(1, (1 << 22) + 1, 1))
    for start, row in ((100, None), (None, 100), (0, 99)):
        with pytest.raises(BadTokenRange):
            bounds(_info(64, 1 << 16, 100), start, row)
    assert bounds(_info(4, 64, 0), None, None) == (0, 0)


def test_looking_uses_no_read_up(tmp_path: Path) -> None:
    """The namespace's rule deletes a sample after its first read."""
    rules = tmp_path / "rules.toml"
    rules.write_text("[namespaces.a]\ndelete_after_reads = 1\n")
    tokens = write_tokens(tmp_path / "tokens.toml", entry("alice", ["a"], "read", "ingest"), entry("root", ["*"], "admin"))
    options = ("--tokens", str(tokens), "--retention", str(rules), "--retention-grace-s", "0")
    sample = SyntheticSample("s", namespace="a")
    with ServerProcess(tmp_path / "data", *options, token=token("root")) as server:
        with IngestClient(server.address, metadata=bearer("alice")) as sender:
            sender.store(sample)
        with WebProcess(server.address) as page, connect(server.address, token=token("alice")) as client:
            visitor = Visitor(page.url).log_in("alice")
            for _ in range(3):
                assert "1000" in visitor.get("/samples/a/s").body
            assert client.stat("s", namespace="a").reads == 0
            client.get("s", namespace="a")
            client.close()
            with connect(server.address, token=token("alice")) as other:
                while next(other.list(namespace="a"), None) is not None:
                    time.sleep(0.01)
            assert visitor.get("/samples/a/s").status == 404


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
def test_figures_are_of_every_dtype(server: ServerProcess, namespace: str, dtype: str) -> None:
    sample = replace(SyntheticSample(f"s-{dtype}", namespace=namespace), dtype=dtype)
    with IngestClient(server.address) as sender:
        sender.store(sample)
    with connect(server.address) as client, client.read(sample.sample_id, namespace=namespace, start=5, stop=30) as reader:
        figures = measure(reader, 3)
    values = np.array(
        [[[sample.value(r, i, k) for k in range(16)] for i in sample.layer_ids] for r in range(5, 30)], dtype=np.float64
    )
    assert np.allclose(figures.norms, np.linalg.norm(values, axis=-1), rtol=1e-12)
    assert figures.row[1].greatest == values[3, 1].max()
    assert not figures.bad_rows


def test_a_large_number_is_no_infinity(server: ServerProcess, namespace: str) -> None:
    """Its square is no float32."""

    class Large(SyntheticSample):
        def rows(self, start: int = 0, stop: int | None = None, layers: tuple[int, ...] | None = None) -> bytes:
            return np.full((self.num_tokens, 3, 16), 1e30, np.float32)[start:stop].tobytes()

    with IngestClient(server.address) as sender:
        sender.store(Large("large", namespace=namespace, dtype="F32", num_tokens=4))
    with connect(server.address) as client, client.read("large", namespace=namespace) as reader:
        figures = measure(reader)
    assert not figures.bad_rows
    assert np.allclose(figures.norms, 4e30)
    assert np.allclose(figures.cosines[:, 1:], 1)
    assert {kind.value for kind in Bad} == {"NaN", "inf", "zero"}


def test_a_sample_that_arrives_shows_no_rows(store: ServerProcess, alice: Visitor) -> None:
    sample = SyntheticSample("arriving", namespace="a")
    with IngestClient(store.address, metadata=bearer("sender")) as sender:
        number = sender.open(sample)
        sender.send_rows(number, sample, 0, 4)
        answer = alice.get("/samples/a/arriving")
    assert answer.status == 200
    assert "still arriving" in answer.body
    assert "at most 40 tokens" in " ".join(answer.body.split())


def test_damage_is_told_beside_the_facts(tmp_path: Path) -> None:
    sample = SyntheticSample("s")
    with ServerProcess(tmp_path / "data") as server:
        with IngestClient(server.address) as sender:
            sender.store(sample)
        (file,) = (tmp_path / "data").rglob("s.safetensors")
        raw = bytearray(file.read_bytes())
        raw[raw.index(sample.rows(3, 4))] ^= 1
        file.write_bytes(raw)
        with WebProcess(server.address, "--allow-anonymous") as page:
            visitor = Visitor(page.url)
            visitor.post("/login", {"token": ""})
            answer = visitor.get("/samples/default/s")
    assert answer.status == 200
    assert "The rows cannot be shown" in answer.body
    assert "(DAMAGED)" in answer.body


@pytest.fixture
def tokenizer(tmp_path: Path) -> Callable[[dict[str, int]], Path]:
    """Writes a tokenizer of these words, which decodes as Llama's does: ▁ is a space, and the first one is dropped."""
    tokenizers = pytest.importorskip("tokenizers")

    def write(words: dict[str, int]) -> Path:
        made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
        made.decoder = tokenizers.decoders.Metaspace()
        folder = tmp_path / "tokenizer"
        folder.mkdir()
        made.save(str(folder / "tokenizer.json"))
        return folder

    return write


def test_tokens_are_text_where_the_operator_gave_a_tokenizer(
    store: ServerProcess, tokenizer: Callable[[dict[str, int]], Path]
) -> None:
    words = {"<unk>": 0, "▁The": 1000, "▁cat": 1001, "s": 1002, "\n": 1003, "<b>x</b>": 1004, "\u202e": 1005}
    with WebProcess(store.address, "--tokenizer", f"test/model={tokenizer(words)}") as page:
        answer = Visitor(page.url).log_in("alice").get("/samples/a/odd?row=4")
    first, _ = re.findall(r'<p class="tokens[^>]*>(.*?)</p>', answer.body, re.S)
    texts = [html.unescape(text) for text in re.findall(r"<a [^>]*>(.*?)(?:<sup>.*?</sup>)?</a>", first, re.S)]
    # A token that the tokenizer lacks has its id.
    assert texts[:8] == ["The", " cat", "s", "↵\n", "<b>x</b>", "\\u202e", "‹1006›", "‹1007›"]
    assert re.search(r'<code class="token">&lt;b&gt;x&lt;/b&gt;</code> token id 1004', answer.body)
    assert "<b>x" not in answer.body
    assert "token ids" not in answer.body


def test_a_tokenizer_of_another_model_is_not_used(store: ServerProcess, tokenizer: Callable[[dict[str, int]], Path]) -> None:
    with WebProcess(store.address, "--tokenizer", f"other={tokenizer({'<unk>': 0, 'word': 1000})}") as page:
        answer = Visitor(page.url).log_in("alice").get("/samples/a/odd")
    assert "word" not in re.sub(r"password", "", answer.body)
    assert "These are token ids" in answer.body
