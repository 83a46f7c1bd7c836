"""What leaves the gateway for one choice: tokens -> text -> reasoning -> stop strings -> tool calls -> events."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

from serve_app.api import identity
from serve_app.api.types import (
    ChoiceDone,
    Event,
    FinishReason,
    GenerateRequest,
    ReasoningDelta,
    TextDelta,
    TokenLogprob,
    ToolCallDelta,
)
from serve_app.sampling_params import TokenLogprobs
from serve_app.text.detokenizer import Detokenizer
from serve_app.text.harmony import HarmonySplitter
from serve_app.text.reasoning import MARKS, TAIL_CHARS, ReasoningSplitter, opens
from serve_app.text.stop import StopMatcher
from serve_app.text.tokenizer import Tokenizer
from serve_app.text.tool_calls import PARSERS, THOUGHT_CALLS, CallPiece, ToolParser


def open_output(
    tokenizer: Tokenizer,
    request: GenerateRequest,
    prompt: np.ndarray,
    *,
    index: int = 0,
    tool_parser: str = "none",
    reasoning_parser: str = "none",
) -> OutputStream:
    """The stream of choice ``index`` of ``request``, whose ``prompt`` is given as token ids; parsers by their names in
    the model's record."""
    tools = request.tools if request.tool_choice != "none" else None
    reasoning: ReasoningSplitter | None = None
    if reasoning_parser != "none" and not request.raw:
        marks = MARKS[reasoning_parser]
        # Each token has a character at least; white space behind the mark may be tokens of its own.
        tail = tokenizer.decode(prompt[-TAIL_CHARS:].tolist(), skip_special_tokens=False)
        if reasoning_parser == "harmony":
            named = [tool["function"]["name"] for tool in tools or ()] if tool_parser == "harmony" else []
            reasoning = HarmonySplitter(named)
        else:
            call, heads = THOUGHT_CALLS[tool_parser] if tools and tool_parser in THOUGHT_CALLS else ("", ("",))
            heads = heads or tuple(tool["function"]["name"] for tool in tools or ())
            reasoning = ReasoningSplitter(marks, inside=opens(tail, marks), call=call, heads=heads)
    keep = MARKS[reasoning_parser].tokens if reasoning is not None else ()
    return OutputStream(
        tokenizer,
        index=index,
        stop=request.stop,
        min_tokens=request.sampling.min_tokens,
        tools=PARSERS[tool_parser](tools) if tools and tool_parser != "none" else None,
        reasoning=reasoning,
        keep=keep,
        one_call=not request.parallel_tool_calls,
    )


class OutputStream:
    """One choice of a request.

    `feed` takes the tokens of an engine step and gives events; `finish` ends it. Once ``done``, a stop string, or the
    only call that was allowed, has ended the choice (its `ChoiceDone` was given): abort the engine's request and feed
    no more. ``keep``: control tokens whose text ``reasoning`` needs.
    """

    __slots__ = (
        "_calls",
        "_detokenizer",
        "_index",
        "_one_call",
        "_pending",
        "_read",
        "_reasoning",
        "_released",
        "_shown",
        "_stop",
        "_told",
        "_tokenizer",
        "_tools",
        "_unstoppable",
        "done",
        "reasoning_tokens",
    )

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        index: int = 0,
        stop: Sequence[str] = (),
        min_tokens: int = 0,
        tools: ToolParser | None = None,
        reasoning: ReasoningSplitter | None = None,
        keep: Sequence[str] = (),
        one_call: bool = False,
    ):
        self._tokenizer = tokenizer
        self._index = index
        self._tools = tools
        self._reasoning = reasoning
        markers = (tokenizer.token_id(marker) for marker in (*keep, *(tools.markers if tools else ())))
        self._detokenizer = Detokenizer(tokenizer, keep=[marker for marker in markers if marker is not None])
        self._stop = StopMatcher(stop)
        # Tokens for which stop strings end nothing yet.
        self._unstoppable = min_tokens
        # (characters of text after this token, id, logprob) of tokens whose text has not been given out.
        self._pending: deque[tuple[int, int, TokenLogprob | None]] = deque()
        self._read = 0
        # Characters of the answer given out; of all text, which the tokens are measured by.
        self._shown = 0
        self._released = 0
        # Where the last token that was told ends.
        self._told = 0
        self._calls = 0
        self._one_call = one_call
        self.done = False
        # Output tokens that were reasoning.
        self.reasoning_tokens = 0

    @property
    def may_stop(self) -> bool:
        """Whether it may be done before the engine is."""
        return bool(self._stop) or (self._one_call and self._tools is not None)

    @property
    def held(self) -> int:
        """Tokens that were fed and whose text has not been given out, because it may be the beginning of something."""
        return len(self._pending)

    def feed(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs] | None = None) -> list[Event]:
        """Events of the tokens of one step; ``logprobs`` parallel to ``token_ids`` where the request wants
        them."""
        if self.done:
            return []
        thought = shown = ""
        for position, token_id in enumerate(token_ids):
            text = self._detokenizer.feed(token_id)
            self._read += len(text)
            self._pending.append(
                (self._read, token_id, self._named(token_id, logprobs[position]) if logprobs else None)
            )
            more, answer = self._split(text)
            thought += more
            if self._unstoppable:
                self._unstoppable -= 1
                shown += answer
                continue
            shown += self._stop.feed(answer)
            if self._stop.matched is not None:
                return self._end(thought, shown, "stop")
        events = self._events(thought, shown)
        if self._one_call and self._calls:
            self.done = True
            events.append(ChoiceDone(self._index, "tool_calls"))
        return events

    def finish(self, reason: str = "stop") -> list[Event]:
        """The last events, for an engine request that ended with ``reason`` ("stop" or "length")."""
        if self.done:
            return []
        rest = self._detokenizer.finish()
        self._read += len(rest)
        thought, answer = self._split(rest, final=True)
        shown = self._stop.feed(answer)
        if self._stop.matched is not None:
            return self._end(thought, shown, "stop")
        return self._end(thought, shown + self._stop.finish(), "length" if reason == "length" else "stop")

    def _split(self, text: str, *, final: bool = False) -> tuple[str, str]:
        """Reasoning and answer. Stop strings are for the answer: one that ends a thought would end all."""
        return ("", text) if self._reasoning is None else self._reasoning.feed(text, final=final)

    def _end(self, thought: str, shown: str, reason: FinishReason) -> list[Event]:
        self.done = True
        events = self._events(thought, shown, last=True)
        if self._calls and reason == "stop":
            reason = "tool_calls"
        return [*events, ChoiceDone(self._index, reason, self._stop.matched)]

    def _events(self, thought: str, shown: str, *, last: bool = False) -> list[Event]:
        events: list[Event] = [ReasoningDelta(self._index, thought)] if thought else []
        for item in self._parsed(shown, last):
            if isinstance(item, str):
                if item:
                    events.append(TextDelta(self._index, item))
                continue
            if self._one_call and item.call:
                break
            call_id = self._call_id(item)
            events.append(ToolCallDelta(self._index, item.call, call_id, item.name, item.arguments, item.last))
            self._calls += item.last
        self._tell_tokens(events, shown, last)
        return events

    def _call_id(self, piece: CallPiece) -> str:
        """The parser's own, or where the request may be run again one that is the same then."""
        known = identity.current.get() is not None
        return f"call_{identity.part_id('call', self._index, piece.call)}" if known else piece.id

    def _parsed(self, answer: str, last: bool) -> list[str | CallPiece]:
        if self._tools is None:
            return [answer]
        return [*self._tools.feed(answer), *self._tools.finish()] if last else self._tools.feed(answer)

    def _tell_tokens(self, events: list[Event], shown: str, last: bool) -> None:
        """Puts the tokens behind the text into its first event, and counts those that were reasoning."""
        self._shown += len(shown)
        self._released = self._shown
        if self._reasoning is not None:
            if not self._reasoning.decided:
                return
            ended = self._reasoning.ended_at
            self._released = self._read if ended is None else ended + self._shown
        ids: list[int] = []
        logprobs: list[TokenLogprob] = []
        for end, token_id, logprob in self._release(last):
            if self._reasoning is not None and self._reasoning.covers(end):
                self.reasoning_tokens += 1
                continue
            ids.append(token_id)
            if logprob is not None:
                logprobs.append(logprob)
        if not ids:
            return
        carrier = next((event for event in events if isinstance(event, TextDelta)), None)
        if carrier is None and logprobs:
            # Log-probabilities are per token, so tokens without text of their own are told as well.
            carrier = TextDelta(self._index, "")
            events.insert(0, carrier)
        if carrier is not None:
            carrier.token_ids = tuple(ids)
            carrier.logprobs = logprobs or None

    def _release(self, last: bool) -> list[tuple[int, int, TokenLogprob | None]]:
        """The tokens whose text was given out; at the end also those without text after it, but none beyond a
        stop string."""
        released: list[tuple[int, int, TokenLogprob | None]] = []
        while self._pending:
            end = self._pending[0][0]
            whole = end <= self._released
            partly = last and (self._stop.matched is None or self._told < self._released)
            if not (whole or partly):
                break
            released.append(self._pending.popleft())
            self._told = end
        return released

    def _named(self, token_id: int, found: TokenLogprobs) -> TokenLogprob:
        name = self._tokenizer.token_text
        return TokenLogprob(name(token_id), token_id, found.logprob, [(name(i), i, p) for i, p in found.top])
