"""The gateway's queue: which waiting request is next, by tokens served and not by requests.

Virtual token counters (VTC, arXiv 2401.00588): a tenant's counter grows by the weighted tokens it is served, divided by
its weight, and the waiting tenant with the smallest counter goes first. A tenant that comes back from idleness is
lifted to the smallest counter of the waiting ones, so that it cannot save up. Priority classes are served the same way
one level above, by their shares: batch work always progresses, and real-time work gets the rest.

Locality goes first within a bound, after the deficits of DLPM (arXiv 2501.14312): among tenants within ``slack`` tokens
of the smallest counter, the request with the longest cached prefix is next. For two tenants that both wait all the
time, the difference of what they have been served stays within ``slack`` and two requests.

A tenant's own requests go shortest first, by the tokens still to be computed, but a token of work outweighs only so
much waiting (``aging``). A request that has waited long enough goes before any shorter one that came later, so none
starves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from heapq import heappop, heappush, nsmallest
from itertools import islice

from serve_app.routing.types import Priority, RouteRequest


@dataclass(slots=True, frozen=True)
class FairConfig:
    """``shares`` of the classes need not sum to one; a token of each kind costs its weight."""

    shares: Mapping[Priority, float] = field(default_factory=lambda: {"realtime": 0.95, "batch": 0.05})
    uncached_weight: float = 1.0
    cached_weight: float = 0.1
    output_weight: float = 2.0
    aging: float = 12_000.0  # tokens of work that one second of waiting outweighs; infinite: first come, first served
    slack: float = 16_384.0  # weighted tokens that a tenant may be ahead for the sake of cached prefixes


@dataclass(slots=True)
class _Waiting:
    request: RouteRequest
    cached: int


# Requests of a tenant that are looked at to know how many go before another.
LOOKED_AT = 256
# A heap of key, number and id; may name requests that have left.
_Order = list[tuple[float, int, str]]


@dataclass(slots=True)
class _Tenant:
    weight: float = 1.0
    counter: float = 0.0
    waiting: dict[str, _Waiting] = field(default_factory=dict)
    order: _Order = field(default_factory=list)
    long: _Order = field(default_factory=list)
    prompt_tokens: int = 0

    def head(self, long: bool) -> _Waiting | None:
        """The tenant's next request, without ``long`` the next that is none; None if there is none."""
        orders = [o for o in ((self.order, self.long) if long else (self.order,)) if self._clean(o)]
        return self.waiting[min(orders)[0][2]] if orders else None

    def _clean(self, order: _Order) -> _Order:
        while order and order[0][2] not in self.waiting:
            heappop(order)
        return order


@dataclass(slots=True)
class _Class:
    counter: float = 0.0
    tenants: dict[str, _Tenant] = field(default_factory=dict)  # idle ones too, for their counters
    waiting: dict[str, _Tenant] = field(default_factory=dict)
    prompt_tokens: int = 0


@dataclass(slots=True)
class _Charge:
    priority: Priority
    tenant: str
    amount: float


class FairQueue:
    """``push`` a request, ``take`` one of the ``heads`` when it may go, ``settle`` when it has been served.

    ``cached(request)`` says how many prompt tokens would come from a cache now; without it the order is VTC's own.
    While ``long_open`` is not set, long requests let all others pass.
    """

    def __init__(self, config: FairConfig | None = None, cached: Callable[[RouteRequest], int] | None = None) -> None:
        self.config = config or FairConfig()
        self._cached = cached
        self._classes: dict[Priority, _Class] = {name: _Class() for name in self.config.shares}
        self._where: dict[str, tuple[Priority, str]] = {}
        self._charges: dict[str, _Charge] = {}
        self._pushed = 0
        self.long_open = True

    def __len__(self) -> int:
        return len(self._where)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._where

    def push(self, request: RouteRequest) -> None:
        """Lets a request wait."""
        if request.weight <= 0:
            raise ValueError(f"a tenant's weight must be positive, got {request.weight}")
        kind = self._classes[request.priority]
        tenant = kind.tenants.setdefault(request.tenant, _Tenant())
        tenant.weight = request.weight
        if not kind.waiting:
            others = [c.counter for c in self._classes.values() if c.waiting]
            if others:
                kind.counter = max(kind.counter, min(others))
        if request.tenant not in kind.waiting:
            if kind.waiting:
                tenant.counter = max(tenant.counter, min(t.counter for t in kind.waiting.values()))
            kind.waiting[request.tenant] = tenant
        cached = min(self._cached(request), request.prompt_tokens) if self._cached is not None else 0
        tenant.waiting[request.id] = _Waiting(request, cached)
        self._pushed += 1
        heappush(tenant.long if request.long else tenant.order, (self._key(request, cached), self._pushed, request.id))
        tenant.prompt_tokens += request.prompt_tokens
        kind.prompt_tokens += request.prompt_tokens
        self._where[request.id] = (request.priority, request.tenant)

    def priorities(self) -> list[Priority]:
        """Those of which a request waits, least served first."""
        return sorted((p for p, kind in self._classes.items() if kind.waiting), key=lambda p: self._classes[p].counter)

    def heads(self, limit: int, priority: Priority | None = None) -> list[RouteRequest]:
        """The next request, of one ``priority`` or of any, and behind it the first one of other tenants, least served
        first; up to ``limit``.
        """
        kinds = [self._able(self._classes[p]) for p in self.priorities() if priority in (None, p)]
        kinds = [kind for kind in kinds if kind]
        if not kinds:
            return []
        first = self._best(kinds[0]).request
        tenants = [one for kind in kinds for one in nsmallest(limit, kind, key=lambda one: one[0].counter)]
        found = [first, *(head.request for _, head in tenants if head.request is not first)]
        return found[:limit]

    def take(self, request_id: str) -> None:
        """Gives a waiting request its turn, charged as if its expected output had been served."""
        kind, tenant = self._where[request_id]
        found = self._classes[kind].tenants[tenant].waiting[request_id]
        self._take(found.request)
        self._charge(found.request, found.cached)

    def remove(self, request_id: str) -> RouteRequest | None:
        """Takes a waiting request out, uncharged: its client has left or its deadline has passed."""
        where = self._where.get(request_id)
        if where is None:
            return None
        request = self._classes[where[0]].tenants[where[1]].waiting[request_id].request
        self._take(request)
        return request

    def settle(self, request_id: str, uncached: int, cached: int, output: int) -> None:
        """Replaces what a request was charged at its turn by what it was served in the end, in tokens."""
        charge = self._charges.pop(request_id, None)
        if charge is not None:
            self._add(charge.priority, charge.tenant, self._cost(uncached, cached, output) - charge.amount)

    def charge(self, priority: Priority, tenant: str, uncached: int, cached: int, output: int) -> None:
        """Counts what a tenant was served elsewhere, by another gateway."""
        self._add(priority, tenant, self._cost(uncached, cached, output))

    def waiting_tokens(self, priority: Priority | None = None) -> int:
        """Prompt tokens that wait, of one ``priority`` or of all."""
        return sum(c.prompt_tokens for p, c in self._classes.items() if priority in (None, p))

    def waiting(self, priority: Priority) -> int:
        """How many requests wait."""
        return sum(len(tenant.waiting) for tenant in self._classes[priority].waiting.values())

    def ahead(self, request: RouteRequest) -> int:
        """Prompt tokens that would be served before ``request`` if it were pushed now, about.

        Of its own tenant's queue those that its order puts first, and of each other tenant what it may be served until
        the counters meet. Batch requests are in nobody's way.
        """
        kind = self._classes[request.priority]
        mine = kind.tenants.get(request.tenant)
        own = self._before(request, mine) if mine else 0
        weight = mine.weight if mine else 1.0
        floor = min((t.counter for t in kind.waiting.values()), default=0.0)
        counter = max(mine.counter if mine else floor, floor)
        total = own
        for name, tenant in kind.waiting.items():
            if name != request.tenant:
                credit = max(counter - tenant.counter, 0.0) + own / weight
                total += min(tenant.prompt_tokens, int(credit * tenant.weight))
        for name, other in self._classes.items():
            if name not in (request.priority, "batch") and other.waiting:
                shares = self.config.shares
                total += min(other.prompt_tokens, int(total * shares[name] / max(shares[request.priority], 1e-9)))
        return total

    def _before(self, request: RouteRequest, tenant: _Tenant) -> int:
        """Prompt tokens of the tenant's requests that go before another of its."""
        waiting = tenant.waiting.values()
        some = list(islice(waiting, LOOKED_AT))
        cached = min(self._cached(request), request.prompt_tokens) if some and self._cached is not None else 0

        def order(one: RouteRequest, cached: int) -> tuple[bool, float]:
            return one.long and not self.long_open, self._key(one, cached)

        mine = order(request, cached)
        first = [w for w in some if order(w.request, w.cached) <= mine]
        share = tenant.prompt_tokens / max(sum(w.request.prompt_tokens for w in some), 1)
        return int(sum(w.request.prompt_tokens for w in first) * share)

    def counters(self, priority: Priority = "realtime") -> dict[str, float]:
        """For metrics: weighted tokens served per tenant of a class."""
        return {name: t.counter for name, t in self._classes[priority].tenants.items()}

    def lengths(self) -> dict[str, int]:
        """For metrics: how many requests of each tenant wait."""
        found: dict[str, int] = {}
        for kind in self._classes.values():
            for name, tenant in kind.waiting.items():
                found[name] = found.get(name, 0) + len(tenant.waiting)
        return found

    # -- inside --------------------------------------------------------------------------------------------------

    def _able(self, kind: _Class) -> list[tuple[_Tenant, _Waiting]]:
        """Tenants of which a request may go, and which."""
        heads = ((tenant, tenant.head(self.long_open)) for tenant in kind.waiting.values())
        return [(tenant, head) for tenant, head in heads if head is not None]

    def _best(self, able: list[tuple[_Tenant, _Waiting]]) -> _Waiting:
        floor = min(tenant.counter for tenant, _ in able)
        if self._cached is None or len(able) == 1:
            return min(able, key=lambda one: one[0].counter)[1]
        near = [one for one in able if one[0].counter <= floor + self.config.slack]
        return max(near, key=lambda one: (one[1].cached, -one[0].counter))[1]

    def _key(self, request: RouteRequest, cached: int) -> float:
        """Work against age: the order of two waiting requests never changes, so a heap will do."""
        if self.config.aging == math.inf:
            return request.arrived_at
        return request.prompt_tokens - cached + self.config.aging * request.arrived_at

    def _take(self, request: RouteRequest) -> None:
        kind = self._classes[request.priority]
        tenant = kind.tenants[request.tenant]
        del tenant.waiting[request.id], self._where[request.id]
        tenant.prompt_tokens -= request.prompt_tokens
        kind.prompt_tokens -= request.prompt_tokens
        if not tenant.waiting:
            del kind.waiting[request.tenant]
            tenant.order.clear()
            tenant.long.clear()
            self._trim(kind)

    def _cost(self, uncached: int, cached: int, output: int) -> float:
        c = self.config
        return c.uncached_weight * uncached + c.cached_weight * cached + c.output_weight * output

    def _charge(self, request: RouteRequest, cached: int) -> None:
        cached = min(cached, request.prompt_tokens)
        output = min(request.expected_output_tokens, request.max_tokens) * request.streams
        amount = self._cost(request.prompt_tokens - cached, cached, output)
        self._charges[request.id] = _Charge(request.priority, request.tenant, amount)
        self._add(request.priority, request.tenant, amount)

    def _add(self, priority: Priority, tenant: str, amount: float) -> None:
        kind = self._classes[priority]
        known = kind.tenants.setdefault(tenant, _Tenant())
        known.counter += amount / known.weight
        kind.counter += amount / self.config.shares[priority]

    def _trim(self, kind: _Class) -> None:
        """Forgets idle tenants with the smallest counters, which would be lifted anyway when they come back."""
        if len(kind.tenants) > 10_000 and kind.waiting:
            floor = min(t.counter for t in kind.waiting.values())
            kind.tenants = {n: t for n, t in kind.tenants.items() if t.waiting or t.counter > floor}
