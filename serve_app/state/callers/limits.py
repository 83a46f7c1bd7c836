"""Limits of an account or of one key, as they are stored and told."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from decimal import Decimal, InvalidOperation
from typing import Any, Literal, get_args

from serve_app.state.errors import AccountsError

# Of the two that are not counted in ones.
MICRO, NANO = 1_000_000, 1_000_000_000
_UNITS = {"neurons_per_day": MICRO, "money_per_month": NANO}
_MOST = 2**62
Plan = Literal["free", "paid"]
PLANS: tuple[str, ...] = get_args(Plan)
# Of Workers AI's free plan, a day.
FREE_NEURONS = 10_000 * MICRO


@dataclass(slots=True, frozen=True)
class Limits:
    """None: no limit of this kind. ``requests_per_minute``, ``tokens_per_minute``; ``streams`` at once;
    ``neurons_per_day`` in micro-neurons, of a day of UTC; ``money_per_month`` in billionths of the price list's
    currency, of a calendar month of UTC. ``plan``, of accounts: the free one has no models that are marked paid, and
    10,000 neurons a day where it is not said otherwise; None: that of the settings.
    """

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    streams: int | None = None
    neurons_per_day: int | None = None
    money_per_month: int | None = None
    plan: Plan | None = None

    def __bool__(self) -> bool:
        # Asked twice for every request, which mostly has none.
        return self is not NO_LIMITS and self != NO_LIMITS

    def shown(self) -> dict[str, int | str]:
        """As people write them: whole numbers, and neurons and money as decimal text."""
        found = {name: value for name, value in asdict(self).items() if value is not None}
        return {name: _decimal(value, _UNITS[name]) if name in _UNITS else value for name, value in found.items()}

    def stored(self) -> str:
        return json.dumps({name: value for name, value in asdict(self).items() if value is not None})

    @classmethod
    def of_stored(cls, text: str) -> Limits:
        """Whatever a newer program has written beside what this one knows is left out."""
        return cls(**{name: value for name, value in json.loads(text or "{}").items() if name in KINDS})


NO_LIMITS = Limits()
KINDS = tuple(each.name for each in fields(Limits))


def read_limits(given: Mapping[str, Any], before: Limits = NO_LIMITS, *, of_key: bool = False) -> Limits:
    """``before`` with what is ``given`` as :meth:`Limits.shown` has it; None takes a limit away. ``of_key``: limits of
    a key, which has its account's plan. Raises :class:`AccountsError`.
    """
    if of_key and given.get("plan") is not None:
        raise AccountsError("plan is a limit of accounts: a key has its account's. Change the account instead.")
    changed = {name: getattr(before, name) for name in KINDS}
    for name, value in given.items():
        if name not in KINDS:
            raise AccountsError(f"There is no limit {str(name)[:60]!r}. Limits: {', '.join(KINDS)}.")
        changed[name] = None if value is None else _plan(value) if name == "plan" else _number(name, value)
    return Limits(**changed)


def _plan(value: Any) -> str:
    if value not in PLANS:
        raise AccountsError(f"plan is one of {', '.join(PLANS)}, not {str(value)[:40]!r}.")
    return str(value)


def _number(name: str, value: Any) -> int:
    unit = _UNITS.get(name, 1)
    try:
        # Text and whole numbers are exact; a float is what its shortest text says.
        number = Decimal(str(value)) * unit
        good = not isinstance(value, bool) and number == number.to_integral_value() and 0 <= number <= _MOST
    except (InvalidOperation, ValueError):
        good = False
    if not good:
        kind = "a whole number from 0" if unit == 1 else f"a number from 0 with at most {len(str(unit)) - 1} decimals"
        raise AccountsError(f"{name} is {kind}, not {str(value)[:40]!r}.")
    return int(number)


def _decimal(value: int, unit: int) -> str:
    whole = format(Decimal(value) / unit, "f")
    return whole.rstrip("0").rstrip(".") if "." in whole else whole
