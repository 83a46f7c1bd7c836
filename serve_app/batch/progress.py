"""How far a batch is: for every API, and as our own object."""

from __future__ import annotations

from typing import Any

import orjson

from serve_app.api.receipt import MICRO, amount_text
from serve_app.state.deferred.batches import ENDED, Batch


def extras(batch: Batch, now: float) -> dict[str, Any]:
    """What no other dialect tells: the rate in requests a second since it began, seconds that are left at this rate
    (None: not known), and what it has cost so far, or in all.
    """
    done = batch.counts.total - batch.counts.left
    until = batch.ended or batch.finalizing or now
    took = until - batch.started if batch.started is not None else 0.0
    rate = done / took if took > 0 and done else None
    left = None
    if batch.status in ENDED or (batch.counts.total and not batch.counts.left):
        left = 0.0
    elif rate:
        left = batch.counts.left / rate
    return {
        "progress": {
            "done": done,
            "requests_per_second": None if rate is None else round(rate, 3),
            "seconds_left": None if left is None else round(left, 1),
        },
        "neurons": batch.used.neurons / MICRO,
        "cost": cost(batch),
    }


def cost(batch: Batch) -> dict[str, str] | None:
    """None where its models have no price in money."""
    used = batch.used
    return {"amount": amount_text(used.money), "currency": used.currency} if used.currency else None


def shown(batch: Batch, now: float) -> dict[str, Any]:
    """Our own object of a batch of any API. Times: unix seconds."""
    about, counts, used = orjson.loads(batch.about), batch.counts, batch.used
    problems = orjson.loads(batch.problems)
    return {
        "id": batch.id,
        "object": "batch",
        "door": batch.door,
        "name": about.get("id", batch.id),
        "model": about.get("model"),
        "status": batch.status,
        "created_at": batch.created,
        "started_at": batch.started,
        "cancelling_at": batch.cancelling,
        "ended_at": batch.ended,
        "deadline": batch.deadline,
        "kept_until": None if batch.ended is None else batch.ended + batch.keep_s,
        "requests": {
            "total": counts.total,
            "waiting": counts.left,
            "succeeded": counts.succeeded,
            "failed": counts.failed,
            "cancelled": counts.cancelled,
            "expired": counts.expired,
        },
        "usage": {
            "input_tokens": used.input_tokens,
            "cached_tokens": used.cached_tokens,
            "output_tokens": used.output_tokens,
        },
        **extras(batch, now),
        "problems": problems,
    }
