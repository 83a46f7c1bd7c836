"""Whose a key is, from memory."""

from __future__ import annotations

import hmac
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from serve_app.state.callers.accounts import ALL_SCOPES, ID_CHARS, Account, Caller, Key, hash_key

# How often a key's last use is told to the store.
USED_EVERY_S = 30.0


@dataclass(slots=True, frozen=True)
class _Known:
    hash: str
    caller: Caller
    key: Key | None
    starts: float = float("-inf")
    expires: float = float("inf")


class AccountBook:
    """``account`` and ``key_hashes`` are those of the settings, valid for everything whatever the store says. Another
    thread may :meth:`fill` it at any time. ``clock`` gives unix seconds.
    """

    def __init__(self, account: str, key_hashes: tuple[str, ...], clock: Callable[[], float] = time.time) -> None:
        self._account = account
        self._fixed = key_hashes
        self._clock = clock
        self._weights: dict[str, float] = {}
        self._by_hash: dict[str, list[_Known]] = {}
        # When a key was last used, and which of that the store has been told.
        self._used: dict[str, float] = {}
        self._told: dict[str, float] = {}
        # Whether the store should know keys that are not here, because it could not be asked yet.
        self.blind = False
        self.fill({})

    def find(self, key: str) -> Caller | None:
        """The caller with this key, None also where it has expired. The time it takes tells nothing of keys: what is
        compared are hashes.
        """
        return self.of_hash(hash_key(key))

    def of_hash(self, hashed: str) -> Caller | None:
        """:meth:`find` by the key's hash."""
        known = self._known(hashed)
        if known is None:
            return None
        now = self._clock()
        if not known.starts <= now < known.expires or not (known.key is None or known.key.enabled):
            return None
        if known.key is not None:
            self._used[known.key.id] = now
        return known.caller

    def knows(self, hashed: str) -> bool:
        """Whether it is the hash of a key, good or not."""
        return self._known(hashed) is not None

    def why_not(self, key: str) -> str | None:
        """Why a key that is known opens nothing now; None for one that is not known, or good."""
        known = self._known(hash_key(key))
        if known is None:
            return None
        now = self._clock()
        if known.expires <= now:
            return f"this API key has expired, on {_day(known.expires)}. Roll it, or ask for a new one"
        if known.starts > now:
            return f"this API key is valid from {_day(known.starts)} on"
        if known.key is not None and not known.key.enabled:
            return "this API key is disabled. Its account's admin can enable it again"
        return None

    def key(self, caller: Caller) -> Key | None:
        """The caller's key as it is stored; None for that of the settings."""
        return self._keys.get(caller.key)

    def today(self, caller: Caller) -> Caller:
        """A caller that was kept for a while, with the weight and the limits that account and key have by now."""
        account, key = self._accounts.get(caller.account), self._keys.get(caller.key)
        if account is None:
            return caller
        limits = caller.limits if key is None else key.limits
        return replace(caller, weight=account.weight, account_limits=account.limits, limits=limits)

    def label(self, account: str) -> str:
        """What people call it, "" where nobody said."""
        found = self._accounts.get(account)
        return "" if found is None else found.label

    def weight(self, account: str) -> float:
        return self._weights.get(account, 1.0)

    def own(self, key: str | None = None) -> Caller:
        """Whoever acts for the account of the settings, with its first key unless one is named; may do everything."""
        key = next((known[:ID_CHARS] for known in self._fixed), "") if key is None else key
        account = self._accounts.get(self._account, Account(self._account))
        return Caller(account.name, account.weight, key=key, scopes=ALL_SCOPES, account_limits=account.limits)

    def fill(self, accounts: Mapping[str, Account]) -> None:
        """Replaces what is known by what the store has."""
        self._accounts = dict(accounts)
        by_hash: dict[str, list[_Known]] = {}
        keys: dict[str, Key] = {}
        for hashed in self._fixed:
            known = _Known(hashed, self.own(hashed[:ID_CHARS]), None)
            by_hash.setdefault(hashed[:ID_CHARS], []).append(known)
        for account in accounts.values():
            scopes = {member.id: member.scopes for member in account.members}
            for key in account.keys:
                keys[key.id] = key
                by_hash.setdefault(key.hash[:ID_CHARS], []).append(_of_key(account, key, scopes))
        self._weights = {account.name: account.weight for account in accounts.values()}
        self._keys, self._by_hash = keys, by_hash

    def untold(self, *, all: bool = False) -> dict[str, float]:
        """When keys were last used, where the store should be told of it: see :meth:`told`."""
        least = 0.0 if all else USED_EVERY_S
        found = {name: at for name, at in list(self._used.items()) if at - self._told.get(name, -1e9) > least}
        return {name: at for name, at in found.items() if name in self._keys}

    def told(self, used: Mapping[str, float]) -> None:
        """The store has this."""
        self._told |= used
        for name in [name for name in self._told if name not in self._keys]:
            self._told.pop(name, None)
            self._used.pop(name, None)

    def _known(self, presented: str) -> _Known | None:
        found = None
        for known in self._by_hash.get(presented[:ID_CHARS], ()):
            if hmac.compare_digest(presented, known.hash):
                found = known
        return found


def _of_key(account: Account, key: Key, members: Mapping[str, frozenset]) -> _Known:
    scopes = key.scopes & members.get(key.member, frozenset()) if key.member else key.scopes
    caller = Caller(account.name, account.weight, key.priority, key.id, scopes, key.limits, account.limits, key.member)
    starts = float("-inf") if key.starts is None else key.starts
    return _Known(key.hash, caller, key, starts, float("inf") if key.expires is None else key.expires)


def _day(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M UTC")
