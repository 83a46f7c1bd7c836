"""What each model costs at a time: the catalogue's prices, and before them the operator's list with its dates, currency
and discounts.

The list is a YAML file:

    currency: EUR            # of all its prices; left out: USD
    per_dollar: 0.92         # what a dollar of the catalogue's prices is, for models that the list does not name
    prices:                  # keys as in records; the newest that holds counts
      - {model: "@cf/meta/llama-3.2-1b-instruct", from: 2026-12-01, input: 0.03, cached: 0.01, output: 0.2}
      - {model: "@cf/qwen/*", input: 0.5, output: 1, neurons: {input: 45455, output: 90909}}
    discounts:               # shares that are taken off
      - {from: 2026-12-01, cached: 0.75, batch: 0.5}

A date holds from 00:00 UTC. An entry that names no neurons leaves the catalogue's. A discount on cached tokens is one
on the price of input tokens, where the list's entry names no price of their own.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, date, datetime
from decimal import Decimal
from fnmatch import fnmatchcase
from fractions import Fraction
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from serve_app.catalog.errors import CatalogError, from_validation
from serve_app.catalog.pricing import CURRENCY, FREE, Amount, Cost, Price, Rates, Tariff, Units, cost

FILE = "prices.yaml"
BUILT_IN = Path(__file__).with_name(FILE)


def _moment(value: Any) -> Any:
    """Unix seconds of a date (00:00 UTC) or a time."""
    if isinstance(value, str):
        with suppress(ValueError):
            value = datetime.fromisoformat(value)
    if isinstance(value, datetime):
        return (value if value.tzinfo else value.replace(tzinfo=UTC)).timestamp()
    if isinstance(value, date):
        return datetime(value.year, value.month, value.day, tzinfo=UTC).timestamp()
    raise ValueError(f"{value!r} is no date | Write it as 2026-12-01, or as 2026-12-01T06:00:00Z.")


Moment = Annotated[float, BeforeValidator(_moment)]
Share = Annotated[Amount, Field(le=1)]


class Listed(Rates):
    """One price of the list. ``model``: an id, or a pattern with ``*``."""

    model: str
    since: Moment = Field(default=0.0, alias="from", validate_default=False)
    neurons: Rates | None = None


class Discount(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)
    since: Moment = Field(default=0.0, alias="from", validate_default=False)
    cached: Share | None = None
    batch: Share = Decimal(0)


class PriceList(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)
    currency: str = Field(default=CURRENCY, pattern=r"^[A-Z]{3}$")
    per_dollar: Amount | None = None
    prices: list[Listed] = []
    discounts: list[Discount] = []


@dataclass(slots=True, frozen=True)
class Quote:
    """What a model costs at a time. ``batch``: the share that is taken off for work of batches. ``priced``: whether
    it has a price in money.
    """

    tariff: Tariff
    batch: Fraction
    priced: bool

    def cost(self, units: Units, *, batch: bool = False) -> Cost:
        return cost(self.tariff, units, discount=self.batch if batch else None)


class Prices:
    """``catalogue``: prices by model id; ``listed``: the operator's."""

    def __init__(
        self, catalogue: Mapping[str, Price | None] = MappingProxyType({}), listed: PriceList | None = None
    ) -> None:
        self._catalogue = catalogue
        self.adopt(listed or PriceList())

    def recatalogue(self, catalogue: Mapping[str, Price | None]) -> None:
        """These are the catalogue's prices from now on."""
        self._catalogue = catalogue
        self.adopt(self._listed)

    def adopt(self, listed: PriceList) -> None:
        """``listed`` is the operator's list from now on."""
        self._listed = listed
        # Between two of these nothing changes.
        dated = ([one.since for one in self._listed.prices], [one.since for one in self._listed.discounts])
        self._dates = sorted({*dated[0], *dated[1]})
        self._quotes: dict[tuple[str, int], Quote] = {}

    @property
    def currency(self) -> str:
        return self._listed.currency

    def price_of(self, model: str, at: float) -> Quote:
        """What ``model`` costs at ``at`` (unix seconds). One without a price is free."""
        period = bisect_right(self._dates, at)
        found = self._quotes.get((model, period))
        if found is None:
            found = self._quotes[model, period] = self._quote(model, at)
        return found

    def price(self, model: str, at: float) -> Price | None:
        """The price itself, for who shows it."""
        known = self._catalogue.get(model)
        named = [one for one in self._listed.prices if one.since <= at and _fits(one.model, model)]
        # The newest; of several the one that names the model, and then the last.
        entry = max(
            enumerate(named), key=lambda pair: (pair[1].since, pair[1].model == model, pair[0]), default=(0, None)
        )[1]
        discount = self._discount(at)
        cached = None if discount is None else discount.cached
        if entry is not None:
            neurons = entry.neurons or (None if known is None else known.neuron_rates)
            price = Price(**entry.amounts, neurons=neurons, currency=self.currency)
            return price if entry.cached is not None else price.discounted(cached)
        return None if known is None else self._converted(known).discounted(cached)

    def _quote(self, model: str, at: float) -> Quote:
        price, discount = self.price(model, at), self._discount(at)
        tariff = Tariff(FREE.rates, 1, self.currency) if price is None else price.tariff
        batch = Fraction(0) if discount is None else Fraction(discount.batch)
        return Quote(tariff, batch, any(money for _, money in tariff.rates.values()))

    def _discount(self, at: float) -> Discount | None:
        held = [one for one in self._listed.discounts if one.since <= at]
        return max(held, key=lambda one: one.since, default=None)

    def _converted(self, price: Price) -> Price:
        """In the list's currency; without ``per_dollar`` another than the price's own has no money for it."""
        if price.currency == self.currency:
            return price
        rate = self._listed.per_dollar if price.currency == CURRENCY else None
        amounts = {} if rate is None else {key: amount * rate for key, amount in price.money_rates.amounts.items()}
        return Price(**amounts, neurons=price.neuron_rates, currency=self.currency)


@cache
def built_in() -> Mapping[str, Price]:
    """Cloudflare's table, by model id."""
    return MappingProxyType({model: Price.model_validate(row) for model, row in _yaml(BUILT_IN).items()})


def read_price_list(path: Path) -> PriceList:
    """Raises CatalogError; it says what to do."""
    found = _yaml(path)
    try:
        return PriceList.model_validate(found)
    except ValidationError as error:
        raise from_validation(path, error, PriceList) from None


def _yaml(path: Path) -> dict[str, Any]:
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CatalogError(path, "", "there is no such file", "Correct SERVE_APP_PRICES, or leave it out.") from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CatalogError(path, "", f"the file cannot be read ({reason})", "Correct the YAML.") from None
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise CatalogError(path, "", "a price list is a mapping of keys to values", "Start it with `prices:`.")
    return found


def _fits(pattern: str, model: str) -> bool:
    return pattern == model or ("*" in pattern and fnmatchcase(model, pattern))
