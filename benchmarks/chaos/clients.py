"""Clients who know the answers, and hold the server to them whatever happens to it."""

from __future__ import annotations

import asyncio
import json
import random
import secrets
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import httpx

from benchmarks.chaos import resuming
from benchmarks.chaos.asks import ADAPTERS, Ask, asks, probes
from benchmarks.chaos.batches import Batches
from benchmarks.chaos.books import Books
from benchmarks.chaos.dialects import Seen
from benchmarks.chaos.ledger import Receipts, Told
from benchmarks.chaos.weather import BROKEN, REFUSED, UNSTORED, Weather
from serve_app.api.retry_after import HEADER, wait_told

if TYPE_CHECKING:
    from benchmarks.chaos.sdk import Sdks

LEAVES = 0.15
RESUMES = 0.35  # of the streams
UNMODIFIED = 0.5  # by client libraries as they are, of what these know
IDEMPOTENT = 0.3  # of whole answers, sent again by the library itself
PATIENCE_S = 60.0  # a request that has not ended by then hangs
RETRY_S = 0.3
AT_ONCE = 4  # requests, where nothing else runs

T = TypeVar("T")


@dataclass(slots=True, frozen=True)
class Way:
    """How a request is made. ``leaves``: its client goes after so many events. ``unmodified``: by a client library."""

    stream: bool = False
    leaves: int | None = None
    resumes: bool = False
    unmodified: bool = False
    key: str = ""


class Clients:
    """``counts`` what they saw, ``weather`` says what they may see and keeps what they may not."""

    def __init__(
        self, url: str, key: str, weather: Weather, sdks: Sdks | None = None, more: Sequence[Ask] = ()
    ) -> None:
        """``more``: what is asked beside :func:`asks`; the first of them is a probe as well."""
        limits = httpx.Limits(max_connections=1000, max_keepalive_connections=20)
        headers = {"Authorization": f"Bearer {key}"}
        self.http = httpx.AsyncClient(base_url=url, headers=headers, timeout=PATIENCE_S, limits=limits)
        self.counts: Counter[str] = Counter()
        self.books = Books()
        self.receipts = Receipts()
        self.asked = 0
        self._sdks = sdks
        self._asks = [*asks(), *more]
        self._probes = [*range(len(probes())), *([len(self._asks) - len(more)] if more else [])]
        self._wanted: dict[tuple[int, bool], Seen] = {}
        self._weather = weather

    @property
    def unmodified(self) -> bool:
        """Whether client libraries are among the clients."""
        return self._sdks is not None

    async def learn(self) -> None:
        """Every answer of the quiet server, whole and streamed. Raises :class:`SystemExit` where they contradict each
        other: then there is nothing to hold anybody to.
        """
        await self._adapters()
        await _each(range(len(self._asks)), self._learn_one)
        texts: dict[str, str] = {}
        for number, ask in enumerate(self._asks):
            text = self._wanted[number, False].texts.get("0", "")
            if ask.alike and texts.setdefault(ask.alike, text) != text:
                raise SystemExit(f"no figures: {ask.name} differs from other dialects: {text!r}")

    async def _adapters(self) -> None:
        """Until those are there that come with the model."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                answer = await self.http.get("/client/v4/accounts/local/ai/finetunes/public")
                if {one["name"] for one in answer.json()["result"]} >= set(ADAPTERS):
                    return
                await asyncio.sleep(RETRY_S)

    def batches(self) -> Batches:
        """What asks the same in batches."""
        return Batches(self.http, self._asks, lambda number: self._wanted[number, False], self._weather)

    async def _learn_one(self, number: int) -> None:
        ask = self._asks[number]
        whole = self._wanted[number, False] = await self._whole(ask)
        if ask.streams:
            streamed = self._wanted[number, True] = await self._stream(ask, None)
            # Usage comes where it is asked for; all else is one answer.
            if problem := streamed.problem(whole) if streamed.usage else streamed.part_problem(whole):
                raise SystemExit(f"no figures: {ask.name}, streamed: {problem}")

    async def again(self) -> None:
        """Every answer once more, when all is quiet again."""
        every = [
            (number, Way(stream=stream))
            for number, ask in enumerate(self._asks)
            for stream in (False, True)[: 1 + ask.streams]
        ]
        await _each(every, lambda pair: self._once(*pair))

    async def loop(self, dice: random.Random, go_on: Callable[[], bool]) -> None:
        """One client after another, until there is no more to do."""
        while go_on():
            number = dice.randrange(len(self._asks))
            if not await self._once(number, self._way(self._asks[number], dice)):
                await asyncio.sleep(RETRY_S)

    def _way(self, ask: Ask, dice: random.Random) -> Way:
        stream = ask.streams and dice.random() < 0.7
        resumes = stream and dice.random() < RESUMES
        leaves = dice.randrange(1, 20) if stream and dice.random() < (0.5 if resumes else LEAVES) else None
        sdks = self._sdks
        if sdks is None or dice.random() >= UNMODIFIED or not sdks.knows(ask, stream, resumes):
            return Way(stream, leaves, resumes)
        again = not stream and sdks.repeats(ask) and dice.random() < IDEMPOTENT
        return Way(stream, leaves, resumes, True, secrets.token_hex(16) if again else "")

    async def round(self) -> str | None:
        """Asks each model once; why that failed, or None."""
        for number in self._probes:
            ask = self._asks[number]
            try:
                if problem := (await self._whole(ask)).problem(self._wanted[number, False]):
                    self.counts["WRONG"] += 1
                    self._weather.violation(f"WRONG: {problem}", ask=ask.name)
            except (httpx.HTTPError, ValueError) as error:
                return repr(error)
        return None

    async def _once(self, number: int, way: Way) -> bool:
        """Asks and checks; whether an answer came. One that resumes comes whatever breaks, once it has begun."""
        ask, wanted, since = self._asks[number], self._wanted[number, way.stream], time.monotonic()
        resumes, leaves = way.resumes, way.leaves
        seen, patience = Seen(key=way.key), resuming.PATIENCE_S if resumes else PATIENCE_S
        self.asked += 1
        self.counts["by client libraries"] += way.unmodified
        self.counts["under a key"] += bool(way.key)
        try:
            async with asyncio.timeout(patience):
                if way.unmodified:
                    await self._unmodified(ask, way, seen)
                elif resumes:
                    self._begun(ask, seen, True)
                    lost = await resuming.resumed(self.http, ask, seen, leaves)
                    self.counts["resumed"] += bool(lost)
                elif way.stream:
                    await self._stream(ask, leaves, seen)
                else:
                    await self._whole(ask, seen)
        except TimeoutError:
            self._note(f"no end after {patience:.0f} s", "hangs", ask, since, "hung")
            return False
        except httpx.HTTPStatusError as error:
            # In the store, or looked up there by a gateway that has not been asked for the adapter before.
            kept = resumes or way.key or ask.adapted
            honest = UNSTORED if kept and "store cannot be reached" in error.response.text else REFUSED
            kind = honest if _honest(error.response) else "dishonest"
            self._note(_refusal(error.response), kind, ask, since, f"status {error.response.status_code}")
            return False
        except httpx.TransportError as error:
            self._cut(seen, wanted, repr(error), ask, since)
            return False
        except (ValueError, KeyError, TypeError) as error:
            self._note(f"not an answer of its dialect: {error!r}", "malformed", ask, since, "malformed")
            return False
        if seen.error is not None:
            self._note(f"an error in the stream: {seen.error}"[:300], REFUSED, ask, since, "error in the stream")
            self._check_part(seen, wanted, ask, since)
            return False
        if not seen.finished:
            if leaves is not None:
                self.counts["left"] += 1
                self._check_part(seen, wanted, ask, since)
                return True
            self._cut(seen, wanted, "the stream ended without its end", ask, since)
            return False
        self.counts["streams" if way.stream else "whole answers"] += 1
        if problem := seen.problem(wanted):
            self._note(f"WRONG: {problem}", "wrong", ask, since, "WRONG")
        self.books.note(ask.name, seen)
        return True

    def _cut(self, seen: Seen, wanted: Seen, why: str, ask: Ask, since: float) -> None:
        self._note(f"the connection broke: {why}", BROKEN, ask, since, "broken connections")
        self._check_part(seen, wanted, ask, since)

    def _check_part(self, seen: Seen, wanted: Seen, ask: Ask, since: float) -> None:
        if problem := seen.part_problem(wanted):
            self._note(f"WRONG: {problem}", "wrong", ask, since, "WRONG")

    def _note(self, what: str, kind: str, ask: Ask, since: float, count: str) -> None:
        self.counts[count] += 1
        self._weather.saw(what, kind, ask.name, since)

    def _begun(self, ask: Ask, seen: Seen | None, resumes: bool = False) -> Seen:
        """What will be seen of a request, which is held against the ledger in the end."""
        seen = Seen() if seen is None else seen
        learned = self._wanted.get((self._asks.index(ask), False)) if ask in self._asks else None
        most = None if learned is None else learned.usage
        self.receipts.note(Told(ask.name, seen, most, ask.model, resuming.KEEP_S if resumes else 0.0))
        return seen

    async def _unmodified(self, ask: Ask, way: Way, seen: Seen) -> None:
        assert self._sdks is not None
        self._begun(ask, seen, way.resumes)
        if way.resumes:
            self.counts["resumed"] += bool(await self._sdks.background(ask, seen, way.leaves))
        elif way.stream:
            await self._sdks.stream(ask, seen, way.leaves)
        else:
            await self._sdks.whole(ask, seen, way.key)

    async def _whole(self, ask: Ask, seen: Seen | None = None) -> Seen:
        seen = self._begun(ask, seen)
        answer = await self.http.post(ask.path, json={k: v for k, v in ask.body.items() if k != "stream_options"})
        seen.request, seen.refused = answer.headers.get("cf-ray", ""), answer.is_error
        answer.raise_for_status()
        ask.dialect.whole(seen, answer.json())
        seen.finished = True
        return seen

    async def _stream(self, ask: Ask, leaves: int | None, seen: Seen | None = None) -> Seen:
        seen, events = self._begun(ask, seen), 0
        async with self.http.stream("POST", ask.path, json={**ask.body, "stream": True}) as answer:
            seen.request, seen.refused = answer.headers.get("cf-ray", ""), answer.is_error
            if answer.is_error:
                await answer.aread()
            answer.raise_for_status()
            async for line in answer.aiter_lines():
                if line == "data: [DONE]":
                    seen.finished = seen.finished or ask.dialect.done
                elif line.startswith("data: "):
                    ask.dialect.event(seen, json.loads(line[6:]))
                    events += 1
                    if leaves is not None and events >= leaves:
                        break
        return seen


async def _each(items: Iterable[T], work: Callable[[T], Awaitable[Any]]) -> None:
    """Works on all items, a few at a time."""
    left = iter(items)

    async def some() -> None:
        for item in left:
            await work(item)

    await asyncio.gather(*(some() for _ in range(AT_ONCE)))


def _honest(answer: httpx.Response) -> bool:
    """A refusal that says what is wrong and when to come back."""
    if answer.status_code not in (429, 503) or wait_told(answer.headers) is None:
        return False
    try:
        body: Any = answer.json()
    except ValueError:
        return False
    return isinstance(body, dict) and bool(body.get("errors") or body.get("error"))


def _refusal(answer: httpx.Response) -> str:
    waits = wait_told(answer.headers)
    return f"status {answer.status_code}, {HEADER} {waits}: {answer.text[:200]!r}"
