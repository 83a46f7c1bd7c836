"""What a decode step of so many rows takes, learned from those that were run."""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass, field

import numpy as np


@dataclass(slots=True)
class Average:
    """Exponential moving average that begins with the least of the first samples. One sample moves it by little: a
    machine has hiccups.
    """

    WEIGHT = 0.1
    FIRST = 3

    value: float = 0.0
    samples: int = 0

    def add(self, sample: float) -> None:
        self.samples += 1
        if self.samples > self.FIRST:
            sample = min(max(sample, self.value / 2), self.value * 2)
        elif self.samples > 1:
            # The first of their kind are often slow ones.
            self.value = sample = min(self.value, sample)
        self.value += max(self.WEIGHT, 1 / self.samples) * (sample - self.value)


def size_class(count: int) -> int:
    """Counts that cost about the same: each up to 16, then in steps of an eighth."""
    return count if count <= 16 else 16 + int(math.log(count / 16, 1.125)) + 1


@dataclass(slots=True)
class _Curve:
    """Seconds by extra rows, at one batch size; ``extras`` ascends, and 0 is the plain step."""

    extras: list[float] = field(default_factory=list)
    seconds: list[Average] = field(default_factory=list)
    _index: dict[int, int] = field(default_factory=dict)

    def add(self, extra: int, seconds: float) -> None:
        key = size_class(extra)
        at = self._index.get(key)
        if at is None:
            at = bisect_left(self.extras, extra)
            self.extras.insert(at, float(extra))
            self.seconds.insert(at, Average())
            self._index = {size_class(round(x)): i for i, x in enumerate(self.extras)}
        self.seconds[at].add(seconds)

    @property
    def plain(self) -> Average | None:
        return self.seconds[0] if self.extras and self.extras[0] == 0 else None


class StepCosts:
    """Seconds of a step as a function of its requests and rows (a row is one token computed).

    Each class of batch sizes has its own curve: plain steps, and steps with so many more rows. Between known points it
    is interpolated, beyond them continued. Where nothing is known it is hopeful, since only what is tried can be
    learned; what trying may cost is bounded elsewhere (:class:`serve_app.engine.speculation.ledger.Ledger`).
    """

    # A row more, as a share of a plain step's cost per request.
    HOPE = 0.25
    MIN_SAMPLES = 3
    # Steps that differ by less take the same time.
    SAME = 0.25

    def __init__(self) -> None:
        self._curves: dict[int, _Curve] = {}
        # Steps that looked for drafts and had none.
        self._looked: dict[int, Average] = {}

    def record(self, batch: int, rows: int, seconds: float, *, looked: bool = False) -> None:
        """One step in which each of ``batch`` requests generated, computing ``rows`` tokens in all, after it ``looked``
        for drafts or without.
        """
        key = size_class(batch)
        if looked and rows == batch:
            self._looked.setdefault(key, Average()).add(seconds)
        else:
            curve = self._curves.get(key)
            if curve is None:
                curve = self._curves[key] = _Curve()
            curve.add(rows - batch, seconds)

    def expected(self, batch: int, extra: int) -> float:
        """Seconds of a step that looked for drafts and has ``extra`` rows of them; needs :meth:`plain`.

        One that has none may take longer than a plain one all the same: it could not be run ahead.
        """
        if extra:
            return float(self.seconds(batch, np.array([float(extra)]))[0])
        plain, looked = self.plain(batch) or 0.0, self._looked.get(size_class(batch))
        if looked is None or looked.samples < self.MIN_SAMPLES or looked.value < (1 + self.SAME) * plain:
            return plain
        return looked.value

    def plain(self, batch: int) -> float | None:
        """Seconds of a step without drafts, once measured."""
        curve = self._curves.get(size_class(batch))
        known = curve.plain if curve is not None else None
        return known.value if known is not None and known.samples >= self.MIN_SAMPLES else None

    def measured(self, batch: int) -> int:
        """How often a step without drafts was measured."""
        curve = self._curves.get(size_class(batch))
        known = curve.plain if curve is not None else None
        return known.samples if known is not None else 0

    def seconds(self, batch: int, extra: np.ndarray) -> np.ndarray:
        """An estimate for each number of ``extra`` rows; needs :meth:`plain` to be known for ``batch``."""
        curve = self._curves[size_class(batch)]
        xs, ys = curve.extras, [y.value for y in curve.seconds]
        if len(xs) == 1 and (like := self._nearest(batch)) is not None:
            # What was learned at another batch size, as a share of its plain step.
            share = ys[0] / like.seconds[0].value
            xs, ys = like.extras, [share * y.value for y in like.seconds]
        plain, last = ys[0], xs[-1]
        found = np.interp(extra, xs, ys)
        if extra[-1] <= last:
            return found
        if len(xs) == 1:
            return plain * (1 + self.HOPE / max(batch, 4) * extra)
        # The line from the plain step: the last two points may be next to each other, and are measured with noise.
        slope = max(0.0, (ys[-1] - plain) / last)
        return found + slope * np.maximum(extra - last, 0)

    def _nearest(self, batch: int) -> _Curve | None:
        """The curve with more than a plain step whose batch size is nearest."""
        key = size_class(batch)
        known = [k for k, curve in self._curves.items() if len(curve.extras) > 1 and curve.plain is not None]
        return self._curves[min(known, key=lambda k: abs(k - key))] if known else None

    def fewest_extra(self, batch: int) -> int:
        """The smallest number of extra rows that was measured at about this batch size; large where none was."""
        curve = self._curves[size_class(batch)]
        return round(curve.extras[1]) if len(curve.extras) > 1 else 1 << 30

    def table(self) -> dict[str, dict[str, float]]:
        """Milliseconds by batch size and extra rows, for statistics."""
        return {
            str(key): {str(round(x)): round(1e3 * y.value, 3) for x, y in zip(curve.extras, curve.seconds, strict=True)}
            for key, curve in sorted(self._curves.items())
        }


class AskCosts:
    """What it takes to ask a proposer for so many tokens for so many requests."""

    # Of a plain step, per token, where nothing is known.
    HOPE = 0.1

    def __init__(self) -> None:
        self._known: dict[tuple[str, int], Average] = {}

    def record(self, source: str, requests: int, count: int, seconds: float) -> None:
        """``seconds`` per token of the chain are what is learned: drafting is one pass after the other."""
        self._known.setdefault((source, size_class(requests)), Average()).add(seconds / max(1, count))

    def seconds(self, source: str, requests: int, count: int, plain: float) -> float:
        """An estimate; ``plain`` is the target's plain step, for want of anything better."""
        known = self._known.get((source, size_class(requests)))
        return count * (known.value if known is not None else self.HOPE * plain)
