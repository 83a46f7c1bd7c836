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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, ClassVar

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status
from opentelemetry.trace import SpanContext, TraceFlags, TraceState

from serve_app.api.trace_context import TraceContext
from serve_app.catalog.tasks import declared

_PROMPT = {f"serve_app.prompt_tokens.{n}": n for n in ("own", "node", "disk", "remote", "prefilled", "computed")}
_TOLD = ("queued", "worker lost", "answered")
# Of a span's flags: that the two bits above say whether its parent is of another process, and that it is.
_HAS_REMOTE, _IS_REMOTE = 0x100, 0x200
_ROOT = 1 | _HAS_REMOTE
# Attributes by name; None is left out.
Words = tuple[tuple[str, str | None], ...]


# What waits in the queue is sampled; the queue asks for that.
SAMPLED = SpanContext(1, 1, False, TraceFlags(TraceFlags.SAMPLED))


@dataclass(slots=True, frozen=True)
class Ended:
    """A request that has ended, by its id, the client's trace and the record. It waits in the queue as it is, and
    becomes spans where they are sent.
    """

    id: str
    known: TraceContext | None
    body: Mapping[str, Any]
    account: str
    task: str
    context: ClassVar[SpanContext] = SAMPLED


@dataclass(slots=True, frozen=True)
class Refused:
    """A request that was refused before anything was begun: ``told`` of it, when (unix seconds) and after how long."""

    id: str
    known: TraceContext | None
    told: Mapping[str, Any]
    at: float
    seconds: float
    context: ClassVar[SpanContext] = SAMPLED


def export_request(ended: Sequence[Ended | Refused], resource: Resource) -> ExportTraceServiceRequest:
    """What a receiver is sent. Written as it goes over the wire: the SDK's own spans in between would cost ten times as
    much.
    """
    found = ExportTraceServiceRequest()
    group = found.resource_spans.add(resource=resource)
    scope = group.scope_spans.add()
    scope.scope.name = "serve_app"
    for each in ended:
        if isinstance(each, Refused):
            add_refused(each, scope.spans)
        else:
            add_spans(each, scope.spans)
    return found


def _names(request_id: str, known: TraceContext | None) -> dict[str, Any]:
    """What the span of the gateway is called, and its parent."""
    own = bytes.fromhex(request_id[:16])
    if known is None:
        return {"trace_id": bytes.fromhex(request_id), "span_id": own}
    found: dict[str, Any] = {
        "trace_id": bytes.fromhex(known.trace_id),
        "span_id": own,
        "parent_span_id": bytes.fromhex(known.parent_id),
    }
    if known.state:
        found["trace_state"] = TraceState.from_header([known.state]).to_header()
    return found


def _flags(known: TraceContext | None) -> int:
    return _ROOT if known is None else _ROOT | _IS_REMOTE


def add_refused(refused: Refused, spans: Any) -> None:
    """Adds the one span that there is."""
    ended = round(refused.at * 1e9)
    span = spans.add(
        **_names(refused.id, refused.known),
        name=str(refused.told.get("http.request.method", "request")),
        kind=Span.SPAN_KIND_SERVER,
        flags=_flags(refused.known),
        start_time_unix_nano=ended - round(refused.seconds * 1e9),
        end_time_unix_nano=ended,
    )
    if refused.told.get("http.response.status_code", 0) >= 500:
        span.status.code = Status.STATUS_CODE_ERROR
    _tell(span, {**refused.told, "serve_app.request_id": refused.id, "serve_app.status": "refused"})


def add_spans(ended: Ended, spans: Any) -> None:
    """Adds the gateway's span and those below it to ``spans``."""
    body, events = ended.body, ended.body["events"]
    began = round(body["created"] * 1e3) * 1_000_000
    first: dict[str, Mapping[str, Any]] = {}
    last: dict[str, Mapping[str, Any]] = {}
    for event in events:
        first.setdefault(event["event"], event)
        last[event["event"]] = event
    received, final, path = first["received"], last.get(body["status"], events[-1]), last.get("decoded", {})
    token, routed = first.get("first token"), first.get("routed")
    status, operation = body["status"], _operation(ended.task)

    own = _names(ended.id, ended.known)
    below_it = {**own, "parent_span_id": own["span_id"]}

    def add(start_ms: float, end_ms: float, ids: Mapping[str, Any], standing: bytes, facts: Mapping[str, Any]) -> Any:
        found = spans.add(
            start_time_unix_nano=began + round(start_ms * 1e6),
            end_time_unix_nano=began + round(max(start_ms, end_ms) * 1e6),
            **ids,
        )
        found.MergeFromString(standing + b"".join([_number(*each) for each in facts.items() if each[1] is not None]))
        return found

    def below(name: str, start_ms: float, end_ms: float, facts: Mapping[str, Any], words: Words = ()) -> None:
        below_it["span_id"] = (random.getrandbits(64) or 1).to_bytes(8, "big")
        add(start_ms, end_ms, below_it, _standing(name, Span.SPAN_KIND_INTERNAL, 1 | _HAS_REMOTE, words), facts)

    last_ms = max(event["ms"] for event in events)
    words: Words = (
        ("gen_ai.operation.name", operation),
        ("gen_ai.provider.name", "serve_app"),
        ("gen_ai.request.model", body["model"]),
        ("gen_ai.response.model", body["model"]),
        ("serve_app.account", ended.account),
        ("serve_app.status", status),
        ("error.type", status if status in ("failed", "refused") else None),
    )
    numbers = {
        "gen_ai.request.max_tokens": received.get("max_tokens"),
        "gen_ai.usage.input_tokens": received.get("prompt_tokens"),
        "gen_ai.usage.output_tokens": final.get("completion_tokens"),
        "gen_ai.usage.cache_read.input_tokens": final.get("cached_tokens"),
    }
    standing = _standing(f"{operation} {body['model']}", Span.SPAN_KIND_SERVER, _flags(ended.known), words)
    span = add(0.0, last_ms, own, standing, numbers)
    if status == "failed":
        span.status.code = Status.STATUS_CODE_ERROR
    first_s = None if token is None else token["ms"] / 1e3
    _tell(span, {"serve_app.request_id": body["id"], "gen_ai.response.time_to_first_chunk": first_s})
    for event in events:
        if event["event"] in _TOLD:
            told = span.events.add(name=event["event"], time_unix_nano=began + round(event["ms"] * 1e6))
            _tell(told, {name: value for name, value in event.items() if name not in ("event", "ms")})
    if routed is None:
        if "queued" in first:
            below("queue", received["ms"], final["ms"], {})
        return
    ahead = first["queued"].get("ahead_tokens") if "queued" in first else None
    below(
        "queue",
        received["ms"],
        routed["ms"],
        {"serve_app.ahead_tokens": ahead},
        (("serve_app.why", routed.get("why")),),
    )
    if token is None:
        return
    ready, took = token["ms"], path.get("handover_s", 0.0)
    if took:
        # The worker has measured from when it began; its first token is the one thing that both clocks know.
        ready = max(routed["ms"], token["ms"] + (path["handover_at_s"] - path["ttft_s"]) * 1e3)
    prompt = {name: path[source] for name, source in _PROMPT.items() if path.get(source)}
    below("prefill", routed["ms"], ready, prompt, (("serve_app.replica", routed.get("prefill")),))
    if took:
        moved = {"serve_app.bytes": path.get("bytes"), "serve_app.early_bytes": path.get("early_bytes")}
        below("hand-over", ready, min(token["ms"], ready + took * 1e3), moved)
    facts = {
        "gen_ai.usage.output_tokens": final.get("completion_tokens"),
        "serve_app.drafted_tokens": path.get("drafted_tokens") or None,
        "serve_app.accepted_tokens": path.get("accepted_tokens") or None,
    }
    below(
        "decode", token["ms"], final["ms"], facts, (("serve_app.replica", path.get("replica") or routed.get("decode")),)
    )


# A span in bytes is a sum: what its parts say, and lists one behind the other. To put bytes into a span costs a
# fraction of what attributes cost one by one, so what comes again is kept as it is sent, and counts are written so:
# https://protobuf.dev/programming-guides/encoding/


@lru_cache(4096)
def _standing(name: str, kind: Span.SpanKind.ValueType, flags: int, words: Words) -> bytes:
    span = Span(name=name, kind=kind, flags=flags)
    _tell(span, dict(words))
    return span.SerializeToString()


def _number(name: str, value: int) -> bytes:
    """A span's attribute that counts something. What is no count goes the library's way: one wrong record must not end
    all that are sent with it.
    """
    if type(value) is not int or value < 0:
        span = Span()
        _tell(span, {name: value})
        return span.SerializeToString()
    low = []
    while value > 127:
        low.append(value & 127 | 128)
        value >>= 7
    key, size = _key(name)
    # attributes = 9 { key = 1, value = 2 { int_value = 3 } }, each a tag, a length and what it holds.
    return b"J%c%b\x12%c\x18%b%c" % (size + len(low) + 6, key, len(low) + 2, bytes(low), value)


@cache
def _key(name: str) -> tuple[bytes, int]:
    said = name.encode()
    return b"\n%c%b" % (len(said), said), len(said)


@cache
def _operation(task: str) -> str:
    known = declared().get(task)
    return known.operation or task if known is not None else task


def _tell(span: Any, facts: Mapping[str, Any]) -> None:
    """Adds attributes; None is left out."""
    attributes = span.attributes
    for name, value in facts.items():
        if value is None:
            continue
        told = attributes.add()
        told.key = name
        if isinstance(value, str):
            told.value.string_value = value
        elif isinstance(value, int):
            told.value.int_value = value
        else:
            told.value.double_value = value
