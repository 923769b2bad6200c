"""The screen of everything: how the server is, and which samples there are."""

from __future__ import annotations

import argparse
from typing import Any

import anyio.to_thread
from starlette.requests import Request
from starlette.responses import Response

from slotstream.cli.common import moment, tag
from slotstream.cli.status import ENGINE_COLUMNS, engine_row, facts
from slotstream.client import Client, PermissionDenied, SampleState
from slotstream.client.info import Page
from slotstream.client.status import Status
from slotstream.web.pages import with_query
from slotstream.web.parts import BadQuery, ScreenParts
from slotstream.wire.errors import BadNamespace, BadParams, BadTags

PAGE_SIZE = 50
_ENGINES_MAX = 100
_NAMESPACES_MAX = 50
_FILTERS = ("namespace", "model", "state", "tag", "request", "since", "until")
_TEXT_CHARS_MAX = 1024


async def overview(site: ScreenParts, client: Client, request: Request) -> Response:
    """Raises what the client raises; BadQuery."""
    asked = {key: value.strip() for key in _FILTERS if (value := request.query_params.get(key, "")).strip()}
    filters = _filters(asked)
    page_token = request.query_params.get("page", "")[:_TEXT_CHARS_MAX]
    status, page = await anyio.to_thread.run_sync(_ask, client, page_token, filters)
    server = status.server
    values = {
        "facts": facts(status, site.settings.server),
        "problems": status.problems,
        "engine_columns": ENGINE_COLUMNS,
        "engines": [] if server is None else [engine_row(engine) for engine in server.engines[:_ENGINES_MAX]],
        "engines_left_out": 0 if server is None else server.engines_left_out + max(0, len(server.engines) - _ENGINES_MAX),
        "samples": page.samples if page else (),
        "may_read": page is not None,
        "now_ns": status.now_unix_ns,
        "asked": asked,
        "states": [state.lower() for state in SampleState],
        "first": with_query("/", asked) if page_token else None,
        "older": with_query("/", {**asked, "page": page.next_token}) if page and page.next_token else None,
        "namespaces": (status.namespaces or ())[:_NAMESPACES_MAX],
        "more_namespaces": status.namespaces_left_out or len(status.namespaces or ()) > _NAMESPACES_MAX,
    }
    return site.pages.answer("overview", values)


def _ask(client: Client, page_token: str, filters: dict[str, Any]) -> tuple[Status, Page | None]:
    """How the server is, and the samples; None where the token may read nothing at all. Raises BadQuery."""
    status = client.status()
    try:
        return status, client.page(page_token, page_size=PAGE_SIZE, **filters)
    except PermissionDenied:
        # A namespace that it may not read looks like one that holds nothing.
        return status, Page((), "") if "read" in status.rights else None
    except (BadNamespace, BadParams, BadTags) as error:
        raise BadQuery(f"{error}.") from error


def _filters(asked: dict[str, str]) -> dict[str, Any]:
    """What `Client.page` takes. Raises BadQuery."""
    if any(len(value) > _TEXT_CHARS_MAX for value in asked.values()):
        raise BadQuery("That filter is too long.")
    found: dict[str, Any] = {key: asked[key] for key in ("namespace", "model", "state", "request") if key in asked}
    try:
        if "tag" in asked:
            found["tags"] = dict(tag(word) for word in asked["tag"].split())
        for key, name in (("since", "created_from"), ("until", "created_until")):
            if key in asked:
                found[name] = moment(asked[key])
    except argparse.ArgumentTypeError as error:
        raise BadQuery(f"{error}.") from error
    return found
