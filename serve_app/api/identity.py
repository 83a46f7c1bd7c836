"""Which request is being answered: its answer's ids, its time and its random seed come from it.

So whoever runs a request again, after the gateway that had it is gone, gives the very same answer.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from contextvars import ContextVar
from dataclasses import dataclass, field


@dataclass(slots=True, frozen=True)
class Identity:
    """``id``: 32 hex digits. ``created``: unix seconds. ``again``: another gateway had begun with it. ``batch``: the
    batch or queue that it belongs to. ``bound``: what it needs was looked up for all of its batch. ``kept``: what was
    looked up for it and is the same when it is run again, by name. ``begun`` has an entry once there is a piece of work
    of it.
    """

    id: str
    created: float
    again: bool = False
    batch: str = ""
    bound: bool = False
    kept: dict[str, str] = field(default_factory=dict)
    begun: list[bool] = field(default_factory=list)


# Not set: nobody can run the request again, and ids are drawn at random.
current: ContextVar[Identity | None] = ContextVar("identity", default=None)


def answer_id() -> str:
    """32 hex digits for the answer, which are the request's."""
    known = current.get()
    return secrets.token_hex(16) if known is None else known.id


def created() -> int:
    """Unix seconds of the answer."""
    known = current.get()
    return int(time.time() if known is None else known.created)


def part_id(*part: str | int) -> str:
    """24 hex digits for a part of the answer."""
    known = current.get()
    return secrets.token_hex(12) if known is None else _digest(known, *part)[:24]


def seed() -> int:
    """32 random bits, for a request that names no seed."""
    known = current.get()
    return secrets.randbits(32) if known is None else int(_digest(known, "seed")[:8], 16)


def again() -> bool:
    known = current.get()
    return known is not None and known.again


def batch() -> str:
    known = current.get()
    return "" if known is None else known.batch


def bound() -> bool:
    """Whether what the request needs has been looked up before, if at all."""
    known = current.get()
    return known is not None and (known.again or known.bound)


def begin() -> None:
    """There is a piece of work of the request, whose end tells of it."""
    if (known := current.get()) is not None and not known.begun:
        known.begun.append(True)


def keep(name: str, value: str) -> None:
    """Has whoever runs the request again find ``value``."""
    if (known := current.get()) is not None:
        known.kept[name] = value


def kept(name: str) -> str | None:
    known = current.get()
    return None if known is None else known.kept.get(name)


def _digest(known: Identity, *part: str | int) -> str:
    return hashlib.sha256("\0".join([known.id, *map(str, part)]).encode()).hexdigest()
