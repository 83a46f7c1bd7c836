"""Who may call, and how much of the machine is theirs: accounts with their weights, keys with their priorities.

Keys are kept as hashes only. Weight and priority belong to account and key: nothing that a client sends can change
them. The account and key of the settings need no entry in the store; an entry under the same name gives that account
a weight and further keys.
"""

from __future__ import annotations

import hashlib
import hmac
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from serve_app.state.errors import AccountsError

Priority = Literal["realtime", "batch"]
PRIORITIES: tuple[str, ...] = get_args(Priority)
MAX_WEIGHT = 1000.0
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}", re.ASCII)
# Enough to tell keys apart, and to find one without comparing it with all.
_ID_CHARS = 12


@dataclass(slots=True, frozen=True)
class Caller:
    """Whose request it is. ``weight``: share of tokens among accounts that wait; ``priority``: of the key."""

    account: str
    weight: float = 1.0
    priority: Priority = "realtime"


@dataclass(slots=True, frozen=True)
class Key:
    """One key of an account, known by its hash; ``id`` is how people name it."""

    hash: str
    priority: Priority
    created: str

    @property
    def id(self) -> str:
        return self.hash[:_ID_CHARS]


@dataclass(slots=True, frozen=True)
class Account:
    name: str
    weight: float
    keys: tuple[Key, ...]


def hash_key(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


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


class AccountBook:
    """Whose a key is, from memory. ``account`` and ``key_hashes`` are those of the settings, valid whatever the store
    says. Another thread may :meth:`fill` it at any time.
    """

    def __init__(self, account: str, key_hashes: tuple[str, ...]) -> None:
        self._account = account
        self._fixed = key_hashes
        self._weights: dict[str, float] = {}
        self._by_id: dict[str, list[tuple[str, Caller]]] = {}
        # Whether the store should know keys that are not here, because it could not be asked yet.
        self.blind = False
        self.fill({})

    def find(self, key: str) -> Caller | None:
        """The caller with this key. The time it takes tells nothing of keys: what is compared are hashes."""
        presented = hash_key(key)
        found = None
        for known, caller in self._by_id.get(presented[:_ID_CHARS], ()):
            if hmac.compare_digest(presented, known):
                found = caller
        return found

    def weight(self, account: str) -> float:
        return self._weights.get(account, 1.0)

    def fill(self, accounts: Mapping[str, Account]) -> None:
        """Replaces what is known by what the store has."""
        weights = {account.name: account.weight for account in accounts.values()}
        by_id: dict[str, list[tuple[str, Caller]]] = {}
        for known in self._fixed:
            own = Caller(self._account, weights.get(self._account, 1.0))
            by_id.setdefault(known[:_ID_CHARS], []).append((known, own))
        for account in accounts.values():
            for key in account.keys:
                by_id.setdefault(key.id, []).append((key.hash, Caller(account.name, account.weight, key.priority)))
        self._weights, self._by_id = weights, by_id
