"""Pictures cut into square tiles and shown once more as a whole: Llama 4's processor of pictures.

transformers has that for torchvision alone, which is not installed; this computes the same with what torchvision itself
calls. Source: `image_processing_llama4.py` of transformers 5; a test holds digests of what that gives.
"""

from __future__ import annotations

import json
import math
import platform
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from serve_app.text.tiles import canvas

# Where torch resizes bytes as bytes; elsewhere it does so in float32.
_NATIVE = ("AVX2", "AVX512")


class TileProcessor:
    """Called like one of transformers' processors."""

    def __init__(self, path: Path) -> None:
        settings = _settings(path)
        self.side: int = settings.get("size", {"height": 336})["height"]
        self.most: int = settings.get("max_patches", 16)
        self.largest: bool = settings.get("resize_to_max_canvas", False)
        self._factor: float = settings.get("rescale_factor", 1 / 255)
        self._mean, self._std = settings.get("image_mean", [0.5] * 3), settings.get("image_std", [0.5] * 3)

    def __call__(self, images: Image.Image, **_: Any) -> dict[str, Tensor]:
        """``pixel_values`` [1, tiles, 3, side, side] bfloat16, row by row, then the whole where there are several."""
        pixels = torch.from_numpy(np.array(images.convert("RGB"))).permute(2, 0, 1)[None].contiguous()
        height, width = pixels.shape[-2:]
        side = self.side
        rows, columns = canvas(width, height, side, self.most, largest=self.largest)
        high, wide = rows * side, columns * side
        if not self.largest:  # a small picture is enlarged to one tile at most
            high, wide = min(max(height, side), high), min(max(width, side), wide)
        resized = _resize(pixels, *_within(height, width, high, wide))
        laid = F.pad(resized, (0, columns * side - resized.shape[-1], 0, rows * side - resized.shape[-2]))
        tiles = self._normal(laid).view(3, rows, side, columns, side).permute(1, 3, 0, 2, 4).flatten(0, 1)
        if rows * columns > 1:
            tiles = torch.cat([tiles, self._normal(_resize(pixels, side, side))])
        return {"pixel_values": tiles[None]}

    def _normal(self, pixels: Tensor) -> Tensor:
        scaled = pixels.to(torch.bfloat16) * self._factor
        mean, std = (torch.tensor(v, dtype=torch.bfloat16).view(-1, 1, 1) for v in (self._mean, self._std))
        return scaled.sub(mean).div_(std)


def _settings(path: Path) -> dict[str, Any]:
    """Of a model's processor of pictures, which stand in one of two files."""
    files = [path / "processor_config.json", path / "preprocessor_config.json"]
    whole, own = (json.loads(file.read_text("utf-8")) if file.is_file() else {} for file in files)
    found: dict[str, Any] = whole.get("image_processor") or own
    return found


def cuts_tiles(path: Path) -> bool:
    """Whether the processor of the model in ``path`` is this one."""
    return str(_settings(path).get("image_processor_type", "")).startswith("Llama4ImageProcessor")


def _within(height: int, width: int, high: int, wide: int) -> tuple[int, int]:
    """The largest size of a picture's shape within a canvas."""
    if wide / width < high / height:
        return max(1, min(math.floor(height * (wide / width)), high)), wide
    return high, max(1, min(math.floor(width * (high / height)), wide))


def _resize(pixels: Tensor, height: int, width: int) -> Tensor:
    """Bilinear with antialiasing, bytes [1, 3, H, W] to bytes."""
    if pixels.shape[-2:] == (height, width):
        return pixels
    native = torch.backends.cpu.get_cpu_capability() in _NATIVE or platform.machine() in ("aarch64", "arm64")
    given = pixels if native else pixels.float()
    found = F.interpolate(given, size=(height, width), mode="bilinear", align_corners=False, antialias=True)
    return found if native else found.round_().to(torch.uint8)
