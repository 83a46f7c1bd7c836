"""What the worker of a summariser does: BART and what else of transformers writes a summary for a text."""

from __future__ import annotations

from typing import Any

from serve_app.predict.predictor import Item, Place
from serve_app.predict.rewriting import Rewriter


class Summariser(Rewriter):
    def prepare(self, data: bytes, options: dict[str, Any]) -> Item:
        ids = self.read(data.decode())
        own = self.model.generation_config
        longest = options.get("max_length") or own.max_length or 128
        # A model that writes at least so many tokens can be asked for fewer.
        least = min(own.min_length or 0, longest)
        return Item(ids, len(ids), kind=(("max_length", longest), ("min_length", least)))

    def example(self) -> bytes:
        return b"a"


def load(place: Place) -> Summariser:
    return Summariser(place)
