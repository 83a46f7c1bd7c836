"""What callers may do: their limits, applied before any work is begun.

Limits of a minute refuse with 971, budgets (neurons a day, money a month) with 3036. A request reserves the most that
it could cost of its budgets, and settles with what it has cost.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from types import MappingProxyType

from serve_app.api.errors import ApiError, BudgetSpent, PaidPlanNeeded, RateLimited, StoreAway
from serve_app.state.background import Background
from serve_app.state.callers.accounts import Caller
from serve_app.state.callers.limits import FREE_NEURONS, Limits, Plan
from serve_app.state.errors import Away
from serve_app.state.owners import Owner
from serve_app.state.protocols import LeaseStore
from serve_app.state.spending.alerts import amount
from serve_app.state.spending.leases import Leases, Reservation, Short
from serve_app.state.spending.quotas import MINUTE_S, MONEY, NEURONS, REQUESTS, STREAMS, TOKENS, Need, Quota

log = logging.getLogger("ray.serve")

# How often leases that are used are set anew, and the least time between two exchanges.
POLL_S = 0.25
GROUP_S = 0.005
# How long a request waits for what others have leased and do not use, and asks for it this often.
PATIENCE_S = 2.0
AGAIN_S = 0.05
_FREE = Reservation()
_UNKNOWN = (
    "The server's store cannot be reached in time, and nobody else knows what is left of the limit; please try again."
)


@dataclass(slots=True, frozen=True)
class Worst:
    """The most that a request could use. ``neurons``: micro-neurons, ``money``: nano-units of ``currency``.
    ``because``: what makes it so much, for the message of a refusal.
    """

    tokens: int = 0
    streams: int = 1
    neurons: int = 0
    money: int = 0
    because: str = ""
    currency: str = "USD"


class Allowance:
    """``by_task``: requests per minute of each account, by task. ``away``: for how many seconds the store has been
    away; after ``away_s`` of them nothing is let in. ``plan``: of accounts that have none. ``drained``: see
    :class:`Leases`. ``clock`` gives unix seconds.
    """

    def __init__(
        self,
        store: LeaseStore,
        owner: Owner,
        *,
        by_task: Mapping[str, int] = MappingProxyType({}),
        away: Callable[[], float] = lambda: 0.0,
        away_s: float = 3600.0,
        clock: Callable[[], float] = time.time,
        plan: Plan = "paid",
        drained: Callable[[], bool] = lambda: False,
    ) -> None:
        self._store = store
        self._plan = plan
        self._owner = owner
        self._by_task = dict(by_task)
        self._away = away
        self._away_s = away_s
        self._clock = clock
        self._background = Background("limits", self._turn, poll_s=POLL_S, group_s=GROUP_S)
        self._waiters: set[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = set()
        self._waiting = threading.Lock()
        self._trouble = ""
        store.away_s = away_s
        self.leases = Leases(self._background.wake, clock, drained)
        self.leases.listeners.append(self._exchanged)

    async def request(self, caller: Caller, task: str) -> dict[str, str]:
        """Counts one request, and gives the headers that tell of it. Raises `RateLimited`, `StoreAway`."""
        self.check_away()
        needs = [Need(Quota(caller.account, key, kind), limit, 1) for key, kind, limit in self._rates(caller, task)]
        if not needs:
            return {}
        reservation = await self._take(needs, lambda short: self._too_many(short, task))
        reservation.settle({REQUESTS: 1})
        return self._headers(needs)

    async def reserve(self, caller: Caller, worst: Worst) -> Reservation:
        """Holds the most that a request could use, until it is settled. Raises `RateLimited`, `BudgetSpent`,
        `StoreAway`.
        """
        needs = list(_needs(caller, "", self._of_account(caller), worst))
        if caller.key:
            needs += _needs(caller, caller.key, caller.limits, worst)
        if not needs:
            return _FREE
        return await self._take(needs, lambda short: self._refusal(short, worst))

    def check_plan(self, caller: Caller, model: str, *, paid: bool) -> None:
        """Raises `PaidPlanNeeded` for a model that is marked ``paid`` where the caller's account has the free plan."""
        if paid and (caller.account_limits.plan or self._plan) == "free":
            raise PaidPlanNeeded(model, caller.account)

    def _of_account(self, caller: Caller) -> Limits:
        limits = caller.account_limits
        if limits.neurons_per_day is None and (limits.plan or self._plan) == "free":
            return replace(limits, neurons_per_day=FREE_NEURONS)
        return limits

    def close(self) -> None:
        """Gives back what is leased and not used. Blocks for a moment; once is enough."""
        self._background.end(2.0)

    async def _take(self, needs: Sequence[Need], refusal: Callable[[Short], ApiError]) -> Reservation:
        self._background.begin(self._owner.live)
        found = self.leases.take(needs)
        if found is None:
            with self.leases.waiting(needs), suppress(TimeoutError):
                async with asyncio.timeout(PATIENCE_S):
                    for turn in itertools.count():
                        await self._next_exchange()
                        if (found := self.leases.take(needs)) is not None:
                            break
                        # The first exchange may have begun before anybody asked. After that, somebody has leased what
                        # is left, and gives back what he does not use.
                        if turn:
                            await asyncio.sleep(AGAIN_S)
                        self.leases.again(needs)
        if isinstance(found, Reservation):
            return found
        if found is None:
            found = self.leases.shortage(needs)
        raise StoreAway(_UNKNOWN) if found.away else refusal(found)

    async def _next_exchange(self) -> None:
        loop = asyncio.get_running_loop()
        waiter = (loop, loop.create_future())
        with self._waiting:
            self._waiters.add(waiter)
        try:
            await waiter[1]
        finally:
            with self._waiting:
                self._waiters.discard(waiter)

    def _exchanged(self) -> None:
        with self._waiting:
            waiters, self._waiters = self._waiters, set()
        for loop, future in waiters:
            # Its loop may have ended.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(_wake, future)

    def _turn(self, poll: bool, last: bool) -> None:
        self._exchange(poll=poll, all=last)
        if last and not any(held for held, _ in self.leases.held().values()):
            with suppress(Away, Exception):
                self._store.forget(self._owner.id)
                self._owner.end()

    def _exchange(self, *, poll: bool, all: bool) -> None:
        try:
            self.leases.exchange(self._store, self._owner.id, all=all, poll=poll)
            self._trouble = ""
        except Away:
            pass
        except Exception as error:
            # Whatever it is, the next exchange may do better, and budgets let in no more than is leased meanwhile.
            if self._trouble != str(error):
                log.error("limits cannot be exchanged with the store", exc_info=error)
            self._trouble = str(error)

    def limits(self, caller: Caller) -> bool:
        """Whether there is anything to reserve for the caller."""
        return bool(caller.limits or self._of_account(caller))

    def check_away(self) -> None:
        """Raises `StoreAway` where the store has been away for too long."""
        if self._away() > self._away_s:
            raise StoreAway(f"The server's store is away for more than {self._away_s:g} seconds, please try again.")

    def _rates(self, caller: Caller, task: str) -> Iterable[tuple[str, str, int]]:
        """(key, kind, limit) of each limit of requests."""
        if (quota := self._by_task.get(task)) is not None:
            yield "", f"{REQUESTS}:{task}", quota
        if (quota := caller.account_limits.requests_per_minute) is not None:
            yield "", REQUESTS, quota
        if caller.key and (quota := caller.limits.requests_per_minute) is not None:
            yield caller.key, REQUESTS, quota

    def _headers(self, needs: Sequence[Need]) -> dict[str, str]:
        """As Cloudflare's API sends them (draft-ietf-httpapi-ratelimit-headers)."""
        now = self._clock()
        left, policy = [], []
        for need in needs:
            name = need.quota.kind.partition(":")[2] or ("key" if need.quota.key else "account")
            reset = math.ceil(need.quota.ends(now) - now)
            left.append(f'"{name}";r={self.leases.left(need.quota)};t={reset}')
            policy.append(f'"{name}";q={need.limit};w={MINUTE_S}')
        return {"Ratelimit": ", ".join(left), "Ratelimit-Policy": ", ".join(policy)}

    def _too_many(self, short: Short, task: str) -> ApiError:
        need = short.need
        reset = self._reset(need)
        what = f"{task} requests" if ":" in need.quota.kind else f"requests of this {_whose(need)}"
        message = f"Rate limit: {need.limit} {what} per minute. Try again in {reset} seconds."
        return RateLimited(message, reset, self._headers([need]))

    def _refusal(self, short: Short, worst: Worst) -> ApiError:
        need, kind = short.need, short.need.quota.kind
        whose, reset = _whose(need), self._reset(need)
        because = f" ({worst.because})" if worst.because else ""
        if kind == STREAMS:
            return RateLimited(
                f"This {whose} may have {need.limit} streams at once, of which {short.left} are left, and this request "
                f"takes {need.amount}. Try again when one has ended.",
                1.0,
                {},
            )
        remedy = "Lower max_tokens or shorten the prompt"
        if kind == TOKENS:
            later = "" if need.amount > need.limit else f", or try again in {reset} seconds"
            return RateLimited(
                f"Rate limit: {need.limit} tokens of this {whose} per minute, of which {short.left} are left, and this "
                f"request could take up to {need.amount}{because}. {remedy}{later}.",
                reset,
                self._headers([need]),
            )
        limit, left, most = (amount(kind, value) for value in (need.limit, short.left, need.amount))
        neurons = kind == NEURONS
        unit, window, end = ("neurons", "daily", "00:00 UTC") if neurons else (worst.currency, "monthly", "next month")
        return BudgetSpent(
            f"The {window} budget of this {whose} is {limit} in {unit}, of which {left} is left until {end}, and this "
            f"request could cost up to {most}{because}. {remedy}, or wait for the next budget.",
            reset,
        )

    def _reset(self, need: Need) -> int:
        now = self._clock()
        return math.ceil(need.quota.ends(now) - now)


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _whose(need: Need) -> str:
    return "key" if need.quota.key else "account"


def _needs(caller: Caller, key: str, limits: Limits, worst: Worst) -> Iterable[Need]:
    if not limits:
        return
    account = caller.account
    if limits.tokens_per_minute is not None:
        yield Need(Quota(account, key, TOKENS), limits.tokens_per_minute, worst.tokens)
    if limits.streams is not None:
        yield Need(Quota(account, key, STREAMS), limits.streams, worst.streams)
    if limits.neurons_per_day is not None and worst.neurons:
        yield Need(Quota(account, key, NEURONS), limits.neurons_per_day, worst.neurons)
    if limits.money_per_month is not None and worst.money:
        yield Need(Quota(account, key, f"{MONEY}:{worst.currency}"), limits.money_per_month, worst.money)
