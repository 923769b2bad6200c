"""Templates, and what they are given: every text in them is escaped, and what cannot be printed is made visible."""

from __future__ import annotations

import datetime
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from starlette.responses import HTMLResponse

from slotstream.cli.common import layers_text, shown, size_text, time_text

HERE = Path(__file__).parent


class Pages:
    def __init__(self) -> None:
        self._environment = Environment(
            loader=FileSystemLoader(HERE / "templates"),
            autoescape=True,
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        self._environment.filters.update(
            text=lambda value: shown(str(value)),
            size=size_text,
            duration=time_text,
            moment=_moment,
            figure=_figure,
            layers=layers_text,
        )
        self._environment.globals.update(sample_url=sample_url, with_query=with_query)

    def answer(self, name: str, values: Mapping[str, Any], status: int = 200) -> HTMLResponse:
        """The page of that template."""
        return HTMLResponse(self._environment.get_template(f"{name}.html").render(values), status)


def sample_url(namespace: str, sample_id: str, anchor: str = "", **query: Any) -> str:
    """Of the sample's screen; a query of None is left out."""
    path = f"/samples/{quote(namespace, safe='')}/{quote(sample_id, safe='')}"
    return with_query(path, query) + (f"#{anchor}" if anchor else "")


def with_query(path: str, query: Mapping[str, Any]) -> str:
    given = {key: value for key, value in query.items() if value not in (None, "")}
    return f"{path}?{urlencode(given, doseq=True)}" if given else path


def _moment(unix_ns: int | None) -> str:
    """In UTC, to the second; "-" for None."""
    if unix_ns is None:
        return "-"
    seconds = min(max(0, unix_ns // 1_000_000_000), 253_402_300_799)  # A peer's clock may say anything.
    return f"{datetime.datetime.fromtimestamp(seconds, datetime.UTC):%Y-%m-%d %H:%M:%S}"


def _figure(value: float | None) -> str:
    """Four digits; "-" where there is no value."""
    return "-" if value is None or math.isnan(value) else f"{value:.4g}"
