"""``serve-app accounts``: accounts, keys, members, and who changed them."""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from datetime import UTC, datetime
from typing import Any

from serve_app.cli.groups import Command, Group
from serve_app.state.callers.accounts import PRIORITIES, SCOPES, Key, Member, check_scopes, sorted_scopes
from serve_app.state.callers.limits import KINDS
from serve_app.state.errors import AccountsError
from serve_app.state.manage import Accounts

_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_ABOUT = """\
An account has a weight (its share while others wait), limits, keys and members. A key opens one account and does what
its scopes say:
  inference  runs models
  read       sees status, usage, traces and lists
  admin      manages its account's keys and members; of the account of the settings: all accounts
A key is shown once, when it is made or rolled. Servers take every change up within a second.

examples:
  serve-app accounts add team-a                                   a key for team-a, which is made if need be
  serve-app accounts add team-a --name ci --scopes inference --expires 90d
  serve-app accounts change team-a --weight 2 --limit neurons_per_day=10000
  serve-app accounts change team-a --key 3f1c0a9d5e77 --limit requests_per_minute=60 --limit streams=
  serve-app accounts roll team-a 3f1c0a9d5e77                     another value; the old one is refused
  serve-app accounts remove team-a --key 3f1c0a9d5e77             the key is refused from now on
  serve-app accounts member team-a ann@example.com --scopes read  her keys may read, and end with her membership
  serve-app accounts audit team-a                                 who changed what
"""


def add_parser(commands: Any) -> None:
    accounts = Group(commands, "accounts", "accounts, their keys and members, beside those of the settings", _ABOUT)

    add = _of_one(accounts, "add", "a new key for an account, which is made if need be; printed once", _add)
    add.add_argument("--weight", type=float, help="share of the tokens served while others wait (default 1)")
    add.add_argument("--priority", choices=PRIORITIES, default="realtime", help="of this key (default realtime)")
    add.add_argument("--member", metavar="EMAIL", help="the member whose key it is")
    _key_options(add, "inference,read")

    accounts.action("list", "accounts with their members and keys", _list, json=True)

    change = _of_one(accounts, "change", "change an account, or with --key one of its keys", _change)
    change.add_argument("--key", metavar="ID", help="the key to change")
    change.add_argument("--label", help="what people call the account")
    change.add_argument("--weight", type=float, help="of the account")
    change.add_argument("--priority", choices=PRIORITIES, help="of the key")
    state = change.add_mutually_exclusive_group()
    state.add_argument("--disable", action="store_true", help="refuse the key until it is enabled again")
    state.add_argument("--enable", action="store_true", help="take the key again")
    _key_options(change, "as they are")

    roll = _of_one(accounts, "roll", "give a key another value, printed once; its id and settings stay", _roll)
    roll.add_argument("key", help="the key's id")

    remove = _of_one(accounts, "remove", "end an account with all its keys, or one of its keys or members", _remove)
    what = remove.add_mutually_exclusive_group()
    what.add_argument("--key", metavar="ID", help="only the key with this id")
    what.add_argument("--member", metavar="EMAIL", help="only this member, with the member's keys")

    member = _of_one(accounts, "member", "a new member, or other scopes for one", _member)
    member.add_argument("email", help="the member's address")
    member.add_argument("--scopes", required=True, help=f"what the member's keys may do at most: {','.join(SCOPES)}")

    audit = accounts.action("audit", "who changed what, newest first", _audit)
    audit.add_argument("name", nargs="?", help="of this account only")
    audit.add_argument("--since", metavar="TIME", help="a time such as 2027-01-31, or how long ago: 7d, 12h")
    audit.add_argument("--limit", type=int, default=100, dest="most", help="at most so many (default 100)")
    audit.add_argument("--json", action="store_true", help="one JSON object a line")


def _of_one(accounts: Group, name: str, help: str, command: Command) -> argparse.ArgumentParser:
    parser = accounts.action(name, help, command)
    parser.add_argument("name", help="the account's id, as it stands in URLs")
    return parser


def _key_options(parser: argparse.ArgumentParser, scopes: str) -> None:
    parser.add_argument("--name", dest="called", help="what people call the key")
    parser.add_argument("--scopes", help=f"what the key may do: {','.join(SCOPES)} (default {scopes})")
    parser.add_argument("--expires", metavar="TIME", help="when the key ends: 90d, 12h, 2027-01-31, or never")
    parser.add_argument(
        "--limit",
        action="append",
        default=[],
        metavar="NAME=N",
        help=f"of the key, or of the account where no key is meant: {', '.join(KINDS)}; without N: none",
    )


def _add(arguments: argparse.Namespace) -> int:
    fields = {"priority": arguments.priority, **_fields(arguments)}
    with Accounts(via="cli") as accounts:
        if arguments.member:
            fields["member"] = _by_email(accounts, arguments.name, arguments.member).id
        if arguments.weight is not None and arguments.name in accounts.list():
            accounts.change(arguments.name, weight=arguments.weight)
        elif arguments.weight is not None:
            accounts.create(arguments.name, weight=arguments.weight)
        key, value = accounts.make_key(arguments.name, **fields)
    print(value)
    print(f"The key {key.id} is shown once; a running server takes it within a second.", file=sys.stderr)
    return 0


def _list(arguments: argparse.Namespace) -> int:
    with Accounts(via="cli") as accounts:
        found = accounts.list().values()
    if arguments.json:
        print(json.dumps([_as_json(account) for account in found], indent=2))
        return 0
    for account in found:
        limits = " ".join(f"{name}={value}" for name, value in account.limits.shown().items())
        label = f"  {account.label}" if account.label else ""
        print(f"{account.name:24} weight {account.weight:<8g} {limits}{label}".rstrip())
        emails = {member.id: member.email for member in account.members}
        for member in account.members:
            print(f"  member {member.email:24} {','.join(sorted_scopes(member.scopes))}")
        for key in account.keys:
            print("  " + _line(key, emails))
    return 0


def _change(arguments: argparse.Namespace) -> int:
    fields = _fields(arguments)
    if arguments.key is None:
        of_keys = {**fields, "priority": arguments.priority, "disable": arguments.disable, "enable": arguments.enable}
        if wrong := [name for name, value in of_keys.items() if name != "limits" and value]:
            raise AccountsError(f"--{wrong[0]} belongs to a key. Name the key with --key ID.")
        with Accounts(via="cli") as accounts:
            accounts.change(arguments.name, label=arguments.label, weight=arguments.weight, limits=fields.get("limits"))
        return 0
    if arguments.label is not None or arguments.weight is not None:
        raise AccountsError("--label and --weight belong to the account. Leave --key out to change them.")
    if arguments.priority:
        fields["priority"] = arguments.priority
    if arguments.enable or arguments.disable:
        fields["enabled"] = arguments.enable
    with Accounts(via="cli") as accounts:
        print(_line(accounts.change_key(arguments.name, arguments.key, **fields), {}))
    return 0


def _roll(arguments: argparse.Namespace) -> int:
    with Accounts(via="cli") as accounts:
        print(accounts.roll_key(arguments.name, arguments.key))
    print("This key is shown once; the one before is refused within a second.", file=sys.stderr)
    return 0


def _remove(arguments: argparse.Namespace) -> int:
    with Accounts(via="cli") as accounts:
        if arguments.key is not None:
            accounts.end_key(arguments.name, arguments.key)
        elif arguments.member is not None:
            accounts.remove_member(arguments.name, _by_email(accounts, arguments.name, arguments.member).id)
        else:
            accounts.remove(arguments.name)
    return 0


def _member(arguments: argparse.Namespace) -> int:
    scopes = check_scopes(arguments.scopes.split(","))
    with Accounts(via="cli") as accounts:
        account = accounts.get(arguments.name)
        known = next((member for member in account.members if member.email == arguments.email), None)
        if known is None:
            accounts.add_member(arguments.name, arguments.email, scopes)
        else:
            accounts.change_member(arguments.name, known.id, scopes)
    return 0


def _audit(arguments: argparse.Namespace) -> int:
    since = None if arguments.since is None else _ago(arguments.since)
    with Accounts(via="cli") as accounts:
        for change in accounts.audit(arguments.name, since=since, limit=arguments.most):
            if arguments.json:
                shown = {name: getattr(change, name) for name in ("id", "at", "account", "action", "kind", "target")}
                print(json.dumps({**shown, "by": change.by.who, "via": change.by.via, "changes": change.changes}))
                continue
            changed = ", ".join(_changed(name, *pair) for name, pair in change.changes.items())
            who = f"{change.by.who} ({change.by.via})"
            said = f"{change.action} {change.kind} {change.target}"
            print(f"{_when(change.at)}  {who:24} {change.account:16} {said}  {changed}".rstrip())
    return 0


def _fields(arguments: argparse.Namespace) -> dict[str, Any]:
    """What the options say of a key."""
    found: dict[str, Any] = {}
    if arguments.called is not None:
        found["name"] = arguments.called
    if arguments.scopes is not None:
        found["scopes"] = check_scopes(arguments.scopes.split(","))
    if arguments.expires is not None:
        found["expires"] = _later(arguments.expires)
    if arguments.limit:
        pairs = [text.partition("=") for text in arguments.limit]
        found["limits"] = {name.strip(): value.strip() or None for name, _, value in pairs}
    return found


def _by_email(accounts: Accounts, name: str, email: str) -> Member:
    found = next((member for member in accounts.get(name).members if member.email == email), None)
    if found is None:
        raise AccountsError(f"{email[:80]} is no member of {name}. `serve-app accounts member` makes one.")
    return found


def _later(text: str) -> float | None:
    """Unix seconds of a time to come. Raises :class:`AccountsError`."""
    if text == "never":
        return None
    found = _moment(text, 1)
    if found <= time.time():
        raise AccountsError(f"{text!r} lies in the past. Name a later time, or remove the key.")
    return found


def _ago(text: str) -> float:
    return _moment(text, -1)


def _moment(text: str, direction: int) -> float:
    if span := re.fullmatch(r"(\d{1,6})([smhdw])", text):
        return time.time() + direction * int(span[1]) * _SECONDS[span[2]]
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        raise AccountsError(f"{text[:40]!r} is no time. Use 90d, 12h, or a date such as 2027-01-31.") from None
    return (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()


def _line(key: Key, emails: dict[str, str]) -> str:
    told = [f"{key.id} {','.join(sorted_scopes(key.scopes)):20} {key.priority:8} {key.status(time.time()):8}"]
    told += [f"made {key.created}"]
    told += [f"expires {_when(key.expires)}"] if key.expires is not None else []
    told += [f"used {_when(key.used)}" if key.used is not None else "never used"]
    told += [f"{name}={value}" for name, value in key.limits.shown().items()]
    told += [emails.get(key.member, key.member)] if key.member else []
    return "  ".join(told + ([key.name] if key.name else []))


def _as_json(account: Any) -> dict[str, Any]:
    names = ("id", "name", "priority", "created", "starts", "expires", "used", "enabled", "member")
    keys = [
        {**{name: getattr(key, name) for name in names}, "scopes": sorted_scopes(key.scopes),
         "limits": key.limits.shown(), "status": key.status(time.time())}
        for key in account.keys
    ]  # fmt: skip
    members = [{"id": each.id, "email": each.email, "scopes": sorted_scopes(each.scopes)} for each in account.members]
    shown = {"id": account.name, "label": account.label, "weight": account.weight, "limits": account.limits.shown()}
    return {**shown, "keys": keys, "members": members}


def _when(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _changed(name: str, old: Any, new: Any) -> str:
    if name in ("starts", "expires"):
        old, new = (None if at is None else _when(at) for at in (old, new))
    if old is None or new is None:
        return f"{name}: {json.dumps(new if old is None else old)}"
    return f"{name}: {json.dumps(old)} -> {json.dumps(new)}"
