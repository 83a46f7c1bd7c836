"""``accounts.yaml``, where accounts were kept before there was a store. Read once, when the store takes it over.

::

    accounts:
      team-a:
        weight: 2.0
        keys:
          - hash: 5e88...            # SHA-256 of a key, in hex
            priority: realtime
            created: 2026-11-21
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from serve_app.state.callers.accounts import ID_CHARS, PRIORITIES, Account, Key, check_name, check_weight
from serve_app.state.errors import AccountsError

_HASH = re.compile(r"[0-9a-f]{64}", re.ASCII)


def read_accounts(path: Path) -> dict[str, Account]:
    """The accounts in a file by name. Raises :class:`AccountsError`."""
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
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
    check_name(name)
    if not isinstance(entry, dict) or not isinstance(entry.get("keys", []), list):
        raise AccountsError(f"{where}: expected `weight` and a list of `keys`.")
    keys = []
    for key in entry.get("keys", []):
        if not isinstance(key, dict) or not _HASH.fullmatch(str(key.get("hash"))):
            raise AccountsError(f"{where}: a key has a `hash` of 64 hex digits. Remove it and add a new key.")
        priority = key.get("priority", "realtime")
        if priority not in PRIORITIES:
            raise AccountsError(f"{where}: priority is one of {', '.join(PRIORITIES)}, not {str(priority)[:40]!r}.")
        keys.append(Key(key["hash"][:ID_CHARS], key["hash"], priority, str(key.get("created", ""))))
    return Account(name, check_weight(where, entry.get("weight", 1.0)), tuple(keys))
