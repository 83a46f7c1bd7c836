"""Who changed what of accounts, keys, members and webhooks: an entry for each change, written with it or not at all."""

from __future__ import annotations

import getpass
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Via = Literal["api", "cli", "python"]
Action = Literal["create", "update", "roll", "delete"]
Kind = Literal["account", "key", "member", "webhook", "subscription", "model", "prompts"]


@dataclass(slots=True, frozen=True)
class Actor:
    """Who changes something: ``who`` is the id of a key, or a user of the machine. ``request``: the id of the request,
    where it came over HTTP.
    """

    who: str
    via: Via
    request: str = ""


@dataclass(slots=True, frozen=True)
class Change:
    """``target``: the id of what was changed. ``changes``: by field, what it was and what it is, None where
    there was nothing. Never a key or its hash. ``at``: unix seconds.
    """

    id: str
    at: float
    account: str
    by: Actor
    action: Action
    kind: Kind
    target: str
    changes: Mapping[str, tuple[Any, Any]]


def local_actor(via: Via = "python") -> Actor:
    """The user whose process this is."""
    try:
        return Actor(getpass.getuser(), via)
    except (KeyError, OSError):  # one that the system has no name for
        return Actor("unknown", via)
