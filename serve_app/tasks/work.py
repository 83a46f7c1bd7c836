"""A piece of work from its begin to its settlement, whatever its task and dialect and however it ends."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

import msgspec

from serve_app.api import identity, trace_context
from serve_app.api.errors import BudgetSpent, LoraUnsupported, OutOfCapacity, RateLimited, WorkersLost
from serve_app.api.types import AdapterRef, Usage
from serve_app.catalog.price_list import Prices, Quote
from serve_app.state.callers.accounts import Caller
from serve_app.state.kept.traces import Trace, Traces
from serve_app.state.spending.allowance import Allowance, Worst
from serve_app.state.spending.leases import Reservation
from serve_app.state.spending.ledger import Entry
from serve_app.state.spending.quotas import MONEY, NEURONS, TOKENS
from serve_app.tasks.backend import Backend
from serve_app.tasks.calls import AskAll, Call
from serve_app.tasks.model import ServedModel
from serve_app.wire.methods import C, Method, R

log = logging.getLogger("ray.serve")

# A request whose worker is lost goes on with another one.
MAX_ATTEMPTS = 3

# left: its client went. failed: after it had begun; refused: before.
Status = Literal["done", "refused", "failed", "left"]


class WorkerGone(RuntimeError):
    """The replica or worker that had the request is gone; another may continue it."""


class Settled(msgspec.Struct, frozen=True):
    """A piece of work that has ended. ``usage``: what it took. ``entry``: what is charged for it, None for nothing.
    ``shown``: the client has seen some of it. ``entry_id``: of the entry, also of one that is not made. ``ttft_s``,
    ``itl_s``: seconds to the first token, and on average between further ones; None where there was none, and of
    batches, which wait. ``work_id``: of the :class:`Work`, while it ran. ``queue_s``: until a worker was chosen, like
    ``ttft_s``. ``cut``: an answer reached its length. ``longest``: tokens of its longest choice, where it has several.
    """

    caller: Caller
    model: str
    task: str
    usage: Usage
    status: Status
    request_id: str
    seconds: float
    entry: Entry | None = None
    shown: bool = False
    entry_id: str = ""
    ttft_s: float | None = None
    itl_s: float | None = None
    work_id: int = 0
    queue_s: float | None = None
    cut: bool = False
    longest: int = 0


class Settlement:
    """Where every piece of work ends, exactly once. ``subscribers`` hear of it: counters, and who holds limits."""

    def __init__(self, *subscribers: Callable[[Settled], None]) -> None:
        self.subscribers = list(subscribers)

    def tell(self, settled: Settled) -> None:
        """A subscriber that fails keeps the others from nothing."""
        for subscriber in self.subscribers:
            try:
                subscriber(settled)
            except Exception:
                log.exception("a settled request could not be counted")

    def book(self, settled: Settled) -> Awaitable[None] | None:
        """Settles, and has the entry written; the result is there when it is safe. Here nothing is written down."""
        self.tell(settled)
        return None


@dataclass(slots=True)
class Work:
    """One piece of work under way. Whoever runs it keeps ``usage`` up to date, since its client may leave at any time,
    and sets ``placed`` once a worker has been chosen for it.

    ``sent``: output tokens whose text has been taken by whoever sends it; None: all that are in ``usage``. ``look()``
    brings both up to date, for who looks while it runs. ``units``: what was used beside tokens, by the names of
    `catalog.pricing.UNITS`; ``sent_units``: of a stream that does not consist of tokens, what has been sent of it.
    ``adapter``, ``batch``: of the entry. ``first_at``: when its first token came, on the
    monotonic clock; ``placed_at``: when a worker had been chosen. ``cut``, ``longest``: as in :class:`Settled`.
    """

    caller: Caller
    model: ServedModel
    salt: bytes = b""
    trace: Trace = field(default_factory=Trace)
    usage: Usage = field(default_factory=Usage)
    placed: bool = False
    traces: Traces | None = None
    sent: int | None = None
    look: Callable[[], None] = lambda: None
    units: dict[str, int] = field(default_factory=dict)
    sent_units: dict[str, int] = field(default_factory=dict)
    adapter: str = ""
    batch: str = ""
    first_at: float | None = None
    placed_at: float | None = None
    cut: bool = False
    longest: int = 0

    def hold(self) -> None:
        """Keeps the trace open beyond the settlement, for who still has something to tell; :meth:`release` is due."""
        self.trace.users += 1

    def release(self) -> None:
        if self.traces is not None:
            self.traces.release(self.trace)


async def no_adapters(model: ServedModel, caller: Caller, name: str) -> AdapterRef:
    """Where there are none."""
    raise LoraUnsupported(model.id)


@dataclass(slots=True)
class Runtime:
    """What a gateway lends to tasks.

    ``call`` reaches a replica of a model. ``salt(account)`` keeps tenants' caches apart. ``prices``: of models at a
    time. ``check()`` raises what keeps any work from being begun. ``book(settled)`` settles, and has the entry written;
    its result, if any, is there when the client may be told of the end. ``keep(id, look)`` has an entry kept as
    ``look()`` makes it, for work that this process may not live to settle. ``allowance``: limits of callers, if any.
    ``adapter(model, caller, name)`` looks an adapter up by id or name, and raises what the client should see.
    ``ask_all`` reaches every replica of a model.
    """

    call: Call
    backend: Callable[[ServedModel], Backend]
    settlement: Settlement
    max_inflight: int
    salt: Callable[[str], bytes] = lambda account: b""
    traces: Traces | None = None
    request_id: Callable[[], str] = lambda: ""
    prices: Prices = field(default_factory=Prices)
    check: Callable[[], None] = lambda: None
    book: Callable[[Settled], Awaitable[None] | None] | None = None
    keep: Callable[[str, Callable[[], Entry | None]], None] | None = None
    allowance: Allowance | None = None
    adapter: Callable[[ServedModel, Caller, str], Awaitable[AdapterRef]] = no_adapters
    ask_all: AskAll | None = None
    # Work under way, by its id.
    running: dict[int, Work] = field(default_factory=dict)

    @asynccontextmanager
    async def work(
        self,
        model: ServedModel,
        caller: Caller,
        *,
        streams: int = 1,
        reject_if_busy: bool = False,
        request_id: str | None = None,
        number: int = 0,
        shown: bool = False,
        facts: Mapping[str, Any] = MappingProxyType({}),
        worst: Mapping[str, int] = MappingProxyType({}),
        adapter: str = "",
    ) -> AsyncIterator[Work]:
        """A piece of work that holds ``streams`` places of the model; ``facts`` begin its trace. ``number``: which one
        of its request. ``shown``: its client sees it as it is made, and not only as a whole. ``worst``: the most of
        each unit that it could use, which is reserved of its caller's limits before anything is done.

        It is settled when the block ends, in whatever way: an exception means failed, or refused where it had not
        started; a block that is left without one of its own (a cancelled task, a closed generator) means left. What is
        behind the block may tell the client of the end: its entry is safe.
        """
        self.check()
        own_id = self.request_id() if request_id is None else request_id
        began = time.monotonic()
        work = Work(
            caller, model, self.salt(caller.account), traces=self.traces, adapter=adapter, batch=identity.batch()
        )
        if self.traces is not None:
            identity.begin()
            work.trace = self.traces.begin(
                own_id, caller.account, model.id, model.record.task, trace_context.current.get()
            )
        work.trace.event("received", **facts)
        quote = self.quote(model, adapter)
        entry_id = (own_id or secrets.token_hex(16)) + (f".{number}" if number else "")

        def charged(status: Status) -> Entry | None:
            return _entry(work, quote, status, entry_id, time.monotonic() - began, shown)

        def under_way() -> Entry | None:
            work.look()
            return charged("failed")

        status: Status = "left"
        reservation = Reservation()
        try:
            if self.allowance is not None:
                self.allowance.check_away()
                if self.allowance.limits(caller):
                    reservation = await self.allowance.reserve(caller, _worst(quote, worst, streams))
            with model.place(caller, self.max_inflight, streams=streams, reject_if_busy=reject_if_busy):
                if shown and self.keep is not None:
                    self.keep(entry_id, under_way)
                self.running[id(work)] = work
                yield work
            status = "done"
        except (OutOfCapacity, RateLimited, BudgetSpent) as refused:
            status = "failed" if work.placed else "refused"
            work.trace.event("answered", status=429, retry_after_s=refused.retry_after)
            raise
        except Exception:
            status = "failed"
            raise
        finally:
            self.running.pop(id(work), None)
            usage, seconds = work.usage, time.monotonic() - began
            if self.traces is not None:
                tokens = {"cached_tokens": usage.cached_tokens, "completion_tokens": usage.completion_tokens}
                self.traces.end(work.trace, status, **tokens)
            entry = charged(status)
            _tell_price(usage, quote, entry)
            seen = shown and entry is not None
            settled = Settled(
                caller, model.id, model.record.task, usage, status, own_id, seconds, entry, seen, entry_id,
                *_latency(work, began, seconds, streams), id(work), _queued(work, began), work.cut, work.longest,
            )  # fmt: skip
            reservation.settle(_spent(entry, usage), "" if entry is None else entry.id)
            safe = (self.book or self.settlement.book)(settled)
            # Who has left is told of nothing.
            if safe is not None and status != "left":
                await safe

    def quote(self, model: ServedModel, adapter: str = "") -> Quote:
        """What work of the request at hand costs; ``adapter``: the id of the one that it uses. A request costs what it
        cost when it came, so that running it again elsewhere changes nothing.
        """
        priced = model.record.adapter_price_id if adapter else model.id
        return self.prices.price_of(priced, _came())

    async def call_retried(self, model: ServedModel, method: Method[C, R], call: C) -> R:
        """:attr:`call` of work that may be done twice: a lost worker costs time and nothing else."""
        for attempt in range(MAX_ATTEMPTS):
            try:
                return await self.call(model, method, call)
            except WorkerGone:
                await asyncio.sleep(0.2 * attempt)
        raise WorkersLost


def _latency(work: Work, began: float, seconds: float, streams: int) -> tuple[float | None, float | None]:
    """Seconds to the first token and, on average, between those after it."""
    if work.first_at is None or work.batch:
        return None, None
    first, more = work.first_at - began, work.usage.completion_tokens - streams
    return first, (seconds - first) * streams / more if more > 0 else None


def _queued(work: Work, began: float) -> float | None:
    """Seconds until a worker had been chosen."""
    return None if work.placed_at is None or work.batch else work.placed_at - began


def _worst(quote: Quote, units: Mapping[str, int], streams: int) -> Worst:
    """What ``units`` cost at most: what is in a cache is not known before, and nothing is taken off."""
    prompt, written = units.get("input_tokens", 0), units.get("output_tokens", 0)
    units = {**units, "requests": 1} if "requests" in quote.tariff.rates else units
    # Nobody says that cached tokens are the cheaper ones.
    cost, cached = quote.cost(units), quote.cost({**units, "cached_tokens": prompt})
    because = f"{prompt} prompt tokens" + (f", max_tokens {written // streams}" if written else "")
    because += f", {streams} choices" if streams > 1 else ""
    neurons, money = max(cost.neurons, cached.neurons), max(cost.money, cached.money)
    return Worst(prompt + written, streams, neurons, money, because, cost.currency)


def _spent(entry: Entry | None, usage: Usage) -> dict[str, int]:
    """By what limits count."""
    cost = {} if entry is None else {NEURONS: entry.neurons, MONEY: entry.money}
    return {TOKENS: usage.total_tokens, **cost}


def _came() -> float:
    """Unix seconds of the request at hand."""
    known = identity.current.get()
    return time.time() if known is None else known.created


def _tell_price(usage: Usage, quote: Quote, entry: Entry | None) -> None:
    """Has the usage say what the entry does."""
    usage.currency = quote.tariff.currency
    if entry is not None:
        usage.micro_neurons = entry.neurons
    if quote.priced:
        usage.nano_cost = 0 if entry is None else entry.money


def _entry(work: Work, quote: Quote, status: Status, entry_id: str, seconds: float, shown: bool) -> Entry | None:
    """What is charged: all that was used for an answer that is complete; of a stream that broke its prompt and the
    tokens that were sent; nothing where the client has seen nothing.
    """
    usage, more = work.usage, work.units
    if status == "done":
        written = usage.completion_tokens
    else:
        written = usage.completion_tokens if work.sent is None else work.sent
        if not (shown and (written or work.sent_units)):
            return None
        more = work.sent_units or more
    units = {
        **more,
        "input_tokens": usage.prompt_tokens,
        "cached_tokens": usage.cached_tokens,
        "output_tokens": written,
    }
    if "requests" in quote.tariff.rates:
        units["requests"] = 1
    cost = quote.cost(units, batch=bool(work.batch))
    return Entry(
        id=entry_id,
        account=work.caller.account,
        key=work.caller.key,
        at=time.time(),
        seconds=seconds,
        model=work.model.id,
        task=work.model.record.task,
        status="failed" if status == "refused" else status,
        units=units,
        neurons=cost.neurons,
        money=cost.money,
        currency=cost.currency,
        adapter=work.adapter,
        batch=work.batch,
    )
