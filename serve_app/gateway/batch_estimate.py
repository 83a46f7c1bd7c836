"""What a batch would use and cost, and when it would be done, without taking it in.

All requests are checked as if it came; some of them, spread evenly, are tokenised and estimated like single ones, and
stand for the rest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request

from serve_app.api.fields.asked import ESTIMATE
from serve_app.api.receipt import MICRO, amount_text
from serve_app.batch.apis import BatchApi
from serve_app.batch.front import refusal
from serve_app.batch.intake import Intake, Refusal
from serve_app.gateway.core import Gateway
from serve_app.state.callers.accounts import Caller
from serve_app.tasks.model import ServedModel

# Requests that are tokenised.
SAMPLE = 200
_CASES = ("least", "expected", "most")


def asks_estimate(request: Request) -> bool:
    return request.headers.get(ESTIMATE, "").strip().lower() in ("true", "1")


@dataclass(slots=True)
class _Model:
    """Of the requests of one model: how many there are, how many were looked at, and units of these by case."""

    model: ServedModel
    requests: int
    looked_at: int = 0
    units: dict[str, dict[str, int]] = field(default_factory=lambda: {case: {} for case in _CASES})


async def estimate_batch(gateway: Gateway, api: BatchApi, caller: Caller, items: Sequence[bytes]) -> dict[str, Any]:
    """Raises `InvalidInput` for a batch that would be refused."""
    batches = gateway.batches
    intake = Intake(api, batches.known, caller, most=batches.known.most)

    def taken() -> Refusal | None:
        for number, item in enumerate(items):
            intake.take(number, item)
        return intake.refused()

    try:
        if (refused := await batches.aside(taken)) is not None:
            raise refusal(refused)
        models = {name: _Model(gateway.models.named(name), count) for name, count in intake.models.items()}
        for name, requests in await batches.aside(intake.sample, SAMPLE):
            found = models[name]
            estimate = await gateway.estimate(found.model, requests, caller)
            found.looked_at += 1
            for case in _CASES:
                for kind, amount in getattr(estimate, case).units.items():
                    units = found.units[case]
                    units[kind] = units.get(kind, 0) + amount
        share = intake.shared_bytes() / max(1, intake.prompt_bytes)
    finally:
        intake.close()
    told = [_told(gateway, found, share) for found in models.values()]
    return {
        "object": "batch.estimate",
        "requests": intake.total,
        "wrong": len(intake.faults),
        "estimated_from": sum(found.looked_at for found in models.values()),
        "cached_share": round(share, 4),
        "units": {case: _sum(one["units"][case] for one in told) for case in _CASES},
        "neurons": {case: sum(one["neurons"][case] for one in told) / MICRO for case in _CASES},
        "cost": _cost(told),
        "finish_s": _finish(gateway, told),
    }


def _told(gateway: Gateway, found: _Model, share: float) -> dict[str, Any]:
    """Units of all requests of a model, and their price."""
    quote = gateway.runtime.quote(found.model)
    units = {
        case: {kind: round(amount * found.requests / max(1, found.looked_at)) for kind, amount in had.items()}
        for case, had in found.units.items()
    }
    expected = units["expected"]
    if "cached_tokens" in expected:
        # What the request before has in common with it is in the cache, beside what is there already.
        near = min(round(expected["input_tokens"] * share), units["least"].get("cached_tokens", 0))
        expected["cached_tokens"] = max(expected["cached_tokens"], near)
    costs = {case: quote.cost(units[case], batch=True) for case in _CASES}
    return {
        "model": found.model,
        "requests": found.requests,
        "units": units,
        "neurons": {case: cost.neurons for case, cost in costs.items()},
        "money": {case: cost.money for case, cost in costs.items()},
        "currency": quote.tariff.currency if quote.priced else None,
    }


def _sum(listed: Any) -> dict[str, int]:
    out: dict[str, int] = {}
    for units in listed:
        for kind, amount in units.items():
            out[kind] = out.get(kind, 0) + amount
    return out


def _cost(told: Sequence[Mapping[str, Any]]) -> dict[str, str] | None:
    """None where not all models have a price in one currency."""
    currencies = {one["currency"] for one in told}
    if len(currencies) != 1 or None in currencies:
        return None
    return {
        **{case: amount_text(sum(one["money"][case] for one in told)) for case in _CASES},
        "currency": currencies.pop(),
    }


def _finish(gateway: Gateway, told: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    """Seconds: ``least`` if it had all workers for itself, at the pace that their steps have now (None: no worker
    tells); ``most``: by then it is done, or expires.
    """
    least: float | None = 0.0
    for one in told:
        model, output = one["model"], one["units"]["expected"].get("output_tokens", 0)
        if not gateway.engine.serves(model) or not output:
            continue
        steps = [load["step_ms"] for load in gateway.engine.dispatcher(model).stats()["workers"] if load["step_ms"]]
        if not steps or least is None:
            least = None
            continue
        least += output * min(steps) / 1e3 / min(model.slots, one["requests"])
    return {"least": None if least is None else round(least, 1), "most": gateway.batches.terms.hours * 3600}
