"""The screen of one sample: its tokens, the map of their rows, one row's figures, and code to copy."""

from __future__ import annotations

from typing import Any

import anyio.to_thread
from markupsafe import Markup, escape
from starlette.requests import Request
from starlette.responses import Response

from slotstream.client import (
    Client,
    PermissionDenied,
    SampleInfo,
    SampleNotFound,
    SampleState,
    SlotStreamError,
    Unauthenticated,
)
from slotstream.web.pages import sample_url
from slotstream.web.parts import BadQuery, ScreenParts, whole_number
from slotstream.web.pieces.code import code_for
from slotstream.web.pieces.heatmap import LEVELS, bad_rows, heatmap
from slotstream.web.pieces.tokens import parts
from slotstream.web.window import Window, bounds, rows_at_once
from slotstream.wire.errors import BadTokenRange

VIEWS = {"norm": "norm", "cosine": "cosine to the layer before"}
_BAD_ROWS_NAMED = 20


async def sample_screen(site: ScreenParts, client: Client, request: Request) -> Response:
    """Raises what `Client.stat` raises; BadQuery."""
    query = request.query_params
    view = query.get("view", "norm")
    if view not in VIEWS:
        raise BadQuery("A map shows view=norm or view=cosine.")
    start, row = whole_number(query.get("start"), "start"), whole_number(query.get("row"), "row")
    namespace, sample_id = request.path_params["namespace"], request.path_params["sample_id"]
    info = await anyio.to_thread.run_sync(lambda: client.stat(sample_id, namespace=namespace))
    window, trouble = await _window(site, client, info, start, row)
    values: dict[str, Any] = {"info": info, "view": view, "views": VIEWS, "trouble": trouble, "window": window}
    # In a thread: a large map takes a few hundredths of a second to draw.
    return await anyio.to_thread.run_sync(lambda: site.pages.answer("sample", values | _shown(site, window, view)))


async def _window(
    site: ScreenParts, client: Client, info: SampleInfo, start: int | None, row: int | None
) -> tuple[Window | None, str]:
    """The window, or why there is none. Raises SampleNotFound and the like where the sample went away meanwhile."""
    if info.state is not SampleState.COMMITTED:
        return None, ""
    try:
        first, stop = bounds(info, start, row)
        return await site.windows.read(client, info, first, stop, row), ""
    except BadTokenRange as error:
        raise BadQuery(f"{error}.") from error
    except (SampleNotFound, PermissionDenied, Unauthenticated):
        raise
    except SlotStreamError as error:
        return None, f"{error} ({error.code})"


def _shown(site: ScreenParts, window: Window | None, view: str) -> dict[str, Any]:
    """What the template needs of a window."""
    if window is None:
        return {}
    info, texts = window.info, site.tokenizers.texts(window.info.model, window.token_ids)
    many = rows_at_once(info)

    def to(anchor: str = "", **query: Any) -> str:
        asked = {"start": window.start or None, "row": window.row, "view": None if view == "norm" else view, **query}
        return sample_url(info.namespace, info.sample_id, anchor, **asked)

    # Once, not for each of some hundred rows. A "=" of an id is quoted: "row=0" is the query's.
    before_row, after_row = escape(to("token", row=0)).split("row=0")

    def to_row(row: int) -> Markup:
        return Markup(f"{before_row}row={row}{after_row}")  # Both are escaped.

    names = tuple(map(str, window.token_ids)) if texts is None else texts
    settings = site.settings
    return {
        "to": to,
        "to_row": to_row,
        "as_text": texts is not None,
        "parts": parts(names, window.start, info.metadata),
        "bad": {window.start + at: window.figures.worst(at) for at in window.figures.bad_rows},
        "bad_rows": bad_rows(window, _BAD_ROWS_NAMED),
        "bad_left_out": max(0, len(window.figures.bad_rows) - _BAD_ROWS_NAMED),
        "map": heatmap(window, view),
        "levels": range(LEVELS),
        "picked": None if window.row is None else names[window.row - window.start],
        "picked_id": None if window.row is None else window.token_ids[window.row - window.start],
        "before": None if window.start == 0 else max(0, window.start - many),
        "after": None if window.stop >= info.num_tokens else window.stop,
        "code": code_for(info, settings.server, window.start, window.stop, tls=settings.access.tls_ca is not None),
    }
