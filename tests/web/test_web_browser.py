"""Both screens in a headless Chromium, on a phone's width and on a desk's: clicked through, with scripts and without."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.browser import Browser
from support.fake_samples import info_of, serving
from support.ingest_client import IngestClient
from support.secure import bearer, token
from support.server import ServerProcess
from support.synthetic import SyntheticSample
from support.web import WebProcess
from support.web_samples import MARKUP

from slotstream.v1 import samples_pb2 as pb

pytestmark = pytest.mark.browser
_WIDTHS = (390, 1280)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as running:
        yield running


@pytest.fixture(scope="module")
def site(store: ServerProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The page with a tokenizer, some of whose tokens are markup."""
    tokenizers = pytest.importorskip("tokenizers")
    words = {f" word{number}": 1000 + number for number in range(700)}
    words |= {"<unk>": 0}
    names = dict.fromkeys(words)
    del names[" word2"], names[" word3"]
    texts = {**{name: words[name] for name in names}, MARKUP: 1002, "</a><script>document.title='x'</script>": 1003}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(texts, unk_token="<unk>"))
    made.decoder = tokenizers.decoders.Fuse()
    folder = tmp_path_factory.mktemp("tokenizer")
    made.save(str(folder / "tokenizer.json"))
    with WebProcess(store.address, "--tokenizer", f"test/model={folder}") as page:
        yield page.url


@pytest.fixture(autouse=True)
def fresh(browser: Browser) -> Iterator[None]:
    """Nobody is logged in, and nothing that the browser refuses or that fails is passed over."""
    browser.call("Network.clearBrowserCookies")
    browser.complaints.clear()
    yield
    browser.scripts(True)
    assert browser.complaints == []


def _log_in(browser: Browser, url: str, name: str = "root") -> None:
    browser.open(f"{url}/login")
    browser.write("#token", token(name))
    browser.click("form button")
    assert browser.run("location.pathname") == "/"


def _looks_right(browser: Browser, name: str) -> None:
    """Nothing is wider than the screen, and axe finds nothing. People may look themselves: SLOTSTREAM_PICTURES."""
    if folder := os.environ.get("SLOTSTREAM_PICTURES"):
        browser.picture(Path(folder) / f"{name}-{browser.run('innerWidth')}.png")
    assert browser.run("document.documentElement.scrollWidth <= innerWidth")
    assert browser.axe() == []


@pytest.mark.parametrize("width", _WIDTHS)
def test_both_screens_are_clicked_through(browser: Browser, site: str, width: int) -> None:
    browser.size(width)
    browser.open(site)
    _looks_right(browser, "login")
    _log_in(browser, site)
    assert "Engines" in browser.text("#state") or "disk" in browser.text("#state")
    _looks_right(browser, "overview")

    browser.run("document.querySelector('select[name=state]').value = 'committed'")
    browser.write("input[name=namespace]", "a")
    browser.click(".filters button")
    browser.click('.samples a[href="/samples/a/odd"]')
    assert browser.text("h1") == "odd"
    _looks_right(browser, "sample")

    browser.click('.tokens a[href*="row=11"]')
    assert browser.run("location.hash") == "#token"
    assert browser.text("#token") == "Row 11"
    assert "18 NaN" in browser.text(".figures")
    _looks_right(browser, "row")

    browser.click('.tabs a[href*="cosine"]')
    assert "of this window" in browser.text(".legend")
    browser.click('.map a[href*="row=13"] rect')
    assert browser.text("#token") == "Row 13"
    assert "view=cosine" in browser.run("location.search")
    _looks_right(browser, "cosine")
    browser.click('[aria-label="the row before"]')
    assert browser.text("#token") == "Row 12"

    browser.open(f"{site}/samples/a/long")
    browser.click(".pager a")
    assert "rows 256 to 511 of 600" in browser.text(".pager")
    browser.click(".top .home")
    browser.click(".top button")
    assert browser.run("location.pathname") == "/login"
    browser.open(f"{site}/samples/a/odd")
    assert browser.run("location.pathname") == "/login"


@pytest.mark.parametrize("width", _WIDTHS)
def test_everything_can_be_read_without_scripts(browser: Browser, site: str, width: int) -> None:
    browser.size(width)
    browser.scripts(False)
    _log_in(browser, site, "alice")
    assert "ok" in browser.text("#state")
    browser.click('.samples a[href="/samples/a/odd"]')
    assert browser.text(".tokens.prompt").startswith(" word0 word1")
    assert browser.text(".tokens.output").startswith(" word20")
    browser.click('.tokens a[href*="row=7"]')
    assert browser.text("#token") == "Row 7"
    assert "zero" in browser.text(".figures")
    assert "client.get" in browser.text("pre")
    browser.click('.tabs a[href*="cosine"]')
    assert browser.all('.tabs [aria-current="true"]') == ["cosine to the layer before"]
    browser.click(".top button")
    assert browser.run("location.pathname") == "/login"


_SEEN = """
(selector => [...document.querySelectorAll(selector)].filter(e => {
  const box = e.getBoundingClientRect(), style = getComputedStyle(e);
  return box.width > 0 && box.height > 0 && style.visibility === 'visible' && Number(style.opacity) > 0;
}).length)
"""


@pytest.mark.parametrize("width", _WIDTHS)
def test_bad_rows_are_seen_to_be_marked(browser: Browser, site: str, width: int) -> None:
    """Among the tokens, in the map and in a list; by a frame and a sign, and not by colour alone."""
    browser.size(width)
    _log_in(browser, site)
    browser.open(f"{site}/samples/a/odd")
    assert browser.all(".t.bad sup") == ["zero", "NaN", "inf"]
    assert browser.all(".map .bad text") == ["0", "0", "0", "0", "N", "∞"]
    for selector, many in ((".t.bad", 3), (".t.bad sup", 3), (".map .bad rect", 6), (".map .bad text", 6)):
        assert browser.run(f"{_SEEN}('{selector}')") == many, selector
    look = "(s => { const c = getComputedStyle(document.querySelector(s)); return [c.outlineStyle, c.stroke, c.fill] })"
    assert browser.run(f"{look}('.t.bad')[0]") == "solid"
    assert browser.run(f"{look}('.t:not(.bad)')[0]") == "none"
    frame, ground = browser.run(f"{look}('.map .bad rect').slice(1)")
    assert frame == "rgb(179, 38, 30)"
    assert ground == "rgb(255, 255, 255)"
    assert [line.split(":")[0].strip() for line in browser.all("section.trouble li")] == ["row 7", "row 11", "row 13"]


@pytest.mark.parametrize("width", _WIDTHS)
def test_markup_in_tokens_and_tags_shows_as_text(browser: Browser, site: str, width: int) -> None:
    browser.size(width)
    _log_in(browser, site)
    browser.open(f"{site}/samples/a/odd")
    assert MARKUP in browser.text(".tokens.prompt")
    assert "</a><script>document.title='x'</script>" in browser.text(".tokens.prompt")
    assert MARKUP in browser.all(".side dd")
    assert "<b>key</b>" in browser.all(".side dt")
    assert "<script>engine</script>" in browser.all(".side dd")
    assert browser.run("document.querySelectorAll('img, b:not(.remark b), main script').length") == 0
    assert browser.run("document.title") == "odd · slotstream"


def test_markup_in_names_shows_as_text(browser: Browser) -> None:
    """Of a server that lies: a sound one has no such ids."""
    nasty = "</td><img src=x onerror=alert(1)>"
    lie = info_of(SyntheticSample(nasty, namespace=nasty, model=nasty, tags={nasty: nasty}))
    status = pb.StatusReply(version=nasty, health=nasty, covers=[nasty], rights=[nasty, "read"])
    status.namespaces.add(namespace=nasty, samples=1, bytes=1)
    with (
        serving(Status=lambda *_: status, List=lambda *_: pb.ListReply(samples=[lie])) as address,
        WebProcess(address) as page,
    ):
        browser.size(1280)
        _log_in(browser, page.url)
        told = browser.text("main")
        assert told.count(nasty) >= 8
        assert browser.run("document.querySelectorAll('img').length") == 0
        assert browser.all(".samples td a") == [nasty]
        _looks_right(browser, "names")


def test_the_overview_is_live(browser: Browser, site: str, store: ServerProcess) -> None:
    """A sample that is stored now appears by itself; the form keeps what is being typed."""
    browser.size(1280)
    _log_in(browser, site)
    browser.write("input[name=model]", "half a wo")
    with IngestClient(store.address, metadata=bearer("root"), engine_id="engine-live") as sender:
        sender.store(SyntheticSample("just-now", namespace="live", num_tokens=1))
        browser.run(
            "new Promise(seen => { const look = () => document.querySelector('#list').innerText.includes('just-now')"
            " && document.querySelector('#state').innerText.includes('engine-live') ? seen(1) : setTimeout(look, 50); look() })"
        )
    assert browser.run("document.querySelector('input[name=model]').value") == "half a wo"
    assert browser.text("[data-live] button") == "Pause"
    browser.click("[data-live] button", loads=False)
    assert browser.text("[data-live]") == "paused Go on"


def test_a_session_that_ends_leads_to_the_login_by_itself(browser: Browser, site: str) -> None:
    """From the overview, which asks again; and back to it."""
    browser.size(1280)
    _log_in(browser, site)
    browser.open(f"{site}/?state=committed")
    browser.call("Network.clearBrowserCookies")
    browser.await_load(lambda: None)
    assert browser.run("location.pathname + location.search") == "/login?next=%2F%3Fstate%3Dcommitted"
