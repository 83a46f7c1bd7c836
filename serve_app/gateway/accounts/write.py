"""Accounts, tokens, members and the audit trail, as Cloudflare's clients read them."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Any

from serve_app.gateway.accounts.scopes import policies, role
from serve_app.state.callers.accounts import Account, Caller, Key, Member, sorted_scopes
from serve_app.state.callers.audit import Change

# The kinds of entries as Cloudflare names what a token belongs to.
_ACTORS = {"api": "user", "cli": "system", "python": "system"}


def account(found: Account) -> dict[str, Any]:
    shown = {"id": found.name, "name": found.label or found.name, "type": "standard", "settings": {}}
    if found.created:
        shown["created_on"] = _stamp(found.created)
    return {**shown, "weight": found.weight, "limits": found.limits.shown()}


def token(found: Key, of: str, value: str | None = None) -> dict[str, Any]:
    """``value``: the key itself, of one that has just been made."""
    scopes = sorted_scopes(found.scopes)
    shown: dict[str, Any] = {"id": found.id, "name": found.name or found.id, "status": found.status(time.time())}
    if found.created:
        shown["issued_on"] = _stamp(found.created)
    times = {"last_used_on": found.used, "expires_on": found.expires, "not_before": found.starts}
    shown |= {name: moment(at) for name, at in times.items() if at is not None}
    shown |= {"policies": policies(of, scopes), "account": of, "scopes": scopes, "priority": found.priority}
    shown |= {"limits": found.limits.shown(), "member": found.member or None}
    return shown if value is None else {**shown, "value": value}


def verified(caller: Caller, key: Key | None) -> dict[str, Any]:
    """What the holder of a valid key is told of it."""
    shown: dict[str, Any] = {"id": caller.key, "status": "active"}
    if key is not None:
        times = {"expires_on": key.expires, "not_before": key.starts}
        shown |= {name: moment(at) for name, at in times.items() if at is not None}
    return {**shown, "account": caller.account, "scopes": sorted_scopes(caller.scopes)}


def member(found: Member) -> dict[str, Any]:
    shown = {"id": found.id, "email": found.email, "status": "accepted", "created_on": _stamp(found.created)}
    user = {"id": found.id, "email": found.email}
    return {**shown, "user": user, "roles": [role(scope) for scope in sorted_scopes(found.scopes)], "policies": []}


def user(caller: Caller, found: Member | None) -> dict[str, Any]:
    """Who holds a key: a member, or the account itself."""
    name = caller.account if found is None else found.id
    organization = {"id": caller.account, "name": caller.account, "status": "member"}
    return {"id": name, "email": "" if found is None else found.email, "organizations": [organization]}


def change(found: Change) -> dict[str, Any]:
    """An entry of the audit trail as ``/accounts/{account}/logs/audit`` has it."""
    by = found.by
    actor: dict[str, Any] = {"id": by.who, "type": _ACTORS[by.via]}
    if by.via == "api":
        actor |= {"context": "api_token", "token_id": by.who}
    said = f"{found.action} {found.kind} {found.target}"
    return {
        "id": found.id,
        "account": {"id": found.account, "name": found.account},
        "action": {"type": found.action, "result": "success", "time": moment(found.at), "description": said},
        "actor": {**actor, "interface": by.via},
        "raw": {"cf_ray_id": by.request} if by.request else {},
        "resource": {"id": found.target, "type": found.kind, "product": "accounts", "scope": "accounts",
                     "request": {name: {"before": old, "after": new} for name, (old, new) in found.changes.items()}},
    }  # fmt: skip


def moment(at: float) -> str:
    """A time in unix seconds as Cloudflare writes it."""
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _stamp(created: str) -> str:
    return created if "T" in created else f"{created}T00:00:00Z"
