"""How far nodes are from each other: in one zone, in one region, or in two.

A zone is written ``region/zone`` or, where no region is known, by its name alone; "" is not known, and near everything.
"""

from __future__ import annotations

NEAR, SAME_REGION, FAR = 0, 1, 2


def distance(zone: str, other: str) -> int:
    """:data:`NEAR` in one zone, :data:`SAME_REGION` in two of one region, :data:`FAR` otherwise."""
    if zone == other or not zone or not other:
        return NEAR
    region, _, _ = zone.rpartition("/")
    return SAME_REGION if region == other.rpartition("/")[0] else FAR
