"""What one resumable stream has shown, and what is needed to go on elsewhere.

::

    tokens of each choice -> events, choice by choice -> their order over all choices -> frames

Everything to the right is a function of what is to the left, and of the request's identity. So the store gets tokens
and order beside the frames. Another gateway that feeds them through the same code stands where the lost one stood:
what it makes again are the very frames that are stored, and what it makes then follows them.
"""

from __future__ import annotations

import asyncio
import re
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec.structs import replace

from serve_app.api.errors import ApiError, Stopped
from serve_app.api.openai.write import close
from serve_app.api.types import Event, Usage
from serve_app.state.kept.streams import Ending, Head, StreamPart
from serve_app.wire.tokens import TokenItem

# Of one stream, with the tokens behind it.
MAX_BYTES = 16 << 20
# Parts in which somebody waits for the store.
WAITS = 10
_END = b"\n\n"
_UNSTABLE = re.compile(rb'"p":"[a-z0-9]*"|"completed_at":[0-9]+')
# (prompt, choice, tokens) in the order in which they came, and the choice of each event, one byte each.
_Trail = tuple[list[tuple[int, int, TokenItem]], bytes]
_trails: msgspec.msgpack.Decoder[_Trail] = msgspec.msgpack.Decoder(_Trail)


class NotNow(BaseException):
    """What went wrong before anything new was made will pass; no writer of frames is to tell of it."""


class Differs(RuntimeError):
    """A request that is run again makes other frames than those that are stored."""


class StreamTooLong(ApiError):
    code, status, type = 5021, 413, "invalid_request_error"

    def __init__(self) -> None:
        super().__init__(f"A resumable stream has at most {MAX_BYTES >> 20} MiB. Ask for less, or do without resuming.")


@dataclass(slots=True, frozen=True)
class ChoiceTokens:
    """The tokens of one choice: those that a lost gateway had, and where new ones go."""

    restored: list[TokenItem]
    log: StreamLog
    prompt: int
    choice: int

    def add(self, item: TokenItem) -> None:
        self.log.add(self.prompt, self.choice, item)


# Of the request at hand; None: it cannot be resumed.
current: ContextVar[StreamLog | None] = ContextVar("stream_log", default=None)


class StreamLog:
    """``epoch``: how often the stream has begun. ``parts``: what is stored of it, frames and trail each."""

    def __init__(self, head: Head, epoch: int = 1, parts: Sequence[tuple[bytes, bytes]] = ()) -> None:
        self.head = head
        self.epoch = epoch
        # Each with its id.
        self.frames: list[bytes] = [frame for frames, _ in parts for frame in split(frames)]
        # How many of them the store has: these may be shown.
        self.safe = len(self.frames)
        self.size = sum(len(frames) + len(trail) for frames, trail in parts)
        self.ending: Ending | None = None
        # Nothing more will be made here: another gateway has the stream.
        self.lost = False
        # Everything is in the store, its ending too.
        self.complete = False
        # Why it is to end early.
        self.stopping: Stopped | None = None
        # What its work has cost (columns of the ledger), which goes to the store with its end; and who hears of the
        # work's end then, since until then another gateway may have it.
        self.entries: list[dict[str, Any]] = []
        self.settlements: list[Callable[[], None]] = []
        self.readers = 0
        # When somebody read it here last, on the monotonic clock, and when anywhere, as the store says.
        self.seen = self.seen_elsewhere = 0.0
        self.task: asyncio.Task[None] | None = None
        # The store knows of it.
        self.begun = epoch > 1
        self.again = epoch > 1
        # Something came that no gateway had before.
        self.fresh = False
        # What goes wrong now is told.
        self.last_try = False
        self._tokens: dict[tuple[int, int], list[TokenItem]] = {}
        self._order = b""
        for _, trail in parts:
            found, order = _trails.decode(trail)
            self._order += order
            for prompt, choice, item in found:
                self._tokens.setdefault((prompt, choice), []).append(item)
        self._made = 0
        self._parts = len(parts)
        self._taken = len(self.frames)
        self._trail: list[tuple[int, int, TokenItem]] = []
        self._ordered = bytearray()
        self._ending_taken = False
        self._changed = asyncio.Event()

    @property
    def id(self) -> str:
        return self.head.id

    # -- what makes the stream

    def tokens(self, prompt: int, choice: int) -> ChoiceTokens:
        return ChoiceTokens(self._tokens.pop((prompt, choice), []), self, prompt, choice)

    def add(self, prompt: int, choice: int, item: TokenItem) -> None:
        self.fresh = True
        self._trail.append((prompt, choice, replace(item, stream_id="")))

    def ordered(self, events: AsyncIterator[Event]) -> Ordered:
        """``events`` in the order in which they were shown before, then as they come."""
        return Ordered(events, self, self._order)

    def note(self, choice: int) -> None:
        """The next event, from now on, is one of this choice."""
        self._ordered.append(choice)

    def append(self, made: bytes) -> None:
        """Frames as the dialect writes them. Raises :class:`Differs` and :class:`StreamTooLong`."""
        for frame in split(made):
            self._made += 1
            numbered = b"id: %d\n%b" % (self._made, frame)
            if self._made <= len(self.frames):
                if _stable(self.frames[self._made - 1]) != _stable(numbered):
                    raise Differs(f"frame {self._made} of stream {self.id}")
                continue
            self.size += len(numbered)
            if self.size > MAX_BYTES:
                raise StreamTooLong
            self.frames.append(numbered)

    @property
    def behind(self) -> bool:
        """Whether frames that were shown have not been made again."""
        return self._made < len(self.frames)

    def end(self, ending: Ending, last: bytes = b"") -> None:
        """Nothing follows but the frame ``last``."""
        if last:
            self.frames += [b"id: %d\n%b" % (len(self.frames) + 1, frame) for frame in split(last)]
        self.ending = ending

    def stop(self, why: Stopped) -> None:
        """Ends the stream where it is; its last frame says why."""
        if self.stopping is None and self.ending is None:
            self.stopping = why
            if self.task is not None:
                self.task.cancel()

    def lose(self) -> None:
        """Another gateway has it."""
        self.lost = True
        if self.task is not None:
            self.task.cancel()
        self._wake()

    # -- what stores it

    def take(self, expires: float) -> StreamPart | None:
        """What the store does not have yet, None for nothing; to be stored as it is, however often that is tried."""
        news = self._taken < len(self.frames) or (self.ending is not None and not self._ending_taken)
        if not news and self.begun:
            return None
        self._parts += 1
        if self.ending is not None and not self.begun:
            # Its client may yet be refused, so the end and what it costs come once the store knows of the stream.
            nothing = msgspec.msgpack.encode(([], b""))
            return StreamPart(self.id, self.epoch, self._parts, self._taken, b"", nothing, self.head)
        before, self._taken = self._taken, len(self.frames)
        trail = msgspec.msgpack.encode((self._trail, bytes(self._ordered)))
        self.size += len(trail)
        self._trail, self._ordered = [], bytearray()
        self._ending_taken = self.ending is not None
        frames = b"".join(self.frames[before:])
        head = None if self.begun else self.head
        kept = None if self.ending is None else expires
        due = tuple(self.entries) if self._ending_taken else ()
        return StreamPart(self.id, self.epoch, self._parts, self._taken, frames, trail, head, self.ending, kept, due)

    def stored(self, part: StreamPart) -> None:
        self.begun = True
        self.safe = part.upto
        self.complete = part.ending is not None
        self._wake()
        if self.complete:
            self.settle()

    def settle(self) -> None:
        settlements, self.settlements = self.settlements, []
        for settle in settlements:
            settle()

    # -- who reads it

    async def read(self, after: int) -> AsyncIterator[bytes]:
        """Frames beyond the first ``after`` as they become safe, until there are no more here."""
        while True:
            if after < self.safe:
                frames, after = self.frames[after : self.safe], self.safe
                yield b"".join(frames)
            elif self.complete or self.lost:
                return
            else:
                await self.change()

    async def stored_once(self, within_s: float) -> None:
        """Until the store knows of it. Raises `TimeoutError`; time for which this process stood still counts for one of
        its parts at most, since what the store has said meanwhile is still to be read.
        """
        for _ in range(WAITS):
            try:
                async with asyncio.timeout(within_s / WAITS):
                    while not (self.begun or self.lost):
                        await self.change()
                if self.begun:
                    return
                break
            except TimeoutError:
                continue
        raise TimeoutError

    async def change(self) -> None:
        """Until something has been stored, or the stream is lost."""
        changed = self._changed
        await changed.wait()

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


class Ordered:
    """Events of all choices; see :meth:`StreamLog.ordered`. Ends the request when the log is told to stop."""

    def __init__(self, events: AsyncIterator[Event], log: StreamLog, before: bytes) -> None:
        self._events = events
        self._log = log
        self._before = deque(before)
        # What has come too early, by choice.
        self._early: dict[int, deque[Event]] = {}
        self._usage: Usage | None = None

    def __aiter__(self) -> Ordered:
        return self

    async def __anext__(self) -> Event:
        log = self._log
        try:
            if log.stopping is not None and not self._before:
                raise log.stopping
            return await self._next()
        except asyncio.CancelledError:
            if log.stopping is None or log.lost:
                raise
            task = asyncio.current_task()
            if task is not None:
                task.uncancel()
            raise log.stopping from None
        except ApiError as error:
            later = log.again and not log.fresh and not log.last_try
            if later and error.status in (429, 503) and log.stopping is None:
                raise NotNow from error
            raise

    async def _next(self) -> Event:
        while self._before:
            waiting = self._early.get(self._before[0])
            if waiting:
                self._before.popleft()
                return waiting.popleft()
            event = await anext(self._events)
            if isinstance(event, Usage):
                raise Differs(f"stream {self._log.id} has ended early")
            self._early.setdefault(event.index, deque()).append(event)
        for waiting in self._early.values():
            if waiting:
                return self._noted(waiting.popleft())
        return self._noted(await anext(self._events))

    def _noted(self, event: Event) -> Event:
        if not isinstance(event, Usage):
            self._log.note(event.index)
        return event

    async def aclose(self) -> None:
        await close(self._events)


def _stable(frame: bytes) -> bytes:
    """A frame without its padding and the time of its end."""
    return _UNSTABLE.sub(b"", frame)


def split(frames: bytes) -> list[bytes]:
    """One by one, each with the empty line that ends it."""
    return [frame + _END for frame in frames.split(_END)[:-1]]


def number_of(frame: bytes) -> int:
    """The number that a frame of a stored stream carries."""
    return int(frame[len(b"id: ") : frame.index(b"\n")])
