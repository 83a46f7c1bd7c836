"""Scopes as Cloudflare's API names them: groups of permissions in a token's policies, and roles of members."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from serve_app.api.errors import BadChange
from serve_app.state.callers.accounts import SCOPES, Scope

RESOURCE = "com.cloudflare.api.account"
ABOUT: dict[Scope, str] = {
    "inference": "Runs models.",
    "read": "Sees status, usage, traces and lists.",
    "admin": "Manages the account: its keys and members.",
}
# Groups that people know from Cloudflare and what they come to here, by name.
_KNOWN: dict[str, tuple[Scope, ...]] = {
    "Workers AI Read": ("inference", "read"),
    "Workers AI Write": ("inference", "read"),
    "Account Analytics Read": ("read",),
    "Account API Tokens Write": ("admin",),
    "Account Settings Write": ("admin",),
}
_MEANS: dict[str, tuple[Scope, ...]] = {scope: (scope,) for scope in SCOPES} | _KNOWN


def groups() -> list[dict[str, Any]]:
    """The permission groups that a policy may name, by ``id`` or by ``name``."""
    return [
        {"id": name, "name": name, "category": "ai_and_machine_learning", "is_selectable": True, "scopes": [RESOURCE]}
        for name in _MEANS
    ]


def roles() -> list[dict[str, Any]]:
    return [role(scope) for scope in SCOPES]


def role(scope: Scope) -> dict[str, Any]:
    return {"id": scope, "name": scope, "description": ABOUT[scope], "permissions": {}}


def policies(account: str, scopes: Iterable[Scope]) -> list[dict[str, Any]]:
    """A token's policies that say the same as ``scopes``."""
    named = [{"id": scope, "name": scope} for scope in scopes]
    return [{"id": account, "effect": "allow", "permission_groups": named, "resources": {f"{RESOURCE}.{account}": "*"}}]


def of_policies(found: Any, account: str) -> set[Scope]:
    """What policies allow in ``account``. Raises :class:`BadChange` for what cannot be enforced here."""
    if not isinstance(found, list) or not found or not all(isinstance(policy, dict) for policy in found):
        raise BadChange("policies is a list of at least one policy.", param="policies")
    scopes: set[Scope] = set()
    for policy in found:
        if policy.get("effect") != "allow":
            raise BadChange('Policies have the effect "allow": what is not allowed is denied.', param="policies")
        _check_resources(policy.get("resources"), account)
        scopes |= of_names(policy.get("permission_groups"), "permission_groups")
    return scopes


def of_names(found: Any, field: str) -> set[Scope]:
    """Scopes of groups or roles, each a name or an object with ``id`` or ``name``. Raises :class:`BadChange`."""
    if not isinstance(found, list) or not found:
        raise BadChange(f"{field} is a list of at least one of: {', '.join(_MEANS)}.", param=field)
    scopes: set[Scope] = set()
    for one in found:
        names = (one.get("id"), one.get("name")) if isinstance(one, dict) else (one,)
        means = next((_MEANS[name] for name in names if isinstance(name, str) and name in _MEANS), None)
        if means is None:
            shown = str(next((name for name in names if name), one))[:60]
            raise BadChange(f"{field} has none {shown!r}. There are: {', '.join(_MEANS)}.", param=field)
        scopes |= set(means)
    return scopes


def _check_resources(resources: Any, account: str) -> None:
    """A policy is for its token's account."""
    if resources is None:
        return
    good = (f"{RESOURCE}.{account}", f"{RESOURCE}.*")
    if not isinstance(resources, Mapping) or not all(name in good for name in resources):
        raise BadChange(
            f'A token is for one account. resources is {{"{RESOURCE}.{account}": "*"}} or left out.', param="policies"
        )
