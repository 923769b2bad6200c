"""The pages by address, and who may see which.

What a visitor may not see is answered exactly as what is not there. docs/security.md has the table of addresses and visitors.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Callable

import anyio
import anyio.to_thread
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp

from slotstream.client import Client, PermissionDenied, SampleNotFound, SlotStreamError, Unauthenticated
from slotstream.common.throttle import Throttle
from slotstream.web.body import form_of
from slotstream.web.guard import Guard
from slotstream.web.overview import overview
from slotstream.web.pages import HERE, Pages, with_query
from slotstream.web.parts import BadQuery, ScreenParts
from slotstream.web.pieces.tokens import Tokenizers
from slotstream.web.sample import sample_screen
from slotstream.web.sessions import SESSION_S, Session, Sessions, WrongTokens
from slotstream.web.settings import WebSettings
from slotstream.web.window import WindowReader
from slotstream.wire.access import check_token
from slotstream.wire.address import is_local
from slotstream.wire.errors import BadNamespace, BadPage, BadSampleId, ConfigError

_log = logging.getLogger(__name__)
Screen = Callable[[ScreenParts, Client, Request], Awaitable[Response]]
_PATH_CHARS_MAX = 2048
_CHECKS_MAX = 4  # Tokens that are tried at a time.
_ABSENT = (SampleNotFound, PermissionDenied, BadSampleId, BadNamespace, BadPage)
_STATUS = {"UNAVAILABLE": 503, "DEADLINE_EXCEEDED": 503, "RESOURCE_EXHAUSTED": 503, "INVALID_ARGUMENT": 400}
_WRONG = "This is no token that the server knows."
_ASKS_NOBODY = (
    "The server asks nobody for a token, and this page would let more people in than the server does. "
    "Give the server tokens, or start slotstream web with --allow-anonymous."
)
# Browsers keep a cookie of the first kind apart from other hosts and ports, where there is TLS.
_SAFE_COOKIE, _PLAIN_COOKIE = "__Host-slotstream", "slotstream"


class _AsksNobodyError(Exception):
    """The server wants no token, and more people reach this page than the server."""


class Site:
    """Everything that requests share. `client` is of no visitor: each session has its own, with the visitor's token."""

    def __init__(
        self,
        settings: WebSettings,
        client: Client,
        *,
        sessions: Sessions | None = None,
        wrong_tokens: WrongTokens | None = None,
    ) -> None:
        """Raises ConfigError for a tokenizer that cannot be read."""
        self._settings, self._client = settings, client
        self._sessions = sessions or Sessions()
        self._wrong_tokens = wrong_tokens or WrongTokens()
        self._pages = Pages()
        self._parts = ScreenParts(settings, self._pages, Tokenizers(settings.tokenizers), WindowReader())
        self._checks = anyio.Semaphore(_CHECKS_MAX)
        self._lines = Throttle(60.0)

    def app(self, port: int) -> ASGIApp:
        """The application, for a page that listens on `port`."""
        screens = Starlette(
            routes=[
                Route("/login", self._login_form, methods=["GET"]),
                Route("/login", self._login, methods=["POST"]),
                Route("/logout", self._logout, methods=["POST"]),
                Route("/", self._for_visitors(overview), methods=["GET"]),
                Route("/samples/{namespace}/{sample_id}", self._for_visitors(sample_screen), methods=["GET"]),
                Mount("/static", StaticFiles(directory=HERE / "static")),
            ],
            exception_handlers={HTTPException: self._no_page, Exception: self._fault},
        )
        screens.router.redirect_slashes = False
        # Outside of Starlette, whose own answer to a fault is outside of its middleware.
        return Guard(screens, self._settings.names(port), https=self._settings.https)

    # Who is there.

    def _cookies(self, request: Request) -> list[str]:
        """What a visitor's cookies hold. With TLS of our own, only what no other host can have set."""
        names = (_SAFE_COOKIE,) if self._settings.https else (_SAFE_COOKIE, _PLAIN_COOKIE)
        return [value for name in names if (value := request.cookies.get(name))]

    def _session(self, request: Request) -> Session | None:
        found = (self._sessions.find(name) for name in self._cookies(request))
        return next((session for session in found if session is not None), None)

    def _for_visitors(self, screen: Screen) -> Callable[[Request], Awaitable[Response]]:
        """A screen for those who are logged in. Everybody else is sent to the login."""

        async def answer(request: Request) -> Response:
            session = self._session(request)
            if session is None:
                return self._to_login(request)
            try:
                return await screen(self._parts, session.client, request)
            except Unauthenticated:  # The token was withdrawn.
                for name in self._cookies(request):
                    self._sessions.end(name)
                return self._to_login(request)
            except _ABSENT:
                return self._absent()
            except BadQuery as error:
                return self._message(400, "Not an address of this page", str(error))
            except SlotStreamError as error:
                return self._message(_STATUS.get(error.status, 502), "That did not work", f"{error} ({error.code})")

        return answer

    def _to_login(self, request: Request) -> Response:
        path = request.url.path + (f"?{request.url.query}" if request.url.query else "")
        return RedirectResponse(with_query("/login", {"next": _own(path) if path != "/" else None}), 303)

    # What is answered where there is nothing to show.

    def _message(self, status: int, title: str, sentence: str) -> Response:
        return self._pages.answer("message", {"title": title, "sentence": sentence}, status)

    def _absent(self) -> Response:
        return self._message(404, "Nothing here", "There is nothing here that your token may read.")

    async def _no_page(self, request: Request, error: Exception) -> Response:
        """An address that no page has. Who is not logged in learns of no address whether there is something."""
        return self._to_login(request) if self._session(request) is None else self._absent()

    async def _fault(self, request: Request, error: Exception) -> Response:
        return self._message(500, "A fault", "That is a fault of this page. Its log says more.")

    # In and out.

    async def _login_form(self, request: Request) -> Response:
        return self._form(request.query_params.get("next", "/"))

    def _form(self, then: str, status: int = 200, said: str = "") -> Response:
        return self._pages.answer("login", {"next": _own(then), "said": said}, status)

    async def _login(self, request: Request) -> Response:
        address = request.client.host if request.client else ""
        if (wait_s := self._wrong_tokens.wait_s(address)) > 0:
            seconds = math.ceil(wait_s)
            answer = self._form("/", 429, f"Too many wrong tokens came from your address: try again in {seconds} s.")
            answer.headers["Retry-After"] = str(seconds)
            return answer
        form = await form_of(request)
        if form is None:
            return self._form("/", 400, "That was no login form.")
        token, then = form.get("token", "").strip(), _own(form.get("next", "/"))
        try:
            async with self._checks:
                client = await anyio.to_thread.run_sync(self._checked, token)
            name = self._sessions.begin(client, token)
        except Unauthenticated:
            self._wrong_tokens.add(address)
            if (more := self._lines.more("wrong token")) is not None:
                _log.warning("a wrong token from %s%s", address, more)
            return self._form(then, 401, _WRONG)
        except _AsksNobodyError:
            return self._form(then, 403, _ASKS_NOBODY)
        except SlotStreamError as error:
            return self._form(then, _STATUS.get(error.status, 502), f"{error} ({error.code})")
        except ConfigError as error:
            _log.warning("no connection to the server: %s", error)
            return self._form(then, 502, "This page's files for the connection to the server cannot be used: see its log.")
        self._wrong_tokens.forget(address)
        secure = self._settings.https or not is_local(request.headers["host"])  # Another name is a proxy's, which has TLS.
        answer = RedirectResponse(then, 303)
        answer.set_cookie(
            _SAFE_COOKIE if secure else _PLAIN_COOKIE,
            name,
            max_age=int(SESSION_S),
            path="/",
            secure=secure,
            httponly=True,
            samesite="strict",
        )
        return answer

    def _checked(self, token: str) -> Client:
        """A client with the visitor's token, after the server was asked. Raises Unauthenticated for a wrong one, and what the
        call raises; ConfigError where our own certificate files went bad.
        """
        if token:
            try:
                check_token(token, "the form")
            except ConfigError as error:
                raise Unauthenticated(str(error)) from error
        client = self._client.with_token(token or None)
        status = client.status()
        if status.server is not None and not status.server.tokens and not self._settings.takes_anonymous:
            raise _AsksNobodyError
        return client

    async def _logout(self, request: Request) -> Response:
        answer = RedirectResponse("/login", 303)
        for name in self._cookies(request):
            self._sessions.end(name)
        for cookie in (_SAFE_COOKIE, _PLAIN_COOKIE):
            if cookie in request.cookies:
                answer.delete_cookie(cookie, path="/", secure=cookie == _SAFE_COOKIE, httponly=True, samesite="strict")
        return answer


def _own(path: str) -> str:
    """`path` if it is one of this site's screens, else the overview: a login leads nowhere else."""
    ours = path == "/" or path.startswith(("/?", "/samples/"))
    return path if ours and path.isascii() and path.isprintable() and "\\" not in path and len(path) <= _PATH_CHARS_MAX else "/"
