"""One-time codes that sign in with a key that is not shown: what ``serve-app serve`` prints in a link."""

from __future__ import annotations

import hashlib
import hmac
import secrets

VALID_S = 15 * 60.0


def make_code(secret: str, key: str, now: float) -> str:
    """A code for the key of that hash, good for one session that begins within :data:`VALID_S`. ``secret``: the
    cluster's.
    """
    stem = f"{secrets.token_urlsafe(16)}.{int(now + VALID_S):x}"
    return f"{stem}.{_mac(secret, key, stem)}"


def is_code(secret: str, key: str, code: str, now: float) -> bool:
    """Whether the code was made for the key of that hash, and is not over."""
    stem, _, mac = code.rpartition(".")
    if not (code.isascii() and len(code) <= 256 and hmac.compare_digest(mac, _mac(secret, key, stem))):
        return False
    return now < int(stem.rpartition(".")[2], 16)


def _mac(secret: str, key: str, stem: str) -> str:
    return hmac.new(secret.encode(), f"sign-in code {key} {stem}".encode(), hashlib.sha256).hexdigest()[:32]
