"""What tasks on pictures share: decoding, the model's own processor, and batches of one shape."""

from __future__ import annotations

import ctypes
import math
import threading
from contextlib import nullcontext
from io import BytesIO
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import AutoImageProcessor

from serve_app.media.decoder import Decoder
from serve_app.media.errors import BadFile
from serve_app.predict.predictor import BadInput, Item, Place
from serve_app.predict.tiles import TileProcessor, cuts_tiles

# Pixels of a picture from which on they are prepared one after the other: processors take about 15 bytes for each.
LARGE_PIXELS = 4 << 20
# Pixels that the budget of a batch counts as one: of 16 by 16, as most models cut pictures.
PATCH = 256


class Pictures:
    """Files to what a model sees. Pictures are decoded in another process, within limits."""

    def __init__(self, place: Place, **options: Any) -> None:
        """``options``: what the processor is told beside its configuration."""
        # Pillow resizes on every machine alike.
        self.processor: Any = (
            TileProcessor(place.path)
            if cuts_tiles(place.path)
            else AutoImageProcessor.from_pretrained(
                place.path, local_files_only=True, trust_remote_code=False, backend="pil"
            )
        )
        self._options = options
        self._decoder = Decoder()
        self._large = threading.Lock()

    def close(self) -> None:
        self._decoder.close()

    def item(self, data: bytes, asked: Any = None) -> Item:
        """An item whose value is the picture's tensors, without the dimension of a batch; ``asked`` is called with the
        picture's height and width. Raises :class:`BadInput`.
        """
        try:
            pixels = self._decoder.image(data)
        except BadFile as refused:
            raise BadInput(f"image: {refused}.") from None
        large = pixels.shape[0] * pixels.shape[1] > LARGE_PIXELS
        with self._large if large else nullcontext():
            found = self.processor(images=Image.fromarray(pixels), return_tensors="pt", **self._options)
            if large:
                _give_back()
        tensors = {name: tensor[0] for name, tensor in found.items() if isinstance(tensor, torch.Tensor)}
        if "image_grid_thw" in tensors:  # a picture is as many rows of pixels as it has patches
            tensors["pixel_values"] = found["pixel_values"]
        shapes = tuple((name, tuple(tensor.shape)) for name, tensor in sorted(tensors.items()))
        made = asked(*pixels.shape[:2]) if asked is not None else None
        return Item(tensors, _patches(tensors), kind=shapes, asked=made, units={"images": 1})


def _give_back() -> None:
    """Memory that has been freed to the system: each thread's part of the heap would keep a picture's."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # of glibc
    if trim is not None:
        trim(0)


def _patches(tensors: dict[str, torch.Tensor]) -> int:
    if "image_grid_thw" in tensors:
        return len(tensors["pixel_values"])
    sizes = (t.shape[-1] * t.shape[-2] * math.prod(t.shape[:-3]) for t in tensors.values() if t.ndim > 1)
    return max(1, max(sizes) // PATCH)


def stacked(items: Any, model: Any) -> dict[str, torch.Tensor]:
    """The items' tensors as one batch, where the model is."""
    names = items[0].value
    batch = {name: torch.stack([item.value[name] for item in items]).to(model.device) for name in names}
    return {name: t.to(model.dtype) if t.is_floating_point() else t for name, t in batch.items()}


def example_picture() -> bytes:
    """A PNG of one colour."""
    out = BytesIO()
    Image.fromarray(np.full((32, 32, 3), 128, np.uint8)).save(out, "PNG")
    return out.getvalue()
