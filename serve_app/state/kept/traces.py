"""The trace of each request: what happened when, with token counts, for whoever sent it.

A trace is written to the store when its request has ended, and once before that if it takes long; other gateways know
it from there. A look-up names the account, and what belongs to another is looked up in the same way as what was never
there.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from serve_app.api.errors import NotFound
from serve_app.api.trace_context import TraceContext
from serve_app.state.protocols import Row, TraceStore
from serve_app.state.reader import ReadPool, plausible
from serve_app.state.writer import GroupWriter

# Events of one request: a bound for those that lose many workers or generate many choices.
MAX_EVENTS = 64
# A request that runs for longer is shown to other gateways while it runs, as it is at that moment.
LONG_S = 1.0
# A trace may be on its way from another gateway: whoever asks for one that is not there gets the answer after this.
MISS_S = 0.5
_LOOKS = 5
_KIND = "trace"


@dataclass(slots=True, frozen=True)
class TraceQuery:
    """Which requests to list; None: whatever it is. ``min_ms``: that took so long at least. ``before``: that ended
    before this time (unix seconds).
    """

    account: str | None = None
    model: str | None = None
    status: str | None = None
    min_ms: float | None = None
    before: float | None = None
    limit: int = 100


@dataclass(slots=True, frozen=True)
class ListedTrace:
    """``body``: JSON. ``task``, ``key``, ``neurons`` (micro-neurons), ``money`` (nano-units): of its entry in the
    ledger, "" and 0 where it has none.
    """

    account: str
    ended: float
    ms: float
    body: bytes
    task: str
    key: str
    neurons: int
    money: int

    def shown(self) -> dict[str, Any]:
        found = orjson.loads(self.body)
        events = found["events"]
        facts: dict[str, Any] = {name: value for event in events for name, value in event.items()}
        first = next((event["ms"] for event in events if event["event"] == "first token"), None)
        tokens = ("prompt_tokens", "cached_tokens", "completion_tokens")
        return {
            "id": found["id"],
            "time": found["created"],
            "ended": self.ended,
            "account": self.account,
            "model": found["model"],
            "task": self.task,
            "key": self.key,
            "status": found["status"],
            "total_ms": self.ms,
            "ttft_ms": first,
            **{name: facts.get(name, 0) for name in tokens},
            "neurons": self.neurons / 1e6,
            "cost": self.money / 1e9,
        }


class Trace:
    """One request under way: events with milliseconds since its arrival."""

    def __init__(
        self,
        request_id: str = "",
        account: str = "",
        model: str = "",
        clock: Callable[[], float] = time.monotonic,
        *,
        task: str = "",
        context: TraceContext | None = None,
    ) -> None:
        """``context``: the client's trace that it is part of."""
        self.id = request_id
        self.account = account
        self.task = task
        self.context = context
        self.model = model
        # A request may be several generations; and calls may have something to tell after the last token.
        self.generations = 0
        self.users = 0
        self.shown = False
        self._clock = clock
        self._began = clock()
        self._body: dict[str, Any] = {"id": request_id, "model": model, "created": round(time.time(), 3)}
        if context is not None:
            self._body["trace_id"] = context.trace_id
        self._body |= {"status": "running", "events": []}

    def event(self, name: str, **facts: Any) -> None:
        """Something happened now. Facts that are None are left out."""
        if len(self._body["events"]) < MAX_EVENTS:
            at = round((self._clock() - self._began) * 1e3, 2)
            self._body["events"].append({"event": name, "ms": at, **{k: v for k, v in facts.items() if v is not None}})

    def end(self, status: str, **facts: Any) -> None:
        """``status``: "done", "refused", "failed" or "left" (its client went)."""
        self.event(status, **facts)
        self._body["status"] = status

    @property
    def status(self) -> str:
        return self._body["status"]

    @property
    def age_s(self) -> float:
        return self._clock() - self._began

    @property
    def trace_id(self) -> str:
        """The client's, or the request's own id."""
        return self.id if self.context is None else self.context.trace_id

    @property
    def body(self) -> Mapping[str, Any]:
        """``id``, ``model``, ``created`` (unix seconds), ``status``, and ``events`` with ``ms`` since then."""
        return self._body

    def packed(self) -> bytes:
        return orjson.dumps(self._body)


class Traces:
    """Those of this gateway under way, bounded by what is in flight; and the store's."""

    def __init__(self, store: TraceStore, writer: GroupWriter, reader: ReadPool) -> None:
        self._store = store
        self._writer = writer
        self._reader = reader
        self._running: dict[tuple[str, str], Trace] = {}
        self._lock = threading.Lock()
        # Hears of each request that has ended, on the thread that requests run in.
        self.ended: Callable[[Trace], None] = lambda trace: None

    def begin(
        self, request_id: str, account: str, model: str, task: str = "", context: TraceContext | None = None
    ) -> Trace:
        """The trace of a request, which several generations may share. Without an id it is not kept."""
        known = self._running.get((account, request_id))
        trace = known or Trace(request_id, account, model, task=task, context=context)
        trace.generations += 1
        trace.users += 1
        if request_id:
            self._running[(account, request_id)] = trace
        return trace

    def end(self, trace: Trace, status: str, **facts: Any) -> None:
        """A generation has ended; with the last one the request has."""
        trace.generations -= 1
        if trace.generations > 0:
            trace.event(status, **facts)
        else:
            trace.end(status, **facts)
        self.release(trace)

    def release(self, trace: Trace) -> None:
        """One user less; with the last one the trace is complete, and can be looked up for a while."""
        trace.users -= 1
        if trace.users > 0:
            return
        with self._lock:
            if self._running.pop((trace.account, trace.id), None) is None:
                return
            self._write(trace)
        self.ended(trace)

    def show_long(self) -> None:
        """Has the store know of requests that take long. For another thread than the one that requests run in."""
        for trace in list(self._running.values()):
            if not trace.shown and trace.age_s > LONG_S:
                with self._lock:
                    if (trace.account, trace.id) in self._running:
                        trace.shown = True
                        self._write(trace)

    async def get(self, account: str, request_id: str) -> dict[str, Any]:
        """The trace as JSON has it, whichever gateway has or had the request. Raises :class:`NotFound`, in the same
        words and time for any id but an own one, and `StoreAway`.
        """
        for look in range(_LOOKS):
            if look:
                await asyncio.sleep(MISS_S / (_LOOKS - 1))
            found = await self._find(account, request_id)
            if found is not None:
                return orjson.loads(found)
        raise NotFound("No such request. The header cf-ray of an answer holds its id.", param="id")

    async def list(self, query: TraceQuery) -> list[dict[str, Any]]:
        """Requests that have ended, and those that run for a while, newest first. Raises `StoreAway`."""
        return [listed.shown() for listed in await self._reader.run(self._store.list, query)]

    async def _find(self, account: str, request_id: str) -> bytes | None:
        key = (account, request_id)
        stored = None
        away = None
        if plausible(request_id):
            try:
                stored = await self._reader.run(self._store.body, account, request_id)
            except Exception as error:
                away = error
        running = self._running.get(key)
        if running is not None:
            return running.packed()
        waiting = self._writer.find(_KIND, key)
        if waiting is not None:
            return waiting["body"]
        if away is not None:
            raise away
        return stored

    def _write(self, trace: Trace) -> None:
        body = trace.packed()
        key = (trace.account, trace.id)
        columns: dict[str, Any] = {"account": trace.account, "id": trace.id, "ended": time.time(), "body": body}
        columns |= {"model": trace.model, "status": trace.status, "ms": round(trace.age_s * 1e3, 2)}
        self._writer.add(Row(_KIND, key, columns, len(body)))
