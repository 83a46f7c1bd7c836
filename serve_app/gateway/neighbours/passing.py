"""Where this gateway passes requests: it asks each listed cluster about once a second how busy it is, and before a
request enters its own queue whether it is better off there.

A request is passed before its first token, and once. What fails before the first token goes on here as if it had not
been tried; what is lost behind it goes on with this cluster's workers where the tokens ended, as if a worker was lost.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from hashlib import sha256

import httpx

from serve_app.api import identity
from serve_app.gateway.core import Gateway
from serve_app.gateway.dispatch.dispatcher import Dispatcher
from serve_app.gateway.neighbours.ahead import line_ahead, tokenizer_print
from serve_app.gateway.neighbours.client import Client, NotPassed, Stream
from serve_app.gateway.neighbours.counts import Seen
from serve_app.gateway.neighbours.prefixes import cached_tokens, chunk_keys, passed_salt, split, tenant_tag
from serve_app.gateway.resume import log as resume
from serve_app.gateway.settings import Listed
from serve_app.routing.neighbours import Line, Option, PassConfig, Passing
from serve_app.routing.types import RouteRequest
from serve_app.tasks.backend import Prepared
from serve_app.tasks.model import ServedModel
from serve_app.tasks.work import Work
from serve_app.text.prompt import Prompt
from serve_app.wire.neighbours import ModelOffer, Offers, PassCall

log = logging.getLogger("ray.serve")

ASK_EVERY_S = 1.0
# What a cluster told is too old after this.
STALE_S = 3.5
# Its gateways take turns in answering, and each knows the prefixes that came by it.
PREFIXES_S = 15.0
# How far one round trip moves what is held for the latency.
LATENCY_GAIN = 0.3
# A cluster's first token may be so late, of a request that this one cannot serve.
PATIENCE_S = 120.0
# A request that said not to wait is refused here at this wait (`serve_app.routing.admission`).
BUSY_S = 0.05


@dataclass(slots=True)
class _Told:
    at: float
    cached: dict[str, frozenset[bytes]]  # by model


@dataclass(slots=True)
class _Neighbour:
    """What is known of one other cluster. ``sent``: by model, tokens that were passed since it told its load."""

    name: str
    client: Client
    seen: Seen
    offers: Offers | None = None
    at: float = 0.0
    sent: dict[str, int] = field(default_factory=dict)
    told: dict[str, _Told] = field(default_factory=dict)  # by its gateways

    def took(self, offers: Offers, seconds: float, now: float) -> None:
        latency = self.seen.latency
        self.seen.latency = seconds if not latency else latency + LATENCY_GAIN * (seconds - latency)
        self.seen.why = ""
        self.offers, self.at, self.sent = offers, now, {}
        cached = {model: split(offer.cached) for model, offer in offers.models.items() if offer.cached}
        self.told = {name: told for name, told in self.told.items() if now - told.at < PREFIXES_S}
        self.told[offers.gateway] = _Told(now, cached)

    def offer(self, model: str, now: float) -> ModelOffer | None:
        fresh = self.offers is not None and self.seen.reachable and now - self.at < STALE_S
        return self.offers.models.get(model) if fresh and self.offers is not None else None


class Neighbours:
    """Of one gateway; an :class:`~serve_app.gateway.backends.elsewhere.Elsewhere`."""

    def __init__(
        self,
        gateway: Gateway,
        listed: Sequence[Listed],
        config: PassConfig | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._gateway = gateway
        self._policy = Passing(config)
        self._counts = gateway.tally.neighbours
        self._all = []
        for one in listed:
            seen = self._counts.seen[one.name] = Seen()
            self._all.append(_Neighbour(one.name, Client(one.url, one.key, transport), seen))
        self._own: dict[str, Line] = {}  # as of the last look
        self._prints: dict[str, str] = {}
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        asking = [self._again(self._ask, one) for one in self._all]
        self._tasks = [asyncio.ensure_future(each) for each in (*asking, self._again(self._look))]

    async def aclose(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for one in self._all:
            await one.client.aclose()

    # -- what is known ---------------------------------------------------------------------------------------------

    async def _again(self, what: Callable[..., Awaitable[None]], *about: _Neighbour) -> None:
        while True:
            try:
                await what(*about)
            except Exception as error:
                log.error("neighbours cannot be looked at", exc_info=error)
            await asyncio.sleep(ASK_EVERY_S)

    async def _ask(self, one: _Neighbour) -> None:
        try:
            offers, seconds = await one.client.offers(self._gateway.tally.gateway)
        except NotPassed as error:
            if one.seen.reachable:
                log.warning("neighbour %s cannot be reached: %s", one.name, error)
            one.seen.why = str(error)
            return
        if not one.seen.reachable:
            log.info("neighbour %s is there, %.1f ms away", one.name, seconds * 1e3)
        one.took(offers, seconds, time.monotonic())

    async def _look(self) -> None:
        """This cluster's own load, and which models others serve as well."""
        gateway, now = self._gateway, time.monotonic()
        for model in list(gateway.models):
            if not gateway.engine.serves(model):
                continue
            offered = [offer for one in self._all if (offer := one.offer(model.id, now)) is not None]
            if offered and model.id not in self._prints:
                self._prints[model.id] = await asyncio.to_thread(tokenizer_print, model)
            dispatcher = gateway.engine.dispatcher(model)
            model.elsewhere = any(self._same(model, dispatcher, offer) for offer in offered)
            line = await line_ahead(model, dispatcher, gateway.settings.account) if model.elsewhere else None
            if line is None:
                self._own.pop(model.id, None)
            else:
                self._own[model.id] = line

    def _same(self, model: ServedModel, dispatcher: Dispatcher, offer: ModelOffer) -> bool:
        """Whether the other cluster's model is this one, token for token."""
        weights = dispatcher.weights
        return offer.tokenizer == self._prints.get(model.id) and (not weights or weights == offer.weights)

    # -- requests --------------------------------------------------------------------------------------------------

    async def passed(
        self, prepared: Prepared, work: Work, route: RouteRequest, dispatcher: Dispatcher
    ) -> Stream | None:
        """As :class:`serve_app.gateway.backends.elsewhere.Elsewhere` has it."""
        model = work.model
        if not model.elsewhere or not _can_go(prepared, work, route) or self._soon_here(model, route, dispatcher):
            return None
        foreseen = await dispatcher.foresee(route) if model.ready else None
        own = None if foreseen is None else foreseen.ttft_s
        if own is not None and route.reject_if_busy and (foreseen.wait_s or 0.0) > BUSY_S:  # type: ignore[union-attr]
            own = None
        left = None if route.deadline is None else route.deadline - dispatcher.now()
        now = time.monotonic()
        options = {}
        for one in self._all:
            offer = one.offer(model.id, now)
            if offer is not None and self._same(model, dispatcher, offer):
                options[one.name] = (one, offer, self._option(one, offer, work, prepared))
        choice = self._policy.choose(own, route.prompt_tokens, [option for _, _, option in options.values()], left)
        if choice is None:
            return None
        one, offer, option = options[choice.name]
        here = None if own is None else round(own * 1e3, 1)
        work.trace.event("passing", to=one.name, expected_ttft_ms=round(choice.ttft * 1e3, 1), own_ttft_ms=here)
        one.sent[model.id] = one.sent.get(model.id, 0) + max(route.prompt_tokens - option.cached, 0)
        # A cluster that keeps silent costs no more than twice what the request would have taken here.
        patience = PATIENCE_S if own is None else max(own, 1.0)
        return await self._begin(
            one, self._call(one, work, prepared, route, left), work, min(patience, left or patience)
        )

    def _soon_here(self, model: ServedModel, route: RouteRequest, dispatcher: Dispatcher) -> bool:
        """Whether this cluster is so idle that nothing is worth a look. Most requests end here."""
        line = self._own.get(model.id)
        if line is None or len(dispatcher.policy.queue) or route.reject_if_busy:
            return False
        return line.ttft(route.prompt_tokens) < self._policy.config.margin_s

    def _option(self, one: _Neighbour, offer: ModelOffer, work: Work, prepared: Prepared) -> Option:
        model, cached = work.model.id, 0
        known = [told.cached[model] for told in one.told.values() if model in told.cached]
        if known and one.offers is not None:
            salt = passed_salt(one.offers.account, tenant_tag(work.salt, one.name))
            keys = chunk_keys(offer.weights, salt, prepared.prompt.ids, offer.chunk_tokens)
            cached = max(cached_tokens(short, keys, offer.chunk_tokens) for short in known)
        line = Line(offer.wait, offer.base, offer.token)
        # The other gateways here will have passed about as much as this one.
        sent = one.sent.get(model, 0) * (1 if one.offers is None else one.offers.askers)
        return Option(one.name, one.seen.latency, line, cached, sent, offer.workers)

    def _call(
        self, one: _Neighbour, work: Work, prepared: Prepared, route: RouteRequest, left: float | None
    ) -> PassCall:
        session = "" if route.session is None else sha256(work.salt + route.session.encode()).hexdigest()[:32]
        return PassCall(
            work.model.id,
            prepared.prompt.ids.astype("<i4").tobytes(),
            prepared.request.sampling,
            tenant_tag(work.salt, one.name),
            self._prints[work.model.id],
            session,
            None if left is None else max(left - one.seen.latency, 1e-3),
            route.reject_if_busy,
            origin=(work.trace.id, work.trace.trace_id),
        )

    async def _begin(self, one: _Neighbour, call: PassCall, work: Work, patience_s: float) -> Stream | None:
        model = work.model.id
        try:
            stream = await one.client.begin(call, _traceparent(work), patience_s)
        except NotPassed as error:
            log.info("neighbour %s did not take a request: %s", one.name, error)
            work.trace.event("not passed", to=one.name, why=str(error))
            self._counts.passed[one.name, model, "refused"] += 1
            # Until it is asked again nothing goes there: what refuses one request may refuse all.
            one.offers = None
            return None
        work.placed, work.placed_at = True, time.monotonic()
        work.first_at = work.placed_at
        work.trace.event("first token", neighbour=one.name)

        def ended(how: str, why: str) -> None:
            self._counts.passed[one.name, model, how] += 1
            if why:
                log.warning("neighbour %s lost a request: %s", one.name, why)

        stream.ended = ended
        return stream


def _can_go(prepared: Prepared, work: Work, route: RouteRequest) -> bool:
    """Whether the request is of a kind that is passed: one answer to a text, in real time, which nobody resumes."""
    request = prepared.request
    prompt = prepared.prompt
    assert isinstance(prompt, Prompt)
    special = request.adapter is not None or prompt.media or request.prompt_only
    special = special or request.sampling.prompt_logprobs is not None
    kept = identity.again() or resume.current.get() is not None
    return request.n == 1 and not special and not kept and not work.batch and route.priority == "realtime"


def _traceparent(work: Work) -> str:
    """The gateway's own span is the parent of what happens there."""
    trace_id, span = work.trace.trace_id, work.trace.id[:16]
    return f"00-{trace_id}-{span}-01" if len(trace_id) == 32 and len(span) == 16 else ""
