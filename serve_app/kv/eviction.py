"""Eviction from a node's pool: what was used longest ago goes first, but only a tenant itself can push its chunks below
its share.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from serve_app.kv.chunk import ChunkMeta

# A tenant that has used nothing for so long has no share.
ACTIVE_S = 1800.0


@dataclass(slots=True, eq=False)
class Tenant:
    """One tenant's chunks, least recently used first. ``seen``: when it last used one, on the index's clock."""

    entries: OrderedDict[str, Entry]
    bytes: int = 0
    seen: float = 0.0


@dataclass(slots=True, eq=False)
class Entry:
    """One chunk that is held. ``used`` grows with every use (0: it goes first); a pinned one stays."""

    meta: ChunkMeta
    value: Any
    tenant: Tenant
    used: int = 0
    pins: int = 0


def shares(tenants: Collection[Tenant], guaranteed_bytes: float, now: float) -> dict[int, float]:
    """Bytes below which others must not push a tenant, by the tenant's identity: equal for all that are active."""
    active = [tenant for tenant in tenants if now - tenant.seen <= ACTIVE_S]
    return {id(tenant): guaranteed_bytes / len(active) for tenant in active}


def victims(tenants: Collection[Tenant], newcomer: Tenant, excess: int, safe: dict[int, float]) -> list[Entry] | None:
    """Whose bytes make ``excess`` or more, for a chunk of ``newcomer``; None: there is no room beside what is pinned
    and what others' shares keep. ``safe``: as :func:`shares` gives it.
    """
    found: list[Entry] = []
    # The tenants' queues are merged from their old ends.
    queues = [(tenant, (e for e in tenant.entries.values() if not e.pins)) for tenant in tenants]
    left = [tenant.bytes for tenant, _ in queues]
    heap = [(e.used, n, e) for n, (_, queue) in enumerate(queues) if (e := next(queue, None)) is not None]
    heapq.heapify(heap)
    while heap and excess > 0:
        _, n, entry = heapq.heappop(heap)
        tenant, queue = queues[n]
        if tenant is not newcomer and left[n] - entry.meta.nbytes < safe.get(id(tenant), 0.0):
            continue
        found.append(entry)
        left[n] -= entry.meta.nbytes
        excess -= entry.meta.nbytes
        if (following := next(queue, None)) is not None:
            heapq.heappush(heap, (following.used, n, following))
    return None if excess > 0 else found
