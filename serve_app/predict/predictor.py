"""What a task's `worker.py` provides: a model, and how inputs become results."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol

Units = dict[str, int]


class BadInput(ValueError):
    """An input that this model can't take; the text is for the client."""


@dataclass(slots=True, frozen=True)
class Place:
    """Where a model lies and where it is to run: as records say it."""

    path: Path
    dtype: str = "auto"
    device: str = "cpu"


@dataclass(slots=True)
class Item:
    """One input, ready for the model. ``size``: what it costs, in what the stage's ``max_batch_tokens`` counts. Items
    of one ``kind`` share a batch. ``asked``: what its result is made with.
    """

    value: Any
    size: int = 1
    kind: Hashable = None
    asked: Any = None
    units: Units = field(default_factory=dict)


class Run(Protocol):
    """Has items computed in common batches with those of other requests; their results in order."""

    async def __call__(self, items: Sequence[Item]) -> list[Any]: ...


class Predictor(ABC):
    """One loaded model."""

    @abstractmethod
    def prepare(self, data: bytes, options: dict[str, Any]) -> Item:
        """One input, decoded and checked; called in a thread, with what the task's gateway side has sent. Raises
        :class:`BadInput`.
        """

    @abstractmethod
    def forward(self, items: Sequence[Item]) -> Sequence[Any]:
        """Of each item its result, as JSON has it. Called by the one thread that has the model."""

    @abstractmethod
    def example(self) -> bytes:
        """An input to warm up with."""

    # What is asked of the example, where a model takes nothing without.
    example_options: ClassVar[dict[str, Any]] = {}

    # Says that a long forward pass goes on; set by who watches over it.
    beat: Callable[[], None] = staticmethod(lambda: None)

    def progress(self, watch: str) -> tuple[int, int]:
        """Steps that are done of an input, and all; of models that know."""
        return 0, 0

    async def answer(self, item: Item, run: Run) -> tuple[Any, Units]:
        """What becomes of one input: by default one item, one result. Others need several steps."""
        [result] = await run([item])
        return result, item.units
