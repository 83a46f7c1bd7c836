"""The workers as one gateway sees them: what they reported, and what it has sent them since."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import nsmallest
from random import Random

from serve_app.costs.places import GAP_S, PATIENCE_S, TURN_S, share
from serve_app.routing.costs import CostModel
from serve_app.routing.links import Link
from serve_app.routing.places import Held, free_after, tokens_left
from serve_app.routing.recent import Recent
from serve_app.routing.shortlist import PRICE_ALL, SHORTLIST, Shortlists
from serve_app.routing.types import Role, RouteRequest, WorkerLoad

# Seconds over which the share of time with prompts is measured, and the most that it is taken to be.
WATCH_S = 10.0
WATCH_ONE_S = 5.0
FULL = 0.95
# Seconds over which prompts are spread that make the streams of one worker wait.
STALL_S = 5.0
# A report made less than this after a decision may not show the request yet.
VISIBLE_AFTER_S = 0.05
# For so long a worker's streams are taken to have as many tokens left as they had.
HELD_S = 0.1


@dataclass(slots=True, frozen=True)
class Transfers:
    """What one request moves: seconds of the prefill worker's link for a fetch, ``crossing`` of them from other nodes,
    and of the decode worker's for a hand-over that is ``ready`` so many seconds after the decision.
    """

    fetch: float = 0.0
    moved: float = 0.0
    ready: float = 0.0
    crossing: float = 0.0


@dataclass(slots=True)
class Reservation:
    """What one request will take, until the workers' own reports show it."""

    made_at: float
    prefill: Worker
    decode: Worker
    seconds: float  # of prefill
    kv_tokens: int
    streams: int = 1
    prompt: int = 0  # of ``kv_tokens``
    stay: int = 256  # tokens of each stream that are expected
    most: int = 256  # and that it may have
    tenant: str = ""
    transfers: Transfers = Transfers()
    started_at: float | None = None  # when its first token was there
    prefill_seen: bool = False
    decode_seen: bool = False
    ended: int = 0  # of the streams, on the decode worker
    passing: int = 0  # of ``prompt``, what no report of the prefill worker shows yet
    links: list[Link] = field(default_factory=list)  # that its hand-over uses


@dataclass(slots=True, eq=False)
class Worker:
    """A report, digested: times instead of tokens, and this gateway's own requests on top."""

    load: WorkerLoad
    slow: float = 1.0  # how many times as long as the model says its steps take
    busy_until: float = 0.0  # when the prompts queued there will have been computed
    batch: int = 0  # sequences that generate or will
    own: int = 0  # of the batch: sent there by this gateway, and not ended yet
    kv_tokens: int = 0
    coming: int = 0  # K/V tokens of this gateway's requests that are prefilled elsewhere, or wait, and are in no report
    passing: int = 0  # K/V tokens of prompts that are computed here for others, and are in no report
    step: float = 0.0  # seconds of a decode step now; 0 without sequences
    prefilling: float = 0.0  # share of its time in which it has lately had prompts to compute
    link: Link = field(default_factory=Link)  # over which K/V come in
    sent: Recent = field(default_factory=lambda: Recent(STALL_S))  # seconds of prompts that this gateway sent
    unseen: deque[Reservation] = field(default_factory=deque)
    # This gateway's requests that have streams here, and how long they stay, as it was at that moment.
    decoding: dict[int, Reservation] = field(default_factory=dict)
    _held: list[Held] | None = None
    _held_at: float = 0.0

    def place_s(self, streams: int, usual: float, now: float, *, sure: bool = False) -> float:
        """Seconds until there are places for so many streams more. ``usual``: tokens of a stream of which nothing is
        known. ``sure``: if this gateway's own take all that they may.
        """
        short = self.batch + streams - self.load.max_seqs
        if short <= 0:
            return 0.0
        held = sorted(self._streams(now, sure=True)) if sure else self.held(now)
        return free_after(short, held, self.others, usual) * self.step

    def gives_s(self, request: RouteRequest) -> float:
        """Seconds until a tenant with more places for its weight gives some to the request; infinite where none has to.

        No more tenants without a place wait for that than there are places.
        """
        load = self.load
        if not load.standing:
            return math.inf
        kind = [s for s in load.standing if s.priority == request.priority]
        others = [(s.streams, s.weight) for s in kind if s.tenant != request.tenant]
        sent = sum(r.streams - r.ended for r in self.decoding.values() if r.tenant == request.tenant)
        mine = max(sent, sum(s.streams for s in kind if s.tenant == request.tenant))
        after = (mine + request.streams) / request.weight
        most = max((streams / weight for streams, weight in others), default=0.0)
        if mine and (after >= most or mine + request.streams > share(load.max_seqs, request.weight, others)):
            return math.inf
        if not others or (not mine and len(kind) >= 2 * load.max_seqs):
            return math.inf
        # A tenant without a place has its turn, if nothing else.
        return (PATIENCE_S if after < most else TURN_S) + GAP_S * len(kind)

    def gap_s(self, now: float, prompt: float) -> float:
        """Seconds between tokens of the streams here as a mean if ``prompt`` seconds of a prompt came beside them: they
        stand still while a step computes prompts.
        """
        return self.step / (1.0 - min(self.sent.rate(now, prompt), FULL))

    @property
    def others(self) -> int:
        """Streams that run here and that this gateway has not sent."""
        return min(max(self.batch - self.own, 0), self.load.max_seqs)

    def held(self, now: float) -> list[Held]:
        """This gateway's streams here, those that are expected to end first in front."""
        if self._held is None or now - self._held_at > HELD_S:
            self._held = sorted(self._streams(now))
            self._held_at = now
        return self._held

    def _streams(self, now: float, sure: bool = False) -> Iterator[Held]:
        for r in self.decoding.values():
            produced = 0.0 if r.started_at is None or not self.step else (now - r.started_at) / self.step
            yield Held(tokens_left(r.most if sure else r.stay, r.most, produced), r.streams - r.ended)

    def holds(self, reservation: Reservation) -> None:
        """A request's places have been taken, or some of them given back, or its first token is there."""
        self._held = None
        if reservation.ended < reservation.streams:
            self.decoding[id(reservation)] = reservation
        else:
            self.decoding.pop(id(reservation), None)

    def token_seconds(self, costs: CostModel, chunk: int) -> float:
        """One prompt token of a long queue here, ``chunk`` of them beside each step of the streams."""
        return costs.token_seconds(chunk, 2048) * self.slow + self.step / chunk

    @property
    def name(self) -> str:
        return self.load.worker

    @property
    def role(self) -> Role:
        return self.load.role


class Fleet:
    """Workers by name: what they reported, and the requests that were sent to them since."""

    def __init__(self, costs: CostModel, random: Random) -> None:
        self._costs = costs
        self._shortlists = Shortlists(costs, random)
        self.workers: dict[str, Worker] = {}
        self.version = 0  # grows with each that comes or goes
        self.waiting = 0  # requests of this view that have not had their turn
        self._inbound: dict[str, Link] = {}
        self._on_node = Counter[str]()  # workers of each node
        self._prefilling = 0.0
        # r / (1 - r), where r is the share of time in which workers for prefill have lately been busy with prompts:
        # for each second wasted there, the prompts behind wait about so many seconds longer.
        self.congestion = 0.0
        self.filled = 0.0  # the share of all workers' K/V cache that has lately been taken

    def __len__(self) -> int:
        return len(self.workers)

    def inbound(self, node: str) -> Link:
        """The link into a node from the others."""
        if (link := self._inbound.get(node)) is None:
            link = self._inbound[node] = Link()
        return link

    def candidates(self, now: float, zone: str = "") -> list[Worker]:
        """Workers worth pricing: all of a small fleet, the least loaded of a large one and of the request's zone."""
        if len(self.workers) <= PRICE_ALL:
            return list(self.workers.values())
        return self._shortlists.candidates(self.workers, zone, now)

    def holding(self, adapter: bytes, now: float) -> list[Worker]:
        """Those that have an adapter in memory; of a large fleet, the least loaded of them."""
        if len(self.workers) <= PRICE_ALL:
            return []
        holding = (w for w in self.workers.values() if adapter in w.load.adapters)
        return nsmallest(SHORTLIST, holding, key=lambda w: max(w.busy_until - now, 0.0) + w.step)

    def turn_s(self, ahead: int, streams: int, usual: float, now: float) -> float:
        """Seconds from the first place for so many streams more to the one behind ``ahead`` others that wait; 0 for a
        large fleet, where streams end all the time.
        """
        if len(self.workers) > PRICE_ALL:
            return 0.0
        workers = list(self.workers.values())
        taken = streams - sum(w.load.max_seqs - w.batch for w in workers)
        if taken + ahead <= 0:
            return 0.0
        step = max(w.step for w in workers)
        ends = [Held(left * w.step / step, count) for w in workers for left, count in w.held(now)]
        others = sum(w.others for w in workers)
        places = sum(end.streams for end in ends) + others
        if not places:
            return 0.0
        ends.sort()

        def after(short: int) -> float:
            # Whoever waits holds a place for as long as is usual once it has one.
            rounds, last = divmod(max(short - 1, 0), places)
            return free_after(last + (short > 0), ends, others, usual) + rounds * usual

        return (after(taken + ahead) - after(taken)) * step

    def report(self, load: WorkerLoad, slow: float = 1.0) -> None:
        """Takes a report in; one that is older than the last is ignored."""
        worker = self.workers.get(load.worker)
        if worker is None:
            worker = self.workers[load.worker] = Worker(load)
            self._on_node[load.node] += 1
            self._shortlists.forget()
            self.version += 1
        elif load.reported_at < worker.load.reported_at:
            return
        self._watch(worker, load)
        worker.load, worker.slow = load, slow
        self._see(worker, load.reported_at - VISIBLE_AFTER_S)
        sent_seconds = sum(r.seconds for r in worker.unseen if r.prefill is worker and not r.prefill_seen)
        sent = [r for r in worker.unseen if r.decode is worker and not r.decode_seen]
        # A request that is long on its way, or is prefilled elsewhere first, is in no report.
        worker.batch = max(load.running + load.waiting + sum(r.streams for r in sent), worker.own)
        worker.kv_tokens = load.kv_tokens_used + worker.coming + sum(r.kv_tokens for r in sent)
        self._set_step(worker)
        chunk = max(load.max_batch_tokens - worker.batch, load.block_tokens)
        queued = load.queued_prefill_tokens * worker.token_seconds(self._costs, chunk)
        worker.busy_until = load.reported_at + queued + sent_seconds
        fetched = sum(r.transfers.fetch for r in worker.unseen if r.prefill is worker and not r.prefill_seen)
        worker.link.queued(self._costs.transfer_seconds("node", load.incoming_tokens) + fetched, load.reported_at)

    def remove(self, worker: str) -> None:
        """The worker is gone."""
        if (gone := self.workers.pop(worker, None)) is not None:
            self._shortlists.forget()
            self.version += 1
            self._on_node[node := gone.load.node] -= 1
            if not self._on_node[node]:
                del self._on_node[node]
                self._inbound.pop(node, None)
            if all(w.role == "decode" for w in self.workers.values()):
                # Nobody is left who would tell that it has passed.
                self._prefilling = self.congestion = 0.0

    def reserve(self, reservation: Reservation) -> None:
        prefill, decode = reservation.prefill, reservation.decode
        now, transfers = reservation.made_at, reservation.transfers
        prefill.busy_until = max(prefill.busy_until, now) + reservation.seconds
        prefill.link.take(transfers.fetch, now)
        self.inbound(prefill.load.node).take(transfers.crossing, now)
        prefill.sent.add(reservation.seconds, now)
        reservation.links = self._crossed(reservation)
        for link in reservation.links:
            link.expect(id(reservation), transfers.moved, now + transfers.ready, now)
        decode.batch += reservation.streams
        decode.own += reservation.streams
        decode.kv_tokens += reservation.kv_tokens
        decode.holds(reservation)
        self._set_step(decode)
        prefill.unseen.append(reservation)
        if decode is not prefill:
            reservation.passing = reservation.prompt
            prefill.passing += reservation.prompt
            decode.unseen.append(reservation)

    def release(self, reservation: Reservation) -> None:
        """The request has ended: no report will show more of it."""
        self.started(reservation, reservation.made_at)
        self.end_streams(reservation, reservation.streams - reservation.ended)
        if not reservation.prefill_seen:
            reservation.prefill.busy_until -= reservation.seconds
            reservation.prefill.link.until -= reservation.transfers.fetch
            if (inbound := self._inbound.get(reservation.prefill.load.node)) is not None:
                inbound.until -= reservation.transfers.crossing
        if not reservation.decode_seen:
            reservation.decode.batch -= reservation.streams
            reservation.decode.kv_tokens -= reservation.kv_tokens
            self._set_step(reservation.decode)
        reservation.prefill_seen = reservation.decode_seen = True

    def started(self, reservation: Reservation, now: float) -> None:
        """The first token is there: the decode worker holds the request's K/V, and its next report counts them."""
        if reservation.started_at is not None:
            return
        for link in reservation.links:
            link.gone(id(reservation))
        if reservation.decode_seen:
            reservation.decode.coming -= reservation.kv_tokens
        if not reservation.prefill_seen:
            self._passed(reservation)
        reservation.started_at = now
        reservation.decode.holds(reservation)

    def _passed(self, reservation: Reservation) -> None:
        """The prompt is in a report of the worker that computes it for another, or needs nothing there any more."""
        if reservation.decode is not reservation.prefill:
            reservation.prefill.passing -= reservation.passing
            reservation.passing = 0

    def end_streams(self, reservation: Reservation, count: int) -> None:
        """The worker has done with so many of the request's streams, though its client may still read."""
        before, decode = reservation.ended, reservation.decode
        reservation.ended = after = min(before + count, reservation.streams)
        decode.own -= after - before
        decode.holds(reservation)
        if reservation.decode_seen:
            # A waiting request may take the place at once, before a report shows that it is free.
            decode.batch = max(decode.batch - (after - before), decode.own)
            share = reservation.kv_tokens / reservation.streams
            decode.kv_tokens = max(decode.kv_tokens - int(share * after) + int(share * before), 0)
            self._set_step(decode)

    def _crossed(self, reservation: Reservation) -> list[Link]:
        prefill, decode = reservation.prefill, reservation.decode
        if not reservation.transfers.moved:
            return []
        away = decode.load.node != prefill.load.node
        return [decode.link, self.inbound(decode.load.node)] if away else [decode.link]

    def _watch(self, worker: Worker, new: WorkerLoad) -> None:
        """Between two reports a worker has had prompts to compute, or has had none."""
        old = worker.load
        seconds, busy = new.reported_at - old.reported_at, FULL if old.queued_prefill_tokens else 0.0
        worker.prefilling += (1.0 - math.exp(-seconds / WATCH_ONE_S)) * (busy - worker.prefilling)
        gain = 1.0 - math.exp(-seconds / len(self.workers) / WATCH_S)
        self.filled += gain * (min(worker.kv_tokens / max(old.kv_tokens_total, 1), 1.0) - self.filled)
        if old.role == "decode":
            return
        self._prefilling += gain * (busy - self._prefilling)
        self.congestion = self._prefilling / (1.0 - self._prefilling)

    def _see(self, worker: Worker, until: float) -> None:
        unseen = worker.unseen
        while unseen and unseen[0].made_at <= until:
            reservation = unseen.popleft()
            if reservation.prefill is worker and not reservation.prefill_seen:
                reservation.prefill_seen = True
                self._passed(reservation)
            if reservation.decode is worker and not reservation.decode_seen:
                reservation.decode_seen = True
                worker.coming += 0 if reservation.started_at is not None else reservation.kv_tokens

    def _set_step(self, worker: Worker) -> None:
        batch = worker.batch
        seconds = self._costs.decode_seconds(batch, worker.kv_tokens) if batch > 0 else 0.0
        worker.step = seconds * worker.slow
