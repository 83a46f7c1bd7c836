"""How many workers each stage needs, and which worker prefers which role now.

Demand is measured as work: seconds of prefill that arrive per second, tokens to decode per second, and the context they
hold. The workers that each stage needs for its latency target follow from these and the cost model. Roles move within
seconds and lose nothing, since a role is only a preference. A move must promise a clear gain, and moves are a while
apart. Where roles are not enough Serve's autoscaler follows the same needs with replicas, within bounds of its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from serve_app.routing.costs import CostModel
from serve_app.routing.types import Role, WorkerLoad


class DemandMeter:
    """What arrives per second, smoothed over about ``tau`` seconds."""

    def __init__(self, tau: float = 30.0) -> None:
        self.tau = tau
        self._at: float | None = None
        self._since: float | None = None
        self._sums = [0.0, 0.0, 0.0]  # prefill seconds, output tokens, output tokens x context

    def arrived(self, now: float, prefill_seconds: float, output_tokens: float, context_tokens: float) -> None:
        """One request: seconds that its uncached tokens take, and what it will decode behind how much context."""
        self._decay(now)
        new = (prefill_seconds, output_tokens, output_tokens * context_tokens)
        self._sums = [s + x for s, x in zip(self._sums, new, strict=True)]

    @property
    def began(self) -> bool:
        """Whether anything has ever arrived."""
        return self._at is not None

    def demand(self, now: float) -> Demand:
        if self._at is None:
            return Demand(0.0, 0.0, 0.0)
        self._decay(now)
        # The weights of a window that has not filled yet sum to less than tau.
        age = now - self._since if self._since is not None else 0.0
        window = max(self.tau * (1.0 - math.exp(-age / self.tau)), 1.0)
        seconds, tokens, contexts = (s / window for s in self._sums)
        return Demand(seconds, tokens, contexts / tokens if tokens > 0 else 0.0)

    def _decay(self, now: float) -> None:
        if self._at is None:
            self._at = self._since = now
        elif now > self._at:
            factor = math.exp(-(now - self._at) / self.tau)
            self._sums = [s * factor for s in self._sums]
            self._at = now


@dataclass(slots=True, frozen=True)
class Demand:
    """``prefill``: seconds of work per second; ``tokens``: output tokens per second; ``context``: mean tokens."""

    prefill: float
    tokens: float
    context: float

    def __mul__(self, gateways: int) -> Demand:
        """Of so many gateways that each have as much."""
        return Demand(self.prefill * gateways, self.tokens * gateways, self.context)


@dataclass(slots=True, frozen=True)
class PlannerConfig:
    ttft_target: float = 2.0
    itl_target: float = 0.05
    prefill_use: float = 0.75  # of a prefill worker's time, so that queues stay short
    kv_use: float = 0.85
    drain_s: float = 10.0  # a backlog should be gone after this long
    gain: float = 0.15  # a move of roles must lower the fuller stage's load by this share
    dwell_s: float = 10.0  # between two moves of roles


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

    def needs(self, loads: Iterable[WorkerLoad], demand: Demand, waiting_tokens: int = 0) -> dict[str, float]:
        """Workers that each stage needs, as fractions of one."""
        config, costs = self.config, self.costs
        workers = list(loads)
        chunk = max((w.max_batch_tokens for w in workers), default=2048)
        backlog = (sum(w.queued_prefill_tokens for w in workers) + waiting_tokens) * costs.token_seconds(chunk)
        # A backlog within the target is what a queue is for.
        excess = max(backlog - 0.25 * config.ttft_target * max(len(workers), 1), 0.0)
        prefill = demand.prefill / config.prefill_use + excess / config.drain_s
        # Of n workers each has b = r·step(b) sequences (Little), r = tokens/s each; step = d0 + b·slope.
        slope = costs.d1 + costs.d2 * demand.context
        rate = (1.0 - min(costs.d0 / config.itl_target, 0.9)) / max(slope, 1e-12)  # tokens/s at the target
        by_time = demand.tokens / rate
        kv = max((w.kv_tokens_total for w in workers), default=0)
        held = sum(w.kv_tokens_used for w in workers)
        expected = demand.tokens * config.itl_target * demand.context
        by_kv = min(max(held, 0), expected) / (config.kv_use * kv) if kv > 1 else 0.0
        seqs = max((w.max_seqs for w in workers), default=0)  # unknown while there is no worker
        by_seqs = demand.tokens * self._step() / seqs if seqs else 0.0
        return {"prefill": prefill, "decode": max(by_time, by_kv, by_seqs)}

    def _step(self) -> float:
        """Seconds of a decode step on a worker that is filled to its target."""
        return max(self.costs.d0, 0.7 * self.config.itl_target)

    def plan(self, loads: Iterable[WorkerLoad], demand: Demand, now: float, *, waiting_tokens: int = 0) -> RolePlan:
        """``waiting_tokens``: prompt tokens that wait in the gateways."""
        workers = list(loads)
        needs = self.needs(workers, demand, waiting_tokens)
        roles: dict[str, Role] = {w.worker: w.role for w in workers}
        moved, why = self._move(workers, roles, needs, now)
        return RolePlan(roles, moved, why)

    # -- roles ---------------------------------------------------------------------------------------------------

    def _move(
        self, workers: list[WorkerLoad], roles: dict[str, Role], needs: dict[str, float], now: float
    ) -> tuple[list[str], str]:
        total = len(workers)
        if total < 2:
            return [], "one worker does both"
        present = sum(r == "prefill" for r in roles.values())
        unset = any(r == "mixed" for r in roles.values())
        wanted = _best_split(total, needs)
        if wanted == present and not unset:
            return [], "roles fit"
        if not unset:
            if now - self._moved_at < self.config.dwell_s:
                return [], "moved a moment ago"
            now_load, then_load = _fullest(present, total, needs), _fullest(wanted, total, needs)
            if now_load < 0.5 or then_load > now_load * (1.0 - self.config.gain):
                return [], "not worth a move"
            # One step at a time for small pools, an eighth of a large one.
            step = max(1, total // 8)
            wanted = present + max(-step, min(step, wanted - present))
        moved = _assign(workers, roles, wanted)
        self._moved_at = now
        return moved, f"{wanted} of {total} prefer prefill"


def _fullest(prefill: int, total: int, needs: Mapping[str, float]) -> float:
    """How loaded the more loaded stage would be."""
    return max(needs["prefill"] / max(prefill, 1e-9), needs["decode"] / max(total - prefill, 1e-9))


def _best_split(total: int, needs: Mapping[str, float]) -> int:
    """Prefill workers of ``total`` for which the more loaded stage is least loaded; at least one of each."""
    if needs["prefill"] + needs["decode"] <= 0:
        return max(1, total // 2)
    ideal = total * needs["prefill"] / (needs["prefill"] + needs["decode"])
    around = {min(total - 1, max(1, n)) for n in (math.floor(ideal), math.ceil(ideal))}
    return min(sorted(around, reverse=True), key=lambda n: _fullest(n, total, needs))


def _assign(workers: list[WorkerLoad], roles: dict[str, Role], prefill: int) -> list[str]:
    """Changes ``roles`` so that ``prefill`` workers prefer prefill, moving the workers that have least to finish."""
    moved = []
    for worker in sorted((w for w in workers if roles[w.worker] == "mixed"), key=lambda w: w.running):
        # A fresh pool: fill the prefill side with the workers that decode least.
        wants = "prefill" if sum(r == "prefill" for r in roles.values()) < prefill else "decode"
        roles[worker.worker] = wants  # type: ignore[assignment]
        moved.append(worker.worker)
    present = [w for w in workers if roles[w.worker] == "prefill"]
    others = [w for w in workers if roles[w.worker] == "decode"]
    if len(present) < prefill:
        for worker in sorted(others, key=lambda w: (w.running, w.worker))[: prefill - len(present)]:
            roles[worker.worker] = "prefill"
            moved.append(worker.worker)
    elif len(present) > prefill:
        for worker in sorted(present, key=lambda w: (w.queued_prefill_tokens, w.worker))[: len(present) - prefill]:
            roles[worker.worker] = "decode"
            moved.append(worker.worker)
    return moved
