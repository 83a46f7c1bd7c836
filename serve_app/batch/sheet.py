"""A batch that somebody wants, and on which terms."""

from __future__ import annotations

import hashlib
import uuid
from dataclasses import dataclass
from typing import Any

from serve_app.state.callers.accounts import Caller


@dataclass(slots=True, frozen=True)
class Terms:
    """What an operator allows. ``hours``: before what is not done expires. ``keep_s``: for how long results are kept.
    ``file_bytes``: of one input.
    """

    hours: float = 24.0
    keep_s: float = 29 * 86_400.0
    file_bytes: int = 200_000_000


@dataclass(slots=True, frozen=True)
class Sheet:
    """A batch that somebody wants. ``id``: see :func:`batch_id`. ``about``: see `Batch.about`."""

    id: str
    door: str
    caller: Caller
    about: dict[str, Any]
    keep_s: float | None = None


def batch_id(caller: Caller, door: str, key: str | None) -> str:
    """A new one; of requests with an `Idempotency-Key` always the same."""
    if not key:
        return uuid.uuid4().hex
    return hashlib.sha256(f"{caller.account}\0{door}\0{key}".encode()).hexdigest()[:32]
