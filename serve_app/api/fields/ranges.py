"""The numbers that fields may hold, once: readers check them and JSON Schemas show them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from serve_app.api.fields.values import integer, number


@dataclass(slots=True, frozen=True)
class Range:
    """From ``low`` to ``high``, both included; ``whole`` for integers."""

    low: int | float
    high: int | float
    whole: bool = True

    def read(self, body: dict[str, Any], name: str) -> Any:
        """The field as an int or float, or None where it is absent or null. Raises `InvalidInput`."""
        if self.whole:
            return integer(body, name, int(self.low), int(self.high))
        return number(body, name, self.low, self.high)

    @property
    def schema(self) -> dict[str, Any]:
        """As JSON Schema has it."""
        return {"type": "integer" if self.whole else "number", "minimum": self.low, "maximum": self.high}


TOKENS = Range(1, 2**31 - 1)
TEMPERATURE = Range(0, 5, whole=False)
TOP_P = Range(0, 2, whole=False)
TOP_K = Range(0, 2**31 - 1)
MIN_P = Range(0, 1, whole=False)
SEED = Range(0, 2**63 - 1)
REPETITION_PENALTY = Range(0, 2, whole=False)
# Of frequency and of presence.
PENALTY = Range(-2, 2, whole=False)
BIAS = Range(-100, 100, whole=False)
CHOICES = Range(1, 128)
LEAST_TOKENS = Range(0, 2**31 - 1)
TOP_LOGPROBS = Range(0, 20)
DIMENSIONS = Range(1, 65536)
# Tokens to keep of a text; -1: what the model takes.
KEPT_TOKENS = Range(-1, 2**31 - 1)
DEADLINE_MS = Range(1, 24 * 3600 * 1000)
RESUMABLE_S = Range(1, 24 * 3600)
# How many of the best contexts to return, and how much each of a text's readings counts.
BEST = Range(1, 2**31 - 1)
# The same where 0 stands for all of them.
RANKED = Range(0, 2**31 - 1)
DOCUMENT_TOKENS = Range(1, 2**31 - 1)
WEIGHT = Range(0, 1e6, whole=False)
