"""Real-time streams beside a batch in modelled time: the engine's scheduler, and steps that take what a formula says.

What `beside` measures is mostly noise where a round has two hundred streams and the machine does other things. Here the
same streams come in seconds that no machine takes, so the same seed gives the same figures anywhere. Steps cost what
they cost a small model on a CPU, and differ by some per cent from what the scheduler could know. The first seconds of
each round are left out: there nothing is known of real-time steps yet.
"""

from __future__ import annotations

import random
from typing import Any

from benchmarks.batch.beside import PLACES, UNDER_WAY, Stream, streams
from benchmarks.checks import Checks
from benchmarks.trace.measure import quantile

SECONDS, RATE = 20.0, 6.0  # of a round; streams a second, which keep the engine busy for seven tenths of the time
SKIPPED_S = 3.0
COSTS = (1.5e-3, 2e-4, 1e-8, 6e-3, 4e-4, 1e-6)  # p0, p1, p2, d0, d1, d2 of `serve_app.costs.steps`
SPREAD = 0.08


class Round:
    """Streams on an engine, with as many batch requests beside them as a runner has under way, or none."""

    def __init__(self, batch: bool, seed: int) -> None:
        from serve_app.costs.steps import StepModel
        from serve_app.engine.blocks import BlockPool
        from serve_app.engine.meter import StepMeter
        from serve_app.engine.scheduler import Scheduler
        from serve_app.engine.sharing import Sharing

        self.now = 0.0
        self.costs, self.meter = StepModel(COSTS), StepMeter()
        self.scheduler = Scheduler(BlockPool(4000), max_batch_tokens=512, max_num_seqs=PLACES, max_model_len=1024)
        self.scheduler.sharing = Sharing(lambda: self.now)
        self.batch_tokens = 0
        self._draw, self._number = random.Random(seed + 1000 * batch), 0
        for _ in range(UNDER_WAY if batch else 0):
            self._feed()

    def run(self, asked: list[Stream]) -> None:
        """Until all have ended; each has when what came."""
        waiting, running = asked[::-1], {}
        while waiting or running:
            while waiting and waiting[-1].at <= self.now:
                stream = waiting.pop()
                running[self._add(stream.prompt, stream.tokens, None)] = stream
            if not self.scheduler.has_work:
                self.now = waiting[-1].at
                continue
            for output in self._step():
                stream = running.get(output.request_id)
                if stream is None:
                    self.batch_tokens += len(output.token_ids)
                    if output.finish_reason is not None:
                        self._feed()
                    continue
                if output.token_ids:
                    stream.came.append((self.now, output.token_ids))
                if output.finish_reason is not None:
                    del running[output.request_id]

    def _step(self) -> list[Any]:
        from serve_app.engine.step import Sampled

        step = self.scheduler.next()
        prompts = rows = kv = 0
        seconds = 0.0
        for item in step.scheduled:
            if item.start < item.request.prompt_len:
                prompts += 1
                seconds += self.costs.chunk_seconds(item.count, item.start)
            else:
                rows, kv = rows + 1, kv + item.start
        seconds += (self.costs.p0 if prompts else 0.0) + (self.costs.decode_seconds(rows, kv) if rows else 0.0)
        seconds *= self._draw.lognormvariate(0.0, SPREAD)
        self.now += seconds
        outputs = self.scheduler.commit(step, [Sampled([5] if item.samples else []) for item in step.scheduled])
        sample = self.meter.record(step.scheduled, seconds)
        if self.scheduler.shares:
            self.scheduler.sharing.learn(sample)
        return outputs

    def _feed(self) -> None:
        draw = self._draw
        self._add([draw.randrange(10, 4000) for _ in range(draw.randrange(30, 200))], draw.randrange(16, 48), 0.05)

    def _add(self, prompt: list[int], tokens: int, share: float | None) -> str:
        from serve_app.engine.request import Request
        from serve_app.sampling_params import SamplingParams

        self._number += 1
        name, sampling = str(self._number), SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
        self.scheduler.add(Request(name, list(prompt), len(prompt), sampling, name.encode(), share=share))
        return name


def modelled(rounds: int, checks: Checks) -> dict[str, Any]:
    """Times of real-time streams, ms, over so many ``rounds``, and how many times as long they are beside a batch."""
    firsts: dict[bool, list[float]] = {False: [], True: []}
    gaps: dict[bool, list[float]] = {False: [], True: []}
    batch_tokens = 0
    for seed in range(rounds):
        for batch in (False, True):
            asked = streams(SECONDS, RATE, seed)
            one = Round(batch, seed)
            one.run(asked)
            batch_tokens += one.batch_tokens
            for stream in asked:
                checks.equal("tokens of a stream", len(stream.answer), stream.tokens)
                first, between = stream.times(0.0)
                if stream.at > SKIPPED_S:
                    firsts[batch].append(first)
                    gaps[batch] += between
    checks.that("a batch beside streams", batch_tokens > 0, "none of its tokens came")
    found: dict[str, Any] = {"streams": len(firsts[True]), "batch_tokens": batch_tokens}
    for name, sides in (("ttft", firsts), ("itl", gaps)):
        for q in (0.5, 0.99):
            without, beside = (quantile(sides[batch], q) for batch in (False, True))
            found[f"{name}_p{round(100 * q)}_ms"] = round(1e3 * without, 2)
            found[f"{name}_p{round(100 * q)}_growth"] = round(beside / without, 3)
    return found
