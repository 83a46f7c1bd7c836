"""Chooses the prefill and the decode worker of a request together.

Every worker can do both, so a choice is to prefill on p and decode on d, or to do both on w (the prompt then runs in
chunks beside w's decoding). Each choice is priced in seconds, and the cheapest is taken::

    price = TTFT + stream_weight · (own streaming time + delay of the streams there) + role_cost where against a role

TTFT is the sum of the queue, fetching what some tier holds (or loading the request's adapter, whichever takes longer),
computing the rest, the hand-over, and waiting for a decode place. The busier the workers for prefill are, the higher is
role_cost and the lower stream_weight, because time wasted there delays all prompts behind. Only the last tie-break is
random; it keeps several gateways from herding.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from hashlib import blake2b
from random import Random
from zlib import crc32

from serve_app.routing.costs import CostModel
from serve_app.routing.fleet import Fleet, Reservation, Worker
from serve_app.routing.locality import LocalityIndex
from serve_app.routing.types import Decision, Priority, RouteRequest, WorkerLoad

_POOL = "node:"
# For so long an adapter is taken to be where a request took it, whatever the worker reports; and how many are known.
TAKEN_S = 2.0
TAKEN = 10_000


@dataclass(slots=True, frozen=True)
class RouterConfig:
    """Weights, times in seconds, and what is allowed at all."""

    chunk_tokens: int = 256  # prompt tokens that one of a request's ``keys`` stands for
    stream_weight: float = 0.0025  # a second of slower streaming against a second of waiting for the first token
    role_cost: float = 0.05  # prefill on a decode worker, or decode on a prefill worker
    calm: float = 2.4  # congestion from which on role_cost grows and stream_weight falls
    session_hold: float = 0.05  # what leaving a session's workers must gain at least
    sessions: int = 100_000
    split: bool = True  # False: prefill and decode always on the same worker
    strict_roles: bool = False  # True: prefill only on workers of that role, decode likewise
    # An adapter that is loaded puts another out: seconds of loading, against seconds of waiting for the first token.
    adapter_weight: float = 2.0
    own_cache: bool = True  # workers keep blocks of their own between requests
    shared_pool: bool = True  # False: a worker has its own cache and nothing else
    early_handover: bool = True  # decode takes chunks while prefill computes
    jitter: float = 1e-3  # largest random addition to a price
    seed: int = 0


@dataclass(slots=True)
class _Price:
    """One worker, one request; seconds unless said otherwise."""

    worker: Worker
    own: int  # prompt tokens in the worker's own cache
    node: int  # tokens to be taken from its node's pool
    remote: int  # tokens to be taken from another's
    uncached: int  # tokens to compute
    wait: float
    compute: float
    ready: float  # prompt computed here: wait, fetch, compute
    step: float  # one decode step with this request in it
    place: float  # waiting for a decode place
    prefill: float  # what prefilling here costs in all
    decode: float  # what decoding here costs in all, without the hand-over
    handover: float  # fetching the prompt from the pool, or loading the adapter meanwhile
    loading: float  # what else loading the adapter costs

    @property
    def cached(self) -> int:
        return self.own + self.node + self.remote


@dataclass(slots=True)
class _Held:
    """A request's size, and how many of its prompt's leading tokens are where."""

    prompt: int
    output: int  # of each stream
    workers: dict[str, int]
    nodes: dict[str, int]  # in the pool of a node
    best: int  # in the best of all pools


class Router:
    """One per model and gateway: ``report`` loads, ``choose`` for a request, ``commit`` when it is sent."""

    def __init__(self, costs: CostModel, locality: LocalityIndex, config: RouterConfig | None = None) -> None:
        self.costs = costs
        self.locality = locality
        self.config = config or RouterConfig()
        self._reservations: dict[str, list[tuple[Fleet, Reservation]]] = {}
        self._sessions: OrderedDict[str, tuple[str, str]] = OrderedDict()  # prefill and decode worker
        # Adapters that requests have taken to workers lately, and when: reports may not tell of them yet.
        self._taken: OrderedDict[tuple[str, bytes], float] = OrderedDict()
        self._random = Random(self.config.seed)
        # As real-time requests find the workers; and as batch requests do, once there are any.
        self.fleet = Fleet(costs, self._random)
        self._whole: Fleet | None = None

    # -- inputs --------------------------------------------------------------------------------------------------

    def report(self, load: WorkerLoad) -> None:
        self.costs.take(load.steps, load.fetches, load.worker)
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
        self.locality.remove_holder(worker)
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
        if request.session is not None:
            self._sessions[request.session] = (prefill.name, decode.name)
            self._sessions.move_to_end(request.session)
            while len(self._sessions) > self.config.sessions:
                self._sessions.popitem(last=False)
        if request.adapter:
            self._takes(request.adapter, {prefill.name, decode.name}, now)
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
        held = self._held(request)
        able = {w.name: w for w in fleet.candidates(now)}
        if request.adapter:
            able |= {w.name: w for w in fleet.holding(request.adapter, now)}
        for name in (*found.workers, *held):
            worker = fleet.workers.get(name)
            if worker is not None:
                able[name] = worker
        if not able:
            return None
        prices = [self._price(request, worker, found, now) for worker in able.values()]
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
        best: tuple[_Price, _Price] | None = None
        least = float("inf")
        for price in both:
            total = price.prefill + price.decode + price.loading + self._random.random() * config.jitter
            if total < least:
                least, best = total, (price, price)
        if config.split:
            pair = self._best_pair(to_prefill, to_decode)
            if pair is not None and (best is None or pair[2] < least):
                best = pair[0], pair[1]
        if best is None:  # strict roles and a single worker
            best = prices[0], prices[0]
        return self._decision(best[0], best[1], held)

    def _best_pair(self, prefill: list[_Price], decode: list[_Price]) -> tuple[_Price, _Price, float] | None:
        """(p, d, price) with p and d different workers; None if there are not two."""
        jitter, draw = self.config.jitter, self._random.random
        first = sorted(((p.prefill + p.loading + draw() * jitter, i) for i, p in enumerate(prefill)))[:2]
        second = sorted(((p.decode + p.handover + p.loading + draw() * jitter, i) for i, p in enumerate(decode)))[:2]
        best = None
        for a, i in first:
            for b, j in second:
                if prefill[i].worker is not decode[j].worker and (best is None or a + b < best[2]):
                    best = prefill[i], decode[j], a + b
        return best

    def _price(self, request: RouteRequest, worker: Worker, held: _Held, now: float) -> _Price:
        costs, config, load = self.costs, self.config, worker.load
        prompt, output = held.prompt, held.output
        own = held.workers.get(worker.name, 0)
        node = remote = 0
        fetch = 0.0
        if held.best:
            gain = held.nodes.get(load.node, 0) - own
            if gain > 0 and costs.fetch_pays("node", gain, own):
                node, fetch = gain, costs.fetch_seconds("node", gain)
            gain = held.best - own - node
            if gain > 0 and costs.fetch_pays("remote", gain, own + node):
                remote, fetch = gain, fetch + costs.fetch_seconds("remote", gain)
        cached = own + node + remote
        uncached = max(1, prompt - cached)
        batch, kv, slow = worker.batch, worker.kv_tokens, worker.slow
        wait = worker.busy_until - now
        if wait < 0.0:
            wait = 0.0
        chunk = max(load.max_batch_tokens - batch, load.block_tokens)
        compute = costs.prefill_seconds(uncached, cached, chunk, worker.step / slow) * slow
        load_s = self._loading_s(request, load, now) if request.adapter else 0.0
        ready = max(wait, fetch, load_s) + compute
        # A request that is larger than a worker waits until one is empty; the engine runs what fits of it.
        room = load.kv_tokens_total
        streams = min(request.streams, load.max_seqs)
        step = costs.decode_seconds(batch + streams, kv + streams * prompt) * slow
        place = worker.place_s(streams, output, now)
        given = worker.gives_s(request)
        total = kv + min(prompt + streams * output, room)
        if total > room:
            # Of n running sequences one ends about every output·step/n seconds; a waiting sequence does not end.
            place = max(place, (total - room) / max(min(kv, room), 1) * output * step)
        place = min(place, given)
        # Going against a role wastes time that prompts wait for: in small chunks there, or beside streams here.
        strain = max(1.0, self.fleet.congestion / config.calm)
        weight, against, role = config.stream_weight / strain, config.role_cost * strain, worker.role
        slower = streams * (costs.d1 + costs.d2 * (prompt + output))  # what this request adds to each step
        prefill = ready + weight * batch * compute
        decode = step + place + weight * output * (step + batch * slower)
        if role == "decode":
            prefill += against
        elif role == "prefill":
            decode += against
        moved = min(prompt, config.chunk_tokens) if config.early_handover else prompt - own
        handover = max(costs.fetch_seconds("node", moved), load_s)
        return _Price(
            worker, own, node, remote, uncached, wait, compute, ready, step, place, prefill, decode, handover,
            load_s * (config.adapter_weight - 1.0 + _order(request.adapter, worker.name)),
        )  # fmt: skip

    def _loading_s(self, request: RouteRequest, load: WorkerLoad, now: float) -> float:
        """Seconds until a worker has the request's adapter in memory."""
        if request.adapter in load.adapters:
            return 0.0
        taken = self._taken.get((load.worker, request.adapter))
        if taken is not None and now - taken < TAKEN_S:
            return 0.0
        return self.costs.fetch_seconds("adapter", request.adapter_bytes)

    def _takes(self, adapter: bytes, workers: set[str], now: float) -> None:
        for worker in workers:
            self._taken[worker, adapter] = now
            self._taken.move_to_end((worker, adapter))
        while len(self._taken) > TAKEN:
            self._taken.popitem(last=False)

    def _lookup(self, request: RouteRequest) -> _Held:
        """What the index knows of the prompt, in tokens."""
        # The last prompt token is always computed: its logits are the first sample.
        size, most = self.config.chunk_tokens, max(request.prompt_tokens - 1, 0)
        held = _Held(request.prompt_tokens, _output(request), {}, {}, 0)
        for holder, chunks in self.locality.match(request.keys).items():
            tokens = min(chunks * size, most)
            if not holder.startswith(_POOL):
                held.workers[holder] = tokens
            elif self.config.shared_pool:
                held.nodes[holder[len(_POOL) :]] = tokens
                held.best = max(held.best, tokens)
        return held

    # -- sessions ----------------------------------------------------------------------------------------------------

    def _held(self, request: RouteRequest) -> dict[str, str]:
        """The workers that a session holds on to, and for what. Every gateway starts a new session on the same ones."""
        if request.session is None:
            return {}
        known = self._sessions.get(request.session)
        if known is not None:
            prefill, decode = known
            return {prefill: "prefill decode"} if prefill == decode else {prefill: "prefill", decode: "decode"}
        held: dict[str, str] = {}
        for role, other in (("prefill", "decode"), ("decode", "prefill")):
            fitting = [w.name for w in self.fleet.workers.values() if w.role != other]
            if fitting:
                name = max(fitting, key=lambda n: _rank(request.session or "", n))
                held[name] = f"{held.get(name, '')} {role}"
        return held

    def _hold(self, request: RouteRequest, price: _Price) -> float:
        """What staying is worth, in seconds: the prefix may be there although this gateway has not seen it."""
        unknown = max(request.prompt_tokens - price.cached, 0)
        saved = min(self.costs.fetch_seconds("node", unknown), unknown * self.costs.p1)
        return self.config.session_hold + saved

    def _decision(self, p: _Price, d: _Price, held: dict[str, str]) -> Decision:
        stays = p is d
        if p.worker.name in held or d.worker.name in held:
            why = "session"
        elif stays:
            why = "prefill behind" if d.worker.role == "decode" else "stays where it is prefilled"
        else:
            why = "longest prefix" if p.own else "least time to first token"
        return Decision(
            decode=d.worker.name,
            prefill=None if stays else p.worker.name,
            ttft=p.ready + d.step + d.place + (0.0 if stays else d.handover),
            itl=d.step,
            uncached=p.uncached,
            wait=p.wait + d.place,
            place=d.place,
            compute=p.compute,
            batch=d.worker.batch,
            why=why,
        )

    # -- the whole fleet ---------------------------------------------------------------------------------------------

    def expected_cached(self, request: RouteRequest) -> int:
        """Prompt tokens that some worker or pool probably holds."""
        found = self.locality.match(request.keys)
        most = max(request.prompt_tokens - 1, 0)
        return min(max(found.values(), default=0) * self.config.chunk_tokens, most)

    def seconds_per_token(self) -> float:
        """One waiting prompt token's share of the time of all workers that prefill."""
        able = [w for w in self.fleet.workers.values() if w.role != "decode"] or list(self.fleet.workers.values())
        rate = 0.0
        for worker in able:
            chunk = max(worker.load.max_batch_tokens - worker.batch, worker.load.block_tokens)
            rate += 1.0 / (self.costs.token_seconds(chunk, 2048, worker.step) * worker.slow)
        return 1.0 / rate if rate else 0.0

    @property
    def reserved(self) -> int:
        """Requests that have been committed and have not finished."""
        return len(self._reservations)


def _reserve(view: Fleet, request: RouteRequest, decision: Decision, now: float) -> Reservation:
    decode, prefill = view.workers[decision.decode], view.workers[decision.prefill or decision.decode]
    kv = request.prompt_tokens + request.streams * _output(request)
    stay, most = request.stay_tokens, request.max_tokens
    reservation = Reservation(
        now, prefill, decode, decision.compute, kv, request.streams, stay, most, tenant=request.tenant
    )
    view.reserve(reservation)
    return reservation


def pool_holder(node: str) -> str:
    """A node's pool as a holder in the locality index."""
    return _POOL + node


def _output(request: RouteRequest) -> int:
    return max(1, min(request.expected_output_tokens, request.max_tokens))


def _order(adapter: bytes, worker: str) -> float:
    """In [0, 1): which worker an adapter comes to first, other things being equal. All gateways agree, and a fleet
    shares many adapters out.
    """
    return crc32(adapter + worker.encode()) / 2**32


def _rank(session: str, worker: str) -> bytes:
    """Rendezvous hashing: every gateway ranks the workers alike, and a lost worker moves only its own sessions."""
    return blake2b(f"{session}\0{worker}".encode(), digest_size=8).digest()
