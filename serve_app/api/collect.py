"""Event streams: gathering one into whole choices, and joining several into one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, field, replace

from serve_app.api.errors import Timeout
from serve_app.api.types import (
    Event,
    FinishReason,
    PromptTokens,
    ReasoningDelta,
    TextDelta,
    TokenLogprob,
    ToolCallDelta,
    Usage,
)


@dataclass(slots=True)
class Choice:
    """One complete answer."""

    text: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCallDelta] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: FinishReason = "stop"
    prompt: PromptTokens | None = None
    token_ids: tuple[int, ...] = ()


def collect(events: Iterable[Event]) -> tuple[list[Choice], Usage]:
    """All choices in order of their index, and the usage."""
    choices: dict[int, Choice] = {}
    texts: dict[int, list[str]] = {}
    usage = Usage()
    for event in events:
        if isinstance(event, Usage):
            usage = event
            continue
        choice = choices.setdefault(event.index, Choice())
        if isinstance(event, TextDelta):
            texts.setdefault(event.index, []).append(event.text)
            choice.logprobs.extend(event.logprobs or ())
        elif isinstance(event, ReasoningDelta):
            choice.reasoning += event.text
        elif isinstance(event, ToolCallDelta):
            join_call(choice.tool_calls, event)
        elif isinstance(event, PromptTokens):
            choice.prompt = event
        else:
            choice.finish_reason, choice.token_ids = event.finish_reason, event.token_ids
    for index, pieces in texts.items():
        choices[index].text = "".join(pieces)
    return [choices[index] for index in sorted(choices)] or [Choice()], usage


def join_call(calls: list[ToolCallDelta], part: ToolCallDelta) -> ToolCallDelta:
    """Adds ``part`` to the last of ``calls``, or as a new one, and gives that call as it is now."""
    if not calls or calls[-1].call_index != part.call_index:
        calls.append(part)
    else:
        calls[-1] = replace(calls[-1], arguments=calls[-1].arguments + part.arguments, last=part.last)
    return calls[-1]


async def merge(streams: Sequence[AsyncIterator[Event]], choices_each: int = 1) -> AsyncIterator[Event]:
    """The events of several requests as those of one: choice ``i`` of stream ``s`` becomes ``s * choices_each
    + i``.

    Events come in the order in which they arrive, one `Usage` with the sums comes last. If one stream fails
    or the reader leaves, all are closed.
    """
    if len(streams) == 1:
        async for event in streams[0]:
            yield event
        return
    total = Usage()
    running = [Usage(final=False) for _ in streams]
    tasks: dict[asyncio.Task[Event | None], int] = {}

    async def take(number: int) -> Event | None:
        return await anext(streams[number], None)

    try:
        for number in range(len(streams)):
            tasks[asyncio.create_task(take(number))] = number
        while tasks:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                number = tasks.pop(task)
                found = task.result()
                if found is None:
                    continue
                if isinstance(found, Usage) and not found.final:
                    running[number] = found
                    so_far = Usage(final=False)
                    for one in running:
                        _add(so_far, one)
                    yield so_far
                elif isinstance(found, Usage):
                    _add(total, found)
                else:
                    yield replace(found, index=found.index + number * choices_each)
                # Not before: a stream that is asked for more knows that what it gave has been taken.
                tasks[asyncio.create_task(take(number))] = number
        yield total
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for stream in streams:
            if hasattr(stream, "aclose"):
                await stream.aclose()


def _add(total: Usage, more: Usage) -> None:
    total.prompt_tokens += more.prompt_tokens
    total.completion_tokens += more.completion_tokens
    total.cached_tokens += more.cached_tokens
    total.micro_neurons += more.micro_neurons
    if more.nano_cost is not None:
        total.nano_cost, total.currency = (total.nano_cost or 0) + more.nano_cost, more.currency
    total.reasoning_tokens += more.reasoning_tokens


async def begun_within(events: AsyncIterator[Event], seconds: float) -> AsyncIterator[Event]:
    """``events``, whose first one must come within ``seconds``; raises `Timeout` and ends them otherwise."""
    try:
        try:
            async with asyncio.timeout(seconds):
                first = await anext(events, None)
        except TimeoutError:
            raise Timeout(f"No answer had begun within the {seconds:g} seconds that the request allows.") from None
        if first is None:
            return
        yield first
        async for event in events:
            yield event
    finally:
        if hasattr(events, "aclose"):
            await events.aclose()
