"""Whether rows travel to their experts, or every rank of a stage has all rows: by the bytes that a rank sends.

Per layer, of ``rows`` of ``width`` bytes on R ranks, in units of (R - 1) / R * rows * width (Patarasuk and Yuan 2009
for rings; an exchange sends as much)::

    all rows everywhere     4         two all-reduces, behind attention and behind the experts: 2 each
    rows travel             2 + 2 p   sums of attention to the owner of each row 1, rows to experts p, what comes of
                                      them back p, all rows to attention again 1

p is the share of ranks that a row has an expert on. It never sends more, and for many ranks half as much; but ranks
have to tell each other first how many rows come, which is one small exchange, and on GPUs the host waits for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, comb

WAYS = ("auto", "always", "never")
# No step has more.
MOST_ROWS = 8192


@dataclass(slots=True, frozen=True)
class Wire:
    """Bytes per second that a rank sends, and the seconds of telling each other how many rows come."""

    rate: float
    told_s: float


# Gloo over the loopback device, measured (`python -m benchmarks parallel`).
LOOPBACK = Wire(1e9, 0.5e-3)
# NVLink of an H100 by its data sheet, a collective and a copy to the host. Not measured.
NVLINK = Wire(450e9, 60e-6)


def reached(experts: int, chosen: int, ranks: int) -> float:
    """The share of ranks that a row has one of its ``chosen`` experts on, each as likely as any other."""
    return 1 - comb(experts - experts // ranks, chosen) / comb(experts, chosen)


def summed_bytes(rows: int, width: int, ranks: int) -> float:
    """That one rank sends in a layer where every rank has all rows."""
    return 4 * (ranks - 1) / ranks * rows * width


def dispatched_bytes(rows: int, width: int, ranks: int, share: float, routed: int = 0) -> float:
    """That one rank sends in a layer where rows travel. ``share``: :func:`reached`; ``routed``: bytes beside each row
    that say which experts it wants.
    """
    return (ranks - 1) / ranks * rows * (2 * width + share * (2 * width + routed))


def least_rows(experts: int, chosen: int, ranks: int, width: int, wire: Wire) -> int:
    """Rows of a step from which on it pays that they travel; 0: it never does."""
    share = reached(experts, chosen, ranks)
    saved = summed_bytes(1, width, ranks) - dispatched_bytes(1, width, ranks, share, 8 * chosen)
    least = ceil(wire.told_s * wire.rate / saved) if saved > 0 else 0
    return least if least <= MOST_ROWS else 0
