"""What stands in a prompt for a picture: as many placeholder tokens as the model's encoder will have features for it.

How many follows from the picture's size by the rules of the model's processor. Those are code of transformers, which a
gateway does not import, so the rules of the families that are served stand here, and a worker compares each number with
what its encoder gives. Sources: `processing_llava.py`, `processing_pixtral.py`, `processing_gemma3.py`,
`image_processing_qwen2_vl.py` and `processing_llama4.py` of transformers 5.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from serve_app.text.media import MediaFile, MediaRule, Medium, NoMedia, read_json
from serve_app.text.tiles import canvas

# Of the longer side to the shorter: what Qwen's processors take at most.
MAX_ASPECT = 200


@dataclass(slots=True, frozen=True)
class Picture(MediaFile):
    """``width`` and ``height`` in pixels, as it is shown."""

    medium: ClassVar[Medium] = "image"
    width: int
    height: int


@dataclass(slots=True, frozen=True)
class PictureRule(MediaRule):
    """The rule of one model, for pictures of any size."""

    @property
    def turns(self) -> bool:
        """Whether positions of tokens depend on the grids of pictures (`serve_app.engine.positions`)."""
        return False

    @abstractmethod
    def grid(self, width: int, height: int) -> tuple[int, int]:
        """Rows and columns of features of a picture; none where its processor refuses it."""

    def tokens_of(self, file: MediaFile) -> int:
        assert isinstance(file, Picture)
        return math.prod(self.grid(file.width, file.height))

    def grid_of(self, file: MediaFile) -> tuple[int, int] | None:
        assert isinstance(file, Picture)
        return self.grid(file.width, file.height) if self.turns else None

    def refusal(self, file: MediaFile) -> str:
        assert isinstance(file, Picture)
        return f"A picture of {file.width} by {file.height} pixels is too thin for this model; cut it."

    def written(self, file: MediaFile) -> str:
        assert isinstance(file, Picture)
        return self.shown(file.width, file.height)

    def shown(self, width: int, height: int) -> str:
        """What stands in the prompt for a picture of this size."""
        rows, columns = self.grid(width, height)
        return self.placeholder * (rows * columns)


@dataclass(slots=True, frozen=True)
class Fixed(PictureRule):
    """LLaVA and Gemma 3: each picture becomes as many tokens, whatever its size, with the same text around them."""

    tokens: int
    before: str = ""
    behind: str = ""

    def grid(self, width: int, height: int) -> tuple[int, int]:
        return 1, self.tokens

    def shown(self, width: int, height: int) -> str:
        return f"{self.before}{self.placeholder * self.tokens}{self.behind}"


@dataclass(slots=True, frozen=True)
class Beside(PictureRule):
    """Llama 3.2 Vision: a picture is one token, and layers attend to what it shows beside the text."""

    @property
    def beside(self) -> bool:
        return True

    def grid(self, width: int, height: int) -> tuple[int, int]:
        return 1, 1


@dataclass(slots=True, frozen=True)
class Rows(PictureRule):
    """Pixtral and Mistral 3: rows of patches, a token behind each and another behind the last. A picture whose longer
    side is above ``longest`` is made smaller first.
    """

    patch: int
    longest: int
    row_end: str
    end: str

    def grid(self, width: int, height: int) -> tuple[int, int]:
        ratio = max(height / self.longest, width / self.longest)
        if ratio > 1:
            height, width = math.floor(height / ratio), math.floor(width / ratio)
        return (height - 1) // self.patch + 1, (width - 1) // self.patch + 1

    def shown(self, width: int, height: int) -> str:
        rows, columns = self.grid(width, height)
        row = self.placeholder * columns
        return (row + self.row_end) * (rows - 1) + row + self.end


@dataclass(slots=True, frozen=True)
class Merged(PictureRule):
    """Qwen2-VL and later: a picture keeps its shape, in steps of ``side`` pixels, and is resized where it has less than
    ``least`` or more than ``most`` pixels. Patches are merged to one token for ``side`` by ``side`` of them.
    """

    side: int
    least: int
    most: int

    @property
    def turns(self) -> bool:
        return True

    def grid(self, width: int, height: int) -> tuple[int, int]:
        # `smart_resize`, in numbers of tokens.
        if max(height, width) / min(height, width) > MAX_ASPECT:
            return 0, 0
        side = self.side
        rows, columns = round(height / side), round(width / side)
        if rows * columns * side**2 > self.most:
            ratio = math.sqrt((height * width) / self.most)
            rows, columns = max(1, math.floor(height / ratio / side)), max(1, math.floor(width / ratio / side))
        elif rows * columns * side**2 < self.least:
            ratio = math.sqrt(self.least / (height * width))
            rows, columns = math.ceil(height * ratio / side), math.ceil(width * ratio / side)
        return rows, columns


@dataclass(slots=True, frozen=True)
class Tiles(PictureRule):
    """Llama 4: a picture is cut into tiles of ``side`` pixels, with ``each`` tokens, and shown once more as a whole
    where there are several. ``most`` and ``largest`` as :func:`serve_app.text.tiles.canvas` takes them."""

    side: int
    most: int
    largest: bool
    each: int

    def grid(self, width: int, height: int) -> tuple[int, int]:
        rows, columns = self._canvas(width, height)
        return rows * columns + (rows * columns > 1), self.each

    def shown(self, width: int, height: int) -> str:
        rows, columns = self._canvas(width, height)
        tile = self.placeholder * self.each
        row = "<|tile_x_separator|>".join([tile] * columns) + "<|tile_y_separator|>"
        return f"<|image_start|>{row * rows if rows * columns > 1 else ''}<|image|>{tile}<|image_end|>"

    def _canvas(self, width: int, height: int) -> tuple[int, int]:
        return canvas(width, height, self.side, self.most, largest=self.largest)


# Qwen's models, whose pictures are a grid of merged patches.
QWEN = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")


def read_rule(folder: Path, names: dict[str, int]) -> PictureRule:
    """The rule of the model in ``folder``, whose control tokens have these ``names``. Raises
    :class:`~serve_app.text.media.NoMedia`."""
    config, processor = read_json(folder, "config.json"), read_json(folder, "processor_config.json")
    settings = processor.get("image_processor") or read_json(folder, "preprocessor_config.json")
    vision = config.get("vision_config")
    if not isinstance(vision, dict) or not settings:
        raise NoMedia("it has no processor for them")
    kind = processor.get("processor_class") or settings.get("processor_class") or ""
    family = config.get("model_type")
    try:
        if family == "mistral3" or (family == "llava" and vision.get("model_type") == "pixtral"):
            found = _rows(processor, settings, vision, config)
        elif family == "llava":
            found = _fixed(processor, settings, vision, config)
        elif family == "gemma3":
            found = _enclosed(processor, settings, read_json(folder, "tokenizer_config.json"), config)
        elif family in QWEN:
            found = _merged(settings, read_json(folder, "tokenizer_config.json"), vision, config)
        elif family == "llama4":
            found = _tiles(processor, settings, vision, config)
        elif family == "mllama":
            found = Beside("<|image|>", "<|image|>", _token(config))
        else:
            raise NoMedia(f"the way of {family or kind} with pictures is not supported; text alone is")
    except (KeyError, TypeError) as error:
        raise NoMedia(f"its processor's configuration is of an unknown form ({error})") from None
    if names.get(found.placeholder) != found.token or found.mark not in names:
        raise NoMedia(f"{found.placeholder} is no control token of its tokenizer with the id {found.token}")
    return found


def _fixed(
    processor: dict[str, Any], settings: dict[str, Any], vision: dict[str, Any], config: dict[str, Any]
) -> PictureRule:
    cropped = settings.get("crop_size") if settings.get("do_center_crop", True) else None
    size = cropped or settings["size"]
    height, width = (size, size) if isinstance(size, int) else (size["height"], size["width"])
    patch = processor.get("patch_size") or vision["patch_size"]
    # The vision tower's own token, which most models leave out.
    own = processor.get("num_additional_image_tokens", int("clip" in vision.get("model_type", "")))
    strategy = processor.get("vision_feature_select_strategy") or config.get("vision_feature_select_strategy")
    tokens = (height // patch) * (width // patch) + own - (strategy in (None, "default"))
    mark = processor.get("image_token") or "<image>"
    return Fixed(mark, mark, _token(config), tokens)


def _enclosed(
    processor: dict[str, Any], settings: dict[str, Any], named: dict[str, Any], config: dict[str, Any]
) -> PictureRule:
    if settings.get("do_pan_and_scan"):
        raise NoMedia("its processor cuts them into several (do_pan_and_scan), which is not supported")
    begin, end = named.get("boi_token") or "<start_of_image>", named.get("eoi_token") or "<end_of_image>"
    tokens = processor.get("image_seq_length") or config["mm_tokens_per_image"]
    placeholder = named.get("image_token") or "<image_soft_token>"
    return Fixed(begin, placeholder, _token(config), tokens, f"\n\n{begin}", f"{end}\n\n")


def _rows(
    processor: dict[str, Any], settings: dict[str, Any], vision: dict[str, Any], config: dict[str, Any]
) -> PictureRule:
    merged = processor.get("spatial_merge_size") or config.get("spatial_merge_size") or 1
    patch = (processor.get("patch_size") or vision["patch_size"]) * merged
    names = [processor.get(f"image{part}_token") or f"[IMG{part.upper()}]" for part in ("", "_break", "_end")]
    return Rows(names[0], names[0], _token(config), patch, settings["size"]["longest_edge"], names[1], names[2])


def _merged(
    settings: dict[str, Any], named: dict[str, Any], vision: dict[str, Any], config: dict[str, Any]
) -> PictureRule:
    if settings.get("do_resize") is False:
        raise NoMedia("its processor takes pictures of its own sizes alone (do_resize), which is not supported")
    merged = settings.get("merge_size", 2)
    size = dict(settings.get("size") or {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280})
    least, most = (
        settings.get("min_pixels") or size["shortest_edge"],
        settings.get("max_pixels") or size["longest_edge"],
    )
    if merged != vision.get("spatial_merge_size", 2):
        raise NoMedia("its processor merges other patches than its encoder")
    mark = named.get("image_token") or "<|image_pad|>"
    return Merged(mark, mark, _token(config), settings.get("patch_size", 14) * merged, least, most)


def _tiles(
    processor: dict[str, Any], settings: dict[str, Any], vision: dict[str, Any], config: dict[str, Any]
) -> PictureRule:
    changed = [name for name in ("do_resize", "do_rescale", "do_normalize") if settings.get(name) is False]
    size = settings.get("size") or {"height": 336, "width": 336}
    if changed or settings.get("resample", 2) != 2 or size["height"] != size["width"]:
        raise NoMedia(f"its processor prepares them otherwise ({', '.join([*changed, 'resample, size'])})")
    patch, side = processor.get("patch_size") or vision["patch_size"], size["height"]
    ratio = processor.get("pixel_shuffle_ratio") or vision.get("pixel_shuffle_ratio", 0.5)
    each = (side // patch) ** 2 // round(1 / ratio**2)
    most, largest = settings.get("max_patches", 16), settings.get("resize_to_max_canvas", False)
    return Tiles("<|image|>", "<|patch|>", _token(config), side, most, largest, each)


def _token(config: dict[str, Any]) -> int:
    found = config.get("image_token_id", config.get("image_token_index"))
    if not isinstance(found, int):
        raise NoMedia("its configuration names no token for them")
    return found
