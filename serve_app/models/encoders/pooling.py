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
from torch import Tensor, nn

from serve_app.engine.encoder.types import Pooling
from serve_app.models.loading.folder import UnsupportedModel

_MODES: dict[str, Pooling] = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_lasttoken": "last",
}
_ACTIVATIONS = {kind.__name__: kind for kind in (nn.Identity, nn.Tanh, nn.ReLU, nn.GELU, nn.Sigmoid, nn.SiLU)}
_NAMES: dict[str, Pooling] = {"mean": "mean", "cls": "cls", "lasttoken": "last"}


@dataclass(slots=True, frozen=True)
class PoolingDefaults:
    """How a checkpoint wants to be read; ``dense`` are layers that pooled rows pass one after the other."""

    pooling: Pooling | None = None
    normalise: bool = True
    dense: tuple[nn.Module, ...] = ()


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

    Raises :class:`UnsupportedModel` for a pooling and for modules that we do not have: to leave those out would give
    wrong vectors without a word.
    """
    listing = path / "modules.json"
    if not listing.is_file():
        return PoolingDefaults()
    pooling: Pooling | None = None
    normalise = False
    dense: list[nn.Module] = []
    for module in json.loads(listing.read_text()):
        kind = str(module.get("type", "")).rsplit(".", 1)[-1]
        if kind == "Pooling":
            pooling = _pooling_mode(path / module["path"] / "config.json")
        elif kind == "Normalize":
            normalise = True
        elif kind == "Dense" and not normalise:
            dense.append(_dense(path / module["path"]))
        elif kind not in ("Transformer", "Dropout"):
            raise UnsupportedModel(f"{listing} asks for a {kind!r} module, which is not supported")
    return PoolingDefaults(pooling, normalise, tuple(dense))


def _dense(folder: Path) -> nn.Module:
    """A Dense module [in_features] -> [out_features], float32, with the activation that its configuration names."""
    from safetensors.torch import load_file

    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    activation = str(config.get("activation_function", "torch.nn.modules.activation.Tanh")).rsplit(".", 1)[-1]
    if activation not in _ACTIVATIONS:
        raise UnsupportedModel(f"{folder} asks for {activation!r}; supported are {', '.join(sorted(_ACTIVATIONS))}")
    if not (folder / "model.safetensors").is_file():
        raise UnsupportedModel(f"{folder} has no model.safetensors; convert it with safetensors.torch.save_file")
    tensors = {name.removeprefix("linear."): t.float() for name, t in load_file(folder / "model.safetensors").items()}
    linear = nn.Linear(config["in_features"], config["out_features"], bias="bias" in tensors)
    if {name: t.shape for name, t in tensors.items()} != {name: t.shape for name, t in linear.named_parameters()}:
        raise UnsupportedModel(f"{folder} has weights of other sizes than its config.json says")
    linear.load_state_dict(tensors)
    return nn.Sequential(linear, _ACTIVATIONS[activation]()).requires_grad_(False).eval()


def _pooling_mode(file: Path) -> Pooling:
    config: dict[str, Any] = json.loads(file.read_text())
    if config.get("include_prompt") is False:
        raise UnsupportedModel(f"{file} leaves prompts out of the vectors (include_prompt), which is not supported")
    if isinstance(config.get("pooling_mode"), str) and config["pooling_mode"] in _NAMES:
        return _NAMES[config["pooling_mode"]]
    asked = [key for key, value in config.items() if key.startswith("pooling_mode") and value]
    if len(asked) == 1 and asked[0] in _MODES:
        return _MODES[asked[0]]
    known = ", ".join(_MODES)
    raise UnsupportedModel(f"{file} asks for {asked or 'no known pooling'}; supported are {known}, one at a time")
