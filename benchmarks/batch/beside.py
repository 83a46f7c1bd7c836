"""Real-time streams on an engine with batch requests beside them, and without, in turn.

The streams come at seeded moments, the same in every round, about as many as keep the engine busy for ``LOAD`` of the
time. Of the batch requests as many are under way as a runner sends. What gateway, runner and store add to that on the
same cores is not in it. Each round has two sides without a batch: what one of them differs by from the other is noise.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, field
from threading import Event
from typing import Any

from benchmarks import CHECKPOINTS
from benchmarks.checks import Checks
from benchmarks.trace.measure import quantile

MOST_GROWTH = 1.10
SIDES = ("without", "beside", "again")
LOAD = 0.5
# Batch requests under way: the engine's places, and a little of its queue.
PLACES, UNDER_WAY = 32, 44
# Of the streams' answers, how many must be the same with and without a batch: rounding may decide between two tokens.
SAME = 0.98


@dataclass(slots=True)
class Stream:
    """``at``: seconds from the round's start. What comes is written down with its time."""

    at: float
    prompt: list[int]
    tokens: int
    came: list[tuple[float, list[int]]] = field(default_factory=list)

    @property
    def answer(self) -> list[int]:
        return [token for _, tokens in self.came for token in tokens]

    def times(self, began: float) -> tuple[float, list[float]]:
        """Seconds to the first token, and from one to the next."""
        gaps = [
            (b - a) / len(tokens)
            for (a, _), (b, tokens) in zip(self.came, self.came[1:], strict=False)
            for _ in tokens
            if tokens
        ]
        return self.came[0][0] - began - self.at, gaps


def streams(seconds: float, rate: float, seed: int) -> list[Stream]:
    """Poisson arrivals."""
    rng, at, found = random.Random(seed), 0.0, []
    while (at := at + rng.expovariate(rate)) < seconds or not found:
        prompt = [rng.randrange(10, 4000) for _ in range(rng.randrange(30, 200))]
        found.append(Stream(at, prompt, rng.randrange(12, 40)))
    return found


class Rig:
    """An engine in its loop, as a worker has it."""

    def __init__(self, checks: Checks) -> None:
        from serve_app.engine.build import EngineLimits, build_engine
        from serve_app.engine.loop import EngineLoop
        from serve_app.models.load import load_causal_lm

        self.checks = checks
        model = load_causal_lm(CHECKPOINTS / "pico-instruct", dtype="float32")
        limits = EngineLimits(64 << 20, 512, PLACES, 1024)
        self.engine = build_engine(model, limits)
        self.loop = EngineLoop(self.engine, self._outputs)
        self._streams: dict[str, Stream] = {}
        self._left = 0
        self._done = Event()
        self._batch: dict[str, int] = {}
        self._feeds = False
        self._rng = random.Random(0)
        self.batch_tokens = self.batch_done = self._number = 0

    def round(self, asked: list[Stream], *, batch: bool) -> tuple[list[float], list[float]]:
        """Times to first tokens and between tokens of the streams."""
        self._feeds, self._left = batch, len(asked)
        self._done.clear()
        for _ in range(UNDER_WAY if batch else 0):
            self._feed()
        if batch:
            time.sleep(0.3)
        began = time.perf_counter()
        for stream in asked:
            time.sleep(max(0.0, began + stream.at - time.perf_counter()))
            self._number += 1
            self._streams[str(self._number)] = stream
            self._add(str(self._number), stream.prompt, stream.tokens, None)
        if not self._done.wait(120):
            raise SystemExit("no figures: a stream did not end")
        self._feeds = False
        while self.engine.has_work:
            time.sleep(0.01)
        for stream in asked:
            self.checks.equal("tokens of a stream", len(stream.answer), stream.tokens)
        told = [stream.times(began) for stream in asked]
        return [first for first, _ in told], [gap for _, gaps in told for gap in gaps]

    def close(self) -> None:
        self.loop.stop()

    def _feed(self) -> None:
        self._number += 1
        rng, name = self._rng, f"batch-{self._number}"
        self._batch[name] = rng.randrange(16, 48)
        prompt = [rng.randrange(10, 4000) for _ in range(rng.randrange(30, 200))]
        self._add(name, prompt, self._batch[name], 0.05)

    def _add(self, name: str, prompt: list[int], tokens: int, share: float | None) -> None:
        from serve_app.engine.request import Request
        from serve_app.sampling_params import SamplingParams

        sampling = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
        # Nobody finds what another has computed, or the rounds would differ.
        self.loop.add(Request(name, list(prompt), len(prompt), sampling, f"{self._number}".encode(), share=share))

    def _outputs(self, outputs: list[Any]) -> None:
        now = time.perf_counter()
        for output in outputs:
            ended = output.finish_reason is not None
            stream = self._streams.get(output.request_id)
            if stream is None:
                self.batch_tokens += len(output.token_ids)
                if ended:
                    self.batch_done += 1
                    wanted = self._batch.pop(output.request_id)
                    self.checks.equal("tokens of a batch request", output.offset + len(output.token_ids), wanted)
                    if self._feeds:
                        self._feed()
                continue
            stream.came.append((now, output.token_ids))
            if ended:
                del self._streams[output.request_id]
                self._left -= 1
                if not self._left:
                    self._done.set()


def beside(seconds: float, rounds: int, checks: Checks) -> dict[str, Any]:
    """Figures of so many ``rounds`` of each side, ``seconds`` each."""
    rig = Rig(checks)
    try:
        rate = _rate(rig)
        times: dict[str, list[tuple[list[float], list[float]]]] = {side: [] for side in SIDES}
        same = total = 0
        for number in range(rounds):
            answers = {}
            for side in SIDES[number % 3 :] + SIDES[: number % 3]:
                asked = streams(seconds, rate, seed=number)
                times[side].append(rig.round(asked, batch=side == "beside"))
                answers[side] = [stream.answer for stream in asked]
            same += sum(a == b for a, b in zip(answers["beside"], answers["without"], strict=True))
            total += len(answers["beside"])
    finally:
        rig.close()
    checks.that("streams beside a batch", same >= SAME * total, f"{same} of {total} have their answer of without")
    checks.that("a batch beside streams", rig.batch_done > 0, "none of its requests ended")
    return {
        "streams": total,
        "batch_requests": rig.batch_done,
        "batch_tokens": rig.batch_tokens,
        **_grown("ttft", [[first for first, _ in times[side]] for side in SIDES]),
        **_grown("itl", [[gaps for _, gaps in times[side]] for side in SIDES]),
    }


def _rate(rig: Rig) -> float:
    """Streams a second that keep the engine busy for ``LOAD`` of the time."""
    asked = streams(1.0, 16.0, seed=-1)
    for stream in asked:
        stream.at = 0.0
    rig.round(asked[:4], batch=False)  # warms up
    asked = streams(1.0, 16.0, seed=-2)
    for stream in asked:
        stream.at = 0.0
    began = time.perf_counter()
    rig.round(asked, batch=False)
    return LOAD * len(asked) / (time.perf_counter() - began)


def _grown(name: str, sides: list[list[list[float]]]) -> dict[str, Any]:
    """p50 and p99 over all rounds of each side, ms, and how many times as long they are beside a batch, and without one
    once more (``noise``); ``range``: least and largest ratio of p99 of a single round.
    """
    without, beside_it, again = sides
    pooled = [[value for one in side for value in one] for side in sides]
    found: dict[str, Any] = {}
    for label, values in zip(("", "_beside", "_again"), pooled, strict=True):
        for q in (0.5, 0.99):
            found[f"{name}_p{round(100 * q)}{label}_ms"] = round(1e3 * quantile(values, q), 2)
    for label, side, values in (("growth", beside_it, pooled[1]), ("noise", again, pooled[2])):
        ratios = [quantile(b, 0.99) / quantile(a, 0.99) for a, b in zip(without, side, strict=True)]
        found[f"{name}_p99_{label}"] = round(quantile(values, 0.99) / quantile(pooled[0], 0.99), 3)
        found[f"{name}_p99_{label}_range"] = f"{min(ratios):.3f}..{max(ratios):.3f}"
    return found
