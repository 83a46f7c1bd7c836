"""From the trace record of a request to spans::

    chat @cf/pico/pico-instruct                     [gateway, from arrival to settlement]
      queue     |------|                            [received -> routed]
      prefill          |--------|                   [routed -> K/V is there, or first token]
      hand-over                 |-|                 [end of prefill elsewhere -> decode begins]
      decode                       |-------------|  [first token -> end]

Nothing is measured here. Of a request with several generations the first times and the last end count.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode

SCOPE = InstrumentationScope("serve_app")
# GenAI semantic conventions' names of what tasks do.
_OPERATIONS = {"text-generation": "chat", "text-embeddings": "embeddings"}
_PROMPT = ("own", "node", "disk", "remote", "prefilled", "computed")


@dataclass(slots=True, frozen=True)
class Ended:
    """A request that has ended: the gateway's span, its parent, and the record. It waits in the queue as it is, and
    becomes spans where they are sent.
    """

    context: SpanContext
    parent: SpanContext | None
    body: Mapping[str, Any]
    account: str
    task: str


def spans_of(ended: Ended, resource: Resource) -> list[ReadableSpan]:
    """The gateway's span and those below it."""
    body, events = ended.body, ended.body["events"]
    began = round(body["created"] * 1e3) * 1_000_000
    first: dict[str, Mapping[str, Any]] = {}
    last: dict[str, Mapping[str, Any]] = {}
    for event in events:
        first.setdefault(event["event"], event)
        last[event["event"]] = event
    received, final, path = first["received"], last.get(body["status"], events[-1]), last.get("decoded", {})

    def at(ms: float) -> int:
        return began + round(ms * 1e6)

    def below(name: str, start_ms: float, end_ms: float, **facts: Any) -> ReadableSpan:
        own = SpanContext(
            ended.context.trace_id, random.getrandbits(64) or 1, False, ended.context.trace_flags,
            ended.context.trace_state,
        )  # fmt: skip
        return ReadableSpan(
            name, own, ended.context, resource, _given(facts), start_time=at(start_ms),
            end_time=at(max(start_ms, end_ms)), instrumentation_scope=SCOPE,
        )  # fmt: skip

    operation = _OPERATIONS.get(ended.task, ended.task)
    token, routed = first.get("first token"), first.get("routed")
    about = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "serve_app",
        "gen_ai.request.model": body["model"],
        "gen_ai.response.model": body["model"],
        "gen_ai.request.max_tokens": received.get("max_tokens"),
        "gen_ai.usage.input_tokens": received.get("prompt_tokens"),
        "gen_ai.usage.output_tokens": final.get("completion_tokens"),
        "gen_ai.usage.cache_read.input_tokens": final.get("cached_tokens"),
        "gen_ai.response.time_to_first_chunk": None if token is None else token["ms"] / 1e3,
        "serve_app.request_id": body["id"],
        "serve_app.account": ended.account,
        "serve_app.status": body["status"],
        "error.type": body["status"] if body["status"] in ("failed", "refused") else None,
    }
    told = [
        Event(event["event"], _given({k: v for k, v in event.items() if k not in ("event", "ms")}), at(event["ms"]))
        for event in events
        if event["event"] in ("queued", "worker lost", "answered")
    ]
    found = [
        ReadableSpan(
            f"{operation} {body['model']}", ended.context, ended.parent, resource, _given(about), told,
            kind=SpanKind.SERVER,
            status=Status(StatusCode.ERROR if body["status"] == "failed" else StatusCode.UNSET),
            start_time=began, end_time=at(max(event["ms"] for event in events)), instrumentation_scope=SCOPE,
        )
    ]  # fmt: skip
    if routed is None:
        if "queued" in first:
            found.append(below("queue", received["ms"], final["ms"]))
        return found
    facts = {"serve_app.why": routed.get("why"), "serve_app.ahead_tokens": first.get("queued", {}).get("ahead_tokens")}
    found.append(below("queue", received["ms"], routed["ms"], **facts))
    if token is None:
        return found
    ready = token["ms"]
    if took := path.get("handover_s", 0.0):
        # The worker has measured from when it began; its first token is the one thing that both clocks know.
        ready = max(routed["ms"], token["ms"] + (path["handover_at_s"] - path["ttft_s"]) * 1e3)
    prompt = {f"serve_app.prompt_tokens.{name}": path.get(name) for name in _PROMPT}
    found.append(below("prefill", routed["ms"], ready, **prompt, **{"serve_app.replica": routed.get("prefill")}))
    if took:
        moved = {"serve_app.bytes": path["bytes"], "serve_app.early_bytes": path["early_bytes"]}
        found.append(below("hand-over", ready, min(token["ms"], ready + took * 1e3), **moved))
    facts = {
        "gen_ai.usage.output_tokens": final.get("completion_tokens"),
        "serve_app.replica": path.get("replica") or routed.get("decode"),
        "serve_app.drafted_tokens": path.get("drafted_tokens"),
        "serve_app.accepted_tokens": path.get("accepted_tokens"),
    }
    found.append(below("decode", token["ms"], final["ms"], **facts))
    return found


def _given(facts: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in facts.items() if value is not None}
