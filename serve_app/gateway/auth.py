"""Who is calling: an API key in, an account out."""

from __future__ import annotations

import hmac
from collections.abc import Mapping

from serve_app.api.errors import AccountForbidden, AuthError
from serve_app.gateway.settings import GatewaySettings, hash_key

_MAX_KEY = 512


def authenticate(headers: Mapping[str, str], settings: GatewaySettings, account: str | None = None) -> str:
    """The account of the key in ``headers``. Raises :class:`AuthError`, or :class:`AccountForbidden` for another's.

    Clients of Cloudflare's gateway host carry a second key (``cf-aig-authorization``); either may be ours.
    """
    presented = _presented(headers)
    if not presented:
        raise AuthError
    # Compare with every key, so that the time tells nothing about which one came close.
    if not any([hmac.compare_digest(hash_key(key), known) for key in presented for known in settings.key_hashes]):
        raise AuthError("Authentication error: this API key is not valid here.")
    if account is not None and account != settings.account:
        raise AccountForbidden(account)
    return settings.account


def _presented(headers: Mapping[str, str]) -> list[str]:
    found = []
    for name in ("authorization", "cf-aig-authorization"):
        scheme, _, token = headers.get(name, "").partition(" ")
        if scheme.lower() == "bearer":
            found.append(token.strip())
    found += [headers.get(name, "") for name in ("x-api-key", "x-auth-key")]
    return [key for key in found if 0 < len(key) <= _MAX_KEY]
