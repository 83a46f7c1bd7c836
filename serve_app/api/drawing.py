"""Requests to draw a picture, for all dialects."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Protocol

from serve_app.api.errors import InvalidInput
from serve_app.api.fields.ranges import SEED, Range
from serve_app.api.types import TaskRequest, Usage

PictureForm = Literal["png", "jpeg", "webp"]
MEDIA_TYPES: dict[PictureForm, str] = {"png": "image/png", "jpeg": "image/jpeg", "webp": "image/webp"}
MAX_CHARS = 2048
SIDE = Range(256, 2048)
STRENGTH = Range(0, 1, whole=False)
GUIDANCE = Range(0, 50, whole=False)
COPIES = Range(1, 10)
QUALITY = Range(1, 100)
# Of all pictures of one request: their files are in memory together.
MAX_PIXELS = 16 << 20
# A tile has so many pixels a side.
TILE = 512


@dataclass(slots=True)
class DrawRequest(TaskRequest):
    """``width``, ``height`` None: those of ``image``. ``image``, ``mask``: files as they came, b"" for none; white of
    the mask is drawn anew. ``seed`` is that of the first of ``copies`` pictures; each further one has the next.
    ``whole``: the native answer is JSON with base64, and not the file itself. ``stream``: progress is told as it is
    made.
    """

    answers: ClassVar[tuple[str, ...]] = tuple(MEDIA_TYPES.values())

    prompt: str
    width: int | None
    height: int | None
    steps: int
    guidance: float
    seed: int
    negative_prompt: str | None = None
    image: bytes = b""
    mask: bytes = b""
    strength: float = 1.0
    copies: int = 1
    form: PictureForm = "png"
    quality: int | None = None
    whole: bool = True
    stream: bool = False

    @property
    def as_file(self) -> bool:
        """Whether the native answer is the file itself: by what the client accepts, or as the model's usual one."""
        if "image/" in self.accept:
            return True
        return not (self.whole or ("application/json" in self.accept and "*/*" not in self.accept))

    @property
    def sent_form(self) -> PictureForm:
        """The one that the client accepts, if it names one."""
        return next((form for form, kind in MEDIA_TYPES.items() if kind in self.accept), self.form)

    def parcel(self, watch: str = "") -> bytes:
        """As workers read it: a line of JSON, then picture and mask, whose sizes it tells. ``watch``: by which the
        progress is asked for.
        """
        asked = {
            "prompt": self.prompt,
            "negative_prompt": self.negative_prompt,
            "width": self.width,
            "height": self.height,
            "steps": self.steps,
            "guidance": self.guidance,
            "strength": self.strength,
            "seeds": [(self.seed + number) % (int(SEED.high) + 1) for number in range(self.copies)],
            "form": self.sent_form,
            "quality": self.quality,
            "watch": watch,
            "files": [len(self.image), len(self.mask)],
        }
        return json.dumps(asked).encode() + b"\n" + self.image + self.mask


class Defaults(Protocol):
    """What a model's record says where a request does not."""

    @property
    def side(self) -> int: ...
    @property
    def steps(self) -> int: ...
    @property
    def most_steps(self) -> int: ...
    @property
    def guidance(self) -> float: ...


@dataclass(slots=True, frozen=True)
class Progress:
    """``done`` of ``steps`` are computed; of several pictures on average."""

    done: int
    steps: int


@dataclass(slots=True, frozen=True)
class Drawn:
    """All pictures: base64 of each file, and the seed that it was drawn with; the units and what they cost."""

    images: tuple[str, ...]
    seeds: tuple[int, ...]
    units: Mapping[str, int] = field(default_factory=dict)
    usage: Usage = field(default_factory=Usage)


def tiles(width: int, height: int) -> int:
    """What pictures are priced in."""
    return -(-width // TILE) * -(-height // TILE)


def check_prompt(prompt: str | None, param: str = "prompt") -> str:
    """Raises `InvalidInput`."""
    if not prompt:
        raise InvalidInput(
            f"Input does not match the model's schema: required: {param} (a non-empty string).", param=param
        )
    if len(prompt) > MAX_CHARS:
        raise InvalidInput(f"{param} must have at most {MAX_CHARS} characters, got {len(prompt)}.", param=param)
    return prompt


def read_steps(body: dict[str, Any], defaults: Defaults) -> int:
    """``num_steps``, which some models call ``steps``."""
    name = "num_steps" if body.get("num_steps") is not None else "steps"
    found: int | None = Range(1, defaults.most_steps).read(body, name)
    return defaults.steps if found is None else found


async def drawn_by(events: AsyncIterator[Progress | Drawn]) -> Drawn:
    """The pictures, of whoever waits for all."""
    async with aclosing(events):  # type: ignore[type-var]
        async for event in events:
            if isinstance(event, Drawn):
                return event
    raise RuntimeError("a worker has drawn nothing")
