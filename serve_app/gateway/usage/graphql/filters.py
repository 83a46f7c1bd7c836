"""Filters of Cloudflare's GraphQL as bounds of time and values of dimensions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from graphql import GraphQLError

from serve_app.gateway.usage.graphql.schema import COMPARISONS, DERIVED, NAMES, TIMES, VALUES
from serve_app.state.spending.ledger import DAY_S
from serve_app.state.spending.usage import moment

# Status of an entry by the code that its request would have been refused with; 0: there was none.
CODES: Mapping[str, int] = {"done": 0, "left": 3008, "failed": 8005}
MAX_VALUES = 200
# Of filters inside filters.
MAX_FILTERS = 64


@dataclass(slots=True)
class Filter:
    """What all conditions together leave. ``since``, ``until``: unix seconds. ``nothing``: they exclude each other."""

    since: int | None = None
    until: int | None = None
    only: dict[str, tuple[str, ...]] = field(default_factory=dict)
    but: dict[str, tuple[str, ...]] = field(default_factory=dict)
    conditions: int = 0

    def after(self, at: int) -> None:
        self.since = at if self.since is None else max(self.since, at)

    def before(self, at: int) -> None:
        self.until = at if self.until is None else min(self.until, at)

    def among(self, name: str, values: Sequence[str]) -> None:
        known = self.only.get(name)
        self.only[name] = tuple(v for v in dict.fromkeys(values) if known is None or v in known)

    @property
    def nothing(self) -> bool:
        return any(not values for values in self.only.values())


def read_filter(given: Mapping[str, Any] | None, now: float) -> Filter:
    """Raises :class:`GraphQLError`."""
    found = Filter()
    _add(found, given or {}, now)
    return found


def _add(found: Filter, given: Mapping[str, Any], now: float) -> None:
    for name, value in given.items():
        found.conditions += 1
        if found.conditions > MAX_FILTERS:
            raise GraphQLError(f"A filter has at most {MAX_FILTERS} conditions.")
        if value is None:
            continue
        plain, how = _split(name)
        if name == "OR":
            raise GraphQLError("OR is not supported here; send a query for each, under aliases.")
        if name == "AND":
            for inner in value:
                _add(found, inner, now)
        elif plain in TIMES:
            _add_time(found, plain, how, value, now)
        elif plain in VALUES:
            if how not in ("_geq", "_gt") or not isinstance(value, (int, float)) or value > 0:
                raise GraphQLError(f"{name}: only what is at least 0 can be asked for.")
        else:
            _add_values(found, plain, how, value)


def _add_time(found: Filter, name: str, how: str, value: Any, now: float) -> None:
    if not isinstance(value, str):
        raise GraphQLError(f"{name}{how} must be a text, as 2026-11-22T06:00:00Z.")
    try:
        at = moment(value, now)
    except ValueError as error:
        raise GraphQLError(f"{name}{how}: {error}") from None
    width = TIMES[name]
    below, above = at - at % width, at + -at % width
    if how in ("", "_geq"):
        found.after(above if how else below)
    if how in ("", "_leq"):
        found.before(below + width)
    if how == "_gt":
        found.after(below + width)
    if how == "_lt":
        found.before(above)


def _add_values(found: Filter, name: str, how: str, value: Any) -> None:
    values = value if isinstance(value, list) else [value]
    if len(values) > MAX_VALUES or not all(isinstance(v, (str, int)) for v in values):
        raise GraphQLError(f"{name}{how} must be at most {MAX_VALUES} texts.")
    texts = [str(v) for v in values]
    if any("\0" in text or len(text) > 512 for text in texts):
        raise GraphQLError(f"{name}{how}: no value here is like that.")
    if name == "errorCode":
        texts = [status for status, code in CODES.items() if str(code) in texts]
        name = "status"
    elif name in DERIVED:
        raise GraphQLError(f"{name} can't be filtered by; ask by {DERIVED[name]}.")
    else:
        name = NAMES[name]
    if how in ("", "_in"):
        found.among(name, texts)
    else:
        found.but[name] = (*found.but.get(name, ()), *texts)


def _split(name: str) -> tuple[str, str]:
    for how in ("_notin", "_neq", "_in", *COMPARISONS[1:]):
        if name.endswith(how):
            return name.removesuffix(how), how
    return name, ""


def span(found: Filter, now: float, days: int) -> tuple[int, int]:
    """The time asked for; ``days`` until now where nothing is said of a beginning."""
    until = int(now) + 1 if found.until is None else found.until
    since = (int(now) // DAY_S - days) * DAY_S if found.since is None else found.since
    return since, until
