"""JSON Schemas of estimates and of usage."""

from __future__ import annotations

from serve_app.api.schema.dialects import enveloped
from serve_app.api.schema.parts import Schema, asked_fields, field, object_

_COUNT: Schema = {"type": "integer", "minimum": 0}
_AMOUNT: Schema = {"type": "number", "minimum": 0}
_SECONDS: Schema = {"type": ["number", "null"]}


def _cases(item: Schema, **more: Schema) -> Schema:
    names = ("least", "expected", "most")
    return object_({**more, **{name: item for name in names}}, [*more, *names])


def estimate() -> Schema:
    units = object_({}, additionalProperties=_COUNT)
    fields = {
        "object": {"const": "estimate"},
        "model": {"type": "string"},
        "task": {"type": "string"},
        "prompt_tokens": _COUNT,
        "cached_tokens": _COUNT,
        "wait_s": _SECONDS,
        "ttft_s": _SECONDS,
        "units": _cases(units),
        "neurons": _cases(_AMOUNT),
        "cost": {"anyOf": [_cases({"type": "string"}, currency={"type": "string"}), {"type": "null"}]},
    }
    return object_(fields, list(fields))


def enveloped_estimate() -> Schema:
    return enveloped(estimate())


def estimate_input() -> Schema:
    """A body of any dialect."""
    model = field("string", "The id of a model of GET /v1/models.", maxLength=512)
    return object_({"model": model, **asked_fields()})


_TEXT: Schema = {"type": "string"}
_NAMES = ("model", "task", "key", "adapter", "batch", "status")
_MONEY = object_({"amount": field("string", "A decimal."), "currency": _TEXT}, ["amount", "currency"])


def outliers_query() -> dict[str, Schema]:
    """The parameters of `GET .../ai/usage/outliers`."""
    return {
        "days": field("integer", "How many days are looked at, today included; 7 unless given.", minimum=1, maximum=60),
        "group_by": field("string", "Any of model, key, task, adapter; model,key unless given."),
        "account": field("string", "For the operator: of these accounts, or all; each is compared with itself."),
    }


def usage_query() -> dict[str, Schema]:
    """The parameters of `GET .../ai/usage`; those that choose may come several times, or with commas."""
    return {
        "since": field("string", "A date, a time, unix seconds, or 7d; 30 days ago unless given."),
        "until": field("string", "The same; now unless given."),
        "interval": {"type": "string", "enum": ["hour", "day", "month", "none"]},
        "group_by": field("string", "Any of account, " + ", ".join(_NAMES) + "."),
        **{name: field("string", f"Only of this {name}.") for name in _NAMES},
        "account": field("string", "For the operator: of these accounts, or all."),
        "order": field("string", "time, requests, seconds, neurons, cost or a group; -neurons has the largest first."),
        "page": {"type": "integer", "minimum": 1},
        "per_page": {"type": "integer", "minimum": 1, "maximum": 10_000},
        "format": {"type": "string", "enum": ["json", "csv"]},
    }


def _used() -> Schema:
    groups = {name: _TEXT for name in ("account", *_NAMES)}
    counts = {"requests": _COUNT, "seconds": _AMOUNT, "units": object_({}, additionalProperties=_COUNT)}
    return {"time": _TEXT, **groups, **counts, "neurons": _AMOUNT, "cost": _MONEY}


def usage() -> Schema:
    row = object_(_used(), ["requests", "seconds", "units", "neurons", "cost"])
    return enveloped({"type": "array", "items": row})


def outliers() -> Schema:
    fields = {"time": _TEXT, "account": _TEXT, "group": _TEXT, "name": _TEXT}
    numbers = {"neurons": _AMOUNT, "usual": _AMOUNT, "ratio": _AMOUNT}
    return enveloped({"type": "array", "items": object_({**fields, **numbers}, [*fields, *numbers])})


def receipt() -> Schema:
    return enveloped(object_({"id": _TEXT, **_used()}, ["id", "time", "units", "neurons", "cost"]))


def graphql_input() -> Schema:
    fields = {"query": field("string", "A query.", minLength=1), "variables": {"type": ["object", "null"]}}
    return object_({**fields, "operationName": {"type": ["string", "null"]}}, ["query"])


def graphql_answer() -> Schema:
    return object_({"data": {"type": ["object", "null"]}, "errors": {"type": ["array", "null"]}}, ["data", "errors"])


def buckets_query() -> dict[str, Schema]:
    times = {"start_time": {"type": "integer", "minimum": 0}, "end_time": {"type": "integer", "minimum": 0}}
    some = ("group_by", "models", "project_ids", "api_key_ids")
    return {
        **times,
        "bucket_width": {"type": "string", "enum": ["1m", "1h", "1d"]},
        **{name: field("string", "May come several times, also as name[].") for name in some},
        "limit": {"type": "integer", "minimum": 1},
        "page": _TEXT,
    }


def buckets() -> Schema:
    bucket = object_({"object": {"const": "bucket"}, "start_time": _COUNT, "end_time": _COUNT}, ["start_time"])
    fields = {"object": {"const": "page"}, "data": {"type": "array", "items": bucket}, "has_more": {"type": "boolean"}}
    return object_({**fields, "next_page": {"type": ["string", "null"]}}, ["object", "data", "has_more"])
