"""One id per request: in every answer's headers, and before every line that the request writes to the log."""

from __future__ import annotations

import logging
import time
import uuid

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve_app.api import identity
from serve_app.api.errors import current_request as current

# Cloudflare's name, and the one that Anthropic's clients read.
HEADERS = (b"cf-ray", b"request-id")

log = logging.getLogger("ray.serve")


class RequestId:
    """ASGI middleware that draws the id. A refused or failed request gets one line in the log."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = uuid.uuid4().hex
        current.set(request_id)
        identity.current.set(identity.Identity(request_id, time.time()))
        started = time.monotonic()

        async def tagged(message: Message) -> None:
            if message["type"] == "http.response.start":
                added = [(name, request_id.encode()) for name in HEADERS]
                message = {**message, "headers": [*message.get("headers", ()), *added]}
                # Who asks for health while models load asks several times a second, and 503 is what they expect.
                if message["status"] >= 400 and scope["path"] != "/health":
                    took = (time.monotonic() - started) * 1e3
                    log.info("%s %s: %d after %.1f ms", scope["method"], scope["path"][:200], message["status"], took)
            await send(message)

        await self._app(scope, receive, tagged)


class _Prefix(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        if request_id := current.get():
            record.msg = f"[{request_id}] {record.msg}"
        return True


_prefix = _Prefix()


def tag(logger: logging.Logger) -> None:
    """Puts the id of the request at hand before every line of ``logger``; asking twice changes nothing."""
    logger.addFilter(_prefix)
