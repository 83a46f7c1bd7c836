"""HTTP to one other cluster: what it offers, and requests that are passed to it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable

import httpx

from serve_app.wire.message import BadMessage
from serve_app.wire.neighbours import MEDIA_TYPE, Frames, Offers, PassCall, PassedTokens, PassFailed, read_offers
from serve_app.wire.tokens import TokenItem

OFFERS, PASS = "/v1/neighbours/offers", "/v1/neighbours/pass"
CONNECT_S = 2.0
ASK_S = 3.0
# A stream that says nothing for so long, not even that it is alive, is lost; signs of life come every few seconds.
SILENT_S = 15.0
END_S = 0.1
MAX_OFFERS = 4 << 20


class NotPassed(Exception):
    """The request has not begun there, and why."""


class Client:
    """``url``: the root of the other cluster's API. No redirect is followed: it would take the key along."""

    def __init__(self, url: str, key: str, transport: httpx.AsyncBaseTransport | None = None) -> None:
        timeout = httpx.Timeout(None, connect=CONNECT_S, pool=CONNECT_S)
        limits = httpx.Limits(max_connections=1024, max_keepalive_connections=64, keepalive_expiry=30)
        headers = {"Authorization": f"Bearer {key}", "Content-Type": MEDIA_TYPE}
        self._http = httpx.AsyncClient(
            base_url=url, headers=headers, timeout=timeout, limits=limits, transport=transport, trust_env=False
        )

    async def offers(self, gateway: str) -> tuple[Offers, float]:
        """What it offers to this ``gateway``, and the seconds that asking took. Raises :class:`NotPassed`."""
        began = time.monotonic()
        try:
            async with asyncio.timeout(ASK_S):
                answer = await self._http.get(OFFERS, params={"gateway": gateway})
        except (httpx.HTTPError, OSError) as error:
            raise NotPassed(_told(error)) from None
        if answer.status_code != 200 or len(answer.content) > MAX_OFFERS:
            raise NotPassed(f"status {answer.status_code}")
        try:
            return read_offers(answer.content), time.monotonic() - began
        except BadMessage as error:
            raise NotPassed(str(error)[:200]) from None

    async def begin(self, call: PassCall, trace: str, patience_s: float) -> Stream:
        """The request, once its first token is there. Raises :class:`NotPassed`, also after ``patience_s`` without
        one.
        """
        headers = {"traceparent": trace} if trace else {}
        request = self._http.build_request("POST", PASS, content=call.encode(), headers=headers)
        stream: Stream | None = None
        try:
            async with asyncio.timeout(patience_s):
                response = await self._http.send(request, stream=True)
                stream = Stream(response)
                if response.status_code != 200:
                    raise NotPassed(f"status {response.status_code}")
                await stream.begin()
        except (httpx.HTTPError, OSError, BadMessage) as error:
            await _closed(stream)
            raise NotPassed(_told(error)) from None
        except BaseException:
            await _closed(stream)
            raise
        return stream

    async def aclose(self) -> None:
        await self._http.aclose()


class Stream:
    """One passed request. ``ended`` is told once how it went: served, left (by whoever reads it) or lost, and why."""

    def __init__(self, response: httpx.Response) -> None:
        self._response = response
        self._chunks = response.aiter_raw()
        self._frames = Frames()
        self._ready: list[PassedTokens | PassFailed] = []
        self._offset = 0
        self.ended: Callable[[str, str], None] = lambda how, why: None
        self._over = False

    async def begin(self) -> None:
        """Until the first frame is there."""
        while not self._ready:
            if not await self._more():
                raise NotPassed("it ended without a token")
        if isinstance(first := self._ready[0], PassFailed):
            raise NotPassed(first.error[:200])

    async def items(self) -> AsyncIterator[TokenItem]:
        """As :class:`serve_app.gateway.backends.elsewhere.Passed` has it."""
        try:
            while True:
                while self._ready:
                    one = self._ready.pop(0)
                    if isinstance(one, PassFailed):
                        raise NotPassed(one.error[:200])
                    if one.finish is not None:
                        self._end("served")
                    yield TokenItem("", self._offset, one.ids, one.finish, one.logprobs, one.cached)
                    self._offset += len(one.ids)
                    if one.finish is not None:
                        return
                async with asyncio.timeout(SILENT_S):
                    if not await self._more():
                        raise NotPassed("it ended in the middle")
        except (NotPassed, httpx.HTTPError, OSError, BadMessage) as error:
            self._end("lost", _told(error))

    async def _more(self) -> bool:
        data = await anext(self._chunks, None)
        if data is None:
            return False
        self._ready += self._frames.feed(data)
        return True

    async def aclose(self) -> None:
        with contextlib.suppress(httpx.HTTPError, OSError):
            if self._over:
                # The end follows the last token at once; a connection that was read to its end serves again.
                async with asyncio.timeout(END_S):
                    while await anext(self._chunks, None) is not None:
                        pass
            self._end("left")
        with contextlib.suppress(httpx.HTTPError, OSError):
            await self._response.aclose()

    def _end(self, how: str, why: str = "") -> None:
        if not self._over:
            self._over = True
            self.ended(how, why)


async def _closed(stream: Stream | None) -> None:
    if stream is not None:
        await stream.aclose()


def _told(error: BaseException) -> str:
    """For logs: what it is, and nothing that was sent."""
    if isinstance(error, TimeoutError):
        return "it took too long"
    return str(error)[:200] if isinstance(error, NotPassed | BadMessage) else type(error).__name__
