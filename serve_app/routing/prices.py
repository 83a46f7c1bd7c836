"""What each worker would cost a request, in seconds, and the cheapest pair of them::

    price = TTFT + stream_weight · (own streaming time + delay of the streams there) + role_cost where against a role
                 + link_weight · what the transfers delay others + place_weight · what others wait longer for places
                 + zone_cost where far from the gateway, or each other

TTFT is the sum of the queue, fetching what some tier holds (or loading the request's adapter, whichever takes longer),
computing the rest, the hand-over, and waiting for a decode place. Transfers wait for what is queued on the same link. A
hand-over runs while the prompt is computed, and ends a chunk later at the earliest. The busier the workers for prefill
are, the higher is role_cost and the lower stream_weight, because time wasted there delays all prompts behind; the
busier a link, the dearer what moves over it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from serve_app.costs.transfers import Tier
from serve_app.costs.zones import distance
from serve_app.routing.adapters import AdapterPlaces, order
from serve_app.routing.costs import CostModel
from serve_app.routing.fleet import Fleet, Worker
from serve_app.routing.types import RouteRequest

# Workers for each stage whose pairs are priced: those that are cheapest by themselves.
PAIRED = 4
# Streams from which on they count in full where a prompt would make them late; of fewer each counts for its part.
MANY = 16
# A target for first tokens from which on roles cost what the configuration says, and the most that a tighter one makes
# of it.
EASY_S = 5.0
TIGHT = 3.0
# The most that it costs to make others wait for a place.
CROWD_S = 1.0
# Congestion of a link from which on a short prompt goes against a role for its part of the cost.
BUSY_LINK = 1.0

# The share of all K/V caches taken from which on roles cost less, and at which they cost nothing.
ROOMY, FULL = 0.2, 0.6


@dataclass(slots=True, frozen=True)
class RouterConfig:
    """Weights, times in seconds, and what is allowed at all."""

    chunk_tokens: int = 256  # prompt tokens that one of a request's ``keys`` stands for
    stream_weight: float = 0.0025  # a second of slower streaming against a second of waiting for the first token
    role_cost: float = 0.05  # prefill on a decode worker, or decode on a prefill worker
    short_s: float = 0.2  # what a prompt takes less than to be short there; 0: none is
    link_weight: float = 1.0  # a second that others wait for a link
    place_weight: float = 1.0  # a second that others wait for a place
    # Work in another zone than the gateway's, in the same region and elsewhere; and a hand-over between two.
    zone_cost: tuple[float, float, float] = (0.0, 0.25, 1.0)
    ttft: float | None = None  # target for first tokens
    itl: float | None = None  # target between tokens
    itl_cost: float = 0.5  # streams that take twice the target between tokens
    calm: float = 2.4  # congestion from which on role_cost grows and stream_weight falls
    session_hold: float = 0.05  # what leaving a session's workers must gain at least
    sessions: int = 100_000
    split: bool = True  # False: prefill and decode always on the same worker
    strict_roles: bool = False  # True: prefill only on workers of that role, decode likewise
    # No more tokens than this are computed where the request is decoded: workers hand no less over.
    least_handover: int = 0
    # An adapter that is loaded puts another out: seconds of loading, against seconds of waiting for the first token.
    adapter_weight: float = 2.0
    own_cache: bool = True  # workers keep blocks of their own between requests
    shared_pool: bool = True  # False: a worker has its own cache and nothing else
    early_handover: bool = True  # decode takes chunks while prefill computes
    jitter: float = 1e-3  # largest random addition to a price
    seed: int = 0


@dataclass(slots=True)
class Held:
    """A request's size, and how many of its prompt's leading tokens are where."""

    prompt: int
    output: int  # of each stream
    workers: dict[str, int]
    nodes: dict[str, int]  # in the pool of a node
    best: int  # in the best of all pools


@dataclass(slots=True)
class Price:
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
    loading: float  # what else loading the adapter costs
    load_s: float  # until the adapter is there
    fetch: float  # of the link, for what is taken from pools
    crossing: float  # of ``fetch``, between nodes
    behind: float  # of waiting for the link before a transfer begins
    link_price: float  # of each second of the link, for what it delays
    space: float  # waiting for room for the prompt alone, which is then handed over

    @property
    def cached(self) -> int:
        return self.own + self.node + self.remote

    @property
    def begin(self) -> float:
        """When the prompt begins to be computed here."""
        return self.ready - self.compute


@dataclass(slots=True, frozen=True)
class Pair:
    """``prefill`` and ``decode`` are the same where the prompt stays. Seconds."""

    prefill: Price
    decode: Price
    price: float
    handover: float = 0.0  # from the end of prefill until decode has it all
    moved: float = 0.0  # of decode's link
    waited: float = 0.0  # of ``handover``, for what is queued on that link

    @property
    def behind(self) -> float:
        """What comes later because of other transfers."""
        p = self.prefill
        fetch = max(p.wait, p.behind + p.fetch) - max(p.wait, p.fetch) if p.fetch else 0.0
        return max(fetch, self.waited)


class Pricer:
    """Prices the workers of a fleet for requests."""

    def __init__(self, costs: CostModel, config: RouterConfig, adapters: AdapterPlaces, random: Random) -> None:
        self._costs = costs
        self._config = config
        self._adapters = adapters
        self._random = random
        # What goes against a role makes prompts behind it wait. The tighter their target, the more of them it costs.
        tight = min(max(EASY_S / config.ttft, 1.0), TIGHT) if config.ttft else 1.0
        self._role_cost = config.role_cost * tight
        self._stall_cost = config.itl_cost * min(tight - 1.0, 1.0)

    def price(self, request: RouteRequest, fleet: Fleet, worker: Worker, held: Held, now: float) -> Price:
        costs, config, load = self._costs, self._config, worker.load
        prompt, output = held.prompt, held.output
        own = held.workers.get(worker.name, 0)
        batch, kv, slow = worker.batch, worker.kv_tokens, worker.slow
        wait = worker.busy_until - now
        if wait < 0.0:
            wait = 0.0
        behind = worker.link.wait(now)
        node = remote = 0
        fetch = crossing = 0.0
        if held.best:
            gain = held.nodes.get(load.node, 0) - own
            if gain > 0 and costs.fetch_pays("node", gain, own, behind - wait, slow):
                node, fetch = gain, costs.fetch_seconds("node", gain)
            gain = held.best - own - node
            if gain > 0:
                inbound = max(behind, fleet.inbound(load.node).wait(now))
                if costs.fetch_pays("remote", gain, own + node, inbound - wait, slow):
                    remote, crossing, behind = gain, costs.fetch_seconds("remote", gain), inbound
                    fetch += crossing
        cached = own + node + remote
        uncached = max(1, prompt - cached)
        chunk = max(load.max_batch_tokens - batch, load.block_tokens)
        compute = costs.prefill_seconds(uncached, cached, chunk, worker.step / slow) * slow
        load_s = self._adapters.loading_s(request, load, now) if request.adapter else 0.0
        ready = max(wait, behind + fetch if fetch else 0.0, load_s) + compute
        # A request that is larger than a worker waits until one is empty; the engine runs what fits of it.
        room = load.kv_tokens_total
        streams = min(request.streams, load.max_seqs)
        step = costs.decode_seconds(batch + streams, kv + streams * prompt) * slow
        place = worker.place_s(streams, output, now)
        given = worker.gives_s(request)
        # Of n running sequences one ends about every output·step/n seconds; a waiting sequence does not end.
        ends = output * step / max(min(kv, room), 1)
        taken = kv + worker.passing
        place = max(place, (kv + min(prompt + streams * output, room) - room) * ends)
        place = min(place, given)
        space = max(taken + min(prompt, room) - room, 0) * output * step / max(min(taken, room), 1)
        # Whoever takes the next place of a full worker makes all that wait come later by as much.
        others = min(config.place_weight * fleet.waiting * place, CROWD_S)
        # Going against a role wastes time that prompts wait for: in small chunks there, or beside streams here.
        strain = max(1.0, fleet.congestion / config.calm)
        weight, role = config.stream_weight / strain, worker.role
        # Where K/V are short everywhere, what counts is who has room, and not what a worker prefers.
        against = self._role_cost * strain * min(max((FULL - fleet.filled) / (FULL - ROOMY), 0.0), 1.0)
        # What this request adds to each step.
        slower = streams * (costs.d1 + costs.d2 * (prompt + output))
        congestion = worker.link.congestion(now)
        link_price = config.link_weight * congestion
        prefill = ready + weight * batch * compute + link_price * fetch
        if crossing:
            prefill += config.link_weight * fleet.inbound(load.node).congestion(now) * crossing
        decode = step + place + others + weight * output * (step + batch * slower)
        if config.itl is not None and output > 1:
            # Beside prompts a stream stands still while a step computes them.
            late = step / (1.0 - worker.prefilling) / config.itl - 1.0
            decode += config.itl_cost * min(max(late, 0.0), 1.0)
        if config.itl is not None and batch and self._stall_cost:
            # In overload prompts would take the time between tokens of all streams here, which come too late then.
            late = worker.gap_s(now, compute) / config.itl - 1.0
            prefill += self._stall_cost * min(max(late, 0.0), 1.0) * min(batch / MANY, 1.0)
        if role == "decode" and uncached > config.least_handover:
            busy = min(congestion / BUSY_LINK, 1.0)
            prefill += against * (1.0 - busy * (1.0 - min(compute / config.short_s, 1.0)) if config.short_s else 1.0)
        elif role == "prefill":
            decode += against
        if request.zone and load.zone and request.zone != load.zone:
            far = 0.5 * config.zone_cost[distance(request.zone, load.zone)]
            prefill += far
            decode += far
        loading = load_s * (config.adapter_weight - 1.0 + order(request.adapter, worker.name)) if load_s else 0.0
        return Price(
            worker, own, node, remote, uncached, wait, compute, ready, step, place, prefill, decode, loading, load_s,
            fetch, crossing, behind, link_price, space,
        )  # fmt: skip

    def cheapest(
        self,
        prefill: Sequence[Price],
        decode: Sequence[Price],
        both: Sequence[Price],
        prompt: int,
        fleet: Fleet,
        now: float,
    ) -> Pair:
        """The cheapest single worker of ``both`` or pair of the others. There must be one."""
        jitter, draw = self._config.jitter, self._random.random
        best: Pair | None = None
        for price in both:
            total = price.prefill + price.decode + price.loading + draw() * jitter
            if best is None or total < best.price:
                best = Pair(price, price, total)
        if self._config.split:
            first = sorted((p.prefill + p.loading + draw() * jitter, i) for i, p in enumerate(prefill))[:PAIRED]
            second = sorted(
                (d.decode + d.loading + max(d.behind, d.load_s) + draw() * jitter, i) for i, d in enumerate(decode)
            )[:PAIRED]
            for a, i in first:
                for b, j in second:
                    p, d = prefill[i], decode[j]
                    if p.worker is d.worker or d.uncached <= self._config.least_handover:
                        continue
                    handover, moved, waited = self._handover(p, d, prompt, fleet, now)
                    total = a + b + p.space - max(d.behind, d.load_s) + max(handover, d.load_s) + d.link_price * moved
                    if p.worker.load.node != d.worker.load.node:
                        congestion = fleet.inbound(d.worker.load.node).congestion(now)
                        total += self._config.link_weight * congestion * moved
                    if p.worker.load.zone != d.worker.load.zone:
                        total += self._config.zone_cost[distance(p.worker.load.zone, d.worker.load.zone)]
                    if best is None or total < best.price:
                        best = Pair(p, d, total, max(handover, d.load_s), moved, waited)
        if best is None:  # strict roles and a single worker
            only = [*decode, *prefill][0]
            best = Pair(only, only, only.prefill + only.decode)
        return best

    def _handover(self, p: Price, d: Price, prompt: int, fleet: Fleet, now: float) -> tuple[float, float, float]:
        """Seconds from the end of prefill until decode has the prompt, of decode's link, and of waiting for it."""
        costs, config = self._costs, self._config
        tier: Tier = "node" if p.worker.load.node == d.worker.load.node else "remote"
        moved = costs.transfer_seconds(tier, max(prompt - d.own, 0))
        if not config.early_handover:
            waited = max(d.worker.link.wait(now, now + p.ready) - p.ready, 0.0)
            return waited + moved + costs.latency(tier), moved, waited
        last = costs.fetch_seconds(tier, min(prompt, config.chunk_tokens))
        # Chunks follow one another out of prefill, as far as the link lets them.
        behind = d.worker.link.wait(now, now + p.ready)
        if tier == "remote":
            behind = max(behind, fleet.inbound(d.worker.load.node).wait(now, now + p.ready))
        alone = max(last, p.begin + moved - p.ready)
        handover = max(last, max(p.begin, behind) + moved - p.ready)
        return handover, moved, handover - alone
