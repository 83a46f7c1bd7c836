"""What the server has written down: of every answer its tokens, of every stored response its text."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from dataclasses import dataclass

import httpx

from benchmarks.chaos.dialects import RESPONSES, Seen
from benchmarks.chaos.weather import BROKEN, Weather

AT_ONCE = 8
KEPT = 400  # answers that are looked up in the end
WRITTEN_S = 3.0  # an answer's trace is written behind it, and is lost with a gateway that dies meanwhile
# Of a request that took long the store knows that it ran.
LOST = ("status 404", "told as running")
LATE_S = 10.0  # until what was written is found


@dataclass(slots=True, frozen=True)
class Entry:
    """A complete answer."""

    ask: str
    seen: Seen
    ended: float


class Books:
    """The newest answers, until :meth:`check`."""

    def __init__(self) -> None:
        self._entries: deque[Entry] = deque(maxlen=KEPT)

    def note(self, ask: str, seen: Seen) -> None:
        self._entries.append(Entry(ask, seen, time.monotonic()))

    async def check(self, http: httpx.AsyncClient, weather: Weather) -> int:
        """Looks every answer up, when all is quiet; how many were."""
        left = iter(self._entries)

        async def some() -> None:
            for entry in left:
                await _check(http, weather, entry)

        await asyncio.gather(*(some() for _ in range(AT_ONCE)))
        return len(self._entries)


async def _check(http: httpx.AsyncClient, weather: Weather, entry: Entry) -> None:
    if entry.seen.request and (problem := await _eventually(http, _trace_problem, entry)):
        killed = any(BROKEN in w.allowed for w in weather.during(entry.ended, entry.ended + WRITTEN_S))
        if not (killed and problem.endswith(LOST)):
            weather.violation(problem, ask=entry.ask, request=entry.seen.request)
    if entry.seen.response and (problem := await _eventually(http, _response_problem, entry)):
        weather.violation(problem, ask=entry.ask, request=entry.seen.request)


async def _eventually(http: httpx.AsyncClient, look: object, entry: Entry) -> str | None:
    """None, or what is still wrong when what is being written would have been."""
    until = time.monotonic() + LATE_S
    while (problem := await look(http, entry)) and time.monotonic() < until:  # type: ignore[operator]
        await asyncio.sleep(0.5)
    return problem


async def _trace_problem(http: httpx.AsyncClient, entry: Entry) -> str | None:
    answer = await http.get(f"/v1/requests/{entry.seen.request}")
    if answer.status_code != 200:
        return f"the path of a complete answer: status {answer.status_code}"
    told = answer.json()
    if told["status"] != "done":
        return f"a complete answer is told as {told['status']}"
    # Each prompt of a request has an end of its own.
    written = sum(event.get("completion_tokens", 0) for event in told["events"] if event["event"] == "done")
    if entry.seen.usage is not None and written != entry.seen.usage[1]:
        return f"{written} tokens are written down for an answer of {entry.seen.usage[1]}"
    return None


async def _response_problem(http: httpx.AsyncClient, entry: Entry) -> str | None:
    answer = await http.get(f"/v1/responses/{entry.seen.response}")
    if answer.status_code != 200:
        return f"a stored response: status {answer.status_code}"
    kept = Seen()
    RESPONSES.whole(kept, answer.json())
    return None if (kept.texts, kept.usage) == (entry.seen.texts, entry.seen.usage) else "a stored response has changed"
