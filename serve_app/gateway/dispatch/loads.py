"""Load reports of the token channel in routing's own nouns: loads, and counts of what went through other gateways."""

from __future__ import annotations

from collections.abc import Collection
from functools import lru_cache

from serve_app.costs.steps import StepSample
from serve_app.costs.transfers import FetchSample, TierCost
from serve_app.routing.served import ServedCount
from serve_app.routing.types import BatchLoad, Role, Standing, WorkerLoad
from serve_app.wire.load import ADAPTER_BYTES, LoadReport


def worker_load(report: LoadReport, now: float) -> WorkerLoad:
    """``now``: when the report was received, on the dispatcher's clock."""
    batch = BatchLoad(*report.batch)
    return WorkerLoad(
        worker=report.replica,
        node=report.node,
        role=_role(report.role),
        stage=report.stage,
        queued_prefill_tokens=max(0, report.queued_tokens - batch.queued_prefill_tokens),
        running=max(0, report.running - batch.running),
        waiting=max(0, report.waiting - batch.waiting),
        max_seqs=max(1, report.max_seqs),
        kv_blocks_used=max(0, report.used_blocks - batch.kv_blocks_used),
        kv_blocks_total=max(1, report.total_blocks),
        block_tokens=max(1, report.block_tokens),
        max_batch_tokens=max(1, report.max_batch_tokens),
        step_seconds=report.step_seconds,
        steps=tuple(StepSample(*sample) for sample in report.steps),
        fetches=tuple(FetchSample(*sample) for sample in report.fetches),  # type: ignore[arg-type]
        reported_at=now,
        batch=batch,
        adapters=_adapters(report.adapters),
        incoming_tokens=report.incoming_tokens,
        standing=tuple(Standing(*one) for one in report.standing),
        weights=report.weights,
        evicted=report.evicted,
        pool=report.pool.incarnation,
        pool_tokens=report.pool.tokens,
        pool_evicted=report.pool.evicted,
        leaving=report.leaving,
        zone=report.zone,
        tiers=tuple(TierCost(*one) for one in report.tiers),  # type: ignore[arg-type]
    )


def served_elsewhere(report: LoadReport, own: Collection[str]) -> list[ServedCount]:
    """What was served by way of other gateways than ``own``."""
    return [
        ServedCount(number, tenant, priority, *counts)
        for number, gateway, tenant, priority, *counts in report.served
        if gateway not in own
    ]


@lru_cache(1024)
def _adapters(told: bytes) -> frozenset[bytes]:
    """A worker tells the same many times."""
    return frozenset(told[at : at + ADAPTER_BYTES] for at in range(0, len(told), ADAPTER_BYTES))


def _role(name: str) -> Role:
    return name if name in ("prefill", "decode", "mixed") else "mixed"  # type: ignore[return-value]
