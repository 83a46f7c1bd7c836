"""Items of many requests through a predictor."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import torch

from serve_app.engine.batching import Batcher, Call, Picked
from serve_app.predict.predictor import Item, Predictor


class PredictBatcher(Batcher):
    """A step is one forward pass over items of one kind, within a ``budget`` of their sizes."""

    def __init__(self, predictor: Predictor, *, budget: int, name: str) -> None:
        self._predictor = predictor
        super().__init__(budget=budget, name=name)
        predictor.beat = self.clock.restart

    def submit(self, items: Sequence[Item], *, batch: bool = False) -> Future[list[Any]]:
        """``items`` of one kind; the future gives their results in order."""
        kind = items[0].kind if items else None
        return self.enqueue(Call(items, [item.size for item in items], kind=kind, batch=batch))

    def step(self, picked: Picked) -> tuple[Sequence[Any], int]:
        items = [call.items[i] for call, i in picked]
        # Each thread is asked anew whether it keeps what gradients would need: all activations.
        with torch.no_grad():
            found = self._predictor.forward(items)
        # Padded to the largest, where sizes are lengths.
        return found, len(items) * items[-1].size
