"""An alert: a budget has reached one of the shares at which somebody is told."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from serve_app.state.quotas import MONEY, NEURONS, Quota

UNIT = {NEURONS: 10**6, MONEY: 10**9}


def amount(kind: str, value: int) -> str:
    """Micro-neurons or nano-units as a decimal."""
    unit = UNIT.get(kind.partition(":")[0], 1)
    whole, rest = divmod(value, unit)
    if unit == 1 or not rest:
        return str(whole)
    return f"{whole}.{rest:0{len(str(unit)) - 1}d}".rstrip("0")


def called(kind: str) -> str:
    """What people call the limit."""
    family, _, of = kind.partition(":")
    return {NEURONS: "neurons a day", MONEY: f"{of or MONEY} a month"}.get(family, f"{family} a minute")


@dataclass(slots=True, frozen=True)
class Alert:
    """``id`` is the same however often it is sent. ``share``: per cent. ``spent``, ``limit``: micro-neurons, or
    nano-units of money. ``window``: begin of the day or month, ``at``: when it was noticed; unix seconds. ``tries``:
    attempts to tell the receiver that came before.
    """

    id: str
    account: str
    key: str
    kind: str
    window: int
    share: int
    spent: int
    limit: int
    at: float
    tries: int = 0

    @property
    def text(self) -> str:
        """For the log."""
        whose = f"account {self.account}" + (f", key {self.key}" if self.key else "")
        spent, limit = amount(self.kind, self.spent), amount(self.kind, self.limit)
        return f"{whose}: {self.share} % of the budget of {limit} {called(self.kind)} is used ({spent})"

    @property
    def body(self) -> dict[str, Any]:
        """For the receiver, in the form that Standard Webhooks has: amounts are decimals, as text."""
        currency = Quota(self.account, self.key, self.kind).currency
        return {
            "type": "budget.reached",
            "timestamp": _iso(self.at),
            "data": {
                "account": self.account,
                "key": self.key or None,
                "limit": "neurons_per_day" if self.kind == NEURONS else "money_per_month",
                "share": self.share,
                "used": amount(self.kind, self.spent),
                "of": amount(self.kind, self.limit),
                **({"currency": currency} if currency else {}),
                "since": _iso(self.window),
            },
        }


def _iso(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
