"""What a running server does at a moment, from two looks at ``GET /v1/status``: for `serve-app top` and `status`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

# What a worker counts up, and what its rate is called.
_RATES = {"generated_tokens": "tokens_per_s", "prompt_tokens": "prompt_tokens_per_s", "cached_tokens": "cached_per_s"}


@dataclass(slots=True)
class WorkerView:
    """``role``: what it is to prefer now; the stage where nobody plans. ``kv_use``: share of its blocks; None: it has
    none.
    """

    stage: str
    role: str
    name: str
    running: int = 0
    waiting: int = 0
    queued_tokens: int = 0
    kv_use: float | None = None
    step_ms: float | None = None


@dataclass(slots=True)
class ModelView:
    """``waiting``: requests by account. Rates are None at the first look. ``silent``: stages with a worker that does
    not answer.
    """

    id: str
    ready: bool
    in_flight: int = 0
    waiting: dict[str, int] = field(default_factory=dict)
    tokens_per_s: float | None = None
    prompt_tokens_per_s: float | None = None
    cached_per_s: float | None = None
    workers: list[WorkerView] = field(default_factory=list)
    silent: list[str] = field(default_factory=list)


@dataclass(slots=True)
class RunnerView:
    """A runner of batches; ``models``: requests that it has under way, by model."""

    name: str
    running: int
    models: dict[str, int]


@dataclass(slots=True)
class MemoryView:
    """A node's memory budget, and of each worker its model, stage, state, bytes and what it waits for."""

    budget: int
    held: int
    reserved: int
    workers: list[tuple[str, str, str, int, str]]


@dataclass(slots=True)
class View:
    """``problem``: of the store or the price list; "" for none. ``runners``: of batches, that work now. ``memory``: of
    nodes with a budget.
    """

    models: list[ModelView]
    problem: str = ""
    runners: list[RunnerView] = field(default_factory=list)
    memory: list[MemoryView] = field(default_factory=list)

    @property
    def ready(self) -> bool:
        return all(model.ready for model in self.models)

    def shown(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self)


def look(status: Mapping[str, Any], before: Mapping[str, Any] | None = None, seconds: float = 0.0) -> View:
    """``status``: what the route answers; ``before``: what it had answered ``seconds`` ago. A key of another account
    than the operator's sees readiness and its own queue.
    """
    earlier = (before or {}).get("models", {})
    models = [_model(name, model, earlier.get(name), seconds) for name, model in status["models"].items()]
    gateway = status.get("gateway") or {}
    problem = (gateway.get("store") or {}).get("problem") or (gateway.get("prices") or {}).get("problem") or ""
    runners = [RunnerView(one["runner"], one["running"], dict(one["models"])) for one in status.get("runners") or ()]
    return View(models, str(problem), runners, [_memory(node) for node in status.get("memory") or ()])


def _memory(node: Mapping[str, Any]) -> MemoryView:
    workers = [(w["model"], w["stage"], w["state"], w["held_bytes"], w["why"]) for w in node["workers"]]
    return MemoryView(node["budget_bytes"], node["held_bytes"], node["reserved_bytes"], workers)


def _model(name: str, now: Mapping[str, Any], before: Mapping[str, Any] | None, seconds: float) -> ModelView:
    routing = now.get("routing") or {}
    waiting = routing.get("waiting") or now.get("waiting") or {}
    view = ModelView(name, now["ready"], now.get("inflight", 0), {who: n for who, n in waiting.items() if n})
    view.silent = list(now.get("silent") or ())
    told = now.get("workers") or []
    if before is not None and seconds > 0:
        for counter, rate in _RATES.items():
            if any(counter in worker for worker in told):
                setattr(view, rate, round(_grown(told, before.get("workers") or [], counter) / seconds, 1))
    reporting = routing.get("workers") or []
    view.workers = [_reporting(load) for load in reporting]
    stages = {load["stage"] for load in reporting}
    view.workers += [_counting(worker) for worker in told if worker["stage"] not in stages]
    return view


def _grown(now: list[dict[str, Any]], before: list[dict[str, Any]], counter: str) -> int:
    """By how much; a worker that is new has counted from nothing."""

    def of(worker: dict[str, Any]) -> tuple[Any, ...]:
        return worker["stage"], worker.get("node"), worker["pid"]

    earlier = {of(worker): worker.get(counter, 0) for worker in before}
    return sum(max(0, worker.get(counter, 0) - earlier.get(of(worker), 0)) for worker in now)


def _reporting(load: Mapping[str, Any]) -> WorkerView:
    """A worker that reports its load to the gateway."""
    numbers = {name: load[name] for name in ("running", "waiting", "queued_tokens", "kv_use", "step_ms")}
    return WorkerView(load["stage"], load["role"] or load["stage"], load["replica"], **numbers)


def _counting(worker: Mapping[str, Any]) -> WorkerView:
    """One of which only counters are known."""
    view = WorkerView(worker["stage"], worker["stage"], f"process {worker['pid']}")
    view.running, view.waiting = worker.get("running", 0), worker.get("waiting", 0)
    if total := worker.get("total_blocks"):
        view.kv_use = round(worker["used_blocks"] / total, 3)
    return view
