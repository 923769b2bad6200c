"""What holds for every request and every answer."""

from __future__ import annotations

from collections.abc import Set as AbstractSet

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADERS = {
    "Content-Security-Policy": "default-src 'self'; frame-ancestors 'none'",
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}


class Guard:
    """In front of all pages. It refuses what is for another host, and what another site's page sent.

    Host: else a name that leads here by somebody else's DNS would make their page ours. Origin: a POST comes from a page of
    ours alone. Where a page sends no referrer, browsers say `Origin: null`. Then Sec-Fetch-Site tells, which no script can set.
    """

    def __init__(self, app: ASGIApp, names: AbstractSet[str], *, https: bool) -> None:
        self._app, self._names, self._https = app, names, https

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers[name] = value
            await send(message)

        refusal = self._refusal(scope["method"], Headers(scope=scope))
        await (self._app if refusal is None else refusal)(scope, receive, send_with_headers)

    def _refusal(self, method: str, headers: Headers) -> PlainTextResponse | None:
        host = headers.get("host", "").lower()
        if len(headers.getlist("host")) != 1 or not self._is_ours(host):
            return PlainTextResponse("This page is not served under that name: see slotstream web --host.\n", 421)
        if method not in ("GET", "POST"):  # HEAD would read rows that nobody sees.
            return PlainTextResponse("GET and POST alone are answered.\n", 405, {"Allow": "GET, POST"})
        origin = headers.get("origin")
        if method == "GET" and origin is None:
            return None
        same_site = origin == "null" and headers.get("sec-fetch-site") == "same-origin"
        if not same_site and origin not in (f"https://{host}", *([] if self._https else [f"http://{host}"])):
            return PlainTextResponse("This was sent from another site's page.\n", 403)
        return None

    def _is_ours(self, host: str) -> bool:
        return host in self._names or (host.rpartition(":")[0] or host) in self._names
