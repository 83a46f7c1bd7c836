"""What one gateway may let in, decided from memory.

::

    limit  =  spent (in the ledger)  +  leases of all gateways  +  what is left in the store
    lease  =  held (running requests, and work whose entry the ledger does not have yet)  +  free

A request that fits into what is free is let in at once. Otherwise it waits for one exchange with the store, which sets
leases anew; so no gateway lets in what another one has, and together they never let in more than the limit. A gateway
leases a little ahead of what comes, at most an eighth of what is left, and gives it back when nothing comes or another
gateway is short. Costs stay in the lease until the ledger has their entries, so nothing is forgotten in between, also
if this process dies: see `store/leases.py`.

While the store is away budgets hold what is leased and no more. Rates and streams are let in up to their whole limit,
less what the others had when they were last heard of.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from serve_app.state.protocols import LeaseStore
from serve_app.state.spending.quotas import Granted, Need, Quota, Want

log = logging.getLogger("ray.serve")

# How far ahead of its requests a gateway leases, and at most which part of what is left.
AHEAD_S = 0.5
SHARE = 8
# Without requests for so long nothing is leased ahead.
IDLE_S = 10.0
# Leases that nobody uses or is short of are set anew no sooner than after this: exchanges of all gateways wait for each
# other, and take the longer the more leases are set.
REST_S = 0.5
# What the store said is good for a refusal for so long.
FRESH_S = 0.3
# An entry that is not in the ledger after so long, although nothing waits for it, was never written down: whoever would
# have been answered has gone.
LOST_S = 120.0
# A clock that others are behind of: entries of the window before may still come.
_SKEW_S = 60.0


@dataclass(slots=True)
class _Lease:
    quota: Quota
    limit: int
    window: int = 0
    amount: int = 0
    # Of running requests, and of those that have ended: of this minute, or whose entries the ledger does not have.
    reserved: int = 0
    used: int = 0
    owed: dict[str, tuple[int, float]] = field(default_factory=dict)
    # What waits for the next exchange.
    waiting: int = 0
    last: Granted = field(default_factory=lambda: Granted(0))
    heard_at: float = float("-inf")
    # Demand: what was taken since the last exchange, per second, and by one request.
    taken: int = 0
    rate: float = 0.0
    typical: int = 0
    taken_at: float = float("-inf")
    due: bool = True
    refused: bool = False

    @property
    def held(self) -> int:
        return self.reserved + self.used

    @property
    def free(self) -> int:
        return self.amount - self.held

    @property
    def left(self) -> int:
        """What nobody uses, as far as is known."""
        return self.limit - self.last.spent - self.last.others_held - self.held

    def ahead(self, now: float) -> int:
        """What should be free."""
        if self.last.contended or now - self.taken_at > IDLE_S:
            return 0
        unleased = self.limit - self.last.spent - self.last.others - self.held
        return max(0, min(max(self.typical, int(self.rate * AHEAD_S)), unleased // SHARE))

    def rests(self, now: float) -> bool:
        """Whether neither this gateway nor another gains by hearing of it now."""
        return not (self.owed or self.waiting or self.last.contended) and now - self.heard_at < REST_S

    def roll(self, now: float) -> None:
        """A new window: minutes begin at nothing; in budgets the ledger does, and leases stay."""
        window = self.quota.window(now)
        if window == self.window:
            return
        if self.quota.is_rate:
            self.amount = self.reserved = self.used = 0
        for entry in [entry for entry, (_, at) in self.owed.items() if at < window - _SKEW_S]:
            self.used -= self.owed.pop(entry)[0]
        self.window, self.last, self.heard_at, self.due = window, Granted(self.amount), float("-inf"), True


@dataclass(slots=True, frozen=True)
class Short:
    """Why a request does not fit. ``left``: what nobody uses; ``away``: the store, which alone could tell, has not."""

    need: Need
    left: int
    away: bool = False


class Reservation:
    """What a request holds of its limits until it is settled, once; a second time changes nothing."""

    __slots__ = ("_leases", "_parts")

    def __init__(self, leases: Leases | None = None, parts: Sequence[tuple[_Lease, int, int]] = ()) -> None:
        self._leases = leases
        self._parts = parts

    def settle(self, spent: Mapping[str, int], entry: str = "") -> None:
        """``spent``: by family, what the request has used in the end. ``entry``: the id of its entry in the ledger, ""
        if there is none.
        """
        parts, self._parts = self._parts, ()
        if parts and self._leases is not None:
            self._leases._settle(parts, spent, entry)


class Leases:
    """``wake`` has :meth:`exchange` called soon, by another thread. ``drained``: whether all entries that this gateway
    has written down are in the ledger. ``clock`` gives unix seconds.
    """

    def __init__(
        self,
        wake: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.time,
        drained: Callable[[], bool] = lambda: False,
    ) -> None:
        self._wake = wake
        self._drained = drained
        self._clock = clock
        self._lock = threading.Lock()
        self._leases: dict[Quota, _Lease] = {}
        self.away = False
        # Called after each exchange, from its thread.
        self.listeners: list[Callable[[], None]] = []

    def take(self, needs: Sequence[Need]) -> Reservation | Short | None:
        """All of ``needs`` or nothing. None: only the store can tell, after the next exchange (:meth:`waiting`)."""
        now = self._clock()
        low = False
        with self._lock:
            leases = [self._lease(need, now) for need in needs]
            unknown = False
            for need, lease in zip(needs, leases, strict=True):
                if need.amount <= lease.free:
                    continue
                if self.away and not lease.quota.is_budget:
                    if need.amount <= lease.limit - lease.last.others - lease.held:
                        continue
                    return Short(need, max(0, lease.limit - lease.last.others - lease.held))
                if need.amount > lease.limit or (now - lease.heard_at < FRESH_S and need.amount > lease.left):
                    low, lease.due, lease.refused = not lease.refused, True, True
                    if low and lease.quota.is_budget:
                        self._wake()
                    return Short(need, max(0, lease.left))
                if self.away:
                    return Short(need, max(0, lease.free), away=True)
                unknown = True
            if unknown:
                return None
            parts = []
            for need, lease in zip(needs, leases, strict=True):
                lease.reserved += need.amount
                lease.taken += need.amount
                lease.typical, lease.taken_at = need.amount, now
                parts.append((lease, need.amount, lease.window))
                if not lease.due and (lease.quota.is_rate or lease.free < lease.ahead(now) // 2 + 1):
                    lease.due = low = True
        if low:
            self._wake()
        return Reservation(self, parts)

    @contextmanager
    def waiting(self, needs: Sequence[Need]) -> Iterator[None]:
        """Asks for ``needs`` in every exchange while the block lasts."""
        now = self._clock()
        with self._lock:
            leases = [self._lease(need, now) for need in needs]
            for need, lease in zip(needs, leases, strict=True):
                lease.waiting += need.amount
                lease.due = True
        self._wake()
        try:
            yield
        finally:
            with self._lock:
                for need, lease in zip(needs, leases, strict=True):
                    lease.waiting -= need.amount

    def again(self, needs: Sequence[Need]) -> None:
        """Has what :meth:`waiting` asks for asked once more."""
        with self._lock:
            for need in needs:
                if (lease := self._leases.get(need.quota)) is not None:
                    lease.due = True
        self._wake()

    def shortage(self, needs: Sequence[Need]) -> Short:
        """Which of ``needs``, that were not taken, there is least for."""
        now = self._clock()
        with self._lock:
            leases = [(need, self._lease(need, now)) for need in needs]
            need, lease = min(leases, key=lambda pair: pair[1].free - pair[0].amount)
            # What is left would do: a store that is slow has not leased it in time.
            untold = need.amount <= lease.left
            return Short(need, max(0, lease.left), away=untold or (self.away and lease.quota.is_budget))

    def left(self, quota: Quota) -> int:
        """What nobody uses, as far as this gateway knows."""
        with self._lock:
            lease = self._leases.get(quota)
            return 0 if lease is None else max(0, lease.left)

    def held(self) -> dict[Quota, tuple[int, int]]:
        """Of each lease its (held, amount)."""
        with self._lock:
            return {quota: (lease.held, lease.amount) for quota, lease in self._leases.items()}

    def exchange(self, store: LeaseStore, owner: str, *, all: bool = True, poll: bool = False) -> None:
        """Sets leases anew: ``all``, or those that are due, or with ``poll`` also those that are used, that somebody is
        short of, or that have rested. Raises :class:`serve_app.state.errors.Away`.
        """
        now = self._clock()
        with self._lock:
            some = [one for one in self._leases.values() if all or one.due or (poll and not one.rests(now))]
            wants = [self._want(lease, now) for lease in some]
            asked = {want.quota: self._leases[want.quota] for want in wants}
        try:
            granted = store.lease(owner, now, wants) if wants else {}
            self.away = False
        except BaseException:
            self.away = True
            raise
        finally:
            if self.away:
                with self._lock:
                    for lease in asked.values():
                        lease.due = True
            else:
                with self._lock:
                    for want in wants:
                        self._heard(asked[want.quota], want, granted[want.quota])
            for listener in list(self.listeners):
                listener()

    def _lease(self, need: Need, now: float) -> _Lease:
        lease = self._leases.get(need.quota)
        if lease is None:
            lease = self._leases[need.quota] = _Lease(need.quota, need.limit, need.quota.window(now))
        lease.limit = need.limit
        lease.roll(now)
        return lease

    def _want(self, lease: _Lease, now: float) -> Want:
        lease.roll(now)
        passed = now - lease.heard_at
        if 0 < passed < IDLE_S:
            lease.rate += min(1.0, passed) * (lease.taken / passed - lease.rate)
            lease.taken = 0
        asked = lease.held + lease.waiting + lease.ahead(now)
        # What is not asked for any more is given up before the store gives it to another.
        lease.amount = min(lease.amount, asked)
        lease.due = False
        refused, lease.refused = lease.refused, False
        owed = {entry: cost for entry, (cost, _) in lease.owed.items()}
        return Want(lease.quota, lease.window, lease.limit, lease.amount, asked, lease.held, owed, refused)

    def _heard(self, lease: _Lease, want: Want, granted: Granted) -> None:
        if lease.window != want.window:
            return
        for entry in granted.written:
            lease.used -= lease.owed.pop(entry, (0, 0.0))[0]
        now = self._clock()
        old = [entry for entry, (_, at) in lease.owed.items() if now - at > LOST_S and entry in want.owed]
        for entry in old if old and self._drained() else ():
            log.info("entry %s never came to the ledger", entry)
            lease.used -= lease.owed.pop(entry)[0]
        lease.amount, lease.last, lease.heard_at = granted.amount, granted, now
        idle = not (lease.amount or lease.held or lease.waiting)
        if idle and now - lease.taken_at > IDLE_S:
            self._leases.pop(lease.quota, None)

    def _settle(self, parts: Sequence[tuple[_Lease, int, int]], spent: Mapping[str, int], entry: str) -> None:
        now = self._clock()
        with self._lock:
            for lease, amount, window in parts:
                quota = lease.quota
                if quota.is_rate and lease.window != window:
                    continue
                lease.reserved -= amount
                used = spent.get(quota.family, 0)
                if quota.is_rate:
                    lease.used += used
                elif quota.is_budget and used and entry:
                    lease.used += used
                    lease.owed[entry] = (used, now)
                lease.due = True
