"""Who may call, what they may do, and how much of the machine is theirs: accounts with weights, keys with scopes and
priorities, and members, the people whom keys may belong to.

Keys are kept as hashes only. Weight, priority, scopes and limits belong to account and key: nothing that a client sends
can change them. The account and key of the settings need no entry in the store; an entry under the same name gives that
account a weight and further keys.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Literal, get_args

from serve_app.state.callers.limits import NO_LIMITS, Limits
from serve_app.state.errors import AccountsError

Priority = Literal["realtime", "batch"]
PRIORITIES: tuple[str, ...] = get_args(Priority)
# inference: run models. read: status, usage, traces, lists. admin: accounts, keys, members.
Scope = Literal["inference", "read", "admin"]
SCOPES: tuple[Scope, ...] = get_args(Scope)
ALL_SCOPES: frozenset[Scope] = frozenset(SCOPES)
# What a key may do where nobody says, and what keys could before there were scopes.
USUAL_SCOPES: frozenset[Scope] = frozenset({"inference", "read"})
MAX_WEIGHT = 1000.0
MAX_LABEL = 120
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}", re.ASCII)
_EMAIL = re.compile(r"[^@\s]{1,64}@[^@\s]{1,189}")
# Enough to tell keys apart, and to find one without comparing it with all.
ID_CHARS = 12


@dataclass(slots=True, frozen=True)
class Caller:
    """Whose request it is. ``weight``: share of tokens among accounts that wait; ``priority``: of the key, whose id is
    ``key``. ``limits`` are the key's, ``account_limits`` those of all keys of the account together.
    """

    account: str
    weight: float = 1.0
    priority: Priority = "realtime"
    key: str = ""
    scopes: frozenset[Scope] = USUAL_SCOPES
    limits: Limits = NO_LIMITS
    account_limits: Limits = NO_LIMITS
    # The id of the member whose key it is; "" for one of the account's own.
    member: str = ""
    # Of a worker's time, the least that its batch requests get.
    share: float = 0.05


@dataclass(slots=True, frozen=True)
class Key:
    """One key of an account. ``hash``: SHA-256 of its value, in hex. ``id`` is how people and the ledger name it; it
    stays when the key is rolled. ``created``: a date, or a time of UTC in ISO 8601. ``starts``, ``expires``, ``used``:
    unix seconds.
    """

    id: str
    hash: str
    priority: Priority = "realtime"
    created: str = ""
    name: str = ""
    scopes: frozenset[Scope] = USUAL_SCOPES
    starts: float | None = None
    expires: float | None = None
    used: float | None = None
    enabled: bool = True
    member: str = ""
    limits: Limits = NO_LIMITS

    def status(self, now: float) -> str:
        """As Cloudflare has it: active, disabled or expired."""
        if self.expires is not None and self.expires <= now:
            return "expired"
        return "active" if self.enabled and (self.starts is None or self.starts <= now) else "disabled"


@dataclass(slots=True, frozen=True)
class Member:
    """Somebody whom keys of an account may belong to: none of them may do more than ``scopes``, and all of them end
    with the membership.
    """

    id: str
    email: str
    scopes: frozenset[Scope]
    created: str = ""


@dataclass(slots=True, frozen=True)
class Account:
    """``name`` is its id, as it stands in URLs, and ``label`` what people call it."""

    name: str
    weight: float = 1.0
    keys: tuple[Key, ...] = ()
    label: str = ""
    created: str = ""
    limits: Limits = NO_LIMITS
    members: tuple[Member, ...] = field(default=())


def hash_key(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def now_text() -> str:
    """This second, as ``created`` has it."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def sorted_scopes(scopes: Iterable[Scope]) -> list[Scope]:
    return [scope for scope in SCOPES if scope in scopes]


def check_name(name: str) -> str:
    """Raises :class:`AccountsError`."""
    if not _NAME.fullmatch(name):
        raise AccountsError(f"{name[:80]!r} is no account name. Use 1 to 64 letters, digits, - and _.")
    return name


def check_weight(where: str, value: Any) -> float:
    """Raises :class:`AccountsError`; ``where`` begins its text."""
    good = type(value) in (int, float) and math.isfinite(value) and 1 / MAX_WEIGHT <= value <= MAX_WEIGHT
    if not good:
        raise AccountsError(f"{where}: weight is a number from {1 / MAX_WEIGHT:g} to {MAX_WEIGHT:g}.")
    return float(value)


def check_label(value: Any) -> str:
    """What an account or a key is called. Raises :class:`AccountsError`."""
    if not isinstance(value, str) or len(value) > MAX_LABEL or not value.isprintable():
        raise AccountsError(f"A name is up to {MAX_LABEL} printable characters.")
    return value.strip()


def check_scopes(given: Iterable[Any]) -> frozenset[Scope]:
    """Raises :class:`AccountsError`."""
    found = frozenset(given)
    if unknown := [scope for scope in found if scope not in ALL_SCOPES]:
        raise AccountsError(f"There is no scope {str(unknown[0])[:60]!r}. Scopes: {', '.join(SCOPES)}.")
    if not found:
        raise AccountsError(f"A key without a scope opens nothing. Scopes: {', '.join(SCOPES)}.")
    return found


def check_priority(value: Any) -> Priority:
    """Raises :class:`AccountsError`."""
    if value not in PRIORITIES:
        raise AccountsError(f"priority is one of {', '.join(PRIORITIES)}, not {str(value)[:40]!r}.")
    return value


def check_email(value: Any) -> str:
    """Raises :class:`AccountsError`."""
    if not isinstance(value, str) or not _EMAIL.fullmatch(value) or not value.isprintable():
        raise AccountsError(f"{str(value)[:80]!r} is no e-mail address.")
    return value
