"""Encoder-decoder models that write one text for another: what translation and summaries share."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from serve_app.predict.loading import load_model
from serve_app.predict.predictor import BadInput, Item, Place, Predictor, Run, Units


class Rewriter(Predictor):
    """Texts of many requests in one call of transformers' ``generate``, with the model's own way of searching; each is
    what it would be alone.
    """

    def __init__(self, place: Place) -> None:
        self.model = load_model(AutoModelForSeq2SeqLM, place)
        self.tokenizer = AutoTokenizer.from_pretrained(place.path, local_files_only=True, trust_remote_code=False)
        # Some tokenizers keep the language that they read.
        self._reading = threading.Lock()
        config = self.model.config
        self._positions: int | None = getattr(config, "max_position_embeddings", None)
        self._pad: int = config.pad_token_id

    def read(self, text: str, before: Callable[[], None] = lambda: None) -> np.ndarray:
        """The tokens of ``text``, int64; ``before`` sets the tokenizer up. Raises :class:`BadInput`."""
        with self._reading:
            before()
            ids = np.asarray(self.tokenizer(text)["input_ids"], np.int64)
        if self._positions is not None and len(ids) > self._positions:
            raise BadInput(
                f"The text has {len(ids)} tokens; this model takes at most {self._positions}. Send it in parts."
            )
        return ids

    def forward(self, items: Sequence[Item]) -> list[tuple[str, int]]:
        """Texts, and how many tokens each has. An item's kind is what ``generate`` is told: pairs of name and value."""
        length = max(item.size for item in items)
        ids = np.full((len(items), length), self._pad, np.int64)
        mask = np.zeros_like(ids)
        for row, item in enumerate(items):
            ids[row, : item.size], mask[row, : item.size] = item.value, 1
        device = self.model.device
        options: dict[str, Any] = dict(items[0].kind)  # type: ignore[call-overload]
        out = self.model.generate(
            input_ids=torch.from_numpy(ids).to(device), attention_mask=torch.from_numpy(mask).to(device), **options
        )
        # The language's name follows the first token, and a tokenizer that is read again may hold it for text.
        said = out[:, 2:] if "forced_bos_token_id" in options else out
        texts = self.tokenizer.batch_decode(said, skip_special_tokens=True)
        written = (out != self._pad).sum(-1).tolist()
        return list(zip(texts, written, strict=True))

    async def answer(self, item: Item, run: Run) -> tuple[str, Units]:
        [(text, written)] = await run([item])
        return text, {"input_tokens": item.size, "output_tokens": written}
