"""What layers keep of a text beside keys and values: recurrent and convolutional states, one of each for a whole text.

Keys and values of a token stay as they are; a state is overwritten by the next token. So states lie in *slots*, each of
which has those of all layers after one text's first so many tokens::

    slot 0    belongs to nobody: what batches without a text's state write to
    slot n    [layer 0: conv, recurrent | layer 1: ... ]

A pass reads a text's states from one slot and writes those after its last row to another one, or to the same.
:mod:`serve_app.engine.state_slots` says which.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from serve_app.engine.gpu.staging import to_device

if TYPE_CHECKING:
    from serve_app.engine.step import Scheduled


@dataclass(slots=True, frozen=True)
class StatePart:
    """One tensor of a text's state: the ``number``-th ``kind`` (``conv`` or ``recurrent``) of ``layer``."""

    layer: int
    kind: str
    number: int
    size: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return math.prod(self.size) * self.dtype.itemsize


@dataclass(slots=True, frozen=True)
class StateShape:
    """All that a model's layers keep of one text. ``single``: behind a state tokens go through one by one."""

    parts: tuple[StatePart, ...] = ()
    single: bool = False

    @property
    def bytes(self) -> int:
        """Of one slot."""
        return sum(part.bytes for part in self.parts)

    def allocate(self, slots: int, device: str | torch.device) -> list[Tensor]:
        """Zeros, of each part [slots, *size]."""
        return [torch.zeros((slots, *part.size), dtype=part.dtype, device=device) for part in self.parts]


@dataclass(slots=True, frozen=True)
class Rows:
    """Rows of a batch that go through a layer with a state together: ``count`` of each of some texts. ``index``
    [texts * count] int64 says which, text by text; None: those of one text, from ``begin`` on. ``reads`` and ``writes``
    [texts] int64 are slots; ``reads`` None: before the texts is nothing. ``generated``: none of them is of a prompt."""

    begin: int
    count: int
    reads: Tensor | None
    writes: Tensor
    index: Tensor | None = None
    generated: bool = False


@dataclass(slots=True)
class BatchStates:
    """How a batch's rows find their texts' states."""

    rows: list[Rows] = field(default_factory=list)


def place_states(scheduled: Sequence[Scheduled], query_start: np.ndarray, device: torch.device) -> BatchStates:
    """Texts with as many rows go together, those that begin apart from those that go on, and prompts from answers."""
    alike: defaultdict[tuple[int, bool, bool], list[tuple[int, int, int]]] = defaultdict(list)
    for begin, s in zip(query_start.tolist(), scheduled, strict=False):
        request = s.request
        reads = request.state if s.start else 0
        writes = request.state_next or request.state
        if not writes:
            raise RuntimeError(f"request {request.id} has no slot for its states")
        # One row is computed in one way, whatever it is.
        generated = s.count > 1 and s.start >= request.prompt_len
        alike[s.count, reads > 0, generated].append((begin, reads, writes))
    rows = []
    for (count, behind, generated), texts in alike.items():
        begins, reads_, writes_ = (np.array(column, np.int64) for column in zip(*texts, strict=True))
        index = (begins[:, None] + np.arange(count)).ravel()
        where, sources, targets = to_device([index, reads_, writes_], device)
        alone = len(texts) == 1
        read_from, index_ = sources if behind else None, None if alone else where
        rows.append(Rows(texts[0][0], count, read_from, targets, index_, generated))
    return BatchStates(rows)
