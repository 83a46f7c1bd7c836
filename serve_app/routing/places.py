"""How long streams hold their places: what clients ask for, and what their tenants' answers have lately taken of it.

A stream that has outlived what is usual for its tenant is expected to take all that it has asked for. The answers of
one tenant resemble each other: where the first ones are long, the others are, too.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

# How far one answer moves its tenant's share; and tenants remembered.
GAIN = 0.1
_TENANTS = 10_000


class Lengths:
    """Of what they may take, the share that answers take: by tenant, and of all for a tenant that is new."""

    def __init__(self) -> None:
        # Nobody is known to take less than he asks for.
        self._of_all = 1.0
        self._any = False
        self._shares: OrderedDict[str, float] = OrderedDict()

    def expected(self, tenant: str, max_tokens: int) -> int:
        """Tokens of an answer that may have ``max_tokens``."""
        return max(1, round(self._shares.get(tenant, self._of_all) * max_tokens))

    def ended(self, tenant: str, max_tokens: int, tokens: float) -> None:
        """An answer has ended after so many tokens."""
        share = min(tokens / max(max_tokens, 1), 1.0)
        known = self._shares.get(tenant, self._of_all if self._any else share)
        self._shares[tenant] = known + GAIN * (share - known)
        self._shares.move_to_end(tenant)
        if len(self._shares) > _TENANTS:
            self._shares.popitem(last=False)
        self._of_all = self._of_all + GAIN * (share - self._of_all) if self._any else share
        self._any = True


class Held(NamedTuple):
    """Places of one request: ``streams`` of them, for ``left`` more tokens each."""

    left: float
    streams: int


def tokens_left(expected: int, most: int, produced: float) -> float:
    """Of a stream that has ``produced`` tokens."""
    return max((expected if produced < expected else most) - produced, 0.0)


def free_after(places: int, held: Sequence[Held], others: int, usual: float) -> float:
    """Tokens of each stream until so many more ``places`` are free. ``held`` is sorted; ``others`` streams, of which
    nothing is known, have ``usual`` tokens each and end one after the other.
    """
    if places <= 0:
        return 0.0
    rate = others / usual  # places a token
    free = 0
    for left, streams in held:
        if free + rate * left < places:
            free += streams
            if free + rate * left >= places:
                return left
        else:
            break
    return (places - free) / rate if rate else usual
