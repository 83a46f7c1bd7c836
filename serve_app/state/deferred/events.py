"""What happens to an account and somebody may want to know: the kinds of events, who is told of them, and what is on
its way to a webhook.

An event is written in the transaction that makes it true, one delivery for each subscription to it. So none is lost,
and nobody is told of what did not happen.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from serve_app.state.errors import StateError

if TYPE_CHECKING:
    from serve_app.state.deferred.batches import Batch

BUDGET = "budget.reached"
# Of batches that came by OpenAI's API, in its words; the others' are in Cloudflare's.
OPENAI_BATCH = "batch."
CLOUDFLARE_BATCH = "cf.workersAi.model.batch."
KINDS = (
    BUDGET,
    *(CLOUDFLARE_BATCH + name for name in ("queued", "succeeded", "failed")),
    *(OPENAI_BATCH + name for name in ("completed", "failed", "cancelled", "expired")),
)
# The subscription of the settings: alerts of every account, to the log and to the URL of the settings.
OPERATOR = ""
# The most subscriptions of an account.
MAX_SUBSCRIPTIONS = 50


class EventsError(StateError):
    """A subscription cannot be made or found; the text says what to do."""


@dataclass(slots=True, frozen=True)
class Event:
    """``body``: JSON as its receiver gets it. ``model``: what it is about, "" for none."""

    kind: str
    body: Mapping[str, Any]
    model: str = ""


@dataclass(slots=True, frozen=True)
class Subscription:
    """Who is told: a webhook at ``url``, or the queue of id ``queue``; the other is "". ``kinds``: of events, where `*`
    stands for any characters. ``model``: only events about this one, "" for all. ``secret``: "whsec_" and base64, what
    webhooks are signed with. Times: unix seconds.
    """

    id: str
    account: str
    name: str
    created: float
    modified: float
    kinds: tuple[str, ...]
    url: str = ""
    queue: str = ""
    model: str = ""
    enabled: bool = True
    secret: str = field(default="", repr=False)

    def wants(self, event: Event) -> bool:
        fits = any(fnmatchcase(event.kind, kind) for kind in self.kinds)
        return self.enabled and fits and self.model in ("", event.model)


@dataclass(slots=True, frozen=True)
class Delivery:
    """An event on its way to one webhook. ``id``: the same however often it is sent. ``at``: when it happened.
    ``body``: JSON. ``tries``: attempts that came before. ``due``: when it is tried next, None once that is over;
    ``sent``: when its receiver took it. ``trouble``: why the last attempt failed.
    """

    id: str
    subscription: str
    account: str
    kind: str
    at: float
    body: bytes
    tries: int = 0
    due: float | None = None
    sent: float | None = None
    trouble: str = ""
    url: str = ""
    secret: str = field(default="", repr=False)

    @property
    def status(self) -> Literal["waiting", "delivered", "dead"]:
        if self.sent is not None:
            return "delivered"
        return "dead" if self.due is None else "waiting"


def check_kinds(kinds: Iterable[str]) -> tuple[str, ...]:
    """Raises :class:`EventsError` for one that no event has."""
    found = tuple(dict.fromkeys(kinds))
    if not found:
        raise EventsError(f"There are no events to tell of. Name some of {', '.join(KINDS)}, or * for all.")
    for kind in found:
        if not any(fnmatchcase(known, kind) for known in KINDS):
            raise EventsError(f"There is no event {kind[:80]!r}. Name some of {', '.join(KINDS)}, or * for all.")
    return found


def of_batch(batch: Batch, now: float) -> Event | None:
    """What there is to tell when a batch has come to its status; None for nothing."""
    about = msgspec.json.decode(batch.about)
    name = about.get("id") or batch.id
    if batch.door == "openai":
        if batch.status not in ("completed", "failed", "cancelled", "expired"):
            return None
        kind = OPENAI_BATCH + batch.status
        told = {"id": f"evt_{batch.id}", "object": "event", "type": kind, "created_at": int(now), "data": {"id": name}}
        return Event(kind, told, about.get("model") or "")
    payload: dict[str, Any] = {"requestId": name}
    if batch.status == "queued":
        kind = "queued"
    elif batch.status == "completed":
        kind = "succeeded"
    elif batch.status in ("failed", "cancelled", "expired"):
        kind = "failed"
        problems = msgspec.json.decode(batch.problems)
        why = str(problems[0].get("message", "")) if problems and isinstance(problems[0], dict) else ""
        codes = {"failed": (5006, 400), "cancelled": (3008, 408), "expired": (3007, 408)}[batch.status]
        payload |= {"message": why or f"The batch has {batch.status}." if batch.status != "cancelled" else "Cancelled."}
        payload |= dict(zip(("internalCode", "httpCode"), codes, strict=True))
    else:
        return None
    model = about.get("model") or ""
    metadata = {"accountId": batch.caller.account, "eventSchemaVersion": 1, "eventTimestamp": iso(now, "milliseconds")}
    source = {"type": "workersAi.model", "modelName": model}
    kind = CLOUDFLARE_BATCH + kind
    return Event(kind, {"type": kind, "source": source, "payload": payload, "metadata": metadata}, model)


def for_subscription(event: Event, subscription_id: str) -> bytes:
    """The event's body as JSON, with the name of the subscription where Cloudflare's form has a place for it."""
    body = dict(event.body)
    if "metadata" in body:
        body["metadata"] = {**body["metadata"], "eventSubscriptionId": subscription_id}
    return msgspec.json.encode(body)


def iso(at: float, timespec: str = "seconds") -> str:
    return datetime.fromtimestamp(at, UTC).isoformat(timespec=timespec).replace("+00:00", "Z")
