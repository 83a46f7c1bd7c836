"""An alert: a budget has reached one of the shares at which somebody is told."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from serve_app.state.deferred.events import BUDGET, Event, iso
from serve_app.state.spending.quotas import MONEY, NEURONS, Quota

UNIT = {NEURONS: 10**6, MONEY: 10**9}
# What the limits are called on the wire.
_WIRE = {NEURONS: "neurons_per_day", MONEY: "money_per_month"}


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
    """``share``: per cent. ``spent``, ``limit``: micro-neurons, or nano-units of money. ``window``: begin of the day or
    month, ``at``: when it was noticed; unix seconds.
    """

    account: str
    key: str
    kind: str
    window: int
    share: int
    spent: int
    limit: int
    at: float

    @property
    def event(self) -> Event:
        """In the form that Standard Webhooks has: amounts are decimals, as text."""
        quota = Quota(self.account, self.key, self.kind)
        data = {
            "account": self.account,
            "key": self.key or None,
            "limit": _WIRE[quota.family],
            "share": self.share,
            "used": amount(self.kind, self.spent),
            "of": amount(self.kind, self.limit),
            **({"currency": quota.currency} if quota.currency else {}),
            "since": iso(self.window),
        }
        return Event(BUDGET, {"type": BUDGET, "timestamp": iso(self.at), "data": data})


def told(data: Mapping[str, Any]) -> str:
    """The line of the log for the ``data`` of an alert's event."""
    whose = f"account {data['account']}" + (f", key {data['key']}" if data["key"] else "")
    kind = next(kind for kind, name in _WIRE.items() if name == data["limit"])
    limit = called(f"{kind}:{data.get('currency', '')}")
    return f"{whose}: {data['share']} % of the budget of {data['of']} {limit} is used ({data['used']})"
