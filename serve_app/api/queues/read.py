"""Bodies of Cloudflare Queues' HTTP API as its clients send them, within its documented bounds."""

from __future__ import annotations

import re
from typing import Any

import orjson

from serve_app.api.errors import BodyTooLarge, InvalidInput
from serve_app.api.fields.values import boolean, choice, integer, number, objects, refuse, string

MAX_MESSAGE, MAX_BATCH, MAX_MESSAGES = 128 * 1024, 256 * 1024, 100
MAX_DELAY_S, MAX_LEASE_S = 86_400, 43_200
KEEP_S = (60, 14 * 86_400)
MAX_RETRIES = 100
Pushed = tuple[bytes, str, float | None]
_NAME = re.compile(r"[A-Za-z0-9_-]{1,63}", re.ASCII)


def queue_name(body: dict[str, Any]) -> str | None:
    name = string(body, "queue_name")
    if name is not None and not _NAME.fullmatch(name):
        raise InvalidInput("queue_name has 1 to 63 letters, digits, - and _.", param="queue_name")
    return name


def settings(body: dict[str, Any], *, whole: bool) -> dict[str, Any]:
    """What ``settings`` says of a queue: any of ``delay_s``, ``keep_s`` and ``paused``. ``whole``: what is missing is
    what a new queue has.
    """
    told = body.get("settings") or {}
    if not isinstance(told, dict):
        raise refuse("settings", "an object", told)
    found: dict[str, Any] = {
        "delay_s": number(told, "delivery_delay", 0, MAX_DELAY_S),
        "keep_s": number(told, "message_retention_period", *KEEP_S),
        "paused": boolean(told, "delivery_paused"),
    }
    usual = {"delay_s": 0.0, "keep_s": 4 * 86_400.0, "paused": False} if whole else {}
    return usual | {name: value for name, value in found.items() if value is not None}


def consumer(body: dict[str, Any]) -> dict[str, Any]:
    """``kind``, ``dead`` and settings of a consumer; ``model`` and ``results`` of one that runs a model."""
    if body.get("type") == "worker":
        raise InvalidInput(
            "There are no Workers here. Use type http_pull, or workers_ai with a model and a results_queue.",
            param="type",
        )
    kind = choice(body, "type", ("http_pull", "workers_ai"))
    if kind is None:
        raise InvalidInput("type is missing: http_pull or workers_ai.", param="type")
    told = body.get("settings") or {}
    if not isinstance(told, dict):
        raise refuse("settings", "an object", told)
    lease_ms = number(told, "visibility_timeout_ms", 0, MAX_LEASE_S * 1000)
    found: dict[str, Any] = {
        "batch": integer(told, "batch_size", 1, MAX_MESSAGES),
        "lease_s": None if lease_ms is None else lease_ms / 1000,
        "retries": integer(told, "max_retries", 0, MAX_RETRIES),
        "delay_s": number(told, "retry_delay", 0, MAX_DELAY_S),
        "dead": string(body, "dead_letter_queue"),
    }
    if kind == "workers_ai":
        found |= {"model": string(body, "model", limit=512), "results": string(body, "results_queue")}
        for name, field in (("model", "model"), ("results_queue", "results")):
            if not found[field]:
                raise InvalidInput(f"{name} is missing, which a consumer of type workers_ai needs.", param=name)
    return {"kind": kind} | {name: value for name, value in found.items() if value is not None}


def pushed(body: dict[str, Any], where: str = "") -> Pushed:
    """A message's body, its content type and its delay in seconds."""
    if "body" not in body:
        raise InvalidInput(f"{where}body is missing.", param=f"{where}body")
    told = body["body"]
    kind = choice(body, "content_type", ("text", "json")) or ("text" if isinstance(told, str) else "json")
    if kind == "text" and not isinstance(told, str):
        raise refuse(f"{where}body", "a string, as its content_type is text", told)
    found = told.encode() if kind == "text" else orjson.dumps(told)
    if len(found) > MAX_MESSAGE:
        raise BodyTooLarge(MAX_MESSAGE)
    return found, kind, number(body, "delay_seconds", 0, MAX_DELAY_S)


def pushed_together(body: dict[str, Any]) -> list[Pushed]:
    """Of a whole batch."""
    found = objects(body.get("messages"), "messages", limit=MAX_MESSAGES)
    if not found:
        raise InvalidInput("messages must not be an empty array.", param="messages")
    delay = number(body, "delay_seconds", 0, MAX_DELAY_S)
    read = [pushed(each, f"messages[{i}].") for i, each in enumerate(found)]
    if sum(len(each[0]) for each in read) > MAX_BATCH:
        raise BodyTooLarge(MAX_BATCH)
    return [(told, kind, delay if own is None else own) for told, kind, own in read]


def pulled(body: dict[str, Any]) -> tuple[int | None, float | None]:
    """How many messages, and for how many seconds."""
    lease_ms = number(body, "visibility_timeout_ms", 0, MAX_LEASE_S * 1000)
    return integer(body, "batch_size", 1, MAX_MESSAGES), None if lease_ms is None else lease_ms / 1000


def settled(body: dict[str, Any]) -> tuple[list[str], list[tuple[str, float | None]]]:
    """Leases that are done, and those that are to be tried again, with the delay in seconds."""
    acks = objects(body.get("acks") or [], "acks", limit=MAX_MESSAGES)
    retries = objects(body.get("retries") or [], "retries", limit=MAX_MESSAGES)
    again = [(_lease(each, f"retries[{i}]"), number(each, "delay_seconds", 0, MAX_DELAY_S))
             for i, each in enumerate(retries)]  # fmt: skip
    return [_lease(each, f"acks[{i}]") for i, each in enumerate(acks)], again


def references(body: dict[str, Any]) -> list[str]:
    """Of messages that were peeked at."""
    found = objects(body.get("refs"), "refs", limit=MAX_MESSAGES)
    return [string(each, "ref", limit=64) or "" for each in found]


def _lease(told: dict[str, Any], where: str) -> str:
    lease = string(told, "lease_id", limit=200)
    if not lease:
        raise InvalidInput(f"{where}.lease_id is missing.", param=f"{where}.lease_id")
    return lease
