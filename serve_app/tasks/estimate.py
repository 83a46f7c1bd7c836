"""What a request would use and cost, and when it would begin, without running it.

Three cases are told. ``least`` and ``most`` are bounds that hold whatever happens: the whole prompt from a cache and
the shortest answer, nothing from a cache and the longest. ``expected`` lies between them: what routing knows of the
prompt's beginning, and an answer as long as the model's others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from serve_app.api.receipt import MICRO, amount_text
from serve_app.catalog.price_list import Quote
from serve_app.tasks.model import ServedModel


@dataclass(slots=True, frozen=True)
class Foreseen:
    """What a backend foresees of a request. ``output_tokens``: of one answer; None: nothing is known. ``wait_s``:
    seconds before anything is computed; ``ttft_s``: seconds to the first token, ``wait_s`` included.
    """

    cached_tokens: int = 0
    output_tokens: int | None = None
    wait_s: float | None = None
    ttft_s: float | None = None


@dataclass(slots=True, frozen=True)
class Case:
    """``units`` by kind, as the ledger would have them; ``neurons`` in millionths, ``money`` in billionths."""

    units: Mapping[str, int] = field(default_factory=dict)
    neurons: int = 0
    money: int = 0

    def __add__(self, other: Case) -> Case:
        kinds = dict.fromkeys((*self.units, *other.units))
        units = {kind: self.units.get(kind, 0) + other.units.get(kind, 0) for kind in kinds}
        return Case(units, self.neurons + other.neurons, self.money + other.money)


@dataclass(slots=True, frozen=True)
class Estimate:
    """Of a whole request, which may be several pieces of work. ``currency`` None: the model has no price in money."""

    model: str
    task: str
    least: Case
    expected: Case
    most: Case
    wait_s: float | None = None
    ttft_s: float | None = None
    currency: str | None = None

    def shown(self) -> dict[str, Any]:
        """As clients see it, in every dialect."""
        cases = {"least": self.least, "expected": self.expected, "most": self.most}
        return {
            "object": "estimate",
            "model": self.model,
            "task": self.task,
            "prompt_tokens": self.expected.units.get("input_tokens", 0),
            "cached_tokens": self.expected.units.get("cached_tokens", 0),
            "wait_s": _rounded(self.wait_s),
            "ttft_s": _rounded(self.ttft_s),
            "units": {name: dict(case.units) for name, case in cases.items()},
            "neurons": {name: case.neurons / MICRO for name, case in cases.items()},
            "cost": None if self.currency is None else {**_amounts(cases), "currency": self.currency},
        }


class Estimated(Exception):
    """A request that asked what it would cost ends with this where it would begin to run. It is an answer, not an
    error.
    """

    def __init__(self, estimate: Estimate) -> None:
        super().__init__("an estimate")
        self.estimate = estimate


def estimate_of(
    quote: Quote,
    model: ServedModel,
    least: Mapping[str, int],
    expected: Mapping[str, int],
    most: Mapping[str, int],
    foreseen: Foreseen,
) -> Estimate:
    """One piece of work of ``model``, whose price is ``quote``."""
    cases = _priced(quote, least), _priced(quote, expected), _priced(quote, most)
    currency = quote.tariff.currency if quote.priced else None
    return Estimate(model.id, model.record.task, *cases, foreseen.wait_s, foreseen.ttft_s, currency)


def together(estimates: Sequence[Estimate]) -> Estimate:
    """Several pieces of work of one request: what they cost in all, and when the last of them begins."""
    first = estimates[0]
    least = sum((e.least for e in estimates), Case())
    expected = sum((e.expected for e in estimates), Case())
    most = sum((e.most for e in estimates), Case())
    waits = [e.wait_s for e in estimates if e.wait_s is not None]
    ttfts = [e.ttft_s for e in estimates if e.ttft_s is not None]
    wait, ttft = max(waits, default=None), max(ttfts, default=None)
    return Estimate(first.model, first.task, least, expected, most, wait, ttft, first.currency)


def _priced(quote: Quote, units: Mapping[str, int]) -> Case:
    counted = dict(units) | ({"requests": 1} if "requests" in quote.tariff.rates else {})
    found = quote.cost(counted)
    return Case(counted, found.neurons, found.money)


def _amounts(cases: Mapping[str, Case]) -> dict[str, str]:
    """Decimals, as in receipts."""
    return {name: amount_text(case.money) for name, case in cases.items()}


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 4)
