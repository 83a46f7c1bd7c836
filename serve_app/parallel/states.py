"""Hidden states for who reads them at rank 0 (an EAGLE-3 head): what enters some layers, which lie on several stages.

Every rank of a stage has all of a row's states, so that its first part sends them, just before logits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from serve_app.engine.runner import Forward
from serve_app.engine.step import Batch, Capture
from serve_app.parallel.group import Group


class Rows(Protocol):
    """Which rows a rank has between layers: ``rows`` of the step under way where each rank has a share of them, else
    0.
    """

    rows: int

    def join(self, x: Tensor) -> Tensor:
        """All rows [T, n], of which each rank of a stage gives its own."""
        ...


class States:
    """``stages``: layers [first, last) of each; states are ``width`` numbers of ``dtype``."""

    def __init__(self, group: Group, stages: list[tuple[int, int]], rows: Rows, width: int, dtype: torch.dtype) -> None:
        self._group, self._stages, self._rows = group, stages, rows
        self._width, self._dtype = width, dtype

    def compute(self, local: Forward, batch: Batch) -> Tensor:
        """``local`` over ``batch``, whose wish it fulfils for layers of this stage, in the order of the wish."""
        wish, stage = batch.capture, self._group.place.stage
        if wish is None:
            return local(batch)
        first = self._stages[stage][0]
        own = Capture(tuple(wish.layers[i] - first for i in self._of(wish, stage)))
        self._rows.rows = 0  # of a pass in which rows are not shared nobody says so
        batch.capture = own if own.layers else None
        try:
            logits = local(batch)
        finally:
            batch.capture = wish
        if own.states is not None:
            states = self._rows.join(own.states.flatten(1)) if self._rows.rows else own.states
            wish.states = states.view(-1, len(own.layers), self._width)
        return logits

    def send(self, batch: Batch) -> None:
        """Another rank's, behind :meth:`compute`."""
        wish, place = batch.capture, self._group.place
        if wish is not None and wish.states is not None and place.stage and not place.part:
            self._group.send_bytes(wish.states.contiguous().view(torch.uint8).flatten(), 0)

    def collecting(self, batch: Batch) -> Callable[[], None]:
        """Rank 0's, behind :meth:`compute`: what is given waits for what other stages have and completes the wish."""
        wish, group, tokens = batch.capture, self._group, len(batch.input_ids)
        if wish is None:
            return lambda: None
        coming: list[tuple[list[int], Tensor, Any]] = []
        for stage in range(1, len(self._stages)):
            if of_it := self._of(wish, stage):
                size = tokens * len(of_it) * self._width * self._dtype.itemsize
                coming.append((of_it, *group.taking_bytes(size, stage * group.place.tensor)))

        def complete() -> None:
            if not coming:
                return
            whole = torch.empty(tokens, len(wish.layers), self._width, dtype=self._dtype, device=group.device)
            if wish.states is not None:
                whole[:, self._of(wish, 0)] = wish.states
            for of_it, data, work in coming:
                with group.waiting.counted():
                    work.wait()
                whole[:, of_it] = data.view(self._dtype).view(tokens, len(of_it), self._width)
            coming.clear()
            wish.states = whole

        return complete

    def _of(self, wish: Capture, stage: int) -> list[int]:
        """Which of the wished for layers a stage has."""
        first, last = self._stages[stage]
        return [index for index, layer in enumerate(wish.layers) if first <= layer < last]
