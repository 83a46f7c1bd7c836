"""Requests of the page: a session's cookie in place of a key, and the token that shows that the page itself sent them.

Cookie and token are two halves. Browsers send the cookie to whatever listens on any port of the same host, and keep the
token, which the page holds, to the page's own origin. Neither of them opens anything without the other.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from starlette.requests import Request

from serve_app.api.errors import AuthError, CrossSite
from serve_app.state.callers.accounts import Caller, hash_key
from serve_app.state.callers.sessions import Session

if TYPE_CHECKING:
    from serve_app.gateway.core import Gateway

COOKIE = "serve_app_session"
TOKEN = "x-csrf-token"
# A session that began so lately at another gateway need not be known here yet.
FRESH_S = 5.0


def cookie_name(request: Request) -> str:
    """Over TLS a name that browsers take from this very host only."""
    return f"__Host-{COOKIE}" if is_https(request) else COOKIE


def is_https(request: Request) -> bool:
    forwarded = request.headers.get("x-forwarded-proto", "").partition(",")[0].strip().lower()
    return (forwarded or request.url.scheme) == "https"


def new_cookie(secret: str, now: float) -> str:
    """A value that nobody can guess, and that nobody else can make: the store is asked about none that is forged."""
    stem = f"{secrets.token_urlsafe(32)}.{int(now):x}"
    return f"{stem}.{_mac(secret, 'cookie', stem)}"


def hash_of(secret: str, cookie: str) -> str | None:
    """Under which the session is stored; None for a value that was not made here."""
    stem, _, mac = cookie.rpartition(".")
    good = len(cookie) <= 256 and cookie.isascii() and hmac.compare_digest(mac, _mac(secret, "cookie", stem))
    return hash_key(stem) if good else None


def token_of(secret: str, cookie: str) -> str:
    """The other half. It cannot be computed from the cookie."""
    return _mac(secret, "token", cookie)


def check_same_site(request: Request) -> None:
    """Raises :class:`CrossSite` for a request that another origin's page has sent, as its browser tells."""
    site, origin = request.headers.get("sec-fetch-site"), request.headers.get("origin")
    if site is not None:
        good = site in ("same-origin", "none")
    else:
        good = origin is None or urlsplit(origin).netloc == request.headers.get("host")
    if not good:
        raise CrossSite("Requests of pages from elsewhere are not taken with a session. Send an API key instead.")


async def session_of(gateway: Gateway, request: Request) -> Session | None:
    """The session whose cookie and token the request has; None without a cookie. Raises :class:`CrossSite`,
    :class:`AuthError` and `StoreAway`.
    """
    cookie = request.cookies.get(cookie_name(request))
    if cookie is None:
        return None
    check_same_site(request)
    secret, now = gateway.settings.cluster_secret, time.time()
    hashed = hash_of(secret, cookie)
    sessions = gateway.state.sessions
    found = None if hashed is None else sessions.find(hashed, now)
    if found is None and hashed is not None and abs(now - int(cookie.split(".")[1], 16)) < FRESH_S:
        await sessions.learn(now)
        found = sessions.find(hashed, now)
    if found is None:
        raise AuthError("This session has ended. Sign in again, or send an API key.")
    presented = request.headers.get(TOKEN, "")
    if not (presented.isascii() and hmac.compare_digest(presented, token_of(secret, cookie))):
        raise CrossSite(f"The header {TOKEN} is missing or wrong. Send the token that signing in has answered.")
    return found


async def signed_in(gateway: Gateway, request: Request) -> Caller | None:
    """Whose session the request belongs to: the caller of its key, as the key is now. None without a session."""
    session = await session_of(gateway, request)
    if session is None:
        return None
    caller = gateway.state.accounts.of_hash(session.key)
    if caller is None:
        raise AuthError("This session has ended with its key. Sign in with another one.")
    request.state.session = session
    return caller


def _mac(secret: str, use: str, text: str) -> str:
    return hmac.new(secret.encode(), f"session {use} {text}".encode(), hashlib.sha256).hexdigest()[:32]
