"""Answers for clients that speak HTTP/1.0, which has no chunks: whole, with their length.

HTTP servers and HAProxy write an answer without a length in chunks whatever the client speaks. So a stream of events
comes at its end, all at once.
"""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send


class Lengths:
    """ASGI middleware that gives every answer to HTTP/1.0 a length."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope.get("http_version") != "1.0":
            await self._app(scope, receive, send)
            return
        start: Message = {}
        body = bytearray()

        async def held(message: Message) -> None:
            nonlocal start
            if message["type"] == "http.response.start":
                start = message
            elif message["type"] != "http.response.body":
                await send(message)
            else:
                body.extend(message.get("body", b""))
                if not message.get("more_body", False):
                    kept = [(name, value) for name, value in start["headers"] if name.lower() != b"content-length"]
                    await send({**start, "headers": [*kept, (b"content-length", str(len(body)).encode())]})
                    await send({"type": "http.response.body", "body": bytes(body)})

        await self._app(scope, receive, held)
