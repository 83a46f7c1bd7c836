"""Pictures to the embeddings that stand in a prompt: the part of a model that looks, transformers' own.

The rest of a model of :data:`KNOWN` is a plain decoder. Its pictures' features take the places of placeholder tokens.
Positions count on through them, or follow from the picture's grid (:mod:`serve_app.engine.positions`); attention stays
causal, or sees a whole picture at once (:mod:`serve_app.models.spanned`). Families that do otherwise are not in the
list, and their pictures are refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from serve_app.models.media import Encoded, kept_apart

# By `model_type`. Llama 3.2 reads pictures in layers of its own (:mod:`serve_app.models.crossing`).
# Of Qwen's, features are of merged patches.
QWEN = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
KNOWN = frozenset({"llava", "mistral3", "gemma3", "llama4", *QWEN})
# The tokens of one picture attend to each other in both directions.
WHOLE = frozenset({"gemma3"})


# Pictures are several tiles, whose features transformers leaves to the model's forward to project.
TILED = frozenset({"llama4"})


@dataclass(slots=True)
class PictureEncoder:
    """See :class:`~serve_app.models.media.MediaEncoder`. ``merged``: patches to a side of what becomes one feature, for
    models whose positions follow from the grid of these; 0 for others. ``tiled``: of :data:`TILED`. ``apart``: pictures
    are encoded one after the other, since in a batch each row would have a mask over all pictures' rows."""

    module: Any
    options: dict[str, Any]
    whole: bool = False
    merged: int = 0
    tiled: bool = False
    apart: bool = False
    beside: bool = False

    @property
    def grids(self) -> bool:
        return bool(self.merged)

    @property
    def place_bytes(self) -> int:
        config = self.module.config
        fed = getattr(config.vision_config, "deepstack_visual_indexes", None) or ()
        return int((1 + len(fed)) * config.get_text_config().hidden_size * self.module.dtype.itemsize)

    @torch.inference_mode()
    def __call__(self, pictures: Sequence[dict[str, Tensor]]) -> list[Encoded]:
        """Of each picture, as the processor makes it and all of one shape, what it becomes."""
        size = 1 if self.apart else len(pictures)
        return [one for at in range(0, len(pictures), size) for one in self._encode(pictures[at : at + size])]

    def _encode(self, pictures: Sequence[dict[str, Tensor]]) -> list[Encoded]:
        device, dtype = self.module.device, self.module.dtype
        names = [name for name in ("pixel_values", "image_sizes", "image_grid_thw") if name in pictures[0]]
        batch = {name: torch.stack([picture[name] for picture in pictures]).to(device) for name in names}
        batch["pixel_values"] = batch["pixel_values"].to(dtype)
        if self.merged:
            batch["pixel_values"] = batch["pixel_values"].flatten(0, 1)
        if self.tiled:
            return [Encoded(kept_apart(features.to(dtype))) for features in self._tiled(batch["pixel_values"])]
        found = self.module.model.get_image_features(**batch, return_dict=True)
        grids: list[tuple[int, int] | None] = [None] * len(pictures)
        if self.merged:
            grids = [(rows // self.merged, columns // self.merged) for _, rows, columns in _sides(pictures)]
        parts = [found.pooler_output, *(getattr(found, "deepstack_features", None) or ())]
        rows = [torch.cat(own, -1).to(dtype) for own in zip(*parts, strict=True)]
        return [Encoded(kept_apart(features), grid) for features, grid in zip(rows, grids, strict=True)]

    def _tiled(self, pixels: Tensor) -> Tensor:
        """Features [pictures, places, hidden] of [pictures, tiles, 3, side, side]."""
        found = self.module.get_image_features(pixels.flatten(0, 1), return_dict=True).last_hidden_state
        return self.module.multi_modal_projector(found).view(
            len(pixels), -1, self.module.config.text_config.hidden_size
        )


def _sides(pictures: Sequence[dict[str, Tensor]]) -> list[list[int]]:
    return [picture["image_grid_thw"].tolist() for picture in pictures]


def picture_encoder(module: nn.Module) -> PictureEncoder | None:
    """The encoder of a loaded model; None if it takes no pictures, or in a way that is not known here."""
    config: Any = module.config
    if config.model_type not in KNOWN:
        return None
    owner: Any = module
    tower = owner.get_encoder(modality="image")
    # The paged attention is the decoder's; pictures have no cache.
    tower.set_attn_implementation("sdpa")
    options: dict[str, Any] = {}
    if apart := config.vision_config.model_type == "pixtral":
        side = config.vision_config.patch_size * getattr(config, "spatial_merge_size", 1)
        options["patch_size"] = {"height": side, "width": side}
    merged = tower.spatial_merge_size if hasattr(getattr(owner, "model", None), "get_rope_index") else 0
    family = config.model_type
    return PictureEncoder(module, options, family in WHOLE, merged, family in TILED, apart)
