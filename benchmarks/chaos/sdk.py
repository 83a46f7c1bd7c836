"""The same asks through unmodified client libraries: OpenAI's, Anthropic's and Cloudflare's.

What they raise is told as httpx's errors, so that a client is judged in one way however it asks. They retry by
themselves only where a key makes a request idempotent: otherwise each request must be one, to be found in the ledger.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import AsyncGenerator, Callable, Iterator
from typing import Any

import anthropic
import cloudflare
import httpx
import httpx2
import openai
from pydantic import BaseModel

from benchmarks.chaos.asks import Ask
from benchmarks.chaos.dialects import CHAT, MESSAGES, NATIVE, NUMBERS, RESPONSES, Seen
from benchmarks.chaos.resuming import AGAIN_S, EMPTY
from serve_app.api.retry_after import HEADER

RETRIES = 8
STATUS = (openai.APIStatusError, anthropic.APIStatusError, cloudflare.APIStatusError)
CONNECTION = (
    openai.APIConnectionError,
    anthropic.APIConnectionError,
    cloudflare.APIConnectionError,
    httpx2.TransportError,
)
NATIVE_RUN = "/client/v4/accounts/local/ai/run/"


class Sdks:
    """One client of each library."""

    def __init__(self, url: str, key: str, timeout_s: float) -> None:
        more: dict[str, Any] = {"timeout": timeout_s, "max_retries": 0}
        self._openai = openai.AsyncOpenAI(api_key=key, base_url=f"{url}/v1", **more)
        self._anthropic = anthropic.AsyncAnthropic(api_key=key, base_url=url, **more)
        self._cloudflare = cloudflare.AsyncCloudflare(api_token=key, base_url=f"{url}/client/v4", **more)

    async def close(self) -> None:
        for client in (self._openai, self._anthropic, self._cloudflare):
            await client.close()

    @staticmethod
    def knows(ask: Ask, stream: bool, resumes: bool) -> bool:
        """Whether one of the libraries can send it. Cloudflare's has no streams, and of streams that resume OpenAI's
        knows responses in the background.
        """
        return not (stream and ask.dialect is NATIVE) and (not resumes or ask.dialect is RESPONSES)

    @staticmethod
    def repeats(ask: Ask) -> bool:
        """Whether the answer says which request it was made for: only then may it be asked for under a key."""
        return ask.dialect in (CHAT, RESPONSES, MESSAGES)

    async def whole(self, ask: Ask, seen: Seen, key: str = "") -> None:
        """``key``: of an idempotent request, which the library sends again by itself."""
        with _as_httpx(seen):
            raw = await self._create(ask, key)(**_split(self._create(ask, key), ask))
            seen.request = raw.headers.get("cf-ray", "")
            body = _plain(await _parsed(raw))
            if key:
                seen.request = body["id"].rpartition("-")[2].rpartition("_")[2]
            ask.dialect.whole(seen, {"result": body} if ask.path.startswith(NATIVE_RUN) else body)
            seen.finished = True

    async def stream(self, ask: Ask, seen: Seen, leaves: int | None) -> None:
        create = self._create(ask)
        with _as_httpx(seen):
            raw = await create(**_split(create, ask, stream=True))
            seen.request = raw.headers.get("cf-ray", "")
            if await _read(ask, seen, await _parsed(raw), leaves):
                # What an unmodified client takes for the end; that it is one is seen by the text.
                seen.finished = seen.finished or ask.dialect.done

    async def background(self, ask: Ask, seen: Seen, leaves: int | None) -> int:
        """A response that is made in the background, read to its end over any number of connections; how often one
        was lost.
        """
        create, lost, empty, last = self._create(ask), 0, 0, -1
        sent = {**_split(create, ask, stream=True), "background": True}
        while empty < EMPTY:
            before, answered = last, False
            try:
                with _as_httpx(seen, begun=bool(seen.response)):
                    if not seen.response:
                        raw = await create(**sent)
                        seen.request = raw.headers.get("cf-ray", "")
                        events = await _parsed(raw)
                    else:
                        events = await self._openai.responses.retrieve(seen.response, stream=True, starting_after=last)
                    async with contextlib.aclosing(_events(events)) as each:
                        async for event in each:
                            if event["sequence_number"] != last + 1:
                                raise ValueError(f"event {event['sequence_number']} follows event {last}")
                            last += 1
                            if event["type"] == "response.created":
                                seen.response = event["response"]["id"]
                            ask.dialect.event(seen, event)
                            if last == leaves:
                                leaves = None
                                break
                    answered = True
            except httpx.TransportError:
                if not seen.response:
                    raise
            except httpx.HTTPStatusError as refused:
                if not (seen.response and refused.response.status_code in (429, 503)):
                    raise
            if seen.finished or seen.error is not None:
                return lost
            if last > before or answered:  # while the server starts anew nobody answers
                empty = empty + 1 if last == before else 0
            lost += 1
            await asyncio.sleep(AGAIN_S)
        raise ValueError(f"a response in the background has ended behind event {last} without its end")

    def _create(self, ask: Ask, key: str = "") -> Callable[..., Any]:
        more: dict[str, Any] = {}
        if key:
            more = {"max_retries": RETRIES, "default_headers": {"Idempotency-Key": key}}
        if ask.dialect is MESSAGES:
            return self._anthropic.with_options(**more).messages.with_raw_response.create
        if ask.path.startswith(NATIVE_RUN):
            return self._cloudflare.with_options(**more).ai.with_raw_response.run
        client = self._openai.with_options(**more)
        if ask.dialect is RESPONSES:
            return client.responses.with_raw_response.create
        if ask.dialect is NUMBERS:
            return client.embeddings.with_raw_response.create
        part = client.chat.completions if ask.path.endswith("/chat/completions") else client.completions
        return part.with_raw_response.create


def _split(create: Callable[..., Any], ask: Ask, stream: bool = False) -> dict[str, Any]:
    """The body as the library's own arguments, and what it has none for as its ``extra_body``."""
    known = inspect.signature(create).parameters
    body = {**ask.body, **({"stream": True} if stream else {})}
    if not stream:
        body.pop("stream_options", None)
    sent = {name: value for name, value in body.items() if name in known}
    if rest := {name: value for name, value in body.items() if name not in known}:
        sent["extra_body"] = rest
    if ask.path.startswith(NATIVE_RUN):
        sent |= {"model_name": ask.path.removeprefix(NATIVE_RUN), "account_id": "local"}
        if "query" in body:
            # It knows rerankers by nothing else.
            sent["text"] = ""
    return sent


async def _parsed(raw: Any) -> Any:
    """Some of the libraries parse at once."""
    found = raw.parse()
    return await found if inspect.isawaitable(found) else found


async def _read(ask: Ask, seen: Seen, events: Any, leaves: int | None) -> bool:
    """Whether the events came to their end."""
    count = 0
    async with contextlib.aclosing(_events(events)) as each:
        async for event in each:
            ask.dialect.event(seen, event)
            count += 1
            if leaves is not None and count >= leaves:
                return False
    return True


async def _events(events: Any) -> AsyncGenerator[dict[str, Any], None]:
    try:
        async for event in events:
            yield _plain(event)
    finally:
        await events.close()


def _plain(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return value.to_dict() if hasattr(value, "to_dict") else value.model_dump(exclude_unset=True)
    if isinstance(value, dict):
        return {name: _plain(inner) for name, inner in value.items()}
    return [_plain(inner) for inner in value] if isinstance(value, list) else value


@contextlib.contextmanager
def _as_httpx(seen: Seen, *, begun: bool = False) -> Iterator[None]:
    """``begun``: what is refused now is not the request itself."""
    try:
        yield
    except STATUS as error:
        answer: Any = error.response
        if answer.status_code < 400:
            seen.error = error.body or str(error)
            return
        if not begun:
            seen.request, seen.refused = answer.headers.get("cf-ray", ""), True
        headers = {name: answer.headers[name] for name in (HEADER, "cf-ray") if name in answer.headers}
        request = httpx.Request("POST", str(answer.url))
        told = httpx.Response(answer.status_code, headers=headers, content=answer.content, request=request)
        raise httpx.HTTPStatusError(str(error), request=request, response=told) from error
    except CONNECTION as error:
        raise httpx.ReadError(repr(error)) from error
    except (openai.APIError, anthropic.APIError, cloudflare.APIError) as error:
        seen.error = error.body or str(error)
