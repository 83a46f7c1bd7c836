"""OpenAI's pictures: what is read of a body or a form, the answer, and its events."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from typing import Any

from serve_app.api import identity, sse
from serve_app.api.drawing import (
    COPIES,
    GUIDANCE,
    MAX_CHARS,
    MAX_PIXELS,
    QUALITY,
    SIDE,
    STRENGTH,
    Defaults,
    Drawn,
    DrawRequest,
    PictureForm,
    Progress,
    check_prompt,
    read_steps,
)
from serve_app.api.errors import InvalidInput
from serve_app.api.fields.asked import parse_asked
from serve_app.api.fields.ranges import SEED
from serve_app.api.fields.values import boolean, choice, string
from serve_app.api.multipart import BodyPart
from serve_app.api.openai.write import error_frame
from serve_app.api.receipt import receipt

FORMS: tuple[PictureForm, ...] = ("png", "jpeg", "webp")
_NUMBERS = {
    "n": int, "output_compression": int, "seed": int, "num_steps": int, "steps": int, "guidance": float,
    "strength": float,
}  # fmt: skip


def parse_generation(body: dict[str, Any], defaults: Defaults) -> DrawRequest:
    """``quality``, ``style``, ``moderation`` and ``user`` change nothing; steps, guidance, seed and what is not to be
    seen are asked for by their native names. Raises `InvalidInput`.
    """
    asked = parse_asked(body)
    if choice(body, "response_format", ("b64_json", "url")) == "url":
        raise InvalidInput("response_format url is not supported: pictures are not kept; use b64_json.",
                           param="response_format")  # fmt: skip
    if choice(body, "background", ("auto", "opaque", "transparent")) == "transparent":
        raise InvalidInput("background transparent is not supported; leave it out.", param="background")
    width, height = read_size(string(body, "size", limit=32), defaults)
    copies = COPIES.read(body, "n") or 1
    if copies * width * height > MAX_PIXELS:
        most = MAX_PIXELS // (width * height)
        raise InvalidInput(f"n: of that size at most {most} pictures are drawn together; ask for fewer.", param="n")
    guidance, seed, strength = GUIDANCE.read(body, "guidance"), SEED.read(body, "seed"), STRENGTH.read(body, "strength")
    return DrawRequest(
        check_prompt(string(body, "prompt")),
        width,
        height,
        read_steps(body, defaults),
        defaults.guidance if guidance is None else guidance,
        identity.seed() if seed is None else seed,
        string(body, "negative_prompt", limit=MAX_CHARS) or None,
        strength=1.0 if strength is None else strength,
        copies=copies,
        form=choice(body, "output_format", FORMS) or "png",  # type: ignore[arg-type]
        quality=QUALITY.read(body, "output_compression") or None,
        stream=bool(boolean(body, "stream")),
        **asked,
    )


def parse_edit(parts: list[BodyPart]) -> tuple[str, dict[str, Any], bytes, bytes]:
    """Of a form the model, the fields as :func:`parse_generation` reads them, the picture and the mask. Raises
    `InvalidInput`.
    """
    files: dict[str, list[BodyPart]] = {"image": [], "mask": []}
    fields: dict[str, Any] = {}
    for part in parts:
        name = part.name.removesuffix("[]")
        if name in files:
            files[name].append(part)
        else:
            fields[name] = _value(name, part.text.strip())
    if not files["image"] or not files["image"][0].data:
        raise InvalidInput("image is missing; send the picture as a part of the form.", param="image")
    if len(files["image"]) > 1:
        raise InvalidInput("image: one picture at a time is changed here; send one.", param="image")
    model = fields.pop("model", "")
    if not model:
        raise InvalidInput("model is missing; name a model as a part of the form.", param="model")
    return model[:512], fields, files["image"][0].data, files["mask"][-1].data if files["mask"] else b""


def _value(name: str, text: str) -> Any:
    """A field of a form as JSON would have it."""
    if name == "stream":
        return {"true": True, "false": False}.get(text.lower(), text)
    try:
        return _NUMBERS[name](text) if name in _NUMBERS else text
    except ValueError:
        return text


def read_size(size: str | None, defaults: Defaults) -> tuple[int, int]:
    """``WxH``; the model's own side where there is none."""
    if size is None or size in ("", "auto"):
        return defaults.side, defaults.side
    found = re.fullmatch(r"([0-9]{1,5})x([0-9]{1,5})", size)
    if found is None:
        raise InvalidInput('size must be "auto" or a width and a height such as "1024x768".', param="size")
    width, height = int(found[1]), int(found[2])
    if not all(SIDE.low <= side <= SIDE.high for side in (width, height)):
        raise InvalidInput(f"size: both sides must have {SIDE.low} to {SIDE.high} pixels, got {size}.", param="size")
    return width, height


def render(request: DrawRequest, drawn: Drawn) -> dict[str, Any]:
    """The answer: pictures in the order of their seeds."""
    return {
        "created": identity.created(),
        "output_format": request.form,
        **_size(request),
        "data": [{"b64_json": image} for image in drawn.images],
        "usage": _usage(drawn),
    }


async def events(request: DrawRequest, told: AsyncIterator[Progress | Drawn], kind: str) -> AsyncIterator[bytes]:
    """An event for each picture when all are drawn, and comments with the progress before. ``kind``: as OpenAI calls
    what was asked for.
    """
    try:
        async for event in told:
            if isinstance(event, Progress):
                yield sse.comment(f"step {event.done} of {event.steps}")
                continue
            for image in event.images:
                name = f"{kind}.completed"
                body = {
                    "type": name,
                    "b64_json": image,
                    "created_at": identity.created(),
                    "output_format": request.form,
                    "background": "opaque",
                    "quality": "auto",
                    **_size(request),
                    "usage": _usage(event),
                }
                yield sse.event(name, body)
    except Exception as error:
        yield error_frame(error)


def _size(request: DrawRequest) -> dict[str, str]:
    return {"size": f"{request.width}x{request.height}"} if request.width else {}


def _usage(drawn: Drawn) -> dict[str, Any]:
    """No tokens; tiles and steps, and what they cost."""
    none = {"image_tokens": 0, "text_tokens": 0}
    tokens = {"input_tokens": 0, "output_tokens": 0, "total_tokens": 0}
    return {
        **tokens,
        "input_tokens_details": none,
        "output_tokens_details": none,
        **drawn.units,
        **receipt(drawn.usage),
    }
