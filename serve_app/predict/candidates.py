"""Pictures beside texts that a client names, with the models that score both: CLIP's way, and SigLIP's.

The scores are those of transformers' ``zero-shot-image-classification``: softmax over the texts (Radford et al. 2021,
https://arxiv.org/abs/2103.00020), or a sigmoid of each alone (Zhai et al. 2023, https://arxiv.org/abs/2303.15343). What
a text means to the model is kept: requests name the same classes again and again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from transformers import AutoModelForZeroShotImageClassification, AutoTokenizer

from serve_app.predict.loading import load_model
from serve_app.predict.pictures import Pictures, example_picture, stacked
from serve_app.predict.predictor import BadInput, Item, Place, Predictor

# Families that give a picture and a text one vector each, and score by their product alone.
FAMILIES = ("chinese_clip", "clip", "siglip")
# Of as many texts the vector is kept.
KEPT = 4096
LABELS = "candidate_labels"

Ids = tuple[int, ...]


class CandidateClassifier(Predictor):
    example_options: ClassVar = {LABELS: ["a"], "sentences": ["a"]}

    def __init__(self, place: Place) -> None:
        self._model = load_model(AutoModelForZeroShotImageClassification, place)
        config = self._model.config
        self._tokenizer: Any = AutoTokenizer.from_pretrained(place.path, local_files_only=True, trust_remote_code=False)
        self._alone = config.model_type == "siglip"
        self._longest: int = config.text_config.max_position_embeddings
        pad = self._tokenizer.pad_token_id
        self._pad = int(pad if pad is not None else config.text_config.pad_token_id or 0)
        self._masks = "attention_mask" in self._tokenizer.model_input_names
        self._pictures = Pictures(place)
        self._kept: OrderedDict[Ids, torch.Tensor] = OrderedDict()

    def prepare(self, data: bytes, options: dict[str, Any]) -> Item:
        labels: list[str] | None = options.get(LABELS)
        if not labels:
            raise BadInput(f"{LABELS}: this model has no classes of its own; name those to choose from.")
        texts = [tuple(self._tokenizer(sentence)["input_ids"]) for sentence in options["sentences"]]
        for number, text in enumerate(texts):
            if len(text) > self._longest:
                raise BadInput(f"{LABELS}[{number}] has {len(text)} tokens; the model takes at most {self._longest}.")
        top = min(options.get("top_k") or len(labels), len(labels))
        return self._pictures.item(data, lambda height, width: (labels, texts, top))

    def forward(self, items: Sequence[Item]) -> list[list[dict[str, Any]]]:
        self._remember({text for item in items for text in item.asked[1]})
        pictures = _unit(self._model.get_image_features(**stacked(items, self._model)).pooler_output)
        found = []
        for picture, item in zip(pictures, items, strict=True):
            labels, texts, top = item.asked
            scores = self._scores(picture @ torch.stack([self._kept[text] for text in texts]).T).float()
            values, places = scores.topk(top)
            best = zip(places.tolist(), values.tolist(), strict=True)
            found.append([{"label": labels[place], "score": score} for place, score in best])
        while len(self._kept) > KEPT:
            self._kept.popitem(last=False)
        return found

    def _scores(self, products: torch.Tensor) -> torch.Tensor:
        logits = products * self._model.logit_scale.exp()
        return (logits + self._model.logit_bias).sigmoid() if self._alone else logits.softmax(-1)

    def _remember(self, texts: set[Ids]) -> None:
        """Has a vector of each text."""
        for text in texts & self._kept.keys():
            self._kept.move_to_end(text)
        if not (new := sorted(texts - self._kept.keys())):
            return
        # SigLIP was trained on texts that are padded to the end, and reads the padding.
        length = self._longest if self._alone else max(map(len, new))
        ids = torch.tensor([[*text, *[self._pad] * (length - len(text))] for text in new])
        given = {"input_ids": ids.to(self._model.device)}
        if self._masks:
            lengths = torch.tensor([len(text) for text in new])
            given["attention_mask"] = (torch.arange(length) < lengths[:, None]).long().to(self._model.device)
        vectors = _unit(self._model.get_text_features(**given).pooler_output)
        self._kept |= zip(new, vectors, strict=True)

    def example(self) -> bytes:
        return example_picture()


def _unit(vectors: torch.Tensor) -> torch.Tensor:
    return vectors / vectors.norm(dim=-1, keepdim=True)
