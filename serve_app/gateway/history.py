"""What gateways have done, as people look at it: by the minute from the store, and live from the memory of all of them.

A task counts each second, and once a minute has the minute written, beside the requests. While the store is away rows
wait in memory.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import msgspec

from serve_app.api.errors import ApiError
from serve_app.gateway.tally import Tally
from serve_app.state.deferred.reports import Report
from serve_app.state.errors import Away
from serve_app.state.kept.history import EVERYBODY, HOUR_S, KEPT_S, MINUTE_S, HistoryRow, Numbers
from serve_app.state.state import State
from serve_app.tasks.work import Work

log = logging.getLogger("ray.serve")

# Rows that wait for a store that is away; the oldest go first.
MAX_WAITING = 50_000
# How long the other gateways have to tell what they do.
TELL_S = 1.0
QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
LATENCIES = ("ttft", "itl", "duration")
# Points that an answer has by itself, and at most.
USUAL_POINTS, MAX_POINTS = 300, 5000
STEPS = (60, 120, 300, 600, 1800, HOUR_S, 3 * HOUR_S, 6 * HOUR_S, 24 * HOUR_S)


class Live(msgspec.Struct, array_like=True):
    """What one gateway has done in the last ``seconds``: numbers by account and model. ``running``, ``waiting``:
    requests at this moment, by account and model.
    """

    seconds: float
    done: list[tuple[str, str, list[int]]]
    running: list[tuple[str, str, int]]
    waiting: list[tuple[str, str, int]]


_READ = msgspec.msgpack.Decoder(Live)


def read_live(told: bytes) -> Live:
    """What :meth:`History.told` has written."""
    return _READ.decode(told)


@dataclass(slots=True, frozen=True)
class HistoryRequest:
    """``account``: None for all of them. ``by``: "model", "account" or ""."""

    since: int
    until: int
    step: int
    account: str | None
    model: str | None = None
    by: str = ""

    @property
    def width(self) -> int:
        return MINUTE_S if self.step % HOUR_S else HOUR_S


class History:
    """Of one gateway. ``running()``: its work under way; ``waiting()``: how many requests of whom wait for which model.
    :attr:`others` asks all gateways, this one too, what :meth:`told` tells; :attr:`runners` what runners report.
    """

    def __init__(
        self,
        tally: Tally,
        state: State,
        running: Callable[[], Iterable[Work]],
        waiting: Callable[[], Mapping[str, Mapping[str, int]]],
    ) -> None:
        self._tally = tally
        self._state = state
        self._running = running
        self._waiting = waiting
        self._rows: list[HistoryRow] = []
        self._task: asyncio.Task[None] | None = None
        self._writing: asyncio.Task[None] | None = None
        self.others: Callable[[], Awaitable[list[bytes]]] | None = None
        self.runners: Callable[[], Awaitable[Sequence[Report]]] | None = None

    def start(self) -> None:
        self._task = asyncio.ensure_future(self._count_always())

    def close(self) -> None:
        """Writes the minute at hand. Blocks."""
        rows = self._rows + self._tally.rows()
        self._rows = []
        with suppress(Away):
            self._state.history.write(rows)

    def told(self) -> bytes:
        """For other gateways."""
        seconds, done = self._tally.live()
        running: dict[tuple[str, str], int] = {}
        for work in self._running():
            pair = work.caller.account, work.model.id
            running[pair] = running.get(pair, 0) + 1
        waiting = [(account, m, n) for m, found in self._waiting().items() for account, n in found.items() if n]
        live = Live(
            seconds, [(*pair, list(n)) for pair, n in done.items()], [(*p, n) for p, n in running.items()], waiting
        )
        return msgspec.msgpack.encode(live)

    async def now(self, account: str | None) -> dict[str, Any]:
        """The last seconds of all gateways, of one account or of all, together and by model."""
        told = [self.told()]
        if self.others is not None:
            try:
                told = await asyncio.wait_for(self.others(), TELL_S)
            except Exception as error:  # one is being replaced: this one is better than nothing
                log.info("the other gateways did not tell what they do (%s)", type(error).__name__)
        runners = [] if self.runners is None else [report.live for report in await self.runners()]
        lives = [_READ.decode(one) for one in (*told, *runners)]
        return {"gateways": len(told), "runners": len(runners), **live_answer(lives, account)}

    async def read(self, asked: HistoryRequest) -> list[dict[str, Any]]:
        """A point for each step and group that has something. Raises `StoreAway`."""
        account = asked.account if asked.account is not None or asked.by == "account" else EVERYBODY
        begin = asked.since // asked.step * asked.step
        rows = await self._state.look(self._state.history.read, asked.width, begin, asked.until, account, asked.model)
        return await asyncio.to_thread(series, rows, asked)

    async def _count_always(self) -> None:
        while True:
            await asyncio.sleep(1.0)
            try:
                self._rows += self._tally.tick(time.monotonic(), time.time(), list(self._running()))
                del self._rows[:-MAX_WAITING]
                if self._rows and (self._writing is None or self._writing.done()):
                    self._writing = asyncio.ensure_future(self._write())
            except Exception:
                log.exception("a second of the history could not be counted")

    async def _write(self) -> None:
        rows = self._rows[:]
        with suppress(ApiError):
            await self._state.look(self._state.history.write, rows)
            del self._rows[: len(rows)]


def usual_step(since: int, until: int, now: float) -> int:
    """One that gives a few hundred points, of minutes that are still kept."""
    least = MINUTE_S if since > now - KEPT_S[MINUTE_S] else HOUR_S
    return next((s for s in STEPS if s >= least and (until - since) / s <= USUAL_POINTS), STEPS[-1])


def series(rows: Iterable[HistoryRow], asked: HistoryRequest) -> list[dict[str, Any]]:
    """``rows`` of any gateways, added up by step and group, in the order of time."""
    found: dict[tuple[int, str], Numbers] = {}
    for row in rows:
        group = "" if not asked.by else row.model if asked.by == "model" else row.account
        found.setdefault((row.at // asked.step * asked.step, group), Numbers()).add(row.numbers)
    return [
        {"time": at, **({asked.by: group} if asked.by else {}), **shown(numbers)}
        for (at, group), numbers in sorted(found.items())
    ]


def shown(numbers: Numbers) -> dict[str, Any]:
    counts = ("requests", "errors", "refusals", "left", "prompt_tokens", "cached_tokens", "completion_tokens")
    told: dict[str, Any] = {name: numbers.of(name) for name in counts}
    told |= {"neurons": numbers.of("neurons") / 1e6, "cost": numbers.of("money") / 1e9}
    for name in LATENCIES:
        told[name] = {label: numbers.quantile(name, share) for label, share in QUANTILES.items()}
    return told


@dataclass(slots=True)
class _Sum:
    numbers: Numbers = field(default_factory=Numbers)
    running: int = 0
    waiting: int = 0


def live_answer(lives: list[Live], account: str | None) -> dict[str, Any]:
    """Rates by the second, requests that run and wait, and latencies: of all models, and of each."""
    models: dict[str, _Sum] = {}
    whole = _Sum()

    for live in lives:
        for whose, model, numbers in live.done:
            if account in (None, whose):
                for entry in (models.setdefault(model, _Sum()), whole):
                    entry.numbers.add(numbers)
        for name, counts in (("running", live.running), ("waiting", live.waiting)):
            for whose, model, count in counts:
                if account in (None, whose):
                    for entry in (models.setdefault(model, _Sum()), whole):
                        setattr(entry, name, getattr(entry, name) + count)
    seconds = max((live.seconds for live in lives), default=0.0) or 1.0
    by_model = [{"model": model, **_rates(models[model], seconds)} for model in sorted(models)]
    return {"seconds": round(seconds, 3), **_rates(whole, seconds), "by_model": by_model}


def _rates(found: _Sum, seconds: float) -> dict[str, Any]:
    numbers = found.numbers
    told = shown(numbers)
    told["requests_per_s"] = numbers.of("requests") / seconds
    told["tokens_per_s"] = numbers.of("completion_tokens") / seconds
    told["prompt_tokens_per_s"] = numbers.of("prompt_tokens") / seconds
    # Requests that wait are under way as well.
    return {**told, "running": max(0, found.running - found.waiting), "waiting": found.waiting}
