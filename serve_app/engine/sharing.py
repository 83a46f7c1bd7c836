"""How much of an engine's time batch requests get.

Batch rows may stretch a step in which real-time rows are by their share of the time (5 %), by what steps are predicted
to take. Where one row, or one block of a prompt, takes more, the shares of several steps are saved up for it. So the
share holds over a long time, and no step becomes much longer. Steps of batch rows alone are part of the share: where
real-time requests leave that much time, none of their steps is stretched.

A step of batch rows alone is as long as it likes while nobody is near. While real-time requests come, it is no longer
than the steps that those meet among themselves: one that arrives meanwhile waits no longer than it would behind others.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, MutableSequence, Sequence
from dataclasses import dataclass

from serve_app.costs.steps import StepModel, StepSample
from serve_app.engine.blocks import BLOCK_TOKENS, BlockPool
from serve_app.engine.request import Request
from serve_app.engine.step import Step
from serve_app.engine.turns import Turns

# Of the engine's time, where a request does not ask for more.
SHARE = 0.05
# The most: real-time requests are never driven out.
MOST = 0.5
# For so long after the last one real-time requests are taken to come.
NEAR_S = 5.0
# Batch requests that are owed so much time are let in even where others would take every place, until they are owed
# less than half of it; and the most that they are owed.
ENTITLED_S = 1.0
OWED_S = 2.0
# Time that nobody else wanted counts as their share, up to this much of it.
CREDIT_S = 0.5
# How far one step moves what is known of real-time steps.
GAIN = 0.02
# Steps that are learned from at first, and one in so many afterwards.
LEARN_FIRST = 100
LEARN_EVERY = 4
# p0, p1, p2, d0, d1, d2 of small models on a CPU, until steps have been measured.
PRIORS = (1.5e-3, 1e-4, 1e-8, 2e-3, 3e-4, 5e-7)


@dataclass(slots=True)
class Room:
    """What batch requests may add to a step: ``seconds``; the last piece may take more, up to ``saved`` in all.

    ``prefills``, ``decodes``: the step computes prompts, and generates, already.
    """

    costs: StepModel
    seconds: float = math.inf
    saved: float = math.inf
    prefills: bool = False
    decodes: bool = False
    taken: float = 0.0

    def fitting(self, request: Request, start: int, count: int) -> int:
        """How many of ``count`` tokens from ``start`` on may be computed: all or none of what generates; of a prompt
        as many as there is room for, but no less than a block.
        """
        if self.seconds == math.inf or not count:
            return count
        if _generates(request, start):
            return count if self._fits(self.cost(request, start, count)) else 0
        each = self.costs.p1 + self.costs.p2 * (start + count * 0.5)
        room = int((self.seconds - self.taken - (0.0 if self.prefills else self.costs.p0)) / each)
        least = min(BLOCK_TOKENS, count)
        if room >= least:
            return min(room, count)
        return least if self._fits(self.cost(request, start, least)) else 0

    def take(self, request: Request, start: int, count: int) -> None:
        """The step has them from now on."""
        if self.seconds != math.inf:
            self.taken += self.cost(request, start, count)
        if _generates(request, start):
            self.decodes = True
        else:
            self.prefills = True

    def cost(self, request: Request, start: int, count: int) -> float:
        costs = self.costs
        if _generates(request, start):
            return costs.d1 * count + costs.d2 * start + (0.0 if self.decodes else costs.d0)
        return costs.chunk_seconds(count, start) + (0.0 if self.prefills else costs.p0)

    def _fits(self, cost: float) -> bool:
        return (not self.taken or self.taken < self.seconds) and self.taken + cost <= self.saved


class Sharing:
    """Of one engine. ``room`` for a step that holds its real-time rows, then ``took``; ``learn`` what steps took.
    ``clock`` gives seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.costs = StepModel(PRIORS)
        self.turns = Turns(clock)
        # Seconds that batch requests have not had of their share; negative: that they have had beyond it.
        self.owed = 0.0
        # They are owed so much that they keep a place.
        self.entitled = False
        self._clock = clock
        self._seen = -math.inf  # when a real-time request was there last
        self._samples = 0
        # Of steps with real-time rows: smoothed seconds, and their squares.
        self._mean = self._square = 0.0

    def room(self, step: Step, realtime: bool, share: float) -> Room:
        """For batch requests with this ``share``. ``step`` holds real-time rows alone; ``realtime``: there are such
        requests, in the step or waiting.
        """
        now = self._clock()
        if not realtime:
            self._owe(min(self.owed, 0.0))
            near = now - self._seen < NEAR_S and self._mean > 0
            # An arrival meets a long step more probably than a short one.
            return Room(self.costs, self._square / self._mean) if near else Room(self.costs)
        self._seen = now
        room = Room(self.costs, 0.0)
        for item in step.scheduled:
            room.take(item.request, item.start, item.count)
        seconds, room.taken = room.taken, 0.0
        if seconds:
            gain = GAIN if self._mean else 1.0
            self._mean += gain * (seconds - self._mean)
            self._square += gain * (seconds * seconds - self._square)
        share = min(share, MOST)
        slack = seconds * share / (1.0 - share)
        self._owe(self.owed + slack)
        # In a step without real-time rows a piece is never too much: the engine would wait for a batch request that
        # keeps its place and may not use it.
        room.seconds, room.saved = max(min(slack, self.owed), 0.0), self.owed if seconds else math.inf
        return room

    def took(self, room: Room) -> None:
        """Batch requests have taken what they could of it."""
        if room.taken:
            self._owe(self.owed - room.taken)

    def learn(self, sample: StepSample) -> None:
        """Takes in a measured step, of those with batch requests about."""
        self._samples += 1
        if self._samples <= LEARN_FIRST or self._samples % LEARN_EVERY == 0:
            self.costs.observe([sample])

    def _owe(self, seconds: float) -> None:
        self.owed = min(max(seconds, -CREDIT_S), OWED_S)
        self.entitled = self.owed >= (0.5 * ENTITLED_S if self.entitled else ENTITLED_S)


def comes(request: Request, running: Sequence[Request], blocks: BlockPool) -> bool:
    """Whether the next block that a request would compute is being computed for another. Batch requests that begin
    alike stand behind each other: one waits for what the other computes, and others go first.
    """
    keys = request.keys[: (len(request.tokens) - 1) // BLOCK_TOKENS]
    held = len(blocks.match(keys))
    return held < len(keys) and any(keys[held] in r.keys[r.sealed :] for r in running if r.pending > 1)


def realtime(requests: MutableSequence[Request]) -> int:
    """How many of ``requests``, of which batch requests are the last, are none."""
    count = len(requests)
    while count and requests[count - 1].batch:
        count -= 1
    return count


def kind(requests: MutableSequence[Request], batch: bool) -> list[Request]:
    """The batch requests among ``requests``, or the others."""
    found = list(requests)
    return found[realtime(found) :] if batch else found[: realtime(found)]


def put(requests: MutableSequence[Request], request: Request) -> None:
    """Behind those of its kind."""
    if request.batch or not requests or not requests[-1].batch:
        requests.append(request)
    else:
        requests.insert(realtime(requests), request)


def _generates(request: Request, start: int) -> bool:
    """Whether a row from ``start`` on computes what was generated last, and nothing of the prompt."""
    return start >= request.prompt_len and start >= len(request.tokens) - 1
