"""From hidden states to one row per sequence, and what a checkpoint's sentence-transformers files say about
it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from serve_app.engine.encoder.types import Pooling
from serve_app.models.load import UnsupportedModel

_MODES: dict[str, Pooling] = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_lasttoken": "last",
}
_NAMES: dict[str, Pooling] = {"mean": "mean", "cls": "cls", "lasttoken": "last"}


@dataclass(slots=True, frozen=True)
class PoolingDefaults:
    """How a checkpoint wants to be read."""

    pooling: Pooling | None = None
    normalise: bool = True


def pool(hidden: Tensor, lengths: Tensor, pooling: Sequence[Pooling]) -> Tensor:
    """Hidden states [T, H] of R concatenated sequences, ``lengths`` [R] int64 on the same device -> [R, H]
    float32.

    ``mean`` averages all tokens of a sequence, special tokens included, as sentence-transformers does;
    ``cls`` takes the first and ``last`` the last token. Each sequence may ask for another kind.
    """
    ends = lengths.cumsum(0)
    kinds = set(pooling)
    if kinds == {"mean"}:
        return torch.segment_reduce(hidden.float(), "mean", lengths=lengths, axis=0)
    rows = {
        "cls": lambda: hidden[ends - lengths].float(),
        "last": lambda: hidden[ends - 1].float(),
        "mean": lambda: torch.segment_reduce(hidden.float(), "mean", lengths=lengths, axis=0),
    }
    out = torch.empty(len(pooling), hidden.shape[1], device=hidden.device)
    for kind in kinds:
        chosen = torch.tensor([p == kind for p in pooling], device=hidden.device)
        out[chosen] = rows[kind]()[chosen]
    return out


def read_pooling(path: Path) -> PoolingDefaults:
    """Reads ``modules.json`` and what it names, as sentence-transformers writes them; a folder without it
    gives defaults.

    Raises :class:`UnsupportedModel` for a pooling we do not have and for modules with weights of their own
    (Dense): to leave those out would give wrong vectors without a word.
    """
    listing = path / "modules.json"
    if not listing.is_file():
        return PoolingDefaults()
    pooling: Pooling | None = None
    normalise = False
    for module in json.loads(listing.read_text()):
        kind = str(module.get("type", "")).rsplit(".", 1)[-1]
        if kind == "Pooling":
            pooling = _pooling_mode(path / module["path"] / "config.json")
        elif kind == "Normalize":
            normalise = True
        elif kind != "Transformer":
            raise UnsupportedModel(f"{listing} asks for a {kind!r} module, which is not supported")
    return PoolingDefaults(pooling, normalise)


def _pooling_mode(file: Path) -> Pooling:
    config: dict[str, Any] = json.loads(file.read_text())
    if isinstance(config.get("pooling_mode"), str) and config["pooling_mode"] in _NAMES:
        return _NAMES[config["pooling_mode"]]
    asked = [key for key, value in config.items() if key.startswith("pooling_mode") and value]
    if len(asked) == 1 and asked[0] in _MODES:
        return _MODES[asked[0]]
    known = ", ".join(_MODES)
    raise UnsupportedModel(f"{file} asks for {asked or 'no known pooling'}; supported are {known}, one at a time")
