"""Prices and neurons.

Source of the rule: Cloudflare's Workers AI pricing page. 1,000 neurons cost $0.011, so a price of d dollars
per million tokens is d / 0.011 * 1000 neurons per million tokens; its own table rounds that to whole neurons.
A record may state the table's figures where the dollar column is rounded more coarsely than the neuron
column.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

DOLLARS_PER_NEURON = 0.011 / 1000


class Rates(BaseModel):
    """Per million tokens. `cached` None: cached prompt tokens cost what uncached ones do."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)
    input: float = Field(ge=0, allow_inf_nan=False)
    cached: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    output: float = Field(default=0.0, ge=0, allow_inf_nan=False)


class Price(Rates):
    """Dollars per million tokens, with the neurons per million where they are stated rather than derived."""

    neurons: Rates | None = None

    @property
    def neuron_rates(self) -> Rates:
        if self.neurons is not None:
            return self.neurons
        return Rates(
            input=float(round(self.input / DOLLARS_PER_NEURON)),
            cached=None if self.cached is None else float(round(self.cached / DOLLARS_PER_NEURON)),
            output=float(round(self.output / DOLLARS_PER_NEURON)),
        )


def neurons(price: Price | None, prompt_tokens: int, cached_tokens: int, completion_tokens: int) -> float:
    """Neurons of one call. `cached_tokens` are part of `prompt_tokens`. A model without a price costs
    nothing.
    """
    if price is None:
        return 0.0
    rates = price.neuron_rates
    cached_rate = rates.input if rates.cached is None else rates.cached
    uncached = prompt_tokens - cached_tokens
    return (uncached * rates.input + cached_tokens * cached_rate + completion_tokens * rates.output) / 1e6


_SHOWN = {"input": "per M input tokens", "cached": "per M cached input tokens", "output": "per M output tokens"}


def price_property(price: Price | None, units: Iterable[str]) -> list[dict[str, Any]]:
    """The `price` property of models/search: {unit, price, currency} of each of ``units`` that has a price."""
    if price is None:
        return []
    priced = [(_SHOWN[unit], getattr(price, unit)) for unit in units]
    return [{"unit": unit, "price": value, "currency": "USD"} for unit, value in priced if value is not None]
