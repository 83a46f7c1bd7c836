"""Pictures to pixels, as transformers' own ``load_image`` would have them."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from io import BytesIO

from PIL import Image, ImageOps

from serve_app.media.errors import BadFile
from serve_app.media.limits import MAX_PIXELS, MAX_RATIO, MAX_SIDE

# Formats whose readers are well tested; others (PostScript, PSD, ...) are not even looked at.
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")
TAKEN = "JPEG, PNG, WebP, GIF, BMP or TIFF"


def decode_image(data: bytes) -> tuple[int, int, bytes]:
    """(width, height, RGB bytes) of the first frame, turned as its EXIF orientation says. Raises :class:`BadFile`."""
    return _decoded(data, lambda opened: opened.convert("RGB"))


def decode_mask(data: bytes) -> tuple[int, int, bytes]:
    """The same with one byte a pixel: how transparent it is, or how bright where nothing is transparent."""
    return _decoded(data, _mask)


def _mask(opened: Image.Image) -> Image.Image:
    if opened.mode in ("RGBA", "LA", "PA") or "transparency" in opened.info:
        alpha = opened.convert("RGBA").getchannel("A")
        if alpha.histogram()[255] < alpha.width * alpha.height:
            return ImageOps.invert(alpha)
    return opened.convert("L")


def _decoded(data: bytes, convert: Callable[[Image.Image], Image.Image]) -> tuple[int, int, bytes]:
    # The sizes that a header tells are checked here; Pillow's own bound would only warn.
    Image.MAX_IMAGE_PIXELS = None
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
                picture = convert(ImageOps.exif_transpose(opened))
    except BadFile:
        raise
    except MemoryError:
        raise BadFile("the picture takes too much memory to decode") from None
    except Exception as error:  # decoders raise whatever their formats have made them raise
        raise BadFile(f"it is no picture that can be read ({_reason(error)}). Send {TAKEN}, whole") from None
    return picture.width, picture.height, picture.tobytes()


def _reason(error: Exception) -> str:
    """The error without addresses of objects."""
    text = str(error)
    return type(error).__name__ if not text or "0x" in text or len(text) > 100 else text
