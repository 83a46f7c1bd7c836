"""What the worker of an image classifier does: any architecture that transformers loads for image classification."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import AutoModelForImageClassification

from serve_app.predict.loading import labels, load_model
from serve_app.predict.pictures import Pictures, example_picture, stacked
from serve_app.predict.predictor import Item, Place, Predictor


class ImageClassifier(Predictor):
    def __init__(self, place: Place) -> None:
        self._model = load_model(AutoModelForImageClassification, place)
        self._labels = labels(self._model)
        self._pictures = Pictures(place)

    def prepare(self, data: bytes, options: dict[str, Any]) -> Item:
        return self._pictures.item(data, lambda height, width: min(options.get("top_k", 5), len(self._labels)))

    def forward(self, items: Sequence[Item]) -> list[list[dict[str, Any]]]:
        scores = self._model(**stacked(items, self._model)).logits.float().softmax(-1)
        return [self._best(row, item.asked) for row, item in zip(scores, items, strict=True)]

    def _best(self, scores: Any, count: int) -> list[dict[str, Any]]:
        values, places = scores.topk(count)
        found = zip(places.tolist(), values.tolist(), strict=True)
        return [{"label": self._labels[place], "score": score} for place, score in found]

    def example(self) -> bytes:
        return example_picture()


def load(place: Place) -> ImageClassifier:
    return ImageClassifier(place)
