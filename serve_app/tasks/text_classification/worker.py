"""What the worker of a text classifier does: any architecture that transformers loads for sequence classification. One
that was trained to tell what follows from a text also says how far the sentence of a class that a client names does.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForSequenceClassification

from serve_app.predict.loading import labels, load_model
from serve_app.predict.predictor import BadInput, Item, Place, Predictor


class TextClassifier(Predictor):
    def __init__(self, place: Place) -> None:
        self._model = load_model(AutoModelForSequenceClassification, place)
        self._labels = labels(self._model)
        self._types = _tells_types(place.path, self._model)
        # Of a model that tells what follows from a text: the classes "no" and "yes", as transformers finds them.
        follows = next((i for i, name in enumerate(self._labels) if name.lower().startswith("entail")), None)
        self._follows = None if follows is None else (-1 if follows == 0 else 0, follows)
        self._pad: int = self._model.config.get_text_config().pad_token_id or 0

    def prepare(self, data: bytes, options: dict[str, Any]) -> Item:
        ids = np.frombuffer(data, np.int32)
        if not options.get("follows"):
            return Item(ids, size=len(ids))
        if self._follows is None:
            own = ", ".join(self._labels[:8]) + ", ..." * (len(self._labels) > 8)
            raise BadInput(f"candidate_labels: this model sorts texts into {own} and nothing else; leave it out.")
        # The types of a pair stand behind its ids.
        return Item(ids, size=len(ids) // 2, kind="pair")

    def forward(self, items: Sequence[Item]) -> list[Any]:
        length = max(item.size for item in items)
        ids = np.full((len(items), length), self._pad, np.int64)
        mask, types = np.zeros_like(ids), np.zeros_like(ids)
        for row, item in enumerate(items):
            ids[row, : item.size], mask[row, : item.size] = item.value[: item.size], 1
            types[row, : len(item.value) - item.size] = item.value[item.size :]
        rows = {"input_ids": ids, "attention_mask": mask} | ({"token_type_ids": types} if self._types else {})
        given = {name: torch.from_numpy(values).to(self._model.device) for name, values in rows.items()}
        if items[0].kind == "pair":
            found: list[Any] = self._model(**given).logits.float()[:, list(self._follows or ())].tolist()
            return found
        scores = self._scores(self._model(**given).logits.float()).tolist()
        return [[{"label": label, "score": s} for label, s in zip(self._labels, row, strict=True)] for row in scores]

    def _scores(self, logits: torch.Tensor) -> torch.Tensor:
        """As transformers' pipeline has them: classes that exclude each other share 1."""
        alone = self._model.config.problem_type == "multi_label_classification" or logits.shape[-1] == 1
        return logits.sigmoid() if alone else logits.softmax(-1)

    def example(self) -> bytes:
        return np.array([1, 2, 3], np.int32).tobytes()


def _tells_types(folder: Path, model: Any) -> bool:
    """Whether the model is told which text of a pair a token is of: unless its tokenizer's file says otherwise."""
    file = folder / "tokenizer_config.json"
    names = json.loads(file.read_text()).get("model_input_names") if file.exists() else None
    takes = "token_type_ids" in inspect.signature(model.forward).parameters
    return takes and (names is None or "token_type_ids" in names)


def load(place: Place) -> TextClassifier:
    return TextClassifier(place)
