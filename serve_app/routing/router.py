"""Chooses the prefill and the decode worker of a request together.

Every worker can do both, so a choice is to prefill on p and decode on d, or to do both on w (the prompt then runs in
chunks beside w's decoding). Each choice is priced in seconds (:mod:`serve_app.routing.prices`), and the cheapest is
taken. Only the last tie-break is random; it keeps several gateways from herding.
"""

from __future__ import annotations

import math
from random import Random

from serve_app.routing.adapters import AdapterPlaces
from serve_app.routing.beliefs import Beliefs, node_of, pool_holder
from serve_app.routing.costs import CostModel
from serve_app.routing.fleet import Fleet, Reservation, Transfers
from serve_app.routing.locality import LocalityIndex
from serve_app.routing.prices import Held, Pair, Price, Pricer, RouterConfig
from serve_app.routing.sessions import Sessions
from serve_app.routing.shortlist import PRICE_ALL
from serve_app.routing.types import Decision, Priority, RouteRequest, WorkerLoad

# For so long the speed of a large fleet is taken to be what it was.
RATE_S = 0.05


class Router:
    """One per model and gateway: ``report`` loads, ``choose`` for a request, ``commit`` when it is sent."""

    def __init__(self, costs: CostModel, locality: LocalityIndex, config: RouterConfig | None = None) -> None:
        self.costs = costs
        self.locality = locality
        self.config = config or RouterConfig()
        self.beliefs = Beliefs(locality, self.config.chunk_tokens)
        self._reservations: dict[str, list[tuple[Fleet, Reservation]]] = {}
        self._sessions = Sessions(self.config.sessions)
        self._adapters = AdapterPlaces(costs)
        self._random = Random(self.config.seed)
        self._pricer = Pricer(costs, self.config, self._adapters, self._random)
        # As real-time requests find the workers; and as batch requests do, once there are any.
        self.fleet = Fleet(costs, self._random)
        self._whole: Fleet | None = None
        self._rate, self._rate_at = 0.0, -math.inf

    # -- inputs --------------------------------------------------------------------------------------------------

    def report(self, load: WorkerLoad) -> None:
        self.costs.expect(load.tiers, load.worker)
        self.costs.take(load.steps, load.fetches, load.worker)
        self.beliefs.take(load)
        slow = self.costs.slowness(load.worker)
        self.fleet.report(load, slow)
        if self._whole is not None:
            self._whole.report(load.whole, slow)

    def view(self, priority: Priority) -> Fleet:
        """The workers as requests of this priority find them: what batch requests have is free for all others."""
        if priority != "batch":
            return self.fleet
        if self._whole is None:
            self._whole = Fleet(self.costs, self._random)
            for worker in self.fleet.workers.values():
                self._whole.report(worker.load.whole, worker.slow)
        return self._whole

    def remove(self, worker: str) -> None:
        """A worker is gone: nothing goes there any more."""
        self.fleet.remove(worker)
        if self._whole is not None:
            self._whole.remove(worker)
        self.beliefs.forget(worker)
        self.costs.forget(worker)

    def commit(self, request: RouteRequest, decision: Decision, now: float) -> None:
        """The request is being sent as decided: its load counts at once, and so do the caches that it will fill."""
        workers = self.view(request.priority).workers
        decode, prefill = workers.get(decision.decode), workers.get(decision.prefill or decision.decode)
        if decode is None or prefill is None:
            return  # a worker was lost meanwhile: the send will fail and be retried
        self.finished(request.id)
        views = [] if request.priority == "batch" else [self.fleet]
        views += [] if self._whole is None else [self._whole]
        self._reservations[request.id] = [(view, _reserve(view, request, decision, now)) for view in views]
        self.learn(request, decision, now)

    def learn(self, request: RouteRequest, decision: Decision, now: float = 0.0) -> None:
        """The request goes where it was decided, here or by another gateway: caches there will have its K/V."""
        workers = self.fleet.workers
        decode, prefill = workers.get(decision.decode), workers.get(decision.prefill or decision.decode)
        if decode is None or prefill is None:
            return
        if request.session is not None:
            self._sessions.went(request.session, prefill.name, decode.name)
        if request.adapter:
            self._adapters.takes(request.adapter, {prefill.name, decode.name}, now)
        holders = {prefill.name, decode.name} if self.config.own_cache else set()
        if self.config.shared_pool:
            holders |= {pool_holder(prefill.load.node), pool_holder(decode.load.node)}
        self.locality.add(request.keys, *holders)

    def finished(self, request_id: str) -> None:
        """The request has ended, was cancelled or is lost; an unknown id is ignored."""
        for view, reservation in self._reservations.pop(request_id, ()):
            view.release(reservation)

    def started(self, request_id: str, now: float) -> None:
        """The request's first token is there."""
        for view, reservation in self._reservations.get(request_id, ()):
            view.started(reservation, now)

    def stream_ended(self, request_id: str) -> None:
        """The decode worker has done with one of the request's streams, though its client may still read."""
        for view, reservation in self._reservations.get(request_id, ()):
            view.end_streams(reservation, 1)

    # -- the choice ------------------------------------------------------------------------------------------------

    def choose(self, request: RouteRequest, now: float) -> Decision | None:
        """The cheapest place; None if there is no worker."""
        config, fleet = self.config, self.view(request.priority)
        found = self._lookup(request)
        held = self._sessions.held(request.session, self.fleet.workers, self.fleet.version)
        able = {w.name: w for w in fleet.candidates(now, request.zone)}
        if request.adapter:
            able |= {w.name: w for w in fleet.holding(request.adapter, now)}
        for name in (*found.workers, *held):
            worker = fleet.workers.get(name)
            if worker is not None:
                able[name] = worker
        if not able:
            return None
        prices = [self._pricer.price(request, fleet, worker, found, now) for worker in able.values()]
        for price in prices:
            roles = held.get(price.worker.name)
            if roles:
                hold = self._hold(request, price)
                price.prefill -= hold * ("prefill" in roles)
                price.decode -= hold * ("decode" in roles)
        strict = config.strict_roles
        to_prefill = [p for p in prices if not (strict and p.worker.role == "decode")] or prices
        to_decode = [p for p in prices if not (strict and p.worker.role == "prefill")] or prices
        both = [p for p in prices if not (strict and p.worker.role != "mixed")] if config.split else prices
        return self._decision(self._pricer.cheapest(to_prefill, to_decode, both, found.prompt, fleet, now), held)

    def _lookup(self, request: RouteRequest) -> Held:
        """What the index knows of the prompt, in tokens."""
        # The last prompt token is always computed: its logits are the first sample.
        size, most = self.config.chunk_tokens, max(request.prompt_tokens - 1, 0)
        held = Held(request.prompt_tokens, _output(request), {}, {}, 0)
        for holder, chunks in self.locality.match(request.keys).items():
            tokens = min(chunks * size, most)
            if (node := node_of(holder)) is None:
                held.workers[holder] = tokens
            elif self.config.shared_pool:
                held.nodes[node] = tokens
                held.best = max(held.best, tokens)
        return held

    def _hold(self, request: RouteRequest, price: Price) -> float:
        """What staying is worth, in seconds: the prefix may be there although this gateway has not seen it."""
        unknown = max(request.prompt_tokens - price.cached, 0)
        computed = unknown * self.costs.p1 * price.worker.slow
        saved = min(self.costs.fetch_seconds("node", unknown), computed)
        return self.config.session_hold + saved

    def _decision(self, pair: Pair, held: dict[str, str]) -> Decision:
        p, d = pair.prefill, pair.decode
        stays = p is d
        space = 0.0 if stays else p.space
        if p.worker.name in held or d.worker.name in held:
            why = "session"
        elif stays:
            why = "prefill behind" if d.worker.role == "decode" else "stays where it is prefilled"
        else:
            why = "longest prefix" if p.own else "least time to first token"
        return Decision(
            decode=d.worker.name,
            prefill=None if stays else p.worker.name,
            ttft=p.ready + space + d.step + d.place + pair.handover,
            itl=d.step,
            uncached=p.uncached,
            wait=p.wait + space + d.place + pair.behind,
            place=d.place,
            behind=pair.behind,
            compute=p.compute,
            fetch=p.fetch,
            crossing=p.crossing,
            moved=pair.moved,
            ready=p.ready,
            batch=d.worker.batch,
            why=why,
        )

    # -- the whole fleet ---------------------------------------------------------------------------------------------

    def expected_cached(self, request: RouteRequest) -> int:
        """Prompt tokens that some worker or pool probably holds."""
        found = self.locality.match(request.keys)
        most = max(request.prompt_tokens - 1, 0)
        return min(max(found.values(), default=0) * self.config.chunk_tokens, most)

    def seconds_per_token(self, now: float) -> float:
        """One waiting prompt token's share of the time of all workers that prefill; of a large fleet as it was a moment
        ago.
        """
        if len(self.fleet) <= PRICE_ALL:
            return self._seconds_per_token()
        if not 0.0 <= now - self._rate_at < RATE_S:
            self._rate_at, self._rate = now, self._seconds_per_token()
        return self._rate

    def _seconds_per_token(self) -> float:
        able = [w for w in self.fleet.workers.values() if w.role != "decode"] or list(self.fleet.workers.values())
        rate = 0.0
        for worker in able:
            chunk = max(worker.load.max_batch_tokens - worker.batch, worker.load.block_tokens)
            rate += 1.0 / worker.token_seconds(self.costs, chunk)
        return 1.0 / rate if rate else 0.0

    @property
    def reserved(self) -> int:
        """Requests that have been committed and have not finished."""
        return len(self._reservations)


def _reserve(view: Fleet, request: RouteRequest, decision: Decision, now: float) -> Reservation:
    decode, prefill = view.workers[decision.decode], view.workers[decision.prefill or decision.decode]
    kv = request.prompt_tokens + request.streams * _output(request)
    stay, most = request.stay_tokens, request.max_tokens
    transfers = Transfers(decision.fetch, decision.moved, decision.ready, decision.crossing)
    reservation = Reservation(
        now, prefill, decode, decision.compute, kv, request.streams, request.prompt_tokens, stay, most, request.tenant,
        transfers,
    )  # fmt: skip
    view.reserve(reservation)
    return reservation


def _output(request: RouteRequest) -> int:
    return max(1, min(request.expected_output_tokens, request.max_tokens))
