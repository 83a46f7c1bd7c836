"""What the worker of a detector does: any architecture that transformers loads for object detection."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForObjectDetection

from serve_app.predict.loading import labels, load_model
from serve_app.predict.pictures import Pictures, example_picture, stacked
from serve_app.predict.predictor import Item, Place, Predictor


@dataclass(slots=True, frozen=True)
class _Asked:
    """``size``: height and width of the picture, in whose pixels boxes are told."""

    size: tuple[int, int]
    threshold: float


class Detector(Predictor):
    def __init__(self, place: Place) -> None:
        self._model = load_model(AutoModelForObjectDetection, place)
        self._labels = labels(self._model)
        self._pictures = Pictures(place)

    def prepare(self, data: bytes, options: dict[str, Any]) -> Item:
        threshold = options.get("threshold", 0.5)
        return self._pictures.item(data, lambda height, width: _Asked((height, width), threshold))

    def forward(self, items: Sequence[Item]) -> list[list[dict[str, Any]]]:
        found = self._model(**stacked(items, self._model))
        sizes = torch.tensor([item.asked.size for item in items])
        # Those below a threshold of their own are left out below.
        least = min(item.asked.threshold for item in items)
        processor = self._pictures.processor
        told = processor.post_process_object_detection(found, threshold=least, target_sizes=sizes)
        return [self._things(things, item.asked) for things, item in zip(told, items, strict=True)]

    def _things(self, found: dict[str, torch.Tensor], asked: _Asked) -> list[dict[str, Any]]:
        """Likeliest first."""
        named = ("xmin", "ymin", "xmax", "ymax")
        rows = zip(found["scores"].tolist(), found["labels"].tolist(), found["boxes"].tolist(), strict=True)
        things = [
            {"score": score, "label": self._labels[label], "box": dict(zip(named, map(int, box), strict=True))}
            for score, label, box in rows
            if score > asked.threshold
        ]
        return sorted(things, key=lambda thing: -thing["score"])

    def example(self) -> bytes:
        return example_picture()


def load(place: Place) -> Detector:
    return Detector(place)
