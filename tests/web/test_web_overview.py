"""The screen of everything: what each visitor is told, and which samples the filters choose."""

from __future__ import annotations

import html
import re
import urllib.parse
from pathlib import Path

import pytest
from support.ingest_client import IngestClient
from support.secure import bearer, entry, token, write_tokens
from support.server import ServerProcess
from support.synthetic import SyntheticSample
from support.web import Answer, Visitor, WebProcess

from slotstream.web.overview import PAGE_SIZE


def _samples(answer: Answer) -> list[str]:
    return re.findall(r'<tr><td><a href="/samples/[^"]*">([^<]*)</a>', answer.body)


def _facts(answer: Answer) -> dict[str, str]:
    return {
        html.unescape(name): html.unescape(value) for name, value in re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", answer.body)
    }


def test_admin_sees_what_status_shows(page: WebProcess, store: ServerProcess) -> None:
    with IngestClient(store.address, metadata=bearer("root"), engine_id="<u>engine</u>"):
        answer = Visitor(page.url).log_in("root").get("/")
    told = _facts(answer)
    assert set(told) >= {"server", "samples", "bytes", "failed", "disk", "readers", "retention", "clock", "samples_failed"}
    assert f" at {store.address}, ok, up " in told["server"]
    assert told["failed"].startswith("1 SLOT_MISMATCH within ")
    assert "<td>&lt;u&gt;engine&lt;/u&gt;</td>" in answer.body
    assert {"odd", "long", "failed", "s"} <= set(_samples(answer))


def test_others_are_told_version_health_and_their_namespaces(alice: Visitor) -> None:
    answer = alice.get("/")
    told = _facts(answer)
    assert ", ok" in told["server"]
    assert told["disk"].startswith("-")
    assert told["rights"] == "read"
    assert told["namespaces"] == "a"
    assert "Engines</h2>" not in answer.body
    assert not re.search(r"namespace=b|/samples/b/|<td>b</td>", answer.body)


def test_who_may_only_store_sees_no_samples(page: WebProcess) -> None:
    answer = Visitor(page.url).log_in("sender").get("/")
    assert answer.status == 200
    assert "Your token may read no samples" in answer.body


def test_a_namespace_of_others_looks_like_an_empty_one(alice: Visitor) -> None:
    theirs, nobodys = (alice.get(f"/?namespace={name}") for name in ("b", "q"))
    assert theirs.status == nobodys.status == 200
    unsteady = r'value="[bq]"|\d+(\.\d+)?[smhd]\b'
    assert re.sub(unsteady, "", theirs.body) == re.sub(unsteady, "", nobodys.body)
    assert "No sample matches" in theirs.body


@pytest.mark.parametrize(
    ("query", "found"),
    [
        ("state=failed", {"failed"}),
        ("state=COMMITTED&namespace=a", {"odd", "long", "s"}),
        ("tag=run=eagle3", {"odd"}),
        ("tag=run=other", set()),
        ("model=nothing", set()),
        ("model=test/model&state=committed", {"odd", "long", "s"}),
        ("since=1s&until=2030-01-01T00:00:00Z&state=failed", set()),
        ("until=2020-01-01T00:00:00Z", set()),
        ("request=odd", {"odd"}),
        ("namespace=+a+&state=failed", {"failed"}),
    ],
)
def test_filters_choose(alice: Visitor, query: str, found: set[str]) -> None:
    assert set(_samples(alice.get(f"/?{query}"))) - {"arriving"} == found


@pytest.mark.parametrize(
    "query",
    ["state=asleep", "tag=novalue", "since=yesterday", "namespace=../x", "model=" + "x" * 2000, "tag=" + "a=b+" * 3 + "c=%00"],
)
def test_a_filter_that_means_nothing_is_refused_in_a_sentence(alice: Visitor, query: str) -> None:
    answer = alice.get(f"/?{query}")
    assert answer.status == 400
    assert "Not an address of this page" in answer.body


def test_the_form_keeps_what_was_asked(alice: Visitor) -> None:
    asked = '"><script>alert(1)</script>'
    answer = alice.get("/?" + urllib.parse.urlencode({"model": asked, "state": "failed"}))
    assert f'value="{html.escape(asked)}"'.replace("&quot;", "&#34;") in answer.body
    assert "<option selected>failed</option>" in answer.body
    assert "<script>alert" not in answer.body


def test_pages_of_samples_follow_each_other(tmp_path: Path) -> None:
    tokens = write_tokens(tmp_path / "tokens.toml", entry("root", ["*"], "ingest", "read"))
    names = [f"s{number:03d}" for number in range(2 * PAGE_SIZE + 3)]
    with ServerProcess(tmp_path / "data", "--tokens", str(tokens), token=token("root")) as server:
        with IngestClient(server.address, metadata=bearer("root")) as sender:
            for name in names:
                sender.store(SyntheticSample(name, num_tokens=1, layer_ids=(1,)))
        with WebProcess(server.address) as page:
            visitor = Visitor(page.url).log_in("root")
            seen: list[list[str]] = []
            path: str | None = "/?state=committed"
            while path:
                answer = visitor.get(path)
                seen.append(_samples(answer))
                older = re.search(r'<a href="([^"]*)">older', answer.body)
                path = html.unescape(older[1]) if older else None
            assert list(map(len, seen)) == [PAGE_SIZE, PAGE_SIZE, 3]
            assert [name for part in seen for name in part] == names[::-1]
            # A page token is of its own listing.
            older = re.search(r'<a href="([^"]*)">older', visitor.get("/?state=committed").body)
            assert older is not None
            assert visitor.get(html.unescape(older[1]).replace("state=committed", "state=failed")).status == 404
