"""What is limited, and what gateways and the store tell each other of it: pure data.

A limit holds for an account, or for one of its keys, over all gateways together. Each gateway has a *lease* of it: a
part that the store has set aside for this gateway, from which it lets requests in without asking.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import NamedTuple

# Kinds. Requests may be those of one task, "requests:TASK"; money is that of one currency, "money:EUR".
REQUESTS, TOKENS, STREAMS, NEURONS, MONEY = "requests", "tokens", "streams", "neurons", "money"
MINUTE_S, DAY_S = 60, 86400


class Quota(NamedTuple):
    """One limit of one account (``key`` "") or key."""

    account: str
    key: str
    kind: str

    @property
    def family(self) -> str:
        return self.kind.partition(":")[0]

    @property
    def currency(self) -> str:
        """Of money."""
        return self.kind.partition(":")[2] if self.family == MONEY else ""

    @property
    def is_budget(self) -> bool:
        """Whether the ledger counts it, and it must hold whatever dies."""
        return self.family in (NEURONS, MONEY)

    @property
    def is_rate(self) -> bool:
        """Whether it is counted by the minute."""
        return self.family in (REQUESTS, TOKENS)

    def window(self, now: float) -> int:
        """The window of ``now``, as its begin in unix seconds; 0 where there is none."""
        if self.is_rate:
            return int(now // MINUTE_S) * MINUTE_S
        if self.kind == NEURONS:
            return int(now // DAY_S) * DAY_S
        if self.family == MONEY:
            return int(_month(now).timestamp())
        return 0

    def ends(self, now: float) -> float:
        """When the window of ``now`` ends, in unix seconds; ``now`` where there is none."""
        if self.family == MONEY:
            month = _month(now)
            return month.replace(year=month.year + month.month // 12, month=month.month % 12 + 1).timestamp()
        if self.kind == NEURONS:
            return float(self.window(now) + DAY_S)
        return float(self.window(now) + MINUTE_S) if self.is_rate else now


def _month(now: float) -> datetime:
    return datetime.fromtimestamp(now, UTC).replace(day=1, hour=0, minute=0, second=0, microsecond=0)


@dataclass(slots=True, frozen=True)
class Need:
    """What a request takes of one limit at most. ``amount`` and ``limit`` in the limit's own units."""

    quota: Quota
    limit: int
    amount: int


@dataclass(slots=True, frozen=True)
class Want:
    """What a gateway asks of the store: a lease of ``asked``, of which ``held`` is in use. ``amount``: what it goes by
    until it is answered, at most what it was last granted. ``owed``: costs by the ids of work that has ended, a part of
    ``held`` until the ledger has their entries. ``refused``: a request did not fit.
    """

    quota: Quota
    window: int
    limit: int
    amount: int
    asked: int
    held: int
    owed: Mapping[str, int] = field(default_factory=dict)
    refused: bool = False


@dataclass(slots=True, frozen=True)
class Granted:
    """The lease as it is now: ``amount``. ``others``: leased by other gateways, ``others_held`` of it in use;
    ``contended``: one of them was given less than it asked for. ``spent``: what the ledger has of the window.
    ``written``: those of the owed whose entries it has, which are no part of ``amount`` any more.
    """

    amount: int
    others: int = 0
    others_held: int = 0
    contended: bool = False
    spent: int = 0
    written: frozenset[str] = frozenset()
