"""What an answer says of its price: neurons, and money as an exact decimal."""

from __future__ import annotations

from typing import Any

from serve_app.api.types import Usage

MICRO, NANO = 10**6, 10**9


def receipt(usage: Usage) -> dict[str, Any]:
    """The part of every dialect's usage that tells the price, of the very entries that were written.

    ``neurons`` is the one float among the numbers, which clients add up; an amount of money is text, so that nobody
    rounds it.
    """
    neurons: dict[str, Any] = {"neurons": usage.micro_neurons / MICRO}
    if usage.nano_cost is None:
        return neurons
    return {**neurons, "cost": {"amount": amount_text(usage.nano_cost), "currency": usage.currency}}


def amount_text(value: int, scale: int = NANO) -> str:
    """``value`` / ``scale`` (a power of ten) as a decimal, without zeros behind it."""
    whole, rest = divmod(abs(value), scale)
    text = f"{whole}.{rest:0{len(str(scale)) - 1}d}".rstrip("0").rstrip(".")
    return f"-{text}" if value < 0 else text
