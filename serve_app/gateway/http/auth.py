"""Who is calling: an API key in, a caller out."""

from __future__ import annotations

from collections.abc import Mapping

from serve_app.api.errors import AccountForbidden, AuthError, StoreAway
from serve_app.state.accounts import AccountBook, Caller

_MAX_KEY = 512


def authenticate(headers: Mapping[str, str], book: AccountBook, account: str | None = None) -> Caller:
    """Whose key is in ``headers``. Raises :class:`AuthError`, :class:`AccountForbidden` for another's account, or
    :class:`StoreAway` while the store has not told yet which keys there are.

    Clients of Cloudflare's gateway host carry a second key (``cf-aig-authorization``); either may be ours.
    """
    presented = _presented(headers)
    if not presented:
        raise AuthError
    callers = [caller for key in presented if (caller := book.find(key)) is not None]
    if not callers:
        if book.blind:
            raise StoreAway
        raise AuthError("Authentication error: this API key is not valid here.")
    if account is not None:
        callers = [caller for caller in callers if caller.account == account]
        if not callers:
            raise AccountForbidden(account)
    return callers[0]


def _presented(headers: Mapping[str, str]) -> list[str]:
    found = []
    for name in ("authorization", "cf-aig-authorization"):
        scheme, _, token = headers.get(name, "").partition(" ")
        if scheme.lower() == "bearer":
            found.append(token.strip())
    found += [headers.get(name, "") for name in ("x-api-key", "x-auth-key")]
    return [key for key in found if 0 < len(key) <= _MAX_KEY]
