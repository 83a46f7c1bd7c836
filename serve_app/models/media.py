"""The parts of a model that see and hear: what becomes of pictures and sounds is what their placeholders are embedded
as."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

# Patches of 16 by 16 pixels, or moments of sound, in one batch of an encoder, unless one file has more.
BATCH = 4096
# Of features that are remembered.
KEPT_BYTES = 256 << 20
# Files beside the text whose features requests hold at the same time.
HELD_FILES = 16
# Files that are prepared at the same time; those of more places than LARGE one after the other: what a processor makes
# of one with 16,384 has 300 MB.
PREPARED = 8
LARGE = 2048
# What processors take of the host's memory for pictures while they make them smaller: about 15 bytes a pixel, for one
# of 64 megapixels and some of 4 (serve_app/predict/pictures.py).
RESIZED_BYTES = 3 << 29


@dataclass(slots=True)
class Encoded:
    """What a file has become: ``features`` [places, hidden] in the model's dtype and the host's memory, as wide as
    :class:`serve_app.engine.step.InputEmbeddings` has them, and their rows and columns where the model's positions
    follow from these. A file that layers attend to beside the text is one feature, of whose places the first ``used``
    are its own and the others padding; it lies where the model is (:mod:`serve_app.models.crossing`)."""

    features: Tensor
    grid: tuple[int, int] | None = None
    used: int = 0


def held_bytes(place: int, context: int, *, beside: bool) -> int:
    """Of features that requests may hold at the same time, of ``place`` bytes each: one whole context of them, or
    :data:`HELD_FILES` files beside the text.
    """
    return max(KEPT_BYTES, place * (HELD_FILES if beside else context))


def kept_apart(features: Tensor) -> Tensor:
    """``features`` in the host's memory, without the rest of a batch that they are a part of."""
    found = features.cpu()
    return found.clone() if found.untyped_storage().nbytes() > found.nbytes else found


class MediaEncoder(Protocol):
    """``options``: what prepares files is told beside the model's own configuration. ``whole``: see
    :class:`serve_app.engine.request.EmbeddedSpan`. ``grids``: whether what it encodes has rows and columns; ``beside``:
    whether layers of their own attend to it. ``place_bytes``: of one place's features."""

    @property
    def options(self) -> dict[str, Any]: ...

    @property
    def whole(self) -> bool: ...

    @property
    def grids(self) -> bool: ...

    @property
    def beside(self) -> bool: ...

    @property
    def place_bytes(self) -> int: ...

    def __call__(self, prepared: Sequence[dict[str, Tensor]], /) -> list[Encoded]:
        """Of each file, prepared and all of one shape, what it becomes."""
