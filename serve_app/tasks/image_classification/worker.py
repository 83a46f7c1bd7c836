"""What the worker of an image classifier does: any architecture that transformers loads for image classification, and
those that score the classes that a client names.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import AutoConfig, AutoModelForImageClassification

from serve_app.predict.candidates import FAMILIES, LABELS, CandidateClassifier
from serve_app.predict.loading import labels, load_model
from serve_app.predict.pictures import Pictures, example_picture, stacked
from serve_app.predict.predictor import BadInput, Item, Place, Predictor

# How many classes are told where nobody says.
TOP = 5


class ImageClassifier(Predictor):
    def __init__(self, place: Place) -> None:
        self._model = load_model(AutoModelForImageClassification, place)
        self._labels = labels(self._model)
        self._pictures = Pictures(place)

    def prepare(self, data: bytes, options: dict[str, Any]) -> Item:
        if options.get(LABELS):
            raise BadInput(
                f"{LABELS}: this model knows its own {len(self._labels)} classes and no others; leave it out."
            )
        return self._pictures.item(data, lambda height, width: min(options.get("top_k") or TOP, len(self._labels)))

    def forward(self, items: Sequence[Item]) -> list[list[dict[str, Any]]]:
        scores = self._model(**stacked(items, self._model)).logits.float().softmax(-1)
        return [self._best(row, item.asked) for row, item in zip(scores, items, strict=True)]

    def _best(self, scores: Any, count: int) -> list[dict[str, Any]]:
        values, places = scores.topk(count)
        found = zip(places.tolist(), values.tolist(), strict=True)
        return [{"label": self._labels[place], "score": score} for place, score in found]

    def example(self) -> bytes:
        return example_picture()


def load(place: Place) -> Predictor:
    kind = AutoConfig.from_pretrained(place.path, local_files_only=True, trust_remote_code=False).model_type
    return CandidateClassifier(place) if kind in FAMILIES else ImageClassifier(place)
