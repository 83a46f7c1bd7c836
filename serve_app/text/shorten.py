"""Which tokens of a text that is too long stay."""

from __future__ import annotations

import numpy as np

from serve_app.api.errors import InvalidInput
from serve_app.api.types import Shorten


def kept_tokens(texts: np.ndarray, shorten: Shorten) -> np.ndarray:
    """The places (ascending) of the tokens that stay. ``texts`` [tokens]: 0 for those of the first text, 1 for those of
    the second, -1 for those that the tokenizer adds, which all stay.

    Raises `InvalidInput` where no token of a text would be left.
    """
    gone = np.zeros(len(texts), bool)
    if shorten.second is not None:
        _drop(gone, np.flatnonzero(texts == 1), int((texts == 1).sum()) - shorten.second, shorten)
    if shorten.tokens is not None:
        for text in (1, 0):
            over = len(texts) - int(gone.sum()) - shorten.tokens
            _drop(gone, np.flatnonzero((texts == text) & ~gone), over, shorten)
        if gone.any() and ((~gone).sum() > shorten.tokens or not (texts[~gone] >= 0).any()):
            added = int((texts < 0).sum())
            raise InvalidInput(
                f"No text would be left of {shorten.tokens} tokens: {added} are the model's own marks. Keep more.",
                param="truncate_prompt_tokens",
            )
    return np.flatnonzero(~gone)


def _drop(gone: np.ndarray, places: np.ndarray, count: int, shorten: Shorten) -> None:
    if count > 0:
        gone[places[:count] if shorten.side == "start" else places[-count:]] = True
