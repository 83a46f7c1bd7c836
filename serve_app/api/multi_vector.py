"""What a text's three readings are worth to each other: dense, lexical and multi-vector scores (BGE-M3).

Formulas and the weights of their sum: arXiv 2402.03216, section 3.2, and FlagEmbedding's `compute_score`. Names in
answers are FlagEmbedding's: ``lexical_weights`` (token id to weight) and ``colbert_vecs``.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

Vectors = npt.NDArray[np.float32]
ScoreMode = Literal["dense", "sparse", "colbert", "all"]
MODES: tuple[str, ...] = ("dense", "sparse", "colbert", "all")
WEIGHTS = (0.4, 0.2, 0.4)  # dense, sparse, colbert


@dataclass(slots=True)
class Reading:
    """What a model says of texts: ``dense`` [n, d] unit vectors, and per text, where asked for, ``lexical`` weights by
    token id and ``colbert`` [tokens - 1, D] unit vectors."""

    dense: Vectors
    lexical: list[dict[int, float]] | None = None
    colbert: list[Vectors] | None = None

    def json(self) -> dict[str, Any]:
        """The fields beside the dense vectors, as answers have them."""
        out: dict[str, Any] = {}
        if self.lexical is not None:
            out["lexical_weights"] = [{str(i): w for i, w in weights.items()} for weights in self.lexical]
        if self.colbert is not None:
            out["colbert_vecs"] = [vectors.tolist() for vectors in self.colbert]
        return out


def lexical_weights(ids: npt.NDArray[np.int32], weights: Vectors, ignored: Collection[int]) -> dict[int, float]:
    """Weights of tokens as those of the text: each token's largest, without control tokens and zeros."""
    out: dict[int, float] = {}
    for index, weight in zip(ids.tolist(), weights.tolist(), strict=True):
        if weight > out.get(index, 0.0) and index not in ignored:
            out[index] = weight
    return out


def scores(reading: Reading, mode: ScoreMode = "dense", weights: tuple[float, ...] = WEIGHTS) -> list[float]:
    """Scores of texts 1 to n-1 against text 0. ``all`` is the sum of the three with ``weights``, divided by theirs."""
    found = {
        "dense": lambda: _dense(reading.dense),
        "sparse": lambda: _sparse(reading.lexical or []),
        "colbert": lambda: _colbert(reading.colbert or []),
    }
    if mode != "all":
        return found[mode]().tolist()
    parts = [weight * score() for weight, score in zip(weights, found.values(), strict=True)]
    return (np.sum(parts, axis=0) / sum(weights)).tolist()


def _dense(rows: Vectors) -> npt.NDArray[np.float64]:
    unit = rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-12)
    return (unit[1:] @ unit[0]).astype(np.float64)


def _sparse(lexical: list[dict[int, float]]) -> npt.NDArray[np.float64]:
    query = lexical[0]
    return np.array([sum(w * query.get(i, 0.0) for i, w in text.items()) for text in lexical[1:]])


def _colbert(vectors: list[Vectors]) -> npt.NDArray[np.float64]:
    """Of each token of the query the best match, on average (late interaction)."""
    query = vectors[0]
    if not len(query):
        return np.zeros(len(vectors) - 1)
    return np.array([float((query @ text.T).max(1).mean()) if len(text) else 0.0 for text in vectors[1:]])
