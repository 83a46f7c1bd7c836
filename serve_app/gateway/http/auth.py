"""Who is calling: an API key in, a caller out."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from serve_app.api.errors import AccountForbidden, AuthError, ScopeMissing, StoreAway
from serve_app.state.callers.accounts import Caller, Scope, sorted_scopes
from serve_app.state.callers.book import AccountBook

_MAX_KEY = 512


def authenticate(
    headers: Mapping[str, str],
    book: AccountBook,
    account: str | None = None,
    scopes: Collection[Scope] = (),
    *,
    operator: str | None = None,
    signed_in: Caller | None = None,
) -> Caller:
    """Whose key is in ``headers``. Raises :class:`AuthError`, :class:`AccountForbidden` for another's account,
    :class:`ScopeMissing` for a key with none of ``scopes``, of which any will do, or :class:`StoreAway` while the store
    has not told yet which keys there are. An admin of the account ``operator`` may name any account. ``signed_in`` is
    whose session it is, where no key is presented.

    Clients of Cloudflare's gateway host carry a second key (``cf-aig-authorization``); either may be ours.
    """
    presented = _presented(headers)
    if not presented and signed_in is None:
        raise AuthError
    callers = [caller for key in presented if (caller := book.find(key)) is not None]
    if not presented and signed_in is not None:
        callers = [signed_in]
    if not callers:
        if book.blind:
            raise StoreAway
        why = next((why for key in presented if (why := book.why_not(key))), "this API key is not valid here")
        raise AuthError(f"Authentication error: {why}.")
    if account is not None:
        callers = [caller for caller in callers if caller.account == account or is_operator(caller, operator)]
        if not callers:
            raise AccountForbidden(account)
    if scopes:
        able = [caller for caller in callers if not caller.scopes.isdisjoint(scopes)]
        if not able:
            raise ScopeMissing(sorted_scopes(scopes), sorted_scopes(callers[0].scopes))
        callers = able
    return callers[0]


def has_key(headers: Mapping[str, str]) -> bool:
    """Whether a key is presented, be it right or wrong."""
    return bool(_presented(headers))


def is_operator(caller: Caller, operator: str | None) -> bool:
    """Whether the caller is an admin of the account ``operator``, that of the settings."""
    return caller.account == operator and "admin" in caller.scopes


def _presented(headers: Mapping[str, str]) -> list[str]:
    found = []
    for name in ("authorization", "cf-aig-authorization"):
        scheme, _, token = headers.get(name, "").partition(" ")
        if scheme.lower() == "bearer":
            found.append(token.strip())
    found += [headers.get(name, "") for name in ("x-api-key", "x-auth-key")]
    return [key for key in found if 0 < len(key) <= _MAX_KEY]
