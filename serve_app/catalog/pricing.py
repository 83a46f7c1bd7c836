"""Prices: what a unit of work costs, in neurons and in money, exactly.

Source of the rule: Cloudflare's Workers AI pricing page. 1,000 neurons cost $0.011, so a price of d dollars per million
tokens is d / 0.011 * 1000 neurons per million tokens; its own table rounds that to whole neurons. A price may state the
table's neurons where its dollar column is rounded more coarsely, and one of them may follow from the other.

Amounts are decimals. A cost is a whole number of micro-neurons (1e-6) and of nano-units of the currency (1e-9), rounded
once per piece of work, half to even. Nothing here is a float.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from decimal import ROUND_HALF_EVEN, Decimal, InvalidOperation
from fractions import Fraction
from types import MappingProxyType
from typing import Annotated, Any, NamedTuple

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

CURRENCY = "USD"
MICRO, NANO = 10**6, 10**9
# Of one neuron.
DOLLARS_PER_NEURON = Decimal("0.000011")


@dataclass(slots=True, frozen=True)
class Unit:
    """What work is counted in. ``name``: in entries and usage; ``key``: in prices, which are per ``per`` of it;
    ``shown``: in models/search, in Cloudflare's words where it has the unit.
    """

    name: str
    key: str
    per: int
    shown: str


# `cached_tokens` are a part of `input_tokens`. A tile has 512 by 512 pixels. Milliseconds and pixels are counted, so
# that counts are whole numbers; they are priced by the minute and the megapixel, of 1024 by 1024 pixels.
UNITS = (
    Unit("input_tokens", "input", 10**6, "per M input tokens"),
    Unit("cached_tokens", "cached", 10**6, "per M cached input tokens"),
    Unit("output_tokens", "output", 10**6, "per M output tokens"),
    Unit("audio_ms", "audio_minute", 60_000, "per audio minute"),
    Unit("streamed_audio_ms", "streamed_audio_minute", 60_000, "per audio minute (WebSocket)"),
    Unit("characters", "thousand_characters", 1000, "per 1k characters"),
    Unit("images", "million_images", 10**6, "per M images"),
    Unit("image_tiles", "tile", 1, "per 512 by 512 tile"),
    Unit("image_steps", "step", 1, "per step"),
    Unit("input_tiles", "input_tile", 1, "per input 512 by 512 tile"),
    Unit("image_tile_steps", "tile_step", 1, "per 512 by 512 tile and step"),
    Unit("input_tile_steps", "input_tile_step", 1, "per input 512 by 512 tile and step"),
    Unit("first_pixels", "first_megapixel", 1 << 20, "per first megapixel"),
    Unit("further_pixels", "further_megapixel", 1 << 20, "per further or input megapixel"),
    Unit("requests", "request", 1, "per request"),
)
UNIT_NAMES = tuple(unit.name for unit in UNITS)
# Units that an entry has by name; those that are not there are 0.
Units = Mapping[str, int]


def _amount(value: Any) -> Any:
    """A price as it was written: the shortest decimal that YAML's float stands for."""
    if isinstance(value, bool) or not isinstance(value, int | float | str | Decimal):
        raise ValueError(f"{value!r} is no price | Write a number of at least 0, such as 0.27.")
    try:
        found = Decimal(str(value))
    except InvalidOperation:
        raise ValueError(f"{value!r} is no price | Write a number of at least 0, such as 0.27.") from None
    if not found.is_finite() or found < 0:
        raise ValueError(f"{value!r} is no price | Write a number of at least 0, such as 0.27.")
    return found


Amount = Annotated[Decimal, BeforeValidator(_amount)]


class Rates(BaseModel):
    """An amount for each unit that has a price, by the unit's key. Without ``cached`` those tokens cost what all do."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)
    input: Amount | None = None
    cached: Amount | None = None
    output: Amount | None = None
    audio_minute: Amount | None = None
    streamed_audio_minute: Amount | None = None
    thousand_characters: Amount | None = None
    million_images: Amount | None = None
    tile: Amount | None = None
    step: Amount | None = None
    input_tile: Amount | None = None
    tile_step: Amount | None = None
    input_tile_step: Amount | None = None
    first_megapixel: Amount | None = None
    further_megapixel: Amount | None = None
    request: Amount | None = None

    @property
    def amounts(self) -> dict[str, Decimal]:
        """By the units' keys, of those that have one."""
        return {unit.key: found for unit in UNITS if (found := getattr(self, unit.key)) is not None}


class Price(Rates):
    """Money for each unit, with the neurons where they are stated rather than derived. A price of neurons alone costs
    what they cost.
    """

    neurons: Rates | None = None
    currency: str = Field(default=CURRENCY, pattern=r"^[A-Z]{3}$")

    @property
    def neuron_rates(self) -> Rates:
        """Stated, or derived and rounded as Cloudflare's table does: to whole neurons per million, else to hundredths.
        Neurons follow from dollars only.
        """
        if self.neurons is not None or self.currency != CURRENCY:
            return self.neurons or Rates()
        derived = {
            unit.key: (amount / DOLLARS_PER_NEURON).quantize(
                Decimal(1) if unit.per == 10**6 else Decimal("0.01"), ROUND_HALF_EVEN
            )
            for unit in UNITS
            if (amount := getattr(self, unit.key)) is not None
        }
        return Rates(**derived)

    @property
    def money_rates(self) -> Rates:
        """Stated, or where only neurons are what these cost in dollars."""
        amounts = self.amounts
        if amounts or self.neurons is None or self.currency != CURRENCY:
            return Rates(**amounts)
        return Rates(**{key: amount * DOLLARS_PER_NEURON for key, amount in self.neurons.amounts.items()})

    @property
    def tariff(self) -> Tariff:
        """For :func:`cost`; worth keeping."""
        return Tariff.of(self.neuron_rates.amounts, self.money_rates.amounts, self.currency)

    def discounted(self, cached: Decimal | None) -> Price:
        """With cached tokens at the price of others less the share ``cached`` of it; None: as it is."""
        if cached is None:
            return self
        money, neurons = self.money_rates.amounts, self.neuron_rates.amounts
        for amounts in (money, neurons):
            if "input" in amounts:
                amounts["cached"] = amounts["input"] * (1 - cached)
        return Price(**money, neurons=Rates(**neurons), currency=self.currency)


class Cost(NamedTuple):
    """``neurons``: micro-neurons; ``money``: nano-units of ``currency``."""

    neurons: int = 0
    money: int = 0
    currency: str = CURRENCY


@dataclass(slots=True, frozen=True)
class Tariff:
    """A price as whole numbers: of each unit's name its (micro-neurons, nano-units), both over one ``denominator``."""

    rates: Mapping[str, tuple[int, int]]
    denominator: int
    currency: str

    @classmethod
    def of(cls, neurons: Mapping[str, Decimal], money: Mapping[str, Decimal], currency: str = CURRENCY) -> Tariff:
        """``neurons``, ``money``: amounts by the units' keys. Tokens without a cached price cost what others do."""
        exact = {
            unit.name: (_each(unit, neurons, MICRO), _each(unit, money, NANO))
            for unit in UNITS
            if unit.key in neurons or unit.key in money
        }
        whole = math.lcm(1, *(part.denominator for pair in exact.values() for part in pair))
        return cls({name: (int(n * whole), int(m * whole)) for name, (n, m) in exact.items()}, whole, currency)

    @property
    def names(self) -> list[str]:
        return list(self.rates)


FREE = Tariff(MappingProxyType({}), 1, CURRENCY)


def _each(unit: Unit, amounts: Mapping[str, Decimal], scale: int) -> Fraction:
    """The price of one of a unit."""
    key = "input" if unit.key == "cached" and "cached" not in amounts else unit.key
    return Fraction(amounts.get(key, Decimal(0))) * scale / unit.per


def cost(tariff: Tariff, units: Units, *, discount: Fraction | None = None) -> Cost:
    """Of one piece of work. ``discount``: the share that is taken off, for batches. A unit without a price is free."""
    rates = tariff.rates
    neurons = money = 0
    for name, count in units.items():
        if count and (rate := rates.get(name)) is not None:
            neurons += count * rate[0]
            money += count * rate[1]
    # Cached tokens are among the input tokens: they cost their own price instead of these'.
    if (cached := units.get("cached_tokens", 0)) and "cached_tokens" in rates and "input_tokens" in rates:
        neurons -= cached * rates["input_tokens"][0]
        money -= cached * rates["input_tokens"][1]
    whole = tariff.denominator
    if discount is not None:
        neurons *= discount.denominator - discount.numerator
        money *= discount.denominator - discount.numerator
        whole *= discount.denominator
    return Cost(_rounded(neurons, whole), _rounded(money, whole), tariff.currency)


def _rounded(numerator: int, denominator: int) -> int:
    """The nearest whole number, of two equally near ones the even."""
    found, rest = divmod(numerator, denominator)
    return found + (2 * rest > denominator or (2 * rest == denominator and found % 2 == 1))


_SHOWN = {unit.key: unit.shown for unit in UNITS}


def price_property(price: Price | None, units: Iterable[str]) -> list[dict[str, Any]]:
    """The `price` property of models/search: {unit, price, currency, neurons} of each of ``units`` that has a price;
    `neurons` where they are known, which Cloudflare tells on its pages only.
    """
    if price is None:
        return []
    amounts, neurons = price.money_rates.amounts, price.neuron_rates.amounts
    return [
        {"unit": _SHOWN[key], "price": float(amounts[key]), "currency": price.currency}
        | ({"neurons": float(neurons[key])} if key in neurons else {})
        for key in units
        if key in amounts
    ]
