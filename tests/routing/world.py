"""Workers with places on a clock of their own, for tests of the dispatch."""

from __future__ import annotations

from dataclasses import dataclass, field
from heapq import heappop, heappush

from serve_app.routing.costs import CostPriors
from serve_app.routing.dispatch import Dispatch, DispatchConfig, Effects
from serve_app.routing.prices import RouterConfig
from serve_app.routing.types import BatchLoad, RouteRequest, WorkerLoad

REPORT_S = 0.1
STEP_S = 0.05
ROUTER = RouterConfig(jitter=0.0)
# Prompts take next to nothing, and every step the same: places are what is short.
PLACES = CostPriors(
    prefill_step=1e-4,
    prefill_token=1e-7,
    prefill_attention=0.0,
    decode_step=STEP_S,
    decode_seq=0.0,
    decode_kv_token=0.0,
)


def request(name: str, tenant: str = "a", prompt: int = 100, output: int = 50, **more) -> RouteRequest:
    return RouteRequest(name, prompt, tenant=tenant, max_tokens=output, **more)


def report_of(worker: str, places: int, now: float, **more) -> WorkerLoad:
    return WorkerLoad(worker, "n0", stage="decode", max_seqs=places, kv_blocks_total=100_000, reported_at=now, **more)


def streams_of(one: RouteRequest) -> int:
    return one.streams


def blocks_of(one: RouteRequest) -> int:
    return one.prompt_tokens // 32 + 1


@dataclass
class World:
    """Workers with places, on a clock of their own. A request holds its places for a step a token; a batch request only
    goes on where others leave it one.
    """

    dispatch: Dispatch
    workers: dict[str, int] = field(default_factory=lambda: {"w0": 4})
    now: float = 0.0
    # By id: what became of it, and on which worker it runs.
    ended: dict[str, str] = field(default_factory=dict)
    running: dict[str, str] = field(default_factory=dict)
    order: list[str] = field(default_factory=list)
    served: dict[str, float] = field(default_factory=dict)  # weighted tokens by tenant
    waiting: dict[str, RouteRequest] = field(default_factory=dict)
    all: dict[str, RouteRequest] = field(default_factory=dict)
    peak: int = 0
    _events: list[tuple[float, int, str, str]] = field(default_factory=list)
    _number: int = 0
    _tick_at: float | None = None

    def __post_init__(self) -> None:
        for worker in self.workers:
            self.report(worker)
            self._at(self.now + REPORT_S, "report", worker)

    def report(self, worker: str) -> None:
        on_it = [self.all[name] for name, at in self.running.items() if at == worker]
        batch = [r for r in on_it if r.priority == "batch"]
        running, used = [sum(size(r) for r in on_it) - sum(size(r) for r in batch) for size in (streams_of, blocks_of)]
        load = report_of(worker, self.workers[worker], self.now, running=running, kv_blocks_used=used)
        load.batch = BatchLoad(running=sum(map(streams_of, batch)), kv_blocks_used=sum(map(blocks_of, batch)))
        self.apply(self.dispatch.report(f"process of {worker}", load, self.now))

    def arrive(self, new: RouteRequest) -> None:
        new.arrived_at = self.now
        self.waiting[new.id] = self.all[new.id] = new
        self.apply(self.dispatch.arrive(new, self.now))

    def apply(self, effects: Effects) -> None:
        for turn in effects.turns:
            ready = self.waiting.pop(turn.request_id)  # fails for a second turn
            if turn.refusal is not None:
                self.ended[ready.id] = "refused"
                continue
            assert turn.decision is not None
            worker = turn.decision.decode
            self.running[ready.id] = worker
            self.order.append(ready.id)
            on_it = [self.all[name] for name, at in self.running.items() if at == worker]
            used = sum(r.streams for r in on_it if r.priority == "realtime")
            self.peak = max(self.peak, used)
            self.dispatch.started(ready.id, self.now)
            self._at(self.now + ready.max_tokens * STEP_S, "finish", ready.id)
        if effects.tick_at is not None and self._tick_at is None:
            self._tick_at = effects.tick_at
            self._at(effects.tick_at, "tick", "")

    def finish(self, name: str) -> None:
        done = self.all[name]
        del self.running[name]
        self.ended[name] = "done"
        for _ in range(done.streams):
            self.dispatch.stream_ended(name)
        output = done.max_tokens * done.streams
        config = self.dispatch.queue.config
        cost = config.uncached_weight * done.prompt_tokens + config.output_weight * output
        self.served[done.tenant] = self.served.get(done.tenant, 0.0) + cost
        self.apply(self.dispatch.finish(name, self.now, output=output))

    def run(self, seconds: float) -> None:
        until = self.now + seconds
        while self._events and self._events[0][0] <= until:
            self.now, _, kind, what = heappop(self._events)
            if kind == "report":
                self.report(what)
                self._at(self.now + REPORT_S, "report", what)
            elif kind == "tick":
                self._tick_at = None
                self.apply(self.dispatch.tick(self.now))
            elif what in self.running and self._paused(what):
                self._at(self.now + STEP_S, "finish", what)
            elif what in self.running:
                self.finish(what)
        self.now = until

    def _paused(self, name: str) -> bool:
        worker = self.running[name]
        on_it = [other for other, at in self.running.items() if at == worker]
        on_it.sort(key=lambda other: self.all[other].priority == "batch")
        return self.all[name].priority == "batch" and on_it.index(name) >= self.workers[worker]

    def _at(self, when: float, kind: str, what: str) -> None:
        self._number += 1
        heappush(self._events, (when, self._number, kind, what))


def world(workers: dict[str, int] | None = None, **config) -> World:
    made = Dispatch(DispatchConfig(**{"router": ROUTER, "priors": PLACES, **config}))
    return World(made, workers or {"w0": 4})


def assert_empty(dispatch: Dispatch) -> None:
    """Nothing is remembered of requests that have ended."""
    assert (len(dispatch), len(dispatch.queue), dispatch.router.reserved) == (0, 0, 0)
    assert (dispatch.admission.in_flight.prefill, dispatch.admission.in_flight.decode) == (0, 0)
    assert (
        not dispatch.admission._admitted and not any(dispatch.admission._streams.values()) and dispatch._unrouted == 0
    )
    assert not dispatch.queue._charges and dispatch.queue.waiting_tokens() == 0
    assert all(worker.own == worker.coming == 0 for worker in dispatch.router.fleet.workers.values())
