"""Pictures to the embeddings that stand in a prompt: the part of a model that looks, transformers' own.

The rest of a model of :data:`KNOWN` is a plain decoder. Its pictures' features take the places of placeholder tokens,
positions count on through them, and attention stays causal, or sees a whole picture at once
(:mod:`serve_app.models.spanned`). Families that do otherwise are not in the list, and their pictures are refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

# By `model_type`. Qwen2-VL and later have three positions a token, Llama 3.2 reads pictures in layers of its own, Llama
# 4 cuts them into tiles.
KNOWN = frozenset({"llava", "mistral3", "gemma3"})
# The tokens of one picture attend to each other in both directions.
WHOLE = frozenset({"gemma3"})


@dataclass(slots=True)
class PictureEncoder:
    """``options``: what the model's image processor is told beside its own configuration. ``whole``: see
    :class:`serve_app.engine.request.EmbeddedSpan`."""

    module: Any
    options: dict[str, Any]
    whole: bool = False

    @torch.inference_mode()
    def __call__(self, pictures: Sequence[dict[str, Tensor]]) -> list[Tensor]:
        """Of each picture, as the processor makes it and all of one shape, the features [places, hidden] in the model's
        dtype."""
        device, dtype = self.module.device, self.module.dtype
        names = [name for name in ("pixel_values", "image_sizes") if name in pictures[0]]
        batch = {name: torch.stack([picture[name] for picture in pictures]).to(device) for name in names}
        batch["pixel_values"] = batch["pixel_values"].to(dtype)
        found = self.module.model.get_image_features(**batch, return_dict=True).pooler_output
        return [features.to(dtype) for features in found]


def picture_encoder(module: nn.Module) -> PictureEncoder | None:
    """The encoder of a loaded model; None if it takes no pictures, or in a way that is not known here."""
    config: Any = module.config
    if config.model_type not in KNOWN:
        return None
    owner: Any = module
    # The paged attention is the decoder's; pictures have no cache.
    owner.model.vision_tower.set_attn_implementation("sdpa")
    options: dict[str, Any] = {}
    if config.vision_config.model_type == "pixtral":
        side = config.vision_config.patch_size * getattr(config, "spatial_merge_size", 1)
        options["patch_size"] = {"height": side, "width": side}
    return PictureEncoder(module, options, config.model_type in WHOLE)
