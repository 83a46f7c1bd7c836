"""Drawing with a pipeline of diffusers: pictures of many requests in one call, where they agree in shape and steps.

What is left to chance comes from a generator of each picture's own, seeded on the CPU: a picture depends on its seed
and on nothing that is drawn beside it, beyond the rounding of larger products.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from io import BytesIO
from typing import Any

import torch
from PIL import Image

from serve_app.media.decoder import Decoder
from serve_app.media.errors import BadFile
from serve_app.predict.drawing.pipelines import REMEDY, Mode, load_ways
from serve_app.predict.pictures import PATCH
from serve_app.predict.predictor import BadInput, Item, Place, Predictor, Run, Units

MAX_SIDE = 2048
# Of all pictures of one request.
MAX_PIXELS = 16 << 20
ALIKE = ("width", "height", "steps", "strength", "guidance")
TILE = 512
HELD_BACK = "The picture was held back by the model's safety checker; change the prompt, or the seed."
TOO_LARGE = "The picture takes more memory than this model's worker has; ask for fewer pixels."


@dataclass(slots=True, eq=False)
class Sketch:
    """One picture to draw, with ``seed``. ``done`` of ``steps`` are computed. ``left``: nobody wants it any more."""

    mode: Mode
    asked: dict[str, Any]
    seed: int = 0
    image: Image.Image | None = None
    mask: Image.Image | None = None
    done: int = 0
    steps: int = 0
    left: threading.Event = field(default_factory=threading.Event)


@dataclass(slots=True, frozen=True)
class Painted:
    """``steps`` were computed. ``refused``: why there is no picture."""

    picture: Image.Image | None
    steps: int = 0
    refused: str = ""


class _NobodyWants(Exception):
    """All pictures of a call are given up."""


class Painter(Predictor):
    def __init__(self, place: Place) -> None:
        self._ways = load_ways(place)
        self._decoder = Decoder()
        # The pictures of a request, by the name that a gateway asks with.
        self._watched: dict[str, list[Sketch]] = {}

    def prepare(self, data: bytes, options: dict[str, Any]) -> Item:
        """``data``: a line of JSON, a picture and a mask; see `serve_app.api.drawing`."""
        if not data:
            return self._first()
        head, _, files = data.partition(b"\n")
        asked: dict[str, Any] = json.loads(head)
        cut = asked["files"][0]
        picture, mask = files[:cut], files[cut:]
        mode: Mode = "fill" if mask else "change" if picture else "draw"
        if mode not in self._ways.by_mode:
            raise BadInput(self._refusal(mode))
        sketch = Sketch(mode, asked, steps=asked["steps"])
        if picture:
            sketch.image = _decoded(self._decoder.image, picture, "image")
            if mask:
                sketch.mask = _decoded(self._decoder.mask, mask, "mask")
            self._fit(sketch, asked["width"] is not None)
        for name in ("width", "height"):
            if asked[name] % self._ways.grid:
                near = max(asked[name] // self._ways.grid, 1) * self._ways.grid
                raise BadInput(f"{name}: this model draws multiples of {self._ways.grid} pixels; take {near}.")
        steps, strength = asked["steps"], asked["strength"]
        if picture and "strength" in self._ways.takes(mode) and int(steps * strength) < 1:
            raise BadInput(f"strength: {strength:g} of {steps} steps is less than one; raise strength or num_steps.")
        pixels, copies = asked["width"] * asked["height"], len(asked["seeds"])
        if copies * pixels > MAX_PIXELS:
            raise BadInput(f"n: at most {MAX_PIXELS // pixels} pictures of that size are drawn together.")
        # One call has one value of these for all pictures.
        alike = (*(asked[name] for name in ALIKE), mode, asked["negative_prompt"] is None)
        return Item(sketch, max(1, pixels // PATCH), kind=alike)

    def _refusal(self, mode: Mode) -> str:
        if "draw" not in self._ways.by_mode:
            return "image, mask: this model fills in parts of pictures; send a picture and its mask."
        return f"{'mask' if mode == 'fill' else 'image'}: this model does not take one; leave it out."

    def _fit(self, sketch: Sketch, given: bool) -> None:
        """Picture and mask in the size that was asked for, or in the picture's own, on the model's grid."""
        assert sketch.image is not None
        grid, asked = self._ways.grid, sketch.asked
        if not given:
            asked["width"], asked["height"] = (max(side // grid, 1) * grid for side in sketch.image.size)
            if max(asked["width"], asked["height"]) > MAX_SIDE:
                width, height = sketch.image.size
                raise BadInput(f"image: it has {width} by {height} pixels; send width and height, at most {MAX_SIDE}.")
        size = (asked["width"], asked["height"])
        sketch.image = _resized(sketch.image, size)
        sketch.mask = _resized(sketch.mask, size) if sketch.mask is not None else None

    def forward(self, items: Sequence[Item]) -> list[Painted]:
        sketches: list[Sketch] = [item.value for item in items]
        mode, first = sketches[0].mode, sketches[0].asked
        done = 0

        def after(pipeline: Any, index: int, when: Any, tensors: dict[str, Any]) -> dict[str, Any]:
            nonlocal done
            # Some schedulers look twice at one step.
            done = min(index + 1, first["steps"])
            self.beat()
            for sketch in sketches:
                sketch.done, sketch.steps = done, max(done, min(pipeline.num_timesteps, first["steps"]))
            if all(sketch.left.is_set() for sketch in sketches):
                raise _NobodyWants
            return {}

        given: dict[str, Any] = {
            "prompt": [sketch.asked["prompt"] for sketch in sketches],
            "width": first["width"],
            "height": first["height"],
            "num_inference_steps": first["steps"],
            "guidance_scale": first["guidance"],
            "strength": first["strength"],
            "image": [sketch.image for sketch in sketches],
            "mask_image": [sketch.mask for sketch in sketches],
            "generator": [torch.Generator("cpu").manual_seed(sketch.seed) for sketch in sketches],
            "callback_on_step_end": after,
        }
        if first["negative_prompt"] is not None:
            given["negative_prompt"] = [sketch.asked["negative_prompt"] for sketch in sketches]
        if mode == "draw":
            given = {name: value for name, value in given.items() if name not in ("image", "mask_image", "strength")}
        takes = self._ways.takes(mode)
        try:
            made = self._ways.by_mode[mode](**{name: value for name, value in given.items() if name in takes})
        except _NobodyWants:
            return [Painted(None) for _ in items]
        except torch.OutOfMemoryError:
            if len(items) == 1:
                return [Painted(None, refused=TOO_LARGE)]
            return [one for item in items for one in self.forward([item])]
        flags = getattr(made, "nsfw_content_detected", None) or [False] * len(sketches)
        return [Painted(one, done, HELD_BACK if held else "") for one, held in zip(made.images, flags, strict=True)]

    async def answer(self, item: Item, run: Run) -> tuple[Any, Units]:
        first: Sketch = item.value
        asked = first.asked
        # One picture and one mask for all, which leave together.
        sketches = [replace(first, seed=seed) for seed in asked["seeds"]]
        if watch := asked["watch"]:
            self._watched[watch] = sketches
        try:
            painted: list[Painted] = await run([replace(item, value=sketch) for sketch in sketches])
        finally:
            first.left.set()
            self._watched.pop(watch, None)
        pictures = []
        for one in painted:
            if one.picture is None or one.refused:
                raise BadInput(one.refused)
            pictures.append(one.picture)
        files = [await asyncio.to_thread(encode, one, asked["form"], asked["quality"]) for one in pictures]
        count = -(-asked["width"] // TILE) * -(-asked["height"] // TILE)
        steps = sum(one.steps for one in painted)
        units = {"image_tiles": count * len(painted), "image_steps": steps, "image_tile_steps": count * steps}
        if first.image is not None:
            units |= {"input_tiles": units["image_tiles"], "input_tile_steps": count * steps}
        return {"images": files, "seeds": asked["seeds"]}, units

    def progress(self, watch: str) -> tuple[int, int]:
        sketches = self._watched.get(watch, [])
        if not sketches:
            return 0, 0
        return sum(sketch.done for sketch in sketches) // len(sketches), max(sketch.steps for sketch in sketches)

    def example(self) -> bytes:
        return b""

    def _first(self) -> Item:
        """A small picture to warm up with, in whatever way the model draws."""
        mode, side = next(iter(self._ways.by_mode)), 8 * self._ways.grid
        asked: dict[str, Any] = {
            "prompt": "a",
            "negative_prompt": None,
            "width": side,
            "height": side,
            "steps": 2,
            "guidance": 2.0,
        }
        asked |= {"strength": 1.0, "seeds": [0], "watch": "", "form": "png", "quality": None}
        sketch = Sketch(mode, asked)
        if mode != "draw":
            sketch.image, sketch.mask = Image.new("RGB", (side, side)), Image.new("L", (side, side), 255)
        return Item(sketch)


class Missing(Predictor):
    """Stands in where diffusers is not installed, without weights: whoever asks is told of it."""

    def prepare(self, data: bytes, options: dict[str, Any]) -> Item:
        if data:
            raise BadInput(REMEDY)
        return Item(None)

    def forward(self, items: Sequence[Item]) -> list[None]:
        return [None for _ in items]

    def example(self) -> bytes:
        return b""


def encode(picture: Image.Image, form: str, quality: int | None) -> bytes:
    """The file of ``picture``."""
    out = BytesIO()
    picture.save(out, form.upper(), **({"quality": quality or 90} if form != "png" else {}))
    return out.getvalue()


def _decoded(decode: Callable[[bytes], Any], data: bytes, name: str) -> Image.Image:
    try:
        return Image.fromarray(decode(data))
    except BadFile as refused:
        raise BadInput(f"{name}: {refused}.") from None


def _resized(picture: Image.Image, size: tuple[int, int]) -> Image.Image:
    """As diffusers would resize it."""
    return picture if picture.size == size else picture.resize(size, Image.Resampling.LANCZOS)
