"""The nouns of encoding: what a caller asks for, a batch, what a model must offer, and the typed errors."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int32]
Rows = npt.NDArray[np.float32]
Pooling = Literal["mean", "cls", "last", "score"]
TokenHead = Literal["sparse", "colbert"]


class EncodeError(ValueError):
    """The caller's input can't be encoded; the text says what to change."""


class SequenceTooLong(EncodeError):
    """A sequence has more tokens than the model has positions. Nothing is ever cut silently."""

    def __init__(self, index: int, length: int, limit: int) -> None:
        super().__init__(f"input {index} has {length} tokens; this model takes at most {limit}; split it")
        self.index, self.length, self.limit = index, length, limit


class EncoderClosed(RuntimeError):
    """The batcher was shut down before the call was answered."""


class EncodeFailed(RuntimeError):
    """The forward pass failed; ``__cause__`` is what it raised."""


@dataclass(slots=True, frozen=True)
class Readout:
    """What a caller wants from the hidden states.

    ``pooling`` is ``mean``, ``cls``, ``last`` for vectors or ``score`` for a reranker's logit. ``normalise``
    scales vectors to unit L2 length; ``dimensions`` keeps the first values only (before normalising, as
    Matryoshka models are trained). ``sigmoid`` maps a score's logit to (0, 1). With ``heads`` a row goes on behind the
    vector with what these heads say of each token (see ``serve_app.models.encoders.token_heads``).
    """

    pooling: Pooling = "mean"
    normalise: bool = True
    dimensions: int | None = None
    sigmoid: bool = True
    heads: tuple[TokenHead, ...] = ()

    def finish(self, rows: Rows) -> Rows:
        """Pooled rows [n, d] float32 -> what the caller gets: [n, dimensions or d], or scores [n]."""
        if self.pooling == "score":
            scores = rows[:, 0]
            # Through tanh, because exp(-x) overflows for confident negatives.
            return 0.5 * (1.0 + np.tanh(0.5 * scores)) if self.sigmoid else scores.copy()
        rows = rows[:, : self.dimensions]
        if not self.normalise:
            return rows.copy()
        return rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-12)

    def finish_long(self, rows: list[Rows], width: int) -> list[Rows]:
        """The same for rows that go on behind a vector of ``width`` values: what follows it stays as it is."""
        return [np.concatenate([self.finish(row[None, :width])[0], row[width:]]) for row in rows]


@dataclass(slots=True)
class EncodeBatch:
    """Sequences of one forward pass, shortest first, concatenated without padding.

    ``ids`` and ``type_ids`` are [T] int32; ``lengths`` [R] int64 sums to T; ``pooling`` has R entries, and so has
    ``heads`` unless no sequence wants any.
    """

    ids: Ids
    type_ids: Ids
    lengths: npt.NDArray[np.int64]
    pooling: list[Pooling]
    heads: list[tuple[TokenHead, ...]] = field(default_factory=list)


class Encoder(Protocol):
    """What the batcher needs of a model (see ``serve_app.models.encoders.encoder.EncoderModel``)."""

    max_length: int
    vocab_size: int
    type_vocab_size: int
    dimensions: int
    readout: Readout

    def forward(self, batch: EncodeBatch) -> Rows | list[Rows]:
        """Pooled rows [R, d] float32, neither cut nor normalised; [R, 1] logits for a reranker. With heads in the
        batch R rows of their own lengths."""
        ...

    def lacks(self, heads: tuple[TokenHead, ...]) -> str:
        """Why the model cannot give all of ``heads``; empty if it can."""
        ...

    def padded_tokens(self, lengths: npt.NDArray[np.int64]) -> int:
        """How many token positions a forward pass over these lengths computes."""
        ...


@dataclass(slots=True)
class EncodeStats:
    """Counters since the start, and what waits now."""

    queued_calls: int = 0
    queued_sequences: int = 0
    queued_tokens: int = 0
    calls: int = 0
    cancelled_calls: int = 0
    failed_calls: int = 0
    batches: int = 0
    sequences: int = 0
    tokens: int = 0
    computed_tokens: int = 0
    busy_s: float = 0.0
