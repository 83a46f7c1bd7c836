"""How many workers each stage needs, and which worker prefers which role now.

Demand is measured as work: seconds of prefill that arrive per second, tokens to decode per second, and the context they
hold. The workers that each stage needs for its latency target follow from these and the cost model. Roles move within
seconds and lose nothing, since a role is only a preference. A move must promise a clear gain, and moves are a while
apart. Where roles are not enough Serve's autoscaler follows the same needs with replicas, within bounds of its own.

Workers need not be equal: each counts for the share of all prompts, and of all streams, that it could take alone, by
its measured speed, its memory, its places and its link (:mod:`serve_app.routing.shares`). Speeds are those of half a
minute, and small differences count as none (:mod:`serve_app.routing.speeds`): equal workers never change places.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from serve_app.costs.transfers import Tier
from serve_app.routing.costs import CostModel
from serve_app.routing.shares import Share, best_split, fullest
from serve_app.routing.speeds import Speeds
from serve_app.routing.types import Role, WorkerLoad

# Load of the more loaded stage below which roles stay as they are.
BUSY = 0.5


class DemandMeter:
    """What arrives per second, smoothed over about ``tau`` seconds."""

    def __init__(self, tau: float = 30.0) -> None:
        self.tau = tau
        self._at: float | None = None
        self._since: float | None = None
        self._sums = [0.0, 0.0, 0.0, 0.0]  # prefill seconds, output tokens, output tokens x context, context

    def arrived(self, now: float, prefill_seconds: float, output_tokens: float, context_tokens: float) -> None:
        """One request: seconds that its uncached tokens take, and what it will decode behind how much context."""
        self._decay(now)
        new = (prefill_seconds, output_tokens, output_tokens * context_tokens, context_tokens)
        self._sums = [s + x for s, x in zip(self._sums, new, strict=True)]

    @property
    def began(self) -> bool:
        """Whether anything has ever arrived."""
        return self._at is not None

    def demand(self, now: float) -> Demand:
        if self._at is None:
            return Demand(0.0, 0.0, 0.0, 0.0)
        self._decay(now)
        # The weights of a window that has not filled yet sum to less than tau.
        age = now - self._since if self._since is not None else 0.0
        window = max(self.tau * (1.0 - math.exp(-age / self.tau)), 1.0)
        seconds, tokens, contexts, prompts = (s / window for s in self._sums)
        return Demand(seconds, tokens, contexts / tokens if tokens > 0 else 0.0, prompts)

    def _decay(self, now: float) -> None:
        if self._at is None:
            self._at = self._since = now
        elif now > self._at:
            factor = math.exp(-(now - self._at) / self.tau)
            self._sums = [s * factor for s in self._sums]
            self._at = now


@dataclass(slots=True, frozen=True)
class Demand:
    """``prefill``: seconds of work per second; ``tokens``: output tokens per second; ``context``: mean tokens;
    ``prompts``: tokens of prompts per second, cached ones included.
    """

    prefill: float
    tokens: float
    context: float
    prompts: float = 0.0

    def __mul__(self, gateways: int) -> Demand:
        """Of so many gateways that each have as much."""
        return Demand(self.prefill * gateways, self.tokens * gateways, self.context, self.prompts * gateways)


@dataclass(slots=True, frozen=True)
class PlannerConfig:
    ttft_target: float = 2.0
    itl_target: float = 0.05
    prefill_use: float = 0.75  # of a prefill worker's time, so that queues stay short
    kv_use: float = 0.85
    seqs_use: float = 0.75  # of a worker's places
    link_use: float = 0.5  # of a worker's link, by hand-overs
    drain_s: float = 10.0  # a backlog should be gone after this long
    gain: float = 0.15  # a move of roles must lower the fuller stage's load by this share
    dwell_s: float = 10.0  # between two moves of roles
    speed_s: float = 30.0  # over which the workers' speeds are averaged
    # Roles end where links make stages so many times as loaded, if workers that do both keep gaps between tokens below
    # this part of their target; they come back where links would cost less, or gaps would be longer.
    apart: float = 1.5
    apart_gap: float = 0.35
    close: float = 1.25
    close_gap: float = 0.5
    retry_s: float = 300.0  # of no roles, after which they are tried: without hand-overs nobody measures links


@dataclass(slots=True)
class RolePlan:
    """``roles`` of all workers; ``moved`` are those whose role is new."""

    roles: dict[str, Role]
    moved: list[str]
    why: str


class Planner:
    """Call :meth:`plan` every second or so with what all workers reported."""

    def __init__(self, costs: CostModel, config: PlannerConfig | None = None) -> None:
        self.costs = costs
        self.config = config or PlannerConfig()
        self._moved_at = -math.inf
        self._apart = True
        self._speeds = Speeds(costs, self.config.speed_s)

    def needs(self, loads: Iterable[WorkerLoad], demand: Demand, waiting_tokens: int = 0) -> dict[str, float]:
        """Workers that each stage needs, as fractions of one like those that it has. Links ask for none: where they are
        what is short, prompts stay where they are computed.
        """
        workers = list(loads)
        there = workers or [WorkerLoad("", "", max_seqs=0)]
        slow = [self.costs.slowness(w.worker) for w in there]
        shares = self._shares(there, slow, demand, waiting_tokens)
        found: dict[str, float] = {}
        for stage, other in (("prefill", "decode"), ("decode", "prefill")):
            own = [s for s, w in zip(shares, workers, strict=False) if w.role != other] or shares
            whole = sum(s.prefill if stage == "prefill" else s.decode for s in own)
            found[stage] = len(own) / whole
        return found

    def _shares(
        self,
        workers: list[WorkerLoad],
        slow: list[float],
        demand: Demand,
        waiting_tokens: int,
        *,
        links: bool = False,
    ) -> list[Share]:
        """Of the prompts and of the streams that there are, what each worker could take alone. ``links``: prompts come
        to the streams over the worker's link.
        """
        config, costs = self.config, self.costs
        chunk = max(w.max_batch_tokens for w in workers)
        backlog = (sum(w.queued_prefill_tokens for w in workers) + waiting_tokens) * costs.token_seconds(chunk)
        # A backlog within the target is what a queue is for.
        excess = max(backlog - 0.25 * config.ttft_target * sum(1.0 / s for s in slow), 0.0)
        prefill = demand.prefill / config.prefill_use + excess / config.drain_s
        held = sum(w.kv_tokens_used for w in workers)
        expected = min(held, demand.tokens * config.itl_target * demand.context)
        slope = costs.d1 + costs.d2 * demand.context
        by_link: dict[Tier, float] = {
            tier: demand.prompts * costs.transfer_seconds(tier, 1) / config.link_use if links else 0.0
            for tier in ("node", "remote")
        }
        on_node = Counter(w.node for w in workers)
        found = []
        for worker, own in zip(workers, slow, strict=True):
            # Of n workers each has b = r·step(b) sequences (Little), r = tokens/s each; step = d0 + b·slope.
            base = own * costs.d0
            rate = (1.0 - min(base / config.itl_target, 0.9)) / max(slope * own, 1e-12)  # tokens/s at the target
            kv, seqs = worker.kv_tokens_total, worker.max_seqs
            by_time = demand.tokens / rate
            by_kv = expected / (config.kv_use * kv) if kv > 1 else 0.0
            # With all places taken a step gives a token to each; where it would be too long, ``by_time`` is more.
            by_seqs = demand.tokens * (base / seqs + slope * own) / config.seqs_use if seqs else 0.0
            # Prompts come from neighbours where there are any.
            tier: Tier = "remote" if on_node[worker.node] == 1 < len(workers) else "node"
            found.append(Share.of(prefill * own, max(by_time, by_kv, by_seqs, by_link[tier])))
        return found

    def plan(self, loads: Iterable[WorkerLoad], demand: Demand, now: float, *, waiting_tokens: int = 0) -> RolePlan:
        """``waiting_tokens``: prompt tokens that wait in the gateways."""
        workers = list(loads)
        roles: dict[str, Role] = {w.worker: w.role for w in workers}
        if len(workers) < 2:
            return RolePlan(roles, [], "one worker does both")
        slow = self._speeds.look(list(roles), now)
        by_name = {w.worker: w for w in workers}
        shares = dict(zip(roles, self._shares(workers, slow, demand, waiting_tokens, links=True), strict=True))
        if now - self._moved_at >= self.config.dwell_s:
            alone = dict(zip(roles, self._shares(workers, slow, demand, waiting_tokens), strict=True))
            stages, without = (fullest(best_split(by_name, s), s) for s in (shares, alone))
            self._apart = self._keep_apart(stages, without, self._gap(slow, demand), now)
        if not self._apart:
            moved = [name for name, role in roles.items() if role != "mixed"]
            if moved:
                self._moved_at = now
            return RolePlan(dict.fromkeys(roles, "mixed"), moved, "links are too slow for roles")
        moved, why = self._move(by_name, shares, roles, now)
        return RolePlan(roles, moved, why)

    def _gap(self, slow: list[float], demand: Demand) -> float:
        """Seconds between two tokens where every worker does both: a step, and the prompts that come between steps."""
        costs, mean = self.costs, sum(slow) / len(slow)
        slope = (costs.d1 + costs.d2 * demand.context) * mean
        step = mean * costs.d0 / max(1.0 - demand.tokens / len(slow) * slope, 0.05)
        return step / max(1.0 - demand.prefill / sum(1.0 / s for s in slow), 0.01)

    def _keep_apart(self, stages: float, without: float, gap: float, now: float) -> bool:
        """Whether some workers should prefer prompts and others streams. ``stages``: their load; ``without`` what links
        add to it; ``gap``: seconds between tokens where no worker prefers anything.
        """
        config = self.config
        if not self._apart:
            if now - self._moved_at >= config.retry_s:
                return True
            return stages < config.close * without or gap > config.close_gap * config.itl_target
        return stages < max(BUSY, config.apart * without) or gap > config.apart_gap * config.itl_target

    # -- roles ---------------------------------------------------------------------------------------------------

    def _move(
        self, workers: dict[str, WorkerLoad], shares: dict[str, Share], roles: dict[str, Role], now: float
    ) -> tuple[list[str], str]:
        present = {name for name, role in roles.items() if role == "prefill"}
        wanted = best_split(workers, shares)
        unset = [name for name, role in roles.items() if role == "mixed"]
        if unset:
            # A fresh pool; workers that have a role keep it if both are there then.
            after = present | (wanted & set(unset))
            wanted = after if 0 < len(after) < len(workers) else wanted
        elif wanted == present:
            return [], "roles fit"
        else:
            if now - self._moved_at < self.config.dwell_s:
                return [], "moved a moment ago"
            now_load, then_load = fullest(present, shares), fullest(wanted, shares)
            if now_load < BUSY or then_load > now_load * (1.0 - self.config.gain):
                return [], "not worth a move"
            wanted = _some(workers, present, wanted)
        moved = []
        for name in workers:
            role: Role = "prefill" if name in wanted else "decode"
            if roles[name] != role:
                roles[name] = role
                moved.append(name)
        self._moved_at = now
        return moved, f"{len(wanted)} of {len(workers)} prefer prefill"


def _some(workers: dict[str, WorkerLoad], present: set[str], wanted: set[str]) -> set[str]:
    """The way from ``present`` to ``wanted`` as far as it goes at a time: one worker, an eighth of a large pool, or
    twice as many pairs that change places; those first that have least to finish.
    """
    step = max(1, len(workers) // 8)
    come = sorted(wanted - present, key=lambda name: (workers[name].running, name))
    go = sorted(present - wanted, key=lambda name: (workers[name].queued_prefill_tokens, name))
    more = len(wanted) - len(present)
    if more:
        return present | set(come[: min(step, more)]) if more > 0 else present - set(go[: min(step, -more)])
    return (present | set(come[: 2 * step])) - set(go[: 2 * step])
