"""Pictures that enter a decoder in several layers: DeepStack (arXiv 2406.04334), as Qwen3-VL has it.

A place's features are those that stand for its token and, beside them, what is added to the states behind each of the
first layers. They come as one row (:class:`serve_app.engine.step.InputEmbeddings`), so whatever carries features
carries these.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor, nn


def add_behind_layers(module: nn.Module) -> None:
    """Makes transformers' own forward add what a batch brings for the layers of a model that has such."""
    config: Any = module.config
    fed = getattr(getattr(config, "vision_config", None), "deepstack_visual_indexes", None) or ()
    owner: Any = module
    for index, layer in enumerate(owner.model.language_model.layers[: len(fed)] if fed else ()):
        # Before what hands the layer's states to another rank.
        layer.register_forward_hook(partial(_add, index), with_kwargs=True, prepend=True)


def _add(index: int, layer: nn.Module, args: Any, options: dict[str, Any], states: Tensor) -> Tensor:
    batch = options.get("batch")
    if batch is None or batch.embeddings is None:
        return states
    return batch.embeddings.add_behind(index, states[0])[None]
