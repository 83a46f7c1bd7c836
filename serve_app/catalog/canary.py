"""Canaries: the share of a model's requests that another model answers, such as a new version of it.

A record says it, or an operator by hand, which comes first.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from serve_app.catalog.errors import CatalogError, from_validation
from serve_app.catalog.operated import Operated, Share
from serve_app.catalog.records import Canary, ModelRecord

FIELD = "canary"


def read_canary(given: Any) -> Share:
    """What came over the network. Raises CatalogError."""
    try:
        canary = Canary.model_validate(given)
    except ValidationError as error:
        raise from_validation(FIELD, error, Canary) from None
    return Share(canary.model, canary.percent)


def effective(record: ModelRecord, operated: Mapping[str, Operated]) -> Share | None:
    """The model's canary, whether or not it is a good one."""
    said, own = operated.get(record.id), record.canary
    if said is not None and said.canary is not None:
        return said.canary if said.canary.model else None
    return None if own is None else Share(own.model, own.percent)


def wrong(model: str, records: Mapping[str, ModelRecord], operated: Mapping[str, Operated]) -> CatalogError | None:
    """Why the model's canary cannot be followed; None where it can, or where there is none."""
    record = records[model]
    canary = effective(record, operated)
    if canary is None:
        return None

    def refuse(reason: str, remedy: str) -> CatalogError:
        return CatalogError(model, FIELD, reason, remedy)

    other = records.get(canary.model)
    if other is None:
        return refuse(f"there is no model {canary.model[:120]} in the catalogue", "Add a record of it first.")
    if other.id == model:
        return refuse("a model is no canary of itself", "Name the other model.")
    if other.task != record.task:
        return refuse(f"{other.id} does {other.task} and {model} does {record.task}", "Name a model of the same task.")
    if (further := effective(other, operated)) is not None:
        return refuse(f"{other.id} has a canary itself, {further.model}", "End that one first: requests move once.")
    before = next(
        (one.id for one in records.values() if (his := effective(one, operated)) and his.model == model), None
    )
    if before is not None:
        return refuse(f"{model} is itself a canary of {before}", "End that one first: requests move once.")
    if (lacks := _lacks(record, other)) is not None:
        return refuse(f"{other.id} {lacks}", "It would refuse, or answer otherwise, what the model takes.")
    return None


def _lacks(record: ModelRecord, other: ModelRecord) -> str | None:
    """What the model has and ``other`` has not, in words."""
    has, its = record.properties, other.properties
    if has.vision and not its.vision:
        return "takes no pictures"
    for name in ("context_window", "max_input_tokens"):
        most, least = getattr(has, name), getattr(its, name)
        if most is not None and least is not None and least < most:
            return f"has {name} {least}, and the model {most}"
    if has.output_dimensions != its.output_dimensions:
        return f"answers with {its.output_dimensions} dimensions, and the model with {has.output_dimensions}"
    if its.require_workers_paid and not has.require_workers_paid:
        return "is for paid plans only"
    return None
