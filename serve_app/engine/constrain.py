"""Constrained decoding's seam: what a grammar allows next, as bits over the vocabulary for every row to be sampled.

A step's masks are computed in a thread of their own while the forward pass runs::

    masking = masks.begin(step.scheduled)   # row j of a request: after its output and its first j drafts
    logits  = forward(batch)
    sample(logits, rows, masking.mask())
    masking.settle(sampled)                 # the grammars read what was drawn; one that is complete ends its request
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from threading import Lock
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from serve_app.engine.drafts import accept
from serve_app.engine.request import FINISH_REFUSED, FINISH_STOP, Request
from serve_app.engine.step import Sampled, Scheduled
from serve_app.kernels.masking import mask_logits


class Constraint(Protocol):
    """A grammar that has read one request's output so far."""

    @property
    def error(self) -> str | None:
        """Why the grammar cannot go on, or None."""
        ...

    @property
    def ended(self) -> bool:
        """Whether nothing can follow: the output is complete, or there is an :attr:`error`."""
        ...

    def allowed(self, draft: list[int]) -> int:
        """How many of ``draft``, from the first on, may follow."""
        ...

    def forced(self, draft: list[int]) -> list[int]:
        """The tokens that must follow the output and ``draft``, as far as only one text is possible and its division
        into tokens is certain."""
        ...

    def advance(self, token_ids: list[int]) -> int:
        """Reads drawn tokens up to the one that completes the output; returns how many were read."""
        ...


@dataclass(slots=True)
class MaskRows:
    """Wanted: the masks of rows ``row`` to ``row + len(draft)``, after the output and after each token of ``draft``."""

    constraint: Constraint
    row: int
    draft: list[int]


class Grammars(Protocol):
    """Compiles grammars for one model and computes their masks."""

    def matcher(self, grammar: str, output: Sequence[int] = ()) -> Constraint:
        """A constraint that has read ``output``. Any thread; raises ValueError for what is no grammar."""
        ...

    def fill(self, wanted: Sequence[MaskRows], rows: int) -> NDArray[np.int32]:
        """Bits [rows, words], lowest token first; a zero forbids. Not for two threads at once."""
        ...


@dataclass(slots=True)
class Mask:
    """``bits`` [C, words] int32 for rows ``rows`` of the logits, lowest token first; a zero forbids."""

    rows: list[int]
    bits: NDArray[np.int32]

    def apply(self, logits: Tensor) -> None:
        """Makes ``logits`` [S, V] float32 minus infinity where a token is forbidden, in place."""
        mask_logits(logits, self.rows, self.bits)


class Masking:
    """The masks of one step, under way."""

    def __init__(
        self,
        items: list[tuple[int, Scheduled]],
        rows: list[int],
        fill: Callable[[], NDArray[np.int32]],
        thread: ThreadPoolExecutor,
    ) -> None:
        self._items = items
        self._rows = rows
        self._fill = fill
        self._filling = thread.submit(fill)

    def mask(self) -> Mask:
        """Waits for the masks. The rows are those of the step's logits."""
        # On a busy machine the thread may not have had its turn.
        return Mask(self._rows, self._fill() if self._filling.cancel() else self._filling.result())

    def settle(self, sampled: list[Sampled], gone: Collection[int] = ()) -> None:
        """Lets the grammars read what was drawn; ``sampled`` is aligned with the step's requests and changed here.
        Those at ``gone`` read nothing.
        """
        for index, item in self._items:
            if index in gone:
                continue
            result, constraint = sampled[index], item.request.constraint
            assert constraint is not None
            drawn = result.token_ids
            if item.request.draft:
                drawn = drawn[: accept(item.request.draft, drawn) + 1]
            read = constraint.advance(drawn)
            result.token_ids = drawn[:read]
            # One that goes on has read everything.
            if read < len(drawn) or constraint.ended:
                self._end(result, constraint)

    @staticmethod
    def _end(result: Sampled, constraint: Constraint) -> None:
        if constraint.error is not None:
            result.token_ids = []
            result.finish_reason = FINISH_REFUSED
            result.error = f"its grammar leads nowhere here: {constraint.error}"
        elif constraint.ended:
            result.finish_reason = FINISH_STOP


class Masks:
    """Gives requests their constraints, and computes masks beside the forward pass."""

    def __init__(self, grammars: Grammars) -> None:
        self._grammars = grammars
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="masks")
        # Where several steps are under way, one's masks may be filled in the engine's thread beside another's.
        self._filling = Lock()

    def compile(self, request: Request) -> None:
        """Gives a request its constraint, off the engine's thread and before it is added. Raises ValueError."""
        if request.sampling.grammar is not None:
            output = request.tokens[request.prompt_len :]
            request.constraint = self._grammars.matcher(request.sampling.grammar, output)

    def begin(self, scheduled: list[Scheduled]) -> Masking | None:
        """Starts on the masks of a step's rows; None where no request has a grammar."""
        items: list[tuple[int, Scheduled]] = []
        wanted: list[MaskRows] = []
        rows: list[int] = []
        at = 0
        for index, item in enumerate(scheduled):
            constraint = item.request.constraint
            if constraint is not None and item.samples:
                items.append((index, item))
                wanted.append(MaskRows(constraint, len(rows), list(item.request.draft)))
                rows += range(at, at + item.samples)
            at += item.samples
        if not items:
            return None
        return Masking(items, rows, partial(self._fill, wanted, len(rows)), self._thread)

    def _fill(self, wanted: Sequence[MaskRows], rows: int) -> NDArray[np.int32]:
        with self._filling:
            return self._grammars.fill(wanted, rows)


def allowed_draft(request: Request, draft: list[int]) -> list[int]:
    """``draft`` up to the first token that the request's grammar forbids: the target could not draw it either."""
    if request.constraint is None or not draft:
        return draft
    return draft[: request.constraint.allowed(draft)]
