"""What the worker of a text classifier does: any architecture that transformers loads for sequence classification."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForSequenceClassification

from serve_app.predict.loading import labels, load_model
from serve_app.predict.predictor import Item, Place, Predictor


class TextClassifier(Predictor):
    def __init__(self, place: Place) -> None:
        self._model = load_model(AutoModelForSequenceClassification, place)
        self._labels = labels(self._model)
        self._pad: int = self._model.config.get_text_config().pad_token_id or 0

    def prepare(self, data: bytes, options: dict[str, Any]) -> Item:
        ids = np.frombuffer(data, np.int32)
        return Item(ids, size=len(ids))

    def forward(self, items: Sequence[Item]) -> list[list[dict[str, Any]]]:
        length = max(len(item.value) for item in items)
        ids = np.full((len(items), length), self._pad, np.int64)
        mask = np.zeros_like(ids)
        for row, item in enumerate(items):
            ids[row, : item.size], mask[row, : item.size] = item.value, 1
        device = self._model.device
        given = {"input_ids": torch.from_numpy(ids).to(device), "attention_mask": torch.from_numpy(mask).to(device)}
        scores = self._scores(self._model(**given).logits.float()).tolist()
        return [[{"label": label, "score": s} for label, s in zip(self._labels, row, strict=True)] for row in scores]

    def _scores(self, logits: torch.Tensor) -> torch.Tensor:
        """As transformers' pipeline has them: classes that exclude each other share 1."""
        alone = self._model.config.problem_type == "multi_label_classification" or logits.shape[-1] == 1
        return logits.sigmoid() if alone else logits.softmax(-1)

    def example(self) -> bytes:
        return np.array([1, 2, 3], np.int32).tobytes()


def load(place: Place) -> TextClassifier:
    return TextClassifier(place)
