"""What steps and drafts take, learned from those that were run."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np


@dataclass(slots=True)
class Average:
    """Exponential moving average of seconds. A machine has hiccups, which only ever make something last longer: a
    sample counts for no more than twice what is believed, or than twice the least of the first few; and what is far
    below is believed sooner.
    """

    WEIGHT, WEIGHT_BELOW = 0.1, 0.5
    FIRST = 3
    # Far below.
    FAR = 1.5

    value: float = 0.0
    samples: int = 0
    _first: tuple[float, ...] = ()

    def add(self, sample: float) -> None:
        self.samples += 1
        if self.samples <= self.FIRST:
            self._first = (*self._first, sample)
            most = 2 * min(self._first)
            self.value = sum([min(one, most) for one in self._first]) / self.samples
            return
        weight = self.WEIGHT_BELOW if sample < self.value / self.FAR else max(self.WEIGHT, 1 / self.samples)
        self.value += weight * (min(max(sample, self.value / 2), self.value * 2) - self.value)


def size_class(count: int) -> int:
    """Counts that cost about the same: each up to 16, then in steps of an eighth."""
    return count if count <= 16 else 16 + int(math.log(count / 16, 1.125)) + 1


class StepCosts:
    """Seconds of a step by its requests and its rows (a row is one token computed).

    Batch sizes of a class have a curve: the plain step, and steps with so many rows more. Between measured points it is
    interpolated, beyond them continued by the line from the plain step (``curve=False``: a line everywhere).
    """

    MIN_SAMPLES = 3
    # A step that looked for drafts and found none is as long as a plain one, unless it is longer by so much.
    SAME = 0.25

    def __init__(self, *, curve: bool = True) -> None:
        self._curve = curve
        # Class of batch size -> rows beyond one a request, ascending -> seconds.
        self._known: dict[int, dict[int, Average]] = {}
        self._idle: dict[int, Average] = {}

    def record(self, batch: int, rows: int, seconds: float, *, looked: bool = False) -> None:
        """One step in which each of ``batch`` requests generated, computing ``rows`` tokens in all, after it ``looked``
        for drafts or without.
        """
        key = size_class(batch)
        if looked and rows == batch:
            self._idle.setdefault(key, Average()).add(seconds)
            return
        curve = self._known.setdefault(key, {})
        extra = next((x for x in curve if size_class(x) == size_class(rows - batch)), None)
        if extra is None:
            extra = rows - batch
            curve = self._known[key] = dict(sorted([*curve.items(), (extra, Average())]))
        curve[extra].add(seconds)

    def plain(self, batch: int) -> float | None:
        """Seconds of a step that does not look for drafts, once measured."""
        known = self._known.get(size_class(batch), {}).get(0)
        return known.value if known is not None and known.samples >= self.MIN_SAMPLES else None

    def most_rows(self, batch: int) -> int:
        """The largest number of extra rows measured at about this batch size."""
        return max(self._known.get(size_class(batch), {0: None}))

    def seconds(self, batch: int, extra: np.ndarray) -> np.ndarray:
        """An estimate for each number of ``extra`` rows; needs :meth:`plain` to be known for ``batch``."""
        curve = self._known[size_class(batch)]
        xs, ys = list(curve), [y.value for y in curve.values()]
        plain, last = ys[0], max(xs[-1], 1)
        if not self._curve:
            slope = sum([(y - plain) * x for x, y in zip(xs, ys, strict=True)]) / max(sum([x * x for x in xs]), 1)
            return plain + max(slope, 0.0) * extra
        found = np.interp(extra, xs, ys)
        # Two neighbouring points are measured with too much noise to give a slope.
        return found + max(0.0, (ys[-1] - plain) / last) * np.maximum(extra - last, 0)

    def expected(self, batch: int, extra: int) -> float:
        """Seconds of a step that looked for drafts and has ``extra`` rows of them; needs :meth:`plain`.

        One that has none may take longer than a plain one all the same: it could not be run ahead.
        """
        if extra:
            return float(self.seconds(batch, np.array([float(extra)]))[0])
        plain, idle = self.plain(batch) or 0.0, self._idle.get(size_class(batch))
        if idle is None or idle.samples < self.MIN_SAMPLES or idle.value < (1 + self.SAME) * plain:
            return plain
        return idle.value

    def table(self) -> dict[str, dict[str, float]]:
        """Milliseconds by batch size and extra rows, for statistics."""
        return {
            str(key): {str(x): round(1e3 * y.value, 3) for x, y in curve.items()}
            for key, curve in sorted(self._known.items())
        }


class DraftCosts:
    """What it takes a proposer to draft so many tokens for so many requests: so long per token of the chain, since
    drafting is one pass after the other.
    """

    # Of a plain step, per token, where nothing is known.
    HOPE = 0.1

    def __init__(self) -> None:
        self._known: dict[tuple[str, int], Average] = {}

    def record(self, source: str, requests: int, count: int, seconds: float) -> None:
        self._known.setdefault((source, size_class(requests)), Average()).add(seconds / max(1, count))

    def per_token(self, source: str, requests: int, plain: float) -> float:
        """An estimate; ``plain`` is the target's plain step, for want of anything better."""
        known = self._known.get((source, size_class(requests)))
        return known.value if known is not None else self.HOPE * plain
