"""Each address and each visitor: the table of docs/security.md, held against the answers."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.server import ServerProcess
from support.web import Answer, HandClock, Visitor, site_of

from slotstream.web.sessions import SESSION_S

_PAGE = (Path(__file__).parents[2] / "docs" / "security.md").read_text()
_VISITORS = ("no session", "wrong session", "expired", "token of `b`", "read", "admin")


def _table() -> dict[str, list[str]]:
    """Request -> what the page says each visitor is answered."""
    head = "| request | " + " | ".join(_VISITORS) + " |\n"
    assert head in _PAGE
    rows = _PAGE.partition(head)[2].partition("\n\n")[0].splitlines()[1:]
    cells = (row.strip("| ").split(" | ") for row in rows)
    return {first: rest for first, *rest in cells}


_ROWS = _table()


@pytest.fixture(scope="module")
def visitors(store: ServerProcess) -> Iterator[dict[str, Visitor]]:
    clock = HandClock()
    with site_of(store.address, clock) as url:
        expired = Visitor(url).log_in("root")
        clock.now_s += SESSION_S
        made = {
            "no session": Visitor(url),
            "wrong session": Visitor(url),
            "expired": expired,
            "token of `b`": Visitor(url).log_in("bob"),
            "read": Visitor(url).log_in("alice"),
            "admin": Visitor(url).log_in("root"),
        }
        made["wrong session"].cookies = {"slotstream": "A" * 43}
        yield made


def _ask(visitor: Visitor, request: str) -> Answer:
    method, path = re.findall(r"[^`, ]+", request)[:2]
    if method == "GET":
        return visitor.get(path)
    kept = dict(visitor.cookies)
    answer = visitor.post(path, {"token": "x" * 24} if "wrong token" in request else {})
    visitor.cookies = kept
    return answer


@pytest.mark.parametrize("who", _VISITORS)
@pytest.mark.parametrize("request_", [row for row in _ROWS if "POST" not in row])
def test_each_visitor_is_answered_as_the_page_of_security_says(visitors: dict[str, Visitor], request_: str, who: str) -> None:
    told = _ROWS[request_][_VISITORS.index(who)]
    answer = _ask(visitors[who], request_)
    assert answer.status == int(told.split(",")[0])
    assert ("No sample matches" in answer.body) is ("empty" in told)
    if answer.status == 303:
        assert answer.location.startswith("/login")
        assert answer.body == ""
    if answer.status != 200 or "empty" in told:
        assert not re.search(r"cmpl|test/model|1003", answer.body)


@pytest.mark.parametrize("who", ["token of `b`", "read", "admin"])
def test_what_is_forbidden_looks_like_what_is_absent(visitors: dict[str, Visitor], who: str) -> None:
    """Byte for byte, headers too, but for the time."""
    answers = [_ask(visitors[who], row) for row, told in _ROWS.items() if told[_VISITORS.index(who)] == "404"]
    assert len(answers) >= 3
    assert len({answer.body for answer in answers}) == 1
    heads = {tuple((name, value) for name, value in answer.headers.items() if name != "date") for answer in answers}
    assert len(heads) == 1


@pytest.mark.parametrize("request_", [row for row in _ROWS if "POST" in row])
def test_forms_are_answered_so_for_everybody(store: ServerProcess, request_: str) -> None:
    for told, name in zip(_ROWS[request_][3:], ("bob", "alice", "root"), strict=True):
        with site_of(store.address, HandClock()) as url:
            visitor = Visitor(url).log_in(name)
            assert _ask(visitor, request_).status == int(told)
            # A wrong token ends nothing, and a logout does.
            assert visitor.get("/").status == (200 if "login" in request_ else 303)
            assert _ask(Visitor(url), request_).status == int(_ROWS[request_][0])


def test_the_table_has_every_address_of_the_site() -> None:
    routes = re.findall(
        r'(?:Route|Mount)\("([^"]+)"', (Path(__file__).parents[2] / "client/slotstream/web/site.py").read_text()
    )
    patterns = [re.sub(r"\{\w+\}", "[^/?]+", route) for route in routes]
    paths = [re.findall(r"[^`, ]+", row)[1] for row in _ROWS]
    assert len(routes) >= 6
    for pattern in patterns:
        assert any(re.match(pattern, path) for path in paths), pattern
