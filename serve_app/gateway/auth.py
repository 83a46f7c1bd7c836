"""Who is calling: an API key in, an account out."""

from __future__ import annotations

import hmac
from collections.abc import Mapping

from serve_app.api.errors import AccountForbidden, AuthError
from serve_app.gateway.settings import GatewaySettings, hash_key

_MAX_KEY = 512


def authenticate(headers: Mapping[str, str], settings: GatewaySettings, account: str | None = None) -> str:
    """The account of the key in ``headers``. Raises :class:`AuthError`, or :class:`AccountForbidden` for another's path."""
    key = _presented(headers)
    if key is None:
        raise AuthError
    presented = hash_key(key)
    # Compare with every key, so that the time tells nothing about which one came close.
    if not any([hmac.compare_digest(presented, known) for known in settings.key_hashes]):
        raise AuthError("Authentication error: this API key is not valid here.")
    if account is not None and account != settings.account:
        raise AccountForbidden(account)
    return settings.account


def _presented(headers: Mapping[str, str]) -> str | None:
    scheme, _, token = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and 0 < len(token.strip()) <= _MAX_KEY:
        return token.strip()
    for name in ("x-api-key", "x-auth-key"):
        if 0 < len(headers.get(name, "")) <= _MAX_KEY:
            return headers[name]
    return None
