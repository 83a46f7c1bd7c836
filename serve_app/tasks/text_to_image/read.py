"""The native bodies of drawing, of all families: ``{prompt, num_steps, ...}``, with ``image`` and ``mask``."""

from __future__ import annotations

from typing import Any

from serve_app.api import identity
from serve_app.api.drawing import GUIDANCE, MAX_CHARS, SIDE, STRENGTH, DrawRequest, check_prompt, read_steps
from serve_app.api.errors import InvalidInput
from serve_app.api.fields.files import decoded
from serve_app.api.fields.ranges import SEED
from serve_app.api.fields.values import boolean, string
from serve_app.api.workers_ai.read import open_native
from serve_app.catalog.records import Drawing


def parse_draw(body: dict[str, Any], drawing: Drawing) -> DrawRequest:
    """``drawing``: the model's own values where the body has none, and the most steps. Raises `InvalidInput`."""
    body, asked = open_native(body)
    prompt = check_prompt(string(body, "prompt"))
    image, mask = _file(body, "image", "image_b64"), _file(body, "mask", "mask_b64")
    if mask and not image:
        raise InvalidInput("mask belongs to an image; send image as well.", param="mask")
    width, height = sides(SIDE.read(body, "width"), SIDE.read(body, "height"), image, drawing)
    strength, guidance = STRENGTH.read(body, "strength"), GUIDANCE.read(body, "guidance")
    seed = SEED.read(body, "seed")
    return DrawRequest(
        prompt,
        width,
        height,
        read_steps(body, drawing),
        drawing.guidance if guidance is None else guidance,
        identity.seed() if seed is None else seed,
        string(body, "negative_prompt", limit=MAX_CHARS) or None,
        image,
        mask,
        1.0 if strength is None else strength,
        form=drawing.form,
        whole=drawing.answer == "json",
        stream=bool(boolean(body, "stream")),
        **asked,
    )


def sides(width: int | None, height: int | None, image: bytes, drawing: Drawing) -> tuple[int | None, int | None]:
    """Width and height, or None for both: those of ``image``. One alone is that of a square."""
    if width is None and height is None:
        return (None, None) if image else (drawing.side, drawing.side)
    return width or height, height or width


def _file(body: dict[str, Any], name: str, coded: str) -> bytes:
    """Bytes as numbers, base64 or a data URL, in the field ``name`` or, as base64 alone, in ``coded``."""
    named = name if body.get(name) is not None else coded
    value = body.get(named)
    if value is None or value == "" or value == []:
        return b""
    return decoded(value, named)
