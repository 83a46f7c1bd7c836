"""Which workers of one machine are up while not all of them fit its memory: turns by demand, within a budget.

Pure: no clock, no futures. :func:`decide` is asked again and again with what is there and says what to begin now;
:mod:`deployments.memory_broker` does it.

* Who is asked for and is not up waits in one queue. The first of it gets room; others pass it only while it has not
  waited :data:`PATIENCE_S`, so that small ones cannot keep a large one out.
* Room is what the budget leaves beside all that is up. Where it is too little, workers that are idle and may sleep make
  room, least recently used first, and no more of them than it takes.
* Who has work under way never leaves. Where the first has waited for :data:`PATIENCE_S`, such as are up for longest are
  closed: they take nothing new, end what they have, and leave then. So nobody waits for ever.
* Who has just come up stays for :data:`STAY_S`: two that do not fit beside each other change places no more often.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

# For so long a worker that has come up stays, whoever waits.
STAY_S = 3.0
# A worker is idle when it has had nothing to do for so long: one request after another is one use.
IDLE_S = 0.5
# For so long the first in the queue waits for somebody to become idle, and lets those pass that fit.
PATIENCE_S = 20.0
# Of a GPU's share: sums of tenths are not exact.
_EPSILON = 1e-9


@dataclass(slots=True, frozen=True)
class Room:
    """``memory``: bytes of the budget; ``gpu``: shares of a GPU; ``spare``: bytes that the machine can still give away,
    whatever the budget says.
    """

    memory: int
    gpu: float = 1.0
    spare: int = 1 << 62


@dataclass(slots=True)
class Tenant:
    """One worker, up or not. Times are seconds on the caller's clock.

    ``need``: bytes that are its own while it is up; ``held``: what it holds of them now; ``gpu``: its share of the GPU.
    ``pinned``: it never sleeps, and its room is kept for it. ``optional``: requests are answered without it, so nobody
    leaves for its sake. ``up``: it is up, starting, or has not quite gone; ``leaving``: it has been told to go;
    ``closed``: to take nothing new. ``busy``: it has work under way. ``asked_at``: since when something waits for it.
    """

    name: str
    need: int
    gpu: float = 0.0
    pinned: bool = False
    optional: bool = False
    up: bool = False
    leaving: bool = False
    closed: bool = False
    busy: bool = False
    held: int = 0
    asked_at: float | None = None
    used_at: float = 0.0
    up_at: float = 0.0

    @property
    def room(self) -> int:
        """Bytes that nobody else may have while it is up."""
        return max(self.need, self.held)


@dataclass(slots=True, frozen=True)
class Moves:
    """Names: whom to wake, to put to sleep, and to close."""

    wake: tuple[str, ...] = ()
    sleep: tuple[str, ...] = ()
    close: tuple[str, ...] = ()


def never_fits(tenant: Tenant, tenants: Iterable[Tenant], room: Room) -> bool:
    """Whether there is no room for it even when everybody sleeps who can. Of pinned ones that do not fit beside each
    other those stay that were up first.
    """
    others = [t for t in tenants if t.pinned and t.name != tenant.name and (t.up or not tenant.pinned)]
    memory, gpu = room.memory - sum(t.room for t in others), room.gpu - sum(t.gpu for t in others)
    return tenant.need > memory or tenant.gpu > gpu + _EPSILON


def decide(tenants: Sequence[Tenant], room: Room, now: float) -> Moves:
    """What to begin now. Names are unique."""
    never = {t.name for t in tenants if not t.up and never_fits(t, tenants, room)}
    waiting = [t for t in tenants if t.asked_at is not None and not t.up and t.name not in never]
    waiting.sort(key=lambda t: (not t.pinned, t.optional, t.asked_at, t.name))
    free = _Free([t for t in tenants if t.up or (t.pinned and t.name not in never)], room)
    wake: list[str] = []
    for tenant in waiting:
        if free.fits(tenant):
            wake.append(tenant.name)
            free.take(tenant)
        elif not tenant.optional:
            first = tenant
            break
    else:
        return Moves(tuple(wake), _names(_down(_idle(tenants, now, damped=False), free)))
    assert first.asked_at is not None
    if free.fits(first, coming=True):
        return Moves(tuple(wake))
    if leaving := _enough(_idle(tenants, now), free, first):
        return Moves(tuple(wake), _names(leaving))
    if now - first.asked_at >= PATIENCE_S:
        return Moves(tuple(wake), close=_names(_enough(_busy(tenants, now), free, first)))
    for tenant in waiting[waiting.index(first) + 1 :]:
        if free.fits(tenant):
            wake.append(tenant.name)
            free.take(tenant)
    return Moves(tuple(wake))


class _Free:
    """What is free, and what becomes free when those have gone that are leaving."""

    def __init__(self, tenants: Iterable[Tenant], room: Room) -> None:
        self.memory, self.gpu, self.spare = room.memory, room.gpu, room.spare
        self.coming_memory, self.coming_gpu = 0, 0.0
        for tenant in tenants:
            self.memory -= tenant.room
            self.gpu -= tenant.gpu
            # What it will still take of the machine.
            self.spare -= tenant.room - tenant.held
            if tenant.leaving or tenant.closed:
                self.coming_memory += tenant.room
                self.coming_gpu += tenant.gpu

    def fits(self, tenant: Tenant | None, more: Iterable[Tenant] = (), *, coming: bool = False) -> bool:
        """Whether it does once ``more`` have gone, and with ``coming`` those that are leaving. The room of pinned ones
        is kept for them and not free. Without ``tenant``, whether those fit that are up.
        """
        need, gpu = (0, 0.0) if tenant is None or tenant.pinned else (tenant.need, tenant.gpu)
        leave = list(more)
        memory = sum(t.room for t in leave) + (self.coming_memory if coming else 0)
        shares = sum(t.gpu for t in leave) + (self.coming_gpu if coming else 0.0)
        fits = need <= self.memory + memory and need <= self.spare + memory
        return fits and gpu <= self.gpu + shares + _EPSILON

    def take(self, tenant: Tenant) -> None:
        """It comes up."""
        if not tenant.pinned:
            self.memory -= tenant.need
            self.spare -= tenant.need
            self.gpu -= tenant.gpu


def _idle(tenants: Iterable[Tenant], now: float, *, damped: bool = True) -> list[Tenant]:
    """Who may be put to sleep, least recently used first."""

    def idles(tenant: Tenant) -> bool:
        return not tenant.busy and tenant.asked_at is None and now - tenant.used_at >= IDLE_S

    found = (t for t in tenants if _may_leave(t, now, damped=damped) and idles(t))
    return sorted(found, key=lambda t: (t.used_at, t.name))


def _busy(tenants: Iterable[Tenant], now: float) -> list[Tenant]:
    """Who may be closed, longest up first."""
    return sorted((t for t in tenants if _may_leave(t, now)), key=lambda t: (t.up_at, t.name))


def _may_leave(tenant: Tenant, now: float, *, damped: bool = True) -> bool:
    stays = damped and now - tenant.up_at < STAY_S
    return tenant.up and not (tenant.pinned or tenant.leaving or tenant.closed or stays)


def _enough(able: list[Tenant], free: _Free, tenant: Tenant) -> list[Tenant]:
    """The first of ``able`` that make room for ``tenant`` together, without those that are not needed for it; nobody
    if all are too few.
    """
    found: list[Tenant] = []
    for one in able:
        found.append(one)
        if free.fits(tenant, found, coming=True):
            break
    else:
        return []
    for one in reversed(found[:-1]):
        if free.fits(tenant, [t for t in found if t is not one], coming=True):
            found.remove(one)
    return found


def _down(able: list[Tenant], free: _Free) -> list[Tenant]:
    """The first of ``able`` that bring what is up down to what there is, as far as they can."""
    found: list[Tenant] = []
    while len(found) < len(able) and not free.fits(None, found, coming=True):
        found.append(able[len(found)])
    return found


def _names(tenants: Iterable[Tenant]) -> tuple[str, ...]:
    return tuple(t.name for t in tenants)
