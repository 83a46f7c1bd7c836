"""Pictures to pixels, as transformers' own ``load_image`` would have them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from io import BytesIO

from PIL import Image, ImageOps

from serve_app.media import allowance
from serve_app.media.errors import BadFile
from serve_app.media.limits import MAX_PIXELS, MAX_RATIO, MAX_SIDE
from serve_app.media.parts import check_parts

# Formats whose readers are well tested; others (PostScript, PSD, ...) are not even looked at.
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")
TAKEN = "JPEG, PNG, WebP, GIF, BMP or TIFF"


# Bytes that a picture is copied in: another whole one would not be in bounds of memory.
PIECE = 4 << 20


def decode_image(data: bytes) -> tuple[int, int, Iterator[bytes]]:
    """(width, height, RGB bytes in pieces) of the first frame, turned as its EXIF orientation says. Raises
    :class:`BadFile`.
    """
    return _decoded(data, lambda opened: _as(opened, "RGB"))


def decode_mask(data: bytes) -> tuple[int, int, Iterator[bytes]]:
    """The same with one byte a pixel: how transparent it is, or how bright where nothing is transparent."""
    return _decoded(data, _mask)


def _mask(opened: Image.Image) -> Image.Image:
    if opened.mode in ("RGBA", "LA", "PA") or "transparency" in opened.info:
        alpha = opened.convert("RGBA").getchannel("A")
        if alpha.histogram()[255] < alpha.width * alpha.height:
            return ImageOps.invert(alpha)
    return _as(opened, "L")


def _as(opened: Image.Image, mode: str) -> Image.Image:
    """Without a copy where it is of that mode."""
    return opened if opened.mode == mode else opened.convert(mode)


def _decoded(data: bytes, convert: Callable[[Image.Image], Image.Image]) -> tuple[int, int, Iterator[bytes]]:
    # The sizes that a header tells are checked here; Pillow's own bound would only warn.
    Image.MAX_IMAGE_PIXELS = None
    check_parts(data)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with Image.open(BytesIO(data), formats=FORMATS) as opened:
                width, height = opened.size
                if width * height > MAX_PIXELS or max(width, height) > MAX_SIDE:
                    raise BadFile(
                        f"the picture has {width} by {height} pixels; at most {MAX_PIXELS} in all and {MAX_SIDE} a "
                        "side are taken. Make it smaller"
                    )
                if max(width, height) > MAX_RATIO * min(width, height):
                    raise BadFile(
                        f"the picture has {width} by {height} pixels; a side may be {MAX_RATIO} times the other. Cut it"
                    )
                allowance.more(allowance.MEGAPIXEL_S * width * height / 1e6)
                ImageOps.exif_transpose(opened, in_place=True)
                opened.load()
                picture = convert(opened)
    except BadFile:
        raise
    except MemoryError:
        raise BadFile("the picture takes too much memory to decode") from None
    except Exception as error:  # decoders raise whatever their formats have made them raise
        raise BadFile(f"it is no picture that can be read ({_reason(error)}). Send {TAKEN}, whole") from None
    return picture.width, picture.height, _pieces(picture)


def _pieces(picture: Image.Image) -> Iterator[bytes]:
    rows = max(1, PIECE // (picture.width * len(picture.getbands())))
    for top in range(0, picture.height, rows):
        yield picture.crop((0, top, picture.width, min(top + rows, picture.height))).tobytes()


def _reason(error: Exception) -> str:
    """The error without addresses of objects."""
    text = str(error)
    return type(error).__name__ if not text or "0x" in text or len(text) > 100 else text
