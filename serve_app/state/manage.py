"""Accounts, keys and members from Python, on the store itself, whether or not a server runs.

::

    from serve_app import Accounts

    with Accounts() as accounts:
        key, value = accounts.make_key("team-a", name="ci", scopes=["inference"], expires=time.time() + 30 * 86400)
        accounts.roll_key("team-a", key.id)
        accounts.end_key("team-a", key.id)

Servers hear of changes within a second. From another machine, use the `cloudflare` package with a key of the scope
`admin`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from serve_app.config import load_settings
from serve_app.state.callers.accounts import Account, Key, Member, Scope
from serve_app.state.callers.audit import Change, Via, local_actor
from serve_app.state.errors import Away, unreachable

if TYPE_CHECKING:
    from serve_app.state.store.sql import SqlStore


class Accounts:
    """``home``: the state directory, that of the environment unless named; which database is used says its settings.

    Every method raises :class:`serve_app.state.errors.StateError`, whose text says what to do; one that changes
    something leaves an entry in the audit trail under the name of the process's user.
    """

    def __init__(self, home: str | os.PathLike[str] | None = None, *, via: Via = "python") -> None:
        from serve_app.state.store.sql import SqlStore

        settings = load_settings(home=None if home is None else Path(home))
        self._by = local_actor(via)
        self._store: SqlStore = SqlStore(settings.home, settings.database)

    def __enter__(self) -> Self:
        try:
            self._store.open()
        except Away as away:
            raise unreachable(away) from None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._store.close()
        if isinstance(error, Away):
            raise unreachable(error) from None

    def list(self) -> dict[str, Account]:
        """By name, each with its keys and members."""
        return self._store.accounts.all()

    def get(self, name: str) -> Account:
        return self._store.accounts.get(name)

    def create(
        self, name: str, *, label: str = "", weight: float = 1.0, limits: Mapping[str, Any] | None = None
    ) -> Account:
        """An account without keys; see :class:`serve_app.state.callers.limits.Limits` for the names of ``limits``."""
        return self._store.accounts.create(name, label=label, weight=weight, limits=limits, by=self._by)

    def change(
        self,
        name: str,
        *,
        label: str | None = None,
        weight: float | None = None,
        limits: Mapping[str, Any] | None = None,
    ) -> Account:
        """Changes what is given; a limit of None is taken away."""
        return self._store.accounts.change(name, label=label, weight=weight, limits=limits, by=self._by)

    def remove(self, name: str) -> None:
        """Ends an account with all its keys. What it has used stays in the books."""
        self._store.accounts.remove(name, by=self._by)

    def make_key(self, account: str, **fields: Any) -> tuple[Key, str]:
        """A new key and its value, which is kept nowhere; the account is made if need be. ``fields``: any of ``name``,
        ``scopes``, ``priority``, ``starts``, ``expires`` (unix seconds), ``limits``, ``member`` (an id), ``enabled``.
        """
        self._store.accounts.keys.check(fields)
        self._store.accounts.ensure(account, by=self._by)
        return self._store.accounts.keys.create(account, by=self._by, **fields)

    def change_key(self, account: str, key_id: str, **fields: Any) -> Key:
        return self._store.accounts.keys.change(account, key_id, by=self._by, **fields)

    def roll_key(self, account: str, key_id: str) -> str:
        """Another value for the key, which is returned; the one it had is refused from then on."""
        return self._store.accounts.keys.roll(account, key_id, by=self._by)

    def end_key(self, account: str, key_id: str) -> None:
        self._store.accounts.keys.remove(account, key_id, by=self._by)

    def add_member(self, account: str, email: str, scopes: Iterable[Scope]) -> Member:
        return self._store.accounts.members.create(account, email, scopes, by=self._by)

    def change_member(self, account: str, member_id: str, scopes: Iterable[Scope]) -> Member:
        return self._store.accounts.members.change(account, member_id, scopes, by=self._by)

    def remove_member(self, account: str, member_id: str) -> None:
        """Ends a membership and the member's keys."""
        self._store.accounts.members.remove(account, member_id, by=self._by)

    def audit(self, account: str | None = None, *, since: float | None = None, limit: int = 100) -> Sequence[Change]:
        """Who changed what since then (unix seconds), newest first; of all accounts unless one is named."""
        return self._store.accounts.audit.read(account, since=since, limit=limit)
