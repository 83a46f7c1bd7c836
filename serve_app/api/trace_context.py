"""The trace that a request belongs to, as `W3C Trace Context <https://www.w3.org/TR/trace-context/>`_ has it."""

from __future__ import annotations

import re
from contextvars import ContextVar
from dataclasses import dataclass

_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
# What a client may send as tracestate; more is left out, as the standard allows.
MAX_STATE = 512


@dataclass(slots=True, frozen=True)
class TraceContext:
    """``trace_id``: 32 hex digits. ``parent_id``: of the client's span, 16 hex digits. ``sampled``: the client's spans
    are kept. ``state``: its tracestate.
    """

    trace_id: str
    parent_id: str
    sampled: bool
    state: str = ""


# Of the request at hand; None: its client named no trace, and its id is the request's.
current: ContextVar[TraceContext | None] = ContextVar("trace_context", default=None)


def read_traceparent(header: str, state: str = "") -> TraceContext | None:
    """None for a header that is not valid, which counts as none at all."""
    found = _TRACEPARENT.fullmatch(header.strip())
    if found is None:
        return None
    version, trace_id, parent_id, flags, more = found.groups()
    if version == "ff" or (version == "00" and more) or not int(trace_id, 16) or not int(parent_id, 16):
        return None
    return TraceContext(trace_id, parent_id, bool(int(flags, 16) & 1), state if len(state) <= MAX_STATE else "")


def trace_id_of(request_id: str) -> str:
    """Of the request at hand."""
    known = current.get()
    return request_id if known is None else known.trace_id


def span_id_of(request_id: str) -> str:
    """Of the gateway's span: 16 hex digits of the request's id, so that it is known before there is a span."""
    return request_id[:16]


def traceresponse(request_id: str, known: TraceContext, *, sampled: bool) -> str:
    """What is given back to a client that has named its trace."""
    return f"00-{known.trace_id}-{span_id_of(request_id)}-{'01' if sampled else '00'}"
