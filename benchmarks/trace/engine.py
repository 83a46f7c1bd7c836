"""The modelled engine: continuous batching with chunked prefill, as the real scheduler does it, with a step cost model.

Step costs are those of NVIDIA Dynamo's mock engine, fitted there to an 8B model on one H100 (ai-dynamo/dynamo,
lib/mocker, perf_model: the polynomials of the default model)::

    prefill of n tokens, ms     4.209989e-07 n^2 + 1.518344e-02 n + 16.50142
    decode, ms                  -25.74 u^2 + 54.01 u + 5.74           u = share of the KV cache in use

and a step that does both takes the sum. They are not ours: the router's cost model has another form and has to learn
them. ``linear`` is another decode cost, in the bytes that a step reads: 5.74 ms for the weights and 52 ns a token of
context (128 KiB at 2.5 TB/s), however large the cache is. Simplifications, the same for every policy: a request is let
into a worker only when its final length fits, so nothing is preempted; sampling and scheduling cost nothing.

Steps that only decode are advanced many at a time; the sums are exact.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Literal

from benchmarks.trace.measure import GapHistogram
from benchmarks.trace.spec import ClusterSpec, Link
from serve_app.costs.pace import Pace
from serve_app.costs.steps import StepSample
from serve_app.costs.transfers import FetchSample
from serve_app.routing.types import Role

P2, P1, P0 = 4.209989e-10, 1.518344e-05, 1.650142e-02  # seconds
D2, D1, D0 = -25.74e-3, 54.01e-3, 5.74e-3
LINEAR = 5.2e-8


@dataclass(slots=True, frozen=True)
class DecodeCost:
    """Seconds of a decode step: ``base`` and so many for each token of context and for each of its squares."""

    base: float
    token: float
    square: float = 0.0


def decode_cost(kind: Literal["mocker", "linear"], kv_tokens: int) -> DecodeCost:
    """``kv_tokens``: the worker's cache."""
    if kind == "linear":
        return DecodeCost(D0, LINEAR)
    return DecodeCost(D0, D1 / kv_tokens, D2 / (kv_tokens * kv_tokens))


def prefill_alone(tokens: int, chunk: int) -> float:
    """Seconds of a prompt on an idle worker, without fetching or decoding anything."""
    full, rest = divmod(tokens, chunk)
    seconds = full * (P0 + P1 * chunk + P2 * chunk * chunk)
    return seconds + (P0 + P1 * rest + P2 * rest * rest if rest else 0.0)


@dataclass(slots=True, eq=False)
class Job:
    """One request on its way; ``decode`` is the worker that generates, ``prefill`` the one that computes the prompt."""

    id: str
    prompt: int
    output: int
    blocks: tuple[bytes, ...]
    at: float
    prefill: int
    decode: int
    cached: int = 0  # prompt tokens not computed
    computed: int = 0  # prompt tokens known to the worker, cached ones included
    fetched_at: float = 0.0  # when what is cached has arrived
    began: float = -1.0  # its first chunk
    prefilled: float = -1.0
    landed: float = -1.0
    first: float = -1.0  # time of the first token
    done: float = -1.0
    published: int = 0  # blocks on their way to the cache, or there
    copied: float = 0.0  # when the last of what was computed has left the worker
    gateway: int = 0
    adapter: bytes = b""

    @property
    def stays(self) -> bool:
        return self.prefill == self.decode


@dataclass(slots=True)
class Finished:
    """What a step brought about."""

    prefilled: list[Job] = field(default_factory=list)
    started: list[Job] = field(default_factory=list)
    done: list[Job] = field(default_factory=list)
    progressed: list[tuple[Job, int]] = field(default_factory=list)  # prompts, and the tokens of them just computed


class EngineModel:
    """One worker. ``begin`` starts the next step or run of steps, ``end`` applies it."""

    def __init__(self, index: int, spec: ClusterSpec, gaps: GapHistogram) -> None:
        self.index = index
        self.slow, room = spec.gpu(index)
        self.kv_total = int(spec.kv_tokens * room)
        self.max_seqs = spec.max_seqs
        self.chunk = spec.chunk
        self.into, self.out = Link(spec.link_bytes_s), Link(spec.link_bytes_s)
        self.coming = 0  # tokens of K/V that will come over the link from other workers, or are on their way
        self._cost = decode_cost(spec.decode_cost, self.kv_total)
        self.role: Role = "mixed"
        self.paced = False  # whether steps keep to the target, as the product's do
        self.gaps = gaps
        self.queue: deque[Job] = deque()  # prompts not begun
        self.landing: deque[Job] = deque()  # prefilled elsewhere, waiting for a place
        self.prefilling: list[Job] = []
        self.reserved = 0  # tokens of KV promised to what runs here
        self.kv = 0  # tokens of context of the generating sequences
        self.batch = 0
        self.steps = 0
        self.busy = False
        self.version = 0
        self.changed = True
        self.reported_at = 0.0
        self.sample: StepSample | None = None
        self.fetches: list[FetchSample] = []  # since the last report
        self._running: list[tuple[int, int, Job]] = []  # by the step in which they end
        self._fresh: list[Job] = []
        self._order = 0
        self._began = 0.0
        self._run = 0  # decode-only steps in the present run; 0: a step with prefill
        self._parts: list[tuple[Job, int]] = []
        self._seconds = 0.0
        self._pace = Pace(spec.itl_target)
        self.prefill_s = 0.0  # of the last step, on prompts
        self.prefill_tokens_done = 0  # since the start
        self.prefilled_tokens = 0  # and how many of their tokens it computed

    # -- what comes in ---------------------------------------------------------------------------------------------

    def push(self, job: Job) -> None:
        self.queue.append(job)
        self.changed = True

    def land(self, job: Job) -> None:
        """A prefilled prompt has arrived."""
        self.landing.append(job)
        self.changed = True

    @property
    def queued_tokens(self) -> int:
        waiting = sum(j.prompt - j.cached for j in self.queue)
        return waiting + sum(j.prompt - j.computed for j in self.prefilling)

    @property
    def has_work(self) -> bool:
        return bool(self.queue or self.landing or self.prefilling or self.batch)

    @property
    def step_tokens(self) -> int:
        return self._pace.tokens(self.chunk) if self.paced else self.chunk

    # -- steps ---------------------------------------------------------------------------------------------------------

    def begin(self, now: float) -> float | None:
        """Starts a step if the worker is free and has something to do. Returns when it ends, or None."""
        if self.busy:
            return None
        self._admit(now)
        if not self.prefilling and not self.batch:
            return None
        self.busy = True
        self.version += 1
        self._began = now
        if self.prefilling:
            self._run = 0
            self._parts = self._cut(max(self.step_tokens - self.batch, 32))
            tokens = sum(n for _, n in self._parts)
            self.prefilled_tokens = tokens
            self.prefill_s = self.slow * (P0 + P1 * tokens + P2 * tokens * tokens)
            self._seconds = self.prefill_s + (self._decode_sum(1) if self.batch else 0.0)
            context = sum(j.computed for j, _ in self._parts)
            self.sample = StepSample(tokens, context, self.batch, self.kv, self._seconds)
        else:
            self.prefilled_tokens = 0
            # A fresh sequence's first token is no gap between tokens: that step is taken by itself.
            self._run = 1 if self._fresh else max(1, self._running[0][0] - self.steps)
            self._seconds = self._decode_sum(self._run)
            self.sample = StepSample(0, 0, self.batch, self.kv, self._decode_sum(1))
        return now + self._seconds

    def interrupt(self, now: float) -> float | None:
        """Something has come in: a run of decode steps ends with the step that is under way. Returns its new end."""
        if not self.busy or self._run <= 1:
            return None
        low, high = 1, self._run
        while low < high:
            middle = (low + high) // 2
            if self._began + self._decode_sum(middle) >= now:
                high = middle
            else:
                low = middle + 1
        if low == self._run:
            return None
        self._run = low
        self._seconds = self._decode_sum(low)
        self.version += 1
        return self._began + self._seconds

    def end(self, now: float) -> Finished:
        """Applies the step or run that ends now."""
        found = Finished()
        self.busy = False
        self.changed = True
        steps = self._run or 1
        if not self.batch:
            self._pace.took(self._seconds, 0)
        if self.batch:
            self._record(steps)
            self._pace.took(self._seconds, steps)
            self.steps += steps
            self.kv += steps * self.batch
            for job in self._fresh:
                job.first = now
                found.started.append(job)
            self._fresh.clear()
            while self._running and self._running[0][0] <= self.steps:
                job = heappop(self._running)[2]
                job.done = now
                self.batch -= 1
                self.kv -= job.prompt + job.output
                self.reserved -= job.prompt + job.output
                found.done.append(job)
        if not self._run:
            self._end_prefill(now, found)
        return found

    def _end_prefill(self, now: float, found: Finished) -> None:
        for job, tokens in self._parts:
            job.computed += tokens
            self.prefill_tokens_done += tokens
            found.progressed.append((job, tokens))
            if job.computed < job.prompt:
                continue
            self.prefilling.remove(job)
            job.prefilled = now
            if not job.stays:
                self.reserved -= job.prompt
                found.prefilled.append(job)
                continue
            job.first = now
            found.started.append(job)
            if job.output == 1:
                job.done = now
                self.reserved -= job.prompt + job.output
                found.done.append(job)
            else:
                self._join(job, job.output - 1, job.prompt + 1)
        self._parts = []

    def _join(self, job: Job, remaining: int, context: int) -> None:
        self._order += 1
        heappush(self._running, (self.steps + remaining, self._order, job))
        self.batch += 1
        self.kv += context

    def _admit(self, now: float) -> None:
        while self.landing and self.batch < self.max_seqs:
            job = self.landing[0]
            if self.reserved + job.prompt + job.output > self.kv_total:
                break
            self.landing.popleft()
            self.reserved += job.prompt + job.output
            self._join(job, job.output, job.prompt)
            self._fresh.append(job)
        # What has not been fetched yet lets others pass.
        waiting: deque[Job] = deque()
        while self.queue:
            job = self.queue.popleft()
            need = job.prompt + (job.output if job.stays else 0)
            places = self.batch + sum(j.stays for j in self.prefilling) < self.max_seqs
            if job.fetched_at > now:
                waiting.append(job)
            elif self.reserved + need > self.kv_total or not places or len(self.prefilling) >= self.max_seqs:
                waiting.append(job)
                break
            else:
                self.reserved += need
                job.began = now
                self.prefilling.append(job)
        waiting.extend(self.queue)
        self.queue = waiting

    def _cut(self, budget: int) -> list[tuple[Job, int]]:
        parts = []
        for job in self.prefilling:
            if budget <= 0:
                break
            tokens = min(budget, job.prompt - job.computed)
            parts.append((job, tokens))
            budget -= tokens
        return parts

    # -- sums ------------------------------------------------------------------------------------------------------

    def _decode_sum(self, k: int) -> float:
        """Seconds of the next k decode steps of the present batch; each step makes each context longer by one."""
        cost, kv, b = self._cost, self.kv, self.batch
        steps, squares = k * (k - 1) / 2, (k - 1) * k * (2 * k - 1) / 6
        first = k * kv + b * steps
        second = k * kv * kv + 2 * kv * b * steps + b * b * squares
        return self.slow * (k * cost.base + cost.token * first + cost.square * second)

    def _record(self, steps: int) -> None:
        """Gaps between tokens of this run into the histogram."""
        old = self.batch - len(self._fresh)
        if not old:
            return
        if steps == 1:
            self.gaps.add(self._seconds, old)
            return
        first = self._decode_sum(1)
        last = self._decode_sum(steps) - self._decode_sum(steps - 1)
        pieces = 1 if last < 1.01 * first else min(16, steps)
        done, before = 0, 0.0
        for piece in range(1, pieces + 1):
            upto = steps * piece // pieces
            seconds = self._decode_sum(upto)
            self.gaps.add((seconds - before) / (upto - done), (upto - done) * old)
            done, before = upto, seconds
