"""What leaves the gateway for one choice: tokens -> text -> stop strings -> tool calls -> events."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from serve_app.api.types import ChoiceDone, Event, FinishReason, TextDelta, TokenLogprob, ToolCallDelta
from serve_app.engine.request import TokenLogprobs
from serve_app.text.detokenizer import Detokenizer
from serve_app.text.stop import StopMatcher
from serve_app.text.tokenizer import Tokenizer
from serve_app.text.tools import PARSERS, ToolCall, ToolParser


class OutputStream:
    """One choice of a request.

    `feed` takes the tokens of an engine step and gives events; `finish` ends it. Once ``done``, a stop string
    has ended the choice (its `ChoiceDone` was given): abort the engine's request and feed no more.
    ``tool_parser`` is a name in `tools.PARSERS` (or "none"), and only to be given where the request offers
    tools.
    """

    __slots__ = (
        "_calls",
        "_detokenizer",
        "_index",
        "_pending",
        "_read",
        "_released",
        "_stop",
        "_tokenizer",
        "_tools",
        "done",
    )

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        index: int = 0,
        stop: Sequence[str] = (),
        tool_parser: str | None = None,
    ):
        self._tokenizer = tokenizer
        self._index = index
        self._tools: ToolParser | None = PARSERS[tool_parser]() if tool_parser not in (None, "none") else None
        markers = (tokenizer.token_id(marker) for marker in (self._tools.markers if self._tools else ()))
        self._detokenizer = Detokenizer(tokenizer, keep=[marker for marker in markers if marker is not None])
        self._stop = StopMatcher(stop)
        # (characters of text after this token, id, logprob) of tokens whose text has not been given out.
        self._pending: deque[tuple[int, int, TokenLogprob | None]] = deque()
        self._read = 0
        self._released = 0
        self._calls = 0
        self.done = False

    def feed(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs] | None = None) -> list[Event]:
        """Events of the tokens of one step; ``logprobs`` parallel to ``token_ids`` where the request wants
        them."""
        if self.done:
            return []
        shown = ""
        for position, token_id in enumerate(token_ids):
            text = self._detokenizer.feed(token_id)
            self._read += len(text)
            self._pending.append(
                (self._read, token_id, self._named(token_id, logprobs[position]) if logprobs else None)
            )
            shown += self._stop.feed(text)
            if self._stop.matched is not None:
                return self._end(shown, "stop")
        return self._events(shown, self._tools.feed(shown) if self._tools else None)

    def finish(self, reason: str = "stop") -> list[Event]:
        """The last events, for an engine request that ended with ``reason`` ("stop" or "length")."""
        if self.done:
            return []
        rest = self._detokenizer.finish()
        self._read += len(rest)
        shown = self._stop.feed(rest)
        if self._stop.matched is not None:
            return self._end(shown, "stop")
        return self._end(shown + self._stop.finish(), "length" if reason == "length" else "stop")

    def _end(self, shown: str, reason: FinishReason) -> list[Event]:
        self.done = True
        events = self._events(
            shown, [*self._tools.feed(shown), *self._tools.finish()] if self._tools else None, last=True
        )
        if self._calls and reason == "stop":
            reason = "tool_calls"
        return [*events, ChoiceDone(self._index, reason, self._stop.matched)]

    def _events(self, shown: str, parsed: list[str | ToolCall] | None, *, last: bool = False) -> list[Event]:
        items = parsed if parsed is not None else [shown]
        self._released += len(shown)
        events: list[Event] = []
        for item in items:
            if isinstance(item, ToolCall):
                events.append(ToolCallDelta(self._index, self._calls, item.id, item.name, item.arguments))
                self._calls += 1
            elif item:
                events.append(TextDelta(self._index, item))
        ids, logprobs = self._release(last)
        if ids or logprobs:
            carrier = next((event for event in events if isinstance(event, TextDelta)), None)
            if carrier is None and logprobs:
                # Log-probabilities are per token, so tokens without text of their own are told as well.
                carrier = TextDelta(self._index, "")
                events.insert(0, carrier)
            if carrier is not None:
                carrier.token_ids = ids
                carrier.logprobs = logprobs or None
        return events

    def _release(self, last: bool) -> tuple[tuple[int, ...], list[TokenLogprob]]:
        """The tokens whose text was given out; at the end also those without text after it, but none beyond a
        stop string."""
        ids: list[int] = []
        logprobs: list[TokenLogprob] = []
        started = 0
        while self._pending:
            end, token_id, logprob = self._pending[0]
            whole = end <= self._released
            partly = last and (self._stop.matched is None or started < self._released)
            if not (whole or partly):
                break
            self._pending.popleft()
            started = end
            ids.append(token_id)
            if logprob is not None:
                logprobs.append(logprob)
        return tuple(ids), logprobs

    def _named(self, token_id: int, found: TokenLogprobs) -> TokenLogprob:
        name = self._tokenizer.token_text
        return TokenLogprob(name(token_id), token_id, found.logprob, [(name(i), i, p) for i, p in found.top])
