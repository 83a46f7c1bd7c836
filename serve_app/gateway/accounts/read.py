"""Bodies and queries about accounts, tokens and members, as Cloudflare's clients send them."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from serve_app.api.errors import BadChange
from serve_app.gateway.accounts.scopes import of_names, of_policies
from serve_app.state.callers.accounts import Scope

MOST_ENTRIES = 1000
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}", re.ASCII)


def account_fields(body: Mapping[str, Any]) -> dict[str, Any]:
    """What a body says of an account: any of ``label``, ``weight`` and ``limits``."""
    found: dict[str, Any] = {}
    if body.get("name") is not None:
        found["label"] = _text(body, "name")
    if body.get("weight") is not None:
        found["weight"] = body["weight"]
    if body.get("limits") is not None:
        found["limits"] = _limits(body)
    return found


def account_id(body: Mapping[str, Any]) -> str:
    """The id of an account to make: ``id``, else what of ``name`` can stand in a URL."""
    if body.get("id") is not None:
        return _text(body, "id")
    label = _text(body, "name")
    if _NAME.fullmatch(label):
        return label
    return re.sub(r"[^a-z0-9]+", "-", label.lower()).strip("-")[:64] or secrets.token_hex(8)


def token_fields(body: Mapping[str, Any], account: str, *, new: bool) -> dict[str, Any]:
    """What a body says of a key, as :class:`KeyTable` takes it. ``scopes`` may stand for ``policies``."""
    found: dict[str, Any] = {}
    if new or body.get("name") is not None:
        found["name"] = _text(body, "name")
    if body.get("scopes") is not None:
        found["scopes"] = of_names(body["scopes"], "scopes")
    elif new or body.get("policies") is not None:
        found["scopes"] = of_policies(body.get("policies"), account)
    if body.get("condition"):
        raise BadChange("Conditions on a token are not supported here. Leave condition out.", param="condition")
    for name, field in (("not_before", "starts"), ("expires_on", "expires")):
        if name in body:
            found[field] = None if body[name] is None else at(body[name], name)
    if (expires := found.get("expires")) is not None and expires <= time.time():
        raise BadChange("expires_on lies in the past. Name a later time, or end the token.", param="expires_on")
    if body.get("status") is not None:
        if body["status"] not in ("active", "disabled"):
            raise BadChange("status is active or disabled.", param="status")
        found["enabled"] = body["status"] == "active"
    if body.get("priority") is not None:
        found["priority"] = body["priority"]
    if body.get("limits") is not None:
        found["limits"] = _limits(body)
    return found


def member_scopes(body: Mapping[str, Any]) -> set[Scope]:
    """From ``roles``: a role's id or an object with one. Policies of members are not supported."""
    if body.get("policies"):
        raise BadChange("Members have roles here. Send roles instead of policies.", param="policies")
    return of_names(body.get("roles"), "roles")


def at(value: Any, name: str) -> float:
    """Unix seconds of a date or a time in ISO 8601; UTC where it does not say. Raises :class:`BadChange`."""
    try:
        found = datetime.fromisoformat(str(value))
        return (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError):
        shown = str(value)[:40]
        raise BadChange(f"{name} is a time such as 2027-01-31T00:00:00Z, not {shown!r}.", param=name) from None


def _text(body: Mapping[str, Any], name: str) -> str:
    value = body.get(name)
    if not isinstance(value, str) or not value.strip():
        raise BadChange(f"{name} is a text of at least one character.", param=name)
    return value


def _limits(body: Mapping[str, Any]) -> Mapping[str, Any]:
    if not isinstance(body["limits"], Mapping):
        raise BadChange("limits is an object of limits by name.", param="limits")
    return body["limits"]


def audit_query(query: Mapping[str, str]) -> dict[str, Any]:
    """Which entries of the audit trail, as :meth:`AuditTable.read` takes it."""
    limit = query.get("limit", "").strip()
    if limit and not (limit.isascii() and limit.isdigit() and 0 < int(limit[:9]) <= MOST_ENTRIES):
        raise BadChange(f"limit is a number from 1 to {MOST_ENTRIES}.", param="limit")
    found: dict[str, Any] = {"limit": int(limit) if limit else 100, "oldest_first": query.get("direction") == "asc"}
    for name in ("since", "before"):
        if query.get(name):
            found[name] = at(query[name], name)
    if cursor := query.get("cursor"):
        if not re.fullmatch(r"[0-9a-f]{32}", cursor):
            raise BadChange("cursor is result_info.cursors.after of the page before.", param="cursor")
        found["after"] = cursor
    return found
