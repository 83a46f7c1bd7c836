"""The route of OpenAI's Realtime transcription sessions, the only one that is a WebSocket."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from contextlib import suppress
from typing import Any, cast

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect

from serve_app.api.envelopes import openai_body
from serve_app.api.errors import InvalidInput, OutOfCapacity
from serve_app.api.transcripts import TranscribeRequest
from serve_app.gateway.http.auth import authenticate
from serve_app.gateway.http.exchange import RUN, Exchange, error_answer
from serve_app.gateway.http.realtime import Transcribing
from serve_app.gateway.http.routes.prefixes import OPENAI
from serve_app.tasks.model import ServedModel

# Of one gateway, and of one account at it.
SESSIONS = 64
EACH = 16
# Bytes of an event, sixteen seconds of sound, and of those that are not heard yet.
MAX_EVENT_BYTES = 1 << 20
MOST_BEHIND_BYTES = 8 << 20
TOO_LONG = "An event may have at most a mebibyte; send the sound in smaller parts."
TOO_FAST = "The sound comes faster than it is heard; send it slower, or as a file to /v1/audio/transcriptions."
# Without an event, and in all, as OpenAI has it.
IDLE_S = 300.0
LONGEST_S = 3600.0
TOO_LARGE, NORMAL = 1009, 1000
# What a socket raises whose client has gone.
GONE = (RuntimeError, WebSocketDisconnect)


def routes(exchange: Exchange) -> list[WebSocketRoute]:
    route = RealtimeRoute(exchange)
    return [WebSocketRoute(prefix + "/realtime", route.serve) for prefix in OPENAI]


class RealtimeRoute:
    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._open: Counter[str] = Counter()

    async def serve(self, socket: WebSocket) -> None:
        gateway = self._exchange.gateway
        try:
            # Keys alone: a browser would send its session's cookie with a socket of any page.
            account = socket.path_params.get("account")
            caller = authenticate(socket.headers, gateway.state.accounts, account, RUN)
            if socket.query_params.get("intent", "transcription") != "transcription":
                raise InvalidInput("intent must be transcription: other sessions are not served.", param="intent")
            if self._open.total() >= SESSIONS or self._open[caller.account] >= EACH:
                raise OutOfCapacity("Too many sessions are open; close one, or try again later.")
        except Exception as error:
            await _refuse(socket, error_answer(error, openai_body))
            return
        socket.state.caller = caller

        async def find(name: str) -> ServedModel:
            return await self._exchange.model(cast(Request, socket), name, TranscribeRequest)

        async def send(told: dict[str, Any]) -> None:
            with suppress(*GONE):  # as whoever reads will find
                await socket.send_text(orjson.dumps(told).decode())

        session = Transcribing(gateway, caller, socket.query_params.get("model", "")[:512], send, find)
        self._open[caller.account] += 1
        try:
            await socket.accept()
            async with asyncio.timeout(LONGEST_S):
                await session.begin()
                await _read(socket, session)
        except (TimeoutError, WebSocketDisconnect):
            pass
        finally:
            self._open[caller.account] -= 1
            self._open += Counter()  # forgets accounts without any
            await session.close()
            with suppress(*GONE):
                await socket.close(NORMAL)


async def _read(socket: WebSocket, session: Transcribing) -> None:
    """Until the client leaves. Serve reads on whatever waits here, so who sends faster than is heard is sent away."""
    waiting: deque[str] = deque()
    come = asyncio.Event()
    behind = 0

    async def hear() -> None:
        nonlocal behind
        while True:
            await come.wait()
            while waiting:
                text = waiting.popleft()
                await session.take(text)
                behind -= len(text)
            come.clear()

    hearing = asyncio.ensure_future(hear())
    try:
        while not hearing.done():
            message = await asyncio.wait_for(socket.receive(), IDLE_S)
            if message["type"] == "websocket.disconnect":
                return
            text = message.get("text")
            if text is None:
                text = (message.get("bytes") or b"").decode(errors="replace")
            behind += len(text)
            if len(text) > MAX_EVENT_BYTES or behind > MOST_BEHIND_BYTES:
                await session.refuse(TOO_FAST if len(text) <= MAX_EVENT_BYTES else TOO_LONG)
                await socket.close(TOO_LARGE)
                return
            waiting.append(text)
            come.set()
        hearing.result()
    finally:
        hearing.cancel()
        await asyncio.wait({hearing})


async def _refuse(socket: WebSocket, answer: Response) -> None:
    """With its status where the server can, and otherwise by closing what was never open."""
    if "websocket.http.response" in socket.scope.get("extensions", {}):
        await socket.send_denial_response(answer)
    else:
        await socket.close()
