"""Who may call, and how much of the machine is theirs: ``$SERVE_APP_HOME/accounts.yaml``.

::

    accounts:
      team-a:
        weight: 2.0                  # share of the tokens served while others wait as well
        keys:
          - hash: 5e88...            # SHA-256 of a key, in hex; the key itself is shown once and never kept
            priority: realtime       # or batch: a twentieth of the work while both wait
            created: 2026-11-21

`serve-app accounts` writes it. Weight and priority belong to account and key: nothing that a client sends can change
them. The account and key of the settings need no entry; an entry under the same name gives that account a weight and
further keys.
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import hashlib
import hmac
import math
import os
import re
import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import yaml

FILE = "accounts.yaml"
Priority = Literal["realtime", "batch"]
PRIORITIES: tuple[str, ...] = get_args(Priority)
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}", re.ASCII)
_HASH = re.compile(r"[0-9a-f]{64}", re.ASCII)
# Enough to tell keys apart, and to find one without comparing it with all.
_ID_CHARS = 12
MAX_WEIGHT = 1000.0
# A change of the file counts this soon.
LOOK_AGAIN_S = 1.0


class AccountsError(Exception):
    """The file or the request to change it cannot be used; the text says what to do."""


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


def read_accounts(path: Path) -> dict[str, Account]:
    """The accounts in a file by name; none if there is no file. Raises :class:`AccountsError`."""
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise AccountsError(f"{path} is not readable as YAML ({type(error).__name__}). Correct or remove it.") from None
    if data is None:
        return {}
    entries = data.get("accounts") if isinstance(data, dict) else None
    if not isinstance(entries, dict):
        raise AccountsError(f"{path}: expected `accounts:` and below it one entry per account.")
    return {str(name): _account(path, str(name), entry) for name, entry in entries.items()}


def _account(path: Path, name: str, entry: Any) -> Account:
    where = f"{path}: account {name[:80]!r}"
    if not _NAME.fullmatch(name):
        raise AccountsError(f"{where}: a name has 1 to 64 letters, digits, - and _.")
    if not isinstance(entry, dict) or not isinstance(entry.get("keys", []), list):
        raise AccountsError(f"{where}: expected `weight` and a list of `keys`.")
    keys = []
    for key in entry.get("keys", []):
        if not isinstance(key, dict) or not _HASH.fullmatch(str(key.get("hash"))):
            raise AccountsError(f"{where}: a key has a `hash` of 64 hex digits. Remove it and add a new key.")
        priority = key.get("priority", "realtime")
        if priority not in PRIORITIES:
            raise AccountsError(f"{where}: priority is one of {', '.join(PRIORITIES)}, not {str(priority)[:40]!r}.")
        keys.append(Key(key["hash"], priority, str(key.get("created", ""))))
    return Account(name, _weight(where, entry.get("weight", 1.0)), tuple(keys))


def _weight(where: str, value: Any) -> float:
    good = type(value) in (int, float) and math.isfinite(value) and 1 / MAX_WEIGHT <= value <= MAX_WEIGHT
    if not good:
        raise AccountsError(f"{where}: weight is a number from {1 / MAX_WEIGHT:g} to {MAX_WEIGHT:g}.")
    return float(value)


class AccountsFile:
    """Changes the file: one process at a time, and readers see the old or the new one, never a part."""

    def __init__(self, home: Path) -> None:
        self.path = home / FILE

    def add(self, name: str, *, weight: float | None = None, priority: Priority = "realtime") -> str:
        """A new key for an account, which is made if need be. Returns the key: it is kept nowhere."""
        if not _NAME.fullmatch(name):
            raise AccountsError(f"{name[:80]!r} is no account name. Use 1 to 64 letters, digits, - and _.")
        key = secrets.token_urlsafe(32)
        with self._changing() as accounts:
            before = accounts.get(name) or Account(name, 1.0, ())
            share = before.weight if weight is None else _weight(f"account {name}", weight)
            new = Key(hash_key(key), priority, datetime.date.today().isoformat())
            accounts[name] = Account(name, share, (*before.keys, new))
        return key

    def remove(self, name: str, key_id: str | None = None) -> None:
        """Forgets an account, or one of its keys."""
        with self._changing() as accounts:
            account = accounts.get(name)
            if account is None:
                raise AccountsError(f"No account {name[:80]!r} in {self.path}. `serve-app accounts list` shows them.")
            if key_id is None:
                del accounts[name]
                return
            left = tuple(key for key in account.keys if key.id != key_id)
            if len(left) == len(account.keys):
                raise AccountsError(f"Account {name} has no key {key_id[:80]!r}. `serve-app accounts list` shows them.")
            accounts[name] = Account(name, account.weight, left)

    @contextlib.contextmanager
    def _changing(self) -> Iterator[dict[str, Account]]:
        self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with open(self.path.with_name(f".{FILE}.lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            accounts = read_accounts(self.path)
            yield accounts
            self._write(accounts)

    def _write(self, accounts: dict[str, Account]) -> None:
        entries = {
            account.name: {
                "weight": account.weight,
                "keys": [{"hash": k.hash, "priority": k.priority, "created": k.created} for k in account.keys],
            }
            for account in accounts.values()
        }
        draft = self.path.with_name(f".{FILE}.{os.getpid()}.{secrets.token_hex(4)}")
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as stream:
            yaml.safe_dump({"accounts": entries}, stream, sort_keys=False)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(draft, self.path)


class AccountBook:
    """Whose a key is, by a file that is read again when it changes. A file that can't be read changes nothing.

    ``account`` and ``key_hashes`` are those of the settings, which are valid whatever the file says.
    """

    def __init__(self, path: Path, account: str, key_hashes: tuple[str, ...]) -> None:
        self._path = path
        self._account = account
        self._fixed = key_hashes
        self._looked_at = -math.inf
        self._seen: tuple[int, int, int] | None = None
        self._weights: dict[str, float] = {}
        self._by_id: dict[str, list[tuple[str, str, Priority]]] = {}
        self.problem: str | None = None
        self._fill({})

    def find(self, key: str) -> Caller | None:
        """The caller with this key. The time it takes tells nothing of keys: what is compared are hashes."""
        self._refresh()
        presented = hash_key(key)
        found = None
        for known, account, priority in self._by_id.get(presented[:_ID_CHARS], ()):
            if hmac.compare_digest(presented, known):
                found = Caller(account, self.weight(account), priority)
        return found

    def weight(self, account: str) -> float:
        return self._weights.get(account, 1.0)

    def _refresh(self) -> None:
        now = time.monotonic()
        if now - self._looked_at < LOOK_AGAIN_S:
            return
        self._looked_at = now
        try:
            stat = self._path.stat()
            seen = (stat.st_ino, stat.st_mtime_ns, stat.st_size)
        except OSError:
            seen = None
        if seen == self._seen:
            return
        self._seen = seen
        try:
            self._fill(read_accounts(self._path))
            self.problem = None
        except AccountsError as error:
            self.problem = str(error)

    def _fill(self, accounts: dict[str, Account]) -> None:
        self._weights = {account.name: account.weight for account in accounts.values()}
        self._by_id = {}
        for known in self._fixed:
            self._by_id.setdefault(known[:_ID_CHARS], []).append((known, self._account, "realtime"))
        for account in accounts.values():
            for key in account.keys:
                self._by_id.setdefault(key.id, []).append((key.hash, account.name, key.priority))
