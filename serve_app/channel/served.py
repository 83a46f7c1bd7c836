"""What a worker has lately served to whom, so that gateways can share fairly what others have given out.

A gateway counts by itself what it has served; of the rest it hears in the workers' load reports. Counts only grow while
a tenant is served, so that a report that is lost or comes twice changes nothing.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from heapq import nlargest
from itertools import count

from serve_app.wire.address import InboxAddress
from serve_app.wire.load import MAX_SERVED, ServedBy

# A count stays in the reports for this long after its last change: several heartbeats. Then it starts anew.
RECENT_S = 10.0
_MOST = 4096


def gateway_name(address: InboxAddress) -> str:
    """A gateway as load reports call it: where its inbox listens, without the secret."""
    return f"{address.host}:{address.port}"


@dataclass(slots=True)
class Served:
    """Tokens served to one tenant in one class by way of one gateway; ``number`` is never used again."""

    number: int
    gateway: str
    tenant: str
    priority: str
    uncached: int = 0
    cached: int = 0
    output: int = 0
    changed_at: float = 0.0


class ServedLedger:
    """A worker's counts."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._entries: OrderedDict[tuple[str, str, str], Served] = OrderedDict()  # least recently changed first
        self._numbers = count(1)

    def add(
        self, gateway: str, tenant: str, priority: str, *, uncached: int = 0, cached: int = 0, output: int = 0
    ) -> None:
        """Prompt tokens by whether they were computed, and tokens of the answer, as they come."""
        key, now = (gateway, tenant, priority), self._clock()
        entry = self._entries.get(key)
        if entry is None or now - entry.changed_at > RECENT_S:
            entry = self._entries[key] = Served(next(self._numbers), gateway, tenant, priority)
        entry.uncached += uncached
        entry.cached += cached
        entry.output += output
        entry.changed_at = now
        self._entries.move_to_end(key)
        if len(self._entries) > _MOST:
            self._entries.popitem(last=False)

    def recent(self) -> tuple[ServedBy, ...]:
        """What changed lately, for a load report."""
        since = self._clock() - RECENT_S
        recent = [entry for entry in self._entries.values() if entry.changed_at >= since]
        latest = nlargest(MAX_SERVED, recent, key=lambda entry: entry.changed_at)
        return tuple(
            ServedBy(e.number, e.gateway, e.tenant, e.priority, e.uncached, e.cached, e.output) for e in latest
        )
