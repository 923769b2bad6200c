"""Who gets in, and what a login leaves with the visitor."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.ports import free_port
from support.secure import Authority, entry, token, write_tokens
from support.server import ServerProcess
from support.web import HandClock, Visitor, WebProcess, site_of

from slotstream.client.client import Client
from slotstream.client.rpc import Rpc
from slotstream.web.guard import HEADERS
from slotstream.web.sessions import (
    ADDRESSES_MAX,
    SESSION_S,
    SESSIONS_MAX,
    SESSIONS_OF_TOKEN_MAX,
    WAIT_S_MAX,
    WRONG_FREE,
    Sessions,
    WrongTokens,
)
from slotstream.wire.errors import TooMany


def test_a_login_leads_to_where_the_visitor_wanted_to_go(page: WebProcess) -> None:
    visitor = Visitor(page.url)
    wanted = "/samples/a/odd?view=cosine&row=3"
    sent = visitor.get(wanted)
    assert (sent.status, sent.location) == (303, "/login?next=%2Fsamples%2Fa%2Fodd%3Fview%3Dcosine%26row%3D3")
    form = visitor.get(sent.location)
    assert form.status == 200
    hidden = re.search(r'name="next" value="([^"]*)"', form.body)
    assert hidden is not None
    then = hidden[1].replace("&amp;", "&")
    answer = visitor.post("/login", {"token": token("alice"), "next": then})
    assert (answer.status, answer.location) == (303, wanted)
    assert visitor.get(wanted).status == 200


@pytest.mark.parametrize(
    "elsewhere",
    ["https://evil.example/", "//evil.example/", "/\\evil.example", "/login", "/samples/\n", "/?" + "x" * 4096, "javascript:1"],
)
def test_a_login_leads_nowhere_else(page: WebProcess, elsewhere: str) -> None:
    answer = Visitor(page.url).post("/login", {"token": token("alice"), "next": elsewhere})
    assert (answer.status, answer.location) == (303, "/")


def test_the_cookie_tells_scripts_and_other_sites_nothing(page: WebProcess) -> None:
    visitor = Visitor(page.url)
    cookie = visitor.post("/login", {"token": token("alice")}).headers["Set-Cookie"]
    name, *attributes = cookie.lower().split("; ")
    assert name.startswith("slotstream=")
    assert set(attributes) == {"httponly", "samesite=strict", "path=/", "max-age=43200"}
    assert token("alice") not in cookie


def test_a_wrong_token_gets_no_session(store: ServerProcess) -> None:
    with site_of(store.address, HandClock()) as url:
        visitor = Visitor(url)
        for wrong in ("x" * 24, "short", "not a token at all", ""):
            visitor.cookies.clear()
            answer = visitor.post("/login", {"token": wrong})
            if "Too many" in answer.body:
                break
            assert (answer.status, visitor.cookies) == (401, {}), wrong
            assert "no token that the server knows" in answer.body
        assert visitor.get("/").status == 303


def test_who_guesses_is_slowed_down(store: ServerProcess) -> None:
    """And while they wait, the server is not asked: a right token does not help either."""
    clock = HandClock()
    with site_of(store.address, clock) as url:
        visitor = Visitor(url)
        for _ in range(WRONG_FREE + 1):
            assert visitor.post("/login", {"token": "x" * 24}).status == 401
        answer = visitor.post("/login", {"token": token("alice")})
        assert (answer.status, answer.headers["Retry-After"]) == (429, "1")
        clock.now_s += 0.8
        assert visitor.post("/login", {"token": token("alice")}).headers["Retry-After"] == "1"
        clock.now_s += 0.2
        assert visitor.post("/login", {"token": "y" * 24}).status == 401
        assert visitor.post("/login", {"token": "y" * 24}).headers["Retry-After"] == "2"
        clock.now_s += 2.0
        assert visitor.post("/login", {"token": token("alice")}).status == 303
        assert visitor.post("/login", {"token": "x" * 24}).status == 401  # Forgotten.


def test_wrong_tokens_of_many_addresses_are_kept_within_bounds() -> None:
    clock = HandClock()
    wrong = WrongTokens(clock)
    for _ in range(WRONG_FREE + 20):
        wrong.add("2001:db8::1")
    assert wrong.wait_s("2001:db8::1") == WAIT_S_MAX
    assert wrong.wait_s("2001:db8::ffff") == WAIT_S_MAX  # Of the same network.
    assert wrong.wait_s("2001:db8:0:1::1") == 0
    for number in range(ADDRESSES_MAX):
        wrong.add(f"10.0.{number >> 8}.{number & 255}")
    assert wrong.wait_s("2001:db8::1") == 0
    assert len(wrong._wrong) == ADDRESSES_MAX


@pytest.fixture
def nobody() -> Client:
    return Client(Rpc("127.0.0.1:1", timeout_s=1.0), stall_timeout_s=1.0)


def test_sessions_end_after_twelve_hours_and_at_the_logout(nobody: Client) -> None:
    clock = HandClock()
    sessions = Sessions(clock)
    first, second = sessions.begin(nobody, "t"), sessions.begin(nobody, "t")
    sessions.end(first)
    assert (sessions.find(first), sessions.find("made up")) == (None, None)
    clock.now_s += SESSION_S - 1
    found = sessions.find(second)
    assert found is not None
    assert found.client is nobody
    clock.now_s += 1
    assert sessions.find(second) is None
    assert first not in repr(vars(sessions))


def test_there_are_a_thousand_sessions_at_most(nobody: Client) -> None:
    clock = HandClock()
    sessions = Sessions(clock)
    names = [sessions.begin(nobody, f"token {number % 20}") for number in range(SESSIONS_MAX)]
    with pytest.raises(TooMany):
        sessions.begin(nobody, "another")
    assert all(map(sessions.find, names))
    clock.now_s += SESSION_S
    assert sessions.find(sessions.begin(nobody, "another"))
    assert len(sessions._sessions) == 1


def test_one_token_has_a_hundred_sessions_at_most(nobody: Client) -> None:
    sessions = Sessions(HandClock())
    others = sessions.begin(nobody, "other")
    first, *rest = [sessions.begin(nobody, "t") for _ in range(SESSIONS_OF_TOKEN_MAX + 1)]
    assert sessions.find(first) is None
    assert all(map(sessions.find, [others, *rest]))


def test_a_logout_ends_the_session(page: WebProcess) -> None:
    visitor = Visitor(page.url).log_in("alice")
    kept = dict(visitor.cookies)
    answer = visitor.post("/logout")
    assert (answer.status, answer.location, visitor.cookies) == (303, "/login", {})
    visitor.cookies = kept
    assert visitor.get("/").status == 303


def test_a_withdrawn_token_ends_its_session(tmp_path: Path) -> None:
    tokens = write_tokens(tmp_path / "tokens.toml", entry("alice", ["a"], "read"), entry("root", ["*"], "read"))
    with (
        ServerProcess(tmp_path / "data", "--tokens", str(tokens), token=token("root")) as server,
        WebProcess(server.address) as page,
    ):
        visitor = Visitor(page.url).log_in("alice")
        assert visitor.get("/").status == 200
        write_tokens(tokens, entry("root", ["*"], "read"))
        assert visitor.get("/samples/a/s").location == "/login?next=%2Fsamples%2Fa%2Fs"
        write_tokens(tokens, entry("alice", ["a"], "read"), entry("root", ["*"], "read"))
        assert visitor.get("/").status == 303  # Nor does it come back.


def test_every_answer_has_the_headers(page: WebProcess, alice: Visitor) -> None:
    answers = [
        Visitor(page.url).get("/"),
        Visitor(page.url).get("/login"),
        Visitor(page.url).get("/static/style.css"),
        Visitor(page.url).get("/login", {"Host": "evil.example"}),
        Visitor(page.url).post("/login", {"token": "x"}, {"Origin": "https://evil.example"}),
        alice.get("/"),
        alice.get("/samples/a/odd"),
        alice.get("/nowhere"),
        alice.get("/samples/a/odd?row=x"),
    ]
    assert [answer.status for answer in answers] == [303, 200, 200, 421, 403, 200, 200, 404, 400]
    for answer in answers:
        assert {name: answer.headers[name] for name in HEADERS} == HEADERS
    assert HEADERS["Content-Security-Policy"] == "default-src 'self'; frame-ancestors 'none'"
    assert (HEADERS["Cache-Control"], HEADERS["Referrer-Policy"]) == ("no-store", "no-referrer")


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 403),
        ({"Origin": "https://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": "null", "Sec-Fetch-Site": "cross-site"}, 403),
        ({"Origin": "null", "Sec-Fetch-Site": "same-origin"}, 303),
    ],
)
def test_a_form_comes_from_our_own_page(page: WebProcess, headers: dict[str, str], status: int) -> None:
    for path, form in (("/login", {"token": token("alice")}), ("/logout", {})):
        assert Visitor(page.url).post(path, form, headers).status == status


def test_a_page_of_another_site_reads_nothing(alice: Visitor) -> None:
    assert alice.get("/", {"Origin": "https://evil.example"}).status == 403


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1", "", "127.0.0.1.evil.example", "localhost:1"])
def test_another_host_is_refused(page: WebProcess, host: str) -> None:
    assert Visitor(page.url).get("/login", {"Host": host}).status == 421


def test_names_of_a_proxy_are_taken(store: ServerProcess) -> None:
    """Whose TLS makes the cookie secure: a browser sends it back over nothing else."""
    with WebProcess(store.address, "--host", "samples.example.org") as page:
        visitor = Visitor(page.url)
        assert visitor.get("/login", {"Host": "samples.example.org"}).status == 200
        assert visitor.get("/login", {"Host": "samples.example.org:8443"}).status == 200
        for origin in ({"Origin": "https://samples.example.org"}, {"Origin": "null", "Sec-Fetch-Site": "same-origin"}):
            sent = {"Host": "samples.example.org", **origin}
            cookie = visitor.post("/login", {"token": token("alice")}, sent).headers["Set-Cookie"]
            assert cookie.startswith("__Host-slotstream=")
            assert "; Secure" in cookie
        assert visitor.get("/", {"Host": "samples.example.org"}).status == 200


def test_tls_is_spoken_and_the_cookie_is_of_this_host_alone(store: ServerProcess, tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    pair = authority.issue("page")
    with WebProcess(store.address, "--https-cert", str(pair.cert), "--https-key", str(pair.key)) as page:
        visitor = Visitor(page.url, ca=authority.path)
        cookie = visitor.post("/login", {"token": token("alice")}).headers["Set-Cookie"]
        assert cookie.startswith("__Host-slotstream=")
        assert "; Secure" in cookie
        assert visitor.get("/samples/a/odd").status == 200
        visitor.cookies = {"slotstream": visitor.cookies["__Host-slotstream"]}  # As another host of the domain could set it.
        assert visitor.get("/").status == 303
        plain = {"Origin": page.url.replace("https:", "http:")}
        assert visitor.post("/login", {"token": token("alice")}, plain).status == 403


@pytest.mark.parametrize("method", ["HEAD", "PUT", "DELETE", "OPTIONS"])
def test_other_methods_are_refused(alice: Visitor, method: str) -> None:
    assert alice.get("/samples/a/odd", method=method).status == 405


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        ({"token": "x" * 9000}, "application/x-www-form-urlencoded"),
        ({"token": "x" * 24}, "text/plain"),
        ({f"f{n}": "x" for n in range(40)}, "application/x-www-form-urlencoded"),
    ],
)
def test_what_is_no_login_form_is_no_wrong_token(page: WebProcess, body: dict[str, str], kind: str) -> None:
    answer = Visitor(page.url).post("/login", body, {"Origin": page.url, "Content-Type": kind})
    assert answer.status == 400


def test_a_server_that_is_away_is_told(tmp_path: Path) -> None:
    with WebProcess(f"unix:{tmp_path}/nobody") as page:
        answer = Visitor(page.url).post("/login", {"token": token("alice")})
        assert answer.status == 503
        assert "UNAVAILABLE" in answer.body


def test_a_server_without_tokens_lets_nobody_else_in(tmp_path: Path) -> None:
    """Everybody on this machine reaches the page; those who may open a unix socket are fewer."""
    with ServerProcess(tmp_path / "data") as server:
        with WebProcess(server.address) as page:
            for word in ("", token("anybody")):
                answer = Visitor(page.url).post("/login", {"token": word})
                assert answer.status == 403
                assert "--allow-anonymous" in answer.body
        with WebProcess(server.address, "--allow-anonymous") as page:
            visitor = Visitor(page.url)
            assert visitor.post("/login", {"token": ""}).status == 303
            assert visitor.get("/").status == 200


def test_a_server_without_tokens_on_loopback_is_open_to_the_same_people(tmp_path: Path) -> None:
    with ServerProcess(tmp_path / "data", address=f"127.0.0.1:{free_port()}") as server, WebProcess(server.address) as page:
        visitor = Visitor(page.url)
        assert visitor.post("/login", {"token": ""}).status == 303
        assert visitor.get("/").status == 200
