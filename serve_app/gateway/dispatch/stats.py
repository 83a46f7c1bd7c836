"""Queues, choices, workers and roles of one dispatcher, for the status route and for metrics."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from serve_app.routing.dispatch import Dispatch


def dispatch_stats(dispatch: Dispatch, now: float) -> dict[str, Any]:
    """Plain numbers by name; the operator sees all of them."""
    return {
        "waiting": dispatch.queue.lengths(),
        "waiting_tokens": dispatch.queue.waiting_tokens(),
        "prefill_tokens_in_flight": dispatch.admission.in_flight.prefill,
        "decode_tokens_in_flight": dispatch.admission.in_flight.decode,
        "placed": dispatch.counters.placed,
        "placed_by_serve": dispatch.counters.unrouted,
        "why": dict(dispatch.counters.why),
        "refused": dict(dispatch.counters.refused),
        "output_tokens": dispatch.counters.output_tokens,
        "cached_tokens": asdict(dispatch.counters.cached_tokens),
        "workers": _workers(dispatch, now),
        "plan": _plan(dispatch, now),
    }


def account_stats(dispatch: Dispatch, account: str) -> dict[str, Any]:
    """Only what concerns one account."""
    return {"waiting": {account: dispatch.queue.lengths().get(account, 0)}}


def _workers(dispatch: Dispatch, now: float) -> list[dict[str, Any]]:
    return [
        {
            "replica": load.worker,
            "node": load.node,
            "zone": load.zone,
            "stage": load.stage,
            "role": load.role,
            "queued_tokens": load.queued_prefill_tokens,
            "running": load.running,
            "waiting": load.waiting,
            "batch": load.batch.running + load.batch.waiting,
            "kv_use": round(load.kv_blocks_used / max(1, load.kv_blocks_total), 3),
            "step_ms": round(load.step_seconds * 1e3, 2),
            "age_s": round(now - load.reported_at, 2),
        }
        for load in dispatch.workers.loads
    ]


def _plan(dispatch: Dispatch, now: float) -> dict[str, Any]:
    workers = dispatch.workers
    needed = {stage: round(replicas, 3) for stage, replicas in workers.needed(now).items()}
    why = None if workers.plan is None else workers.plan.why
    return {"needed": needed, "why": why if workers.planning else "another gateway plans"}
