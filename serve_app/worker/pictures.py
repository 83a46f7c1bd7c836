"""Pictures of requests to what stands in their prompts: decoded, prepared by the model's own processor, and encoded.

::

    file -> pixels (another process) -> tensors (a thread) -> features (batches over requests) -> spans of prompts

Features are remembered by tenant and the file's digest, and one picture that several requests of a tenant ask for at
the same time is encoded once: whether another tenant has sent a picture can't be told by the clock. A prompt whose K/V
are stored asks for none: then nobody reads its spans.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from serve_app.engine.batching import Batcher, Call, Picked
from serve_app.engine.request import EmbeddedSpan
from serve_app.kv.keys import media_parts
from serve_app.predict.predictor import BadInput, Item, Place
from serve_app.wire.generate import Failed, PictureAt

if TYPE_CHECKING:
    from serve_app.engine.request import Request
    from serve_app.models.vision import PictureEncoder, Seen

log = logging.getLogger(__name__)

# Of features that are remembered.
KEPT_BYTES = 256 << 20
# Patches of 16 by 16 pixels in one batch of the encoder, and pictures that are prepared at the same time.
BATCH_PATCHES = 4096
PREPARED = 8
# Those of more places than this are prepared and encoded one after the other: what a processor makes of one with
# 16,384 has 300 MB.
LARGE = 2048


class BadPictures(ValueError):
    """Pictures that no worker of this model will ever take; the text says why."""


class PictureWork:
    """Of one worker. ``features`` may be called from any thread."""

    def __init__(self, encoder: PictureEncoder, path: Path, *, kept_bytes: int = KEPT_BYTES) -> None:
        # Here, since workers of most models need no processor.
        from serve_app.predict.pictures import Pictures

        self._files = Pictures(Place(path), **encoder.options)
        self.whole, self.grids = encoder.whole, bool(encoder.merged)
        self._batcher = _Encoding(encoder)
        self._threads = ThreadPoolExecutor(PREPARED, "pictures")
        self._lock, self._large = threading.Lock(), threading.Lock()
        self._coming: dict[tuple[bytes, bytes], Future[Seen]] = {}
        self._kept: OrderedDict[tuple[bytes, bytes], Seen] = OrderedDict()
        self._left = kept_bytes
        self.encoded = self.remembered = 0

    def features(self, data: bytes, digest: bytes, salt: bytes, places: int) -> Future[Seen]:
        """What becomes of a file of the tenant that ``salt`` stands for, for so many ``places``. Raises
        :class:`~serve_app.predict.predictor.BadInput` for one that can't be decoded.
        """
        key = (salt, digest)
        with self._lock:
            if (known := self._kept.get(key)) is not None:
                self._kept.move_to_end(key)
                self.remembered += 1
                found: Future[Seen] = Future()
                found.set_result(known)
                return found
            if (coming := self._coming.get(key)) is not None:
                return coming
            found = self._coming[key] = Future()
        self._threads.submit(self._encode, data, key, found, places > LARGE)
        return found

    def stats(self) -> dict[str, int]:
        """Pictures that were encoded, and that were asked for and remembered; bytes of features that are kept."""
        with self._lock:
            held = sum(map(_size, self._kept.values()))
            return {"encoded": self.encoded, "remembered": self.remembered, "bytes": held}

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._batcher.close()
        self._files.close()

    def _encode(self, data: bytes, key: tuple[bytes, bytes], found: Future[Seen], large: bool) -> None:
        try:
            with self._large if large else nullcontext():
                [seen] = self._batcher.enqueue(_call(self._files.item(data))).result()
            with self._lock:
                self.encoded += 1
                self._keep(key, seen)
                del self._coming[key]
            found.set_result(seen)
        except BaseException as error:
            with self._lock:
                self._coming.pop(key, None)
            found.set_exception(error)

    def _keep(self, key: tuple[bytes, bytes], seen: Seen) -> None:
        self._kept[key] = seen
        self._left -= _size(seen)
        while self._left < 0 and self._kept:
            self._left += _size(self._kept.popitem(last=False)[1])


class _Encoding(Batcher):
    """A step is one pass of the encoder over pictures of one shape."""

    def __init__(self, encoder: PictureEncoder) -> None:
        self._encoder = encoder
        super().__init__(budget=BATCH_PATCHES, name="pictures")

    def step(self, picked: Picked) -> tuple[Sequence[Seen], int]:
        items: list[Item] = [call.items[i] for call, i in picked]
        return self._encoder([item.value for item in items]), sum(item.size for item in items)


def _call(item: Item) -> Call:
    return Call([item], [item.size], kind=item.kind)


def _size(seen: Seen) -> int:
    return seen.features.numel() * seen.features.element_size()


class Look:
    """One picture of one request: its features, once somebody has asked for them."""

    def __init__(self, work: PictureWork, at: PictureAt, salt: bytes) -> None:
        self.at = at
        self._salt = salt
        self._work = work
        self._features: Tensor | None = None

    @property
    def end(self) -> int:
        """One past its last placeholder."""
        first, count = self.at.places[-1]
        return first + count

    @property
    def places(self) -> int:
        return sum(count for _, count in self.at.places)

    def ask(self) -> Future[Seen]:
        return self._work.features(self.at.data, self.at.digest, self._salt, self.places)

    def take(self, seen: Seen) -> None:
        """Raises :class:`BadPictures` where they are not as many as the gateway has made room for, or lie otherwise."""
        if len(seen.features) != self.places:
            raise BadPictures(f"a picture has {len(seen.features)} features and {self.places} placeholders")
        if seen.grid != self.at.grid:
            raise BadPictures(f"a picture has a grid of {seen.grid}, and its prompt was made for {self.at.grid}")
        self._features = seen.features

    def read(self, first: int, count: int) -> Tensor:
        """In the engine's thread, which waits where what was stored of the prompt has gone since."""
        if self._features is None:
            self.take(self.ask().result())
        assert self._features is not None
        return self._features[first : first + count]

    def spans(self) -> list[EmbeddedSpan]:
        found, at = [], 0
        for start, end, digest in media_parts(self.at.digest, self.at.places, self.at.grid):
            read = partial(self.read, at, end - start)
            found.append(EmbeddedSpan(start, end - start, digest, read, self._work.whole, self.at.grid))
            at += end - start
        return found


def put_into(request: Request, pictures: Sequence[PictureAt], work: PictureWork | None, salt: bytes) -> list[Look]:
    """Gives a request its spans; ``salt`` stands for its tenant. Raises :class:`BadPictures` where they can't be its
    prompt's, or no model's.
    """
    if not pictures:
        return []
    if work is None:
        raise BadPictures("the model takes no pictures")
    if not all(at.places for at in pictures):
        raise BadPictures("a picture has no place in its prompt")
    if not all(_lies(at, work.grids) for at in pictures):
        raise BadPictures("its pictures' places are not those of their grids")
    looks = [Look(work, at, salt) for at in pictures]
    spans = [span for look in looks for span in look.spans()]
    borders = [0, *(border for span in spans for border in (span.start, span.end)), len(request.tokens)]
    if borders != sorted(borders) or any(span.count < 1 for span in spans):
        raise BadPictures("its pictures' places are not in its prompt")
    request.embedded = spans
    return looks


def _lies(at: PictureAt, grids: bool) -> bool:
    """Whether a picture says in what grid its places lie, all of them in one run, where a model wants to know."""
    if not grids or at.grid is None:
        return not grids and at.grid is None
    return len(at.places) == 1 and min(at.grid) > 0 and at.grid[0] * at.grid[1] == at.places[0][1]


async def look_at(looks: Sequence[Look], computed: int) -> Failed | None:
    """Has the pictures encoded that reach beyond the first ``computed`` tokens; what to answer where one can't be."""
    wanted = [look for look in looks if look.end > computed]
    # Others may wait for the same one.
    asked: list[Any] = [asyncio.shield(asyncio.wrap_future(look.ask())) for look in wanted]
    found = await asyncio.gather(*asked, return_exceptions=True)
    for look, features in zip(wanted, found, strict=True):
        try:
            if isinstance(features, BaseException):
                raise features
            look.take(features)
        except (BadInput, BadPictures) as refused:
            return Failed(str(refused), refused=True)
        except Exception as error:  # another worker may do better
            log.warning("a picture can't be encoded: %s: %s", type(error).__name__, error)
            return Failed(f"a picture can't be encoded here ({type(error).__name__})")
    return None
