"""One id per request: in every answer's headers, and before every line that the request writes to the log."""

from __future__ import annotations

import logging
import secrets
import time
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve_app import logs
from serve_app.api import identity, trace_context
from serve_app.api.errors import current_request as current
from serve_app.api.trace_context import TraceContext
from serve_app.gateway.tracing.export import Tracing

# Cloudflare's name, and the one that Anthropic's clients read.
HEADERS = (b"cf-ray", b"request-id")

log = logging.getLogger("ray.serve")


class RequestId:
    """ASGI middleware that draws the id, and takes over the trace that a client names (``traceparent``), which is given
    back with the gateway's span (``traceresponse``). A refused or failed request gets one line in the log, and where
    nothing of it was begun a span of its own. Of a WebSocket, a refusal has one: by it HAProxy knows what is ours.
    """

    def __init__(self, app: ASGIApp, tracing: Tracing) -> None:
        self._app = app
        self._tracing = tracing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await self._app(scope, receive, _refused(send))
            return
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        # Random in all bits, since samplers take some of them for a random number.
        request_id = secrets.token_hex(16)
        current.set(request_id)
        own = identity.Identity(request_id, time.time())
        identity.current.set(own)
        known = _trace(scope)
        trace_context.current.set(known)
        started = time.monotonic()

        async def tagged(message: Message) -> None:
            if message["type"] == "http.response.start":
                added = _headers(request_id)
                if known is not None:
                    sampled = self._tracing.sampled(request_id, known)
                    given = trace_context.traceresponse(request_id, known, sampled=sampled)
                    added.append((b"traceresponse", given.encode()))
                message = {**message, "headers": [*message.get("headers", ()), *added]}
                # Who asks for health while models load asks several times a second, and 503 is what they expect.
                if message["status"] >= 400 and scope["path"] != "/health":
                    took, method, path = time.monotonic() - started, scope["method"], scope["path"][:200]
                    log.info("%s %s: %d after %.1f ms", method, path, message["status"], took * 1e3)
                    if not own.begun:
                        self._tracing.refused(request_id, known, _told(method, path, message["status"]), took)
            await send(message)

        await self._app(scope, receive, tagged)


def _headers(request_id: str) -> list[tuple[bytes, bytes]]:
    return [(name, request_id.encode()) for name in HEADERS]


def _refused(send: Send) -> Send:
    async def tagged(message: Message) -> None:
        if message["type"] == "websocket.http.response.start":
            message = {**message, "headers": [*message.get("headers", ()), *_headers(secrets.token_hex(16))]}
        await send(message)

    return tagged


def _told(method: str, path: str, status: int) -> dict[str, Any]:
    """Of a refused request, by the conventions for HTTP."""
    found = {"http.request.method": method, "url.path": path, "http.response.status_code": status}
    return {**found, "error.type": str(status)}


def _trace(scope: Scope) -> TraceContext | None:
    """The client's; a request has one ``traceparent`` or none."""
    found = {name: value for name, value in scope["headers"] if name in (b"traceparent", b"tracestate")}
    if (parent := found.get(b"traceparent")) is None:
        return None
    return trace_context.read_traceparent(parent.decode("latin-1"), found.get(b"tracestate", b"").decode("latin-1"))


class _Prefix(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        # In JSON it is a field of its own.
        if not logs.as_json() and (request_id := current.get()):
            record.msg = f"[{request_id}] {record.msg}"
        return True


_prefix = _Prefix()


def tag(logger: logging.Logger) -> None:
    """Puts the id of the request at hand before every line of ``logger``; asking twice changes nothing."""
    logger.addFilter(_prefix)


def ids_at_hand() -> tuple[str, str]:
    """Of the request at hand and its trace, for logs."""
    request_id = current.get()
    return request_id, trace_context.trace_id_of(request_id)
