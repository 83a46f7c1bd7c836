"""The largest pictures and sounds that a model takes, as its processor would make them: shapes without values.

How large follows from the settings of the processor, which bound the size, and from the context, which bounds the
places. Files of fixed size are the largest themselves.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from serve_app.models.hearing import MERGED
from serve_app.models.vision import QWEN

Prepared = dict[str, Tensor]
# Patches of 16 by 16 pixels that count as one in a batch (serve_app/predict/pictures.py).
PATCH = 256
# Tokens of the largest picture of Qwen's, where no settings of a processor are there.
QWEN_TOKENS = 16_384
# Of one sound (serve_app/text/sounds.py has the same), at 16 kHz, of which a frame takes 160.
MAX_FRAMES = 1800 * 100
# Seconds of a sound that processors take by default; 0: one window.
LONGEST_S = {"qwen2_audio": 0, "audioflamingo3": 600, "glmasr": 655, "voxtral": 1800}


@dataclass(slots=True, frozen=True)
class Largest:
    """``prepared``: of one file; integers have values. ``size``: what a batch counts it as. ``fixed``: whether all are
    of this size.
    """

    prepared: Prepared
    size: int
    fixed: bool = False

    def batch(self, budget: int) -> int:
        """So many of them take at least what any batch does; more than one only where they fit ``budget``."""
        return max(1, budget // self.size if self.fixed else -(-budget // self.size))

    @property
    def bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self.prepared.values())


def largest_picture(config: Any, settings: dict[str, Any], places: int) -> Largest:
    """``config``: the model's, with defaults. ``settings``: of its processor of pictures, {} for its authors' own.
    ``places``: tokens of the longest context.
    """
    family = config.model_type
    if config.vision_config.model_type == "pixtral":
        family = "pixtral"
    return _PICTURES.get(family, _square)(config, settings, places)


def largest_sound(config: Any, settings: dict[str, Any], places: int) -> Largest:
    """Likewise. A sound is some windows, each of as many frames as the encoder hears at once."""
    hears = config.audio_config
    moments = int(getattr(hears, "max_source_positions", None) or hears.max_position_embeddings)
    frames, family = 2 * moments, config.model_type
    longest = min(MAX_FRAMES, 100 * int(settings.get("max_audio_len", LONGEST_S[family])))
    merged = MERGED[family] or hears.intermediate_size // hears.hidden_size
    count = max(1, min(longest // frames, places // max(1, moments // merged)))
    windows = _floats(count, hears.num_mel_bins, frames)
    return Largest({"windows": windows, "heard": torch.full((count,), frames)}, count * moments, fixed=not longest)


def _floats(*shape: int) -> Tensor:
    return torch.empty(shape, device="meta")


def _side(config: Any, settings: dict[str, Any]) -> int:
    """Of a picture or tile in pixels."""
    size = (settings.get("crop_size") if settings.get("do_center_crop", True) else None) or settings.get("size")
    if isinstance(size, dict):
        size = math.isqrt(size["height"] * size["width"]) if "height" in size else size.get("shortest_edge")
    return int(size or config.vision_config.image_size)


def _square(config: Any, settings: dict[str, Any], places: int) -> Largest:
    side = _side(config, settings)
    return Largest({"pixel_values": _floats(3, side, side)}, max(1, side * side // PATCH), fixed=True)


def _rows(config: Any, settings: dict[str, Any], places: int) -> Largest:
    unit = config.vision_config.patch_size * getattr(config, "spatial_merge_size", 1)
    longest = (settings.get("size") or {}).get("longest_edge") or config.vision_config.image_size
    side = min(-(-longest // unit), max(1, math.isqrt(places))) * unit
    prepared = {"pixel_values": _floats(3, side, side), "image_sizes": torch.tensor([side, side])}
    return Largest(prepared, max(1, side * side // PATCH))


def _tiles(config: Any, settings: dict[str, Any], places: int) -> Largest:
    seen, side = config.vision_config, _side(config, settings)
    each = (side // seen.patch_size) ** 2 // round(1 / seen.pixel_shuffle_ratio**2)
    most = settings.get("max_patches", 16)
    count = max(1, min(most + (most > 1), places // each))
    prepared = {"pixel_values": _floats(count, 3, side, side).bfloat16()}
    return Largest(prepared, max(1, count * side * side // PATCH))


def _beside(config: Any, settings: dict[str, Any], places: int) -> Largest:
    side, tiles = _side(config, settings), config.vision_config.max_num_tiles
    prepared = {
        "pixel_values": _floats(1, tiles, 3, side, side), "aspect_ratio_ids": torch.ones(1, dtype=torch.int64),
        "aspect_ratio_mask": torch.ones(1, tiles, dtype=torch.int64),
    }  # fmt: skip
    return Largest(prepared, max(1, tiles * side * side // PATCH), fixed=True)


def _merged(config: Any, settings: dict[str, Any], places: int) -> Largest:
    seen = config.vision_config
    merged, patch = seen.spatial_merge_size, seen.patch_size
    unit = (merged * patch) ** 2
    pixels = settings.get("max_pixels") or (settings.get("size") or {}).get("longest_edge") or QWEN_TOKENS * unit
    tokens = max(1, min(pixels // unit, places))
    high = math.isqrt(tokens)
    grid = [1, high * merged, tokens // high * merged]
    rows = math.prod(grid)
    values = _floats(rows, 3 * seen.temporal_patch_size * patch * patch)
    return Largest({"pixel_values": values, "image_grid_thw": torch.tensor(grid)}, rows)


_PICTURES: dict[str, Callable[[Any, dict[str, Any], int], Largest]] = {
    "pixtral": _rows, "llama4": _tiles, "mllama": _beside,
} | dict.fromkeys(QWEN, _merged)  # fmt: skip
