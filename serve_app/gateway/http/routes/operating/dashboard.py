"""The dashboard: its files, and signing in to it with a key or a one-time code. What it shows comes by other routes."""

from __future__ import annotations

import time
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from serve_app.api.errors import AuthError, InvalidInput, StoreAway
from serve_app.api.fields.values import string
from serve_app.api.schema.openapi import Operation
from serve_app.dashboard.address import address_of
from serve_app.dashboard.code import is_code
from serve_app.dashboard.files import Files
from serve_app.gateway.http.auth import is_operator
from serve_app.gateway.http.exchange import Endpoint, Exchange, json_answer
from serve_app.gateway.http.session import (
    check_same_site,
    cookie_name,
    hash_of,
    is_https,
    new_cookie,
    token_of,
)
from serve_app.state.callers.accounts import Caller, hash_key, sorted_scopes
from serve_app.state.callers.sessions import LONGEST_S, Session

_TAG = "Dashboard"
_HTML = {"type": "string"}
_TEXT = {"type": "string"}
_WHO = {
    "type": "object",
    "properties": {
        "account": _TEXT,
        "account_name": _TEXT,
        "scopes": {"type": "array", "items": _TEXT},
        "operator": {"type": "boolean"},
        "key": {"type": "object", "properties": {"id": _TEXT, "name": _TEXT}},
        "started": {"type": "number"},
        "expires": {"type": "number"},
        "csrf": _TEXT,
    },
    "required": ["account", "scopes", "operator", "key", "started", "expires", "csrf"],
}
_SIGN_IN = {
    "type": "object",
    "properties": {"key": {**_TEXT, "maxLength": 512}, "code": {**_TEXT, "maxLength": 512}},
    "oneOf": [{"required": ["key"]}, {"required": ["code"]}],
}
_PAGE = Operation("The dashboard", _TAG, _HTML, media_type="text/html", fails=(404,))
_FILE = Operation("A file of the dashboard", _TAG, _HTML, media_type="*/*", fails=(404,))


def endpoints(exchange: Exchange) -> list[Endpoint]:
    files, session = Files(), SessionRoutes(exchange)
    begin = Operation(
        "Sign in", _TAG, _WHO, _SIGN_IN, {"key": "YOUR KEY"}, fails=(400, 401, 403, 408, 413, 415, 429, 503)
    )
    who, out = Operation("Who is signed in", _TAG, _WHO), Operation("Sign out, everywhere the session is used", _TAG)
    return [
        Endpoint("GET", "/dashboard", files.index, _PAGE, scopes=None),
        Endpoint("GET", "/dashboard/static/{version}/{path:path}", files.file, _FILE, scopes=None),
        Endpoint("POST", "/dashboard/session", session.begin, begin, scopes=None),
        Endpoint("GET", "/dashboard/session", session.get, who, scopes=()),
        Endpoint("DELETE", "/dashboard/session", session.end, out, scopes=()),
        Endpoint("GET", "/dashboard/{page:path}", files.index, _PAGE, scopes=None),
    ]


class SessionRoutes:
    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange

    async def begin(self, request: Request) -> Response:
        """A new session, whatever cookie came along; that one's ends."""
        check_same_site(request)
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            # What forms of other pages cannot send.
            raise InvalidInput("Send JSON with Content-Type: application/json.")
        address, now = address_of(request), time.time()
        body = await self._exchange.body(request)
        key, code = string(body, "key", limit=512), string(body, "code", limit=512)
        if bool(key) == bool(code):
            raise InvalidInput("Send either key, an API key, or code, from the link of `serve-app dashboard`.")
        attempts = self._exchange.gateway.state.attempts
        await attempts.begin(address, now)
        try:
            caller, key_hash = self._caller(key, code, now)
        except StoreAway:
            await attempts.succeeded(address, now)  # or not: nobody can say
            raise
        if caller is None:
            raise AuthError("This link has been used or is over. `serve-app dashboard` prints another."
                            if code else "This API key is not valid here.")  # fmt: skip
        gateway = self._exchange.gateway
        secret = gateway.settings.cluster_secret
        cookie = new_cookie(secret, now)
        hashed = hash_of(secret, cookie)
        assert hashed is not None
        session = Session(hashed, key_hash, now, now, hash_key(code) if code else "")
        if not await gateway.state.sessions.begin(session):
            raise AuthError("This link has been used or is over. `serve-app dashboard` prints another.")
        await attempts.succeeded(address, now)
        if before := hash_of(secret, request.cookies.get(cookie_name(request), "")):
            await gateway.state.sessions.end(before)
        answer = json_answer(self._shown(caller, session, cookie))
        answer.headers["Cache-Control"] = "no-store"
        answer.set_cookie(cookie_name(request), cookie, max_age=int(LONGEST_S), **_cookie(request))
        return answer

    async def get(self, request: Request) -> Response:
        session, cookie = self._own(request)
        answer = json_answer(self._shown(request.state.caller, session, cookie))
        answer.headers["Cache-Control"] = "no-store"
        return answer

    async def end(self, request: Request) -> Response:
        session, _ = self._own(request)
        await self._exchange.gateway.state.sessions.end(session.hash)
        answer = json_answer({"signed_out": True})
        answer.delete_cookie(cookie_name(request), **_cookie(request))
        return answer

    def _caller(self, key: str | None, code: str | None, now: float) -> tuple[Caller | None, str]:
        """Whose key it is or the code was made for, and its hash."""
        gateway = self._exchange.gateway
        book = gateway.state.accounts
        if key:
            hashed = hash_key(key)
            caller = book.of_hash(hashed)
            if caller is None and book.blind:
                raise StoreAway
            return caller, hashed
        assert code
        secret = gateway.settings.cluster_secret
        hashed = next((h for h in gateway.settings.key_hashes if is_code(secret, h, code, now)), "")
        return (book.of_hash(hashed) if hashed else None), hashed

    @staticmethod
    def _own(request: Request) -> tuple[Session, str]:
        session = getattr(request.state, "session", None)
        if session is None:
            raise AuthError("There is no session. Sign in by POST /dashboard/session.")
        return session, request.cookies[cookie_name(request)]

    def _shown(self, caller: Caller, session: Session, cookie: str) -> dict[str, Any]:
        gateway = self._exchange.gateway
        book = gateway.state.accounts
        key = book.key(caller)
        return {
            "account": caller.account,
            "account_name": book.label(caller.account) or caller.account,
            "scopes": sorted_scopes(caller.scopes),
            "operator": is_operator(caller, gateway.settings.account),
            "key": {"id": caller.key, "name": key.name if key is not None else ""},
            "started": session.started,
            "expires": session.expires,
            "csrf": token_of(gateway.settings.cluster_secret, cookie),
        }


def _cookie(request: Request) -> dict[str, Any]:
    return {"path": "/", "secure": is_https(request), "httponly": True, "samesite": "strict"}
