"""Finds the modules of a base model from its configuration, without its weights.

``python -m serve_app.models.loading.bare FOLDER HOME`` keeps them in the state directory.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

from serve_app.adapters.shapes import keep, kept_at
from serve_app.models.linears import is_linear
from serve_app.models.loading.folder import class_of, read_config
from serve_app.models.mixtures.mixture import own_weights
from serve_app.sealed import read_sealed

# What an adapter would have to be trained without.
SEES = "linear that pictures or sounds go through, and no text"


def publish(folder: Path, home: Path) -> None:
    """Keeps the modules of the model in ``folder``, unless somebody has."""
    if read_sealed(kept_at(folder, home)) is None:
        keep(describe(folder), folder, home)


def describe(folder: Path) -> dict[str, Any]:
    """See :class:`serve_app.adapters.shapes.Base`."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    with torch.device("meta"):
        module = class_of(read_config(folder), folder)._from_config(config)
    linears, others = {}, {}
    read = _reads_text(module)
    for name, each in module.named_modules():
        if not name.startswith(read):
            if is_linear(each) or isinstance(each, nn.Linear):
                others[name] = SEES
        elif isinstance(each, nn.Linear):
            linears[name] = [each.out_features, each.in_features]
        elif type(each).__name__ == "Conv1D":  # of GPT-2: a linear whose weight is [in, out]
            into, out = each.weight.shape
            linears[name] = [out, into]
        elif next(each.parameters(recurse=False), None) is not None:
            others[name] = type(each).__name__
    weights = own_weights(module)
    return {"linears": linears, "others": others, "kind": config.model_type, "weights": weights}


def _reads_text(module: Any) -> tuple[str, ...]:
    """How names of modules begin that text goes through: all of them, but in a model that sees or hears."""
    if module.config.get_text_config() is module.config:
        return ("",)
    parts = {id(part) for part in (module.get_decoder(), module.get_output_embeddings()) if part is not None}
    return tuple(name for name, each in module.named_modules() if id(each) in parts) or ("",)


if __name__ == "__main__":
    publish(Path(sys.argv[1]), Path(sys.argv[2]))
