"""Pictures and sounds of requests to what stands in their prompts: decoded, prepared by the model's own processor, and
encoded.

::

    file -> pixels or samples (another process) -> tensors (a thread) -> features (batches over requests) -> spans

Features are remembered by tenant and the file's digest, and one file that several requests of a tenant ask for at
the same time is encoded once: whether another tenant has sent it can't be told by the clock. A prompt whose K/V
are stored asks for none: then nobody reads its spans.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from serve_app.engine.batching import Batcher, Call, Picked
from serve_app.engine.crossing import Beside
from serve_app.engine.request import EmbeddedSpan
from serve_app.kv.keys import media_parts
from serve_app.models.media import BATCH, HELD_FILES, KEPT_BYTES, LARGE, PREPARED, held_bytes
from serve_app.predict.predictor import BadInput, Item, Place
from serve_app.wire.generate import Failed, MediaAt
from serve_app.worker.room import Room

if TYPE_CHECKING:
    from serve_app.engine.request import Request
    from serve_app.models.media import Encoded, MediaEncoder

log = logging.getLogger(__name__)

NAMED = {"image": "a picture", "audio": "a sound"}


class BadMedia(ValueError):
    """Files that no worker of this model will ever take; the text says why."""


class Files(Protocol):
    """Files of one medium to what an encoder takes."""

    def item(self, data: bytes) -> Item:
        """Raises :class:`~serve_app.predict.predictor.BadInput`."""

    def close(self) -> None: ...


class MediaWork:
    """Of one worker and medium. ``features`` may be called from any thread."""

    def __init__(
        self, encoder: MediaEncoder, files: Files, *, kept_bytes: int = KEPT_BYTES, held_bytes: int = KEPT_BYTES
    ) -> None:
        """``kept_bytes``: of features that are remembered; ``held_bytes``: of those that requests hold."""
        self._files = files
        self.place_bytes, self.room = encoder.place_bytes, Room(held_bytes)
        self.whole, self.grids, self.beside = encoder.whole, encoder.grids, encoder.beside
        self._batcher = _Encoding(encoder)
        self._threads = ThreadPoolExecutor(PREPARED, "media")
        self._lock, self._large = threading.Lock(), threading.Lock()
        self._coming: dict[tuple[bytes, bytes], Future[Encoded]] = {}
        self._kept: OrderedDict[tuple[bytes, bytes], Encoded] = OrderedDict()
        self._left = kept_bytes
        self.encoded = self.remembered = 0

    def features(self, data: bytes, digest: bytes, salt: bytes, places: int) -> Future[Encoded]:
        """What becomes of a file of the tenant that ``salt`` stands for, for so many ``places``. Raises
        :class:`~serve_app.predict.predictor.BadInput` for one that can't be decoded.
        """
        key = (salt, digest)
        with self._lock:
            if (known := self._kept.get(key)) is not None:
                self._kept.move_to_end(key)
                self.remembered += 1
                found: Future[Encoded] = Future()
                found.set_result(known)
                return found
            if (coming := self._coming.get(key)) is not None:
                return coming
            found = self._coming[key] = Future()
        self._threads.submit(self._encode, data, key, found, places > LARGE)
        return found

    def stats(self) -> dict[str, int]:
        """Files that were encoded, and that were asked for and remembered; bytes of features that are kept."""
        with self._lock:
            held = sum(map(_size, self._kept.values()))
            done = {"encoded": self.encoded, "remembered": self.remembered}
        return {**done, "bytes": held, "held_bytes": self.room.used}

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._batcher.close()
        self._files.close()

    def _encode(self, data: bytes, key: tuple[bytes, bytes], found: Future[Encoded], large: bool) -> None:
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

    def _keep(self, key: tuple[bytes, bytes], seen: Encoded) -> None:
        self._kept[key] = seen
        self._left -= _size(seen)
        while self._left < 0 and self._kept:
            self._left += _size(self._kept.popitem(last=False)[1])


class _Encoding(Batcher):
    """A step is one pass of the encoder over files of one shape."""

    def __init__(self, encoder: MediaEncoder) -> None:
        self._encoder = encoder
        super().__init__(budget=BATCH, name="media")

    def step(self, picked: Picked) -> tuple[Sequence[Encoded], int]:
        items: list[Item] = [call.items[i] for call, i in picked]
        return self._encoder([item.value for item in items]), sum(item.size for item in items)


def _call(item: Item) -> Call:
    return Call([item], [item.size], kind=item.kind)


def _size(seen: Encoded) -> int:
    return seen.features.numel() * seen.features.element_size()


class Look:
    """One file of one request: its features, once somebody has asked for them."""

    def __init__(self, work: MediaWork, at: MediaAt, salt: bytes) -> None:
        self.at = at
        self._salt = salt
        self._work = work
        self._seen: Encoded | None = None
        self._held = 0

    def needed(self, computed: int) -> bool:
        """Whether its features are, where the K/V of the first ``computed`` tokens are there: every token that is
        computed sees what layers attend to beside the text."""
        first, count = self.at.places[-1]
        return self._work.beside or first + count > computed

    @property
    def places(self) -> int:
        return sum(count for _, count in self.at.places)

    @property
    def named(self) -> str:
        return NAMED[self.at.medium]

    async def hold(self, places: int, ended: asyncio.Future[Any]) -> None:
        """Waits for room for the features of so many places, or for the end of the request."""
        count = places * self._work.place_bytes
        taken = self._work.room.take(count)
        try:
            await asyncio.wait([taken, ended], return_when=asyncio.FIRST_COMPLETED)
        finally:
            if taken.done():
                self._held = count
            else:
                taken.cancel()

    def read_once(self) -> None:
        """The prompt has been computed. Features are read again only where a request loses its blocks."""
        if not self._work.beside:
            self._seen = None
            self.leave()

    def leave(self) -> None:
        """Gives the room back."""
        count, self._held = self._held, 0
        self._work.room.give(count)

    def ask(self) -> Future[Encoded]:
        return self._work.features(self.at.data, self.at.digest, self._salt, self.places)

    def take(self, seen: Encoded) -> None:
        """Raises :class:`BadMedia` where they are not as many as the gateway has made room for, or lie otherwise."""
        if len(seen.features) != self.places:
            raise BadMedia(f"{self.named} has {len(seen.features)} features and {self.places} placeholders")
        if seen.grid != self.at.grid:
            raise BadMedia(f"{self.named} has a grid of {seen.grid}, and its prompt was made for {self.at.grid}")
        self._seen = seen

    def read(self, first: int, count: int) -> Tensor:
        """In the engine's thread, which waits where what was stored of the prompt has gone since."""
        return self._encoded().features[first : first + count]

    def beside(self) -> Beside:
        """Likewise."""
        seen = self._encoded()
        return Beside(seen.features[0], seen.used)

    def _encoded(self) -> Encoded:
        seen = self._seen
        if seen is None:
            seen = self.ask().result()
            self.take(seen)
        return seen

    def spans(self) -> list[EmbeddedSpan]:
        found, at = [], 0
        for start, end, digest in media_parts(self.at.digest, self.at.places, self.at.grid):
            read = partial(self.read, at, end - start)
            beside = self.beside if self._work.beside else None
            found.append(EmbeddedSpan(start, end - start, digest, read, self._work.whole, self.at.grid, beside))
            at += end - start
        return found


def works(encoders: Mapping[str, MediaEncoder], path: Path, context: int) -> dict[str, MediaWork]:
    """By medium; ``path``: the model's folder, ``context``: tokens of its longest."""
    found = {}
    for medium, encoder in encoders.items():
        # Here, since workers of most models need no processor.
        if medium == "image":
            from serve_app.predict.pictures import Pictures

            files: Files = Pictures(Place(path), **encoder.options)
        else:
            from serve_app.predict.sounds import Sounds

            files = Sounds(Place(path), **encoder.options)
        found[medium] = MediaWork(
            encoder, files, held_bytes=held_bytes(encoder.place_bytes, context, beside=encoder.beside)
        )
    return found


def put_into(request: Request, media: Sequence[MediaAt], works: Mapping[str, MediaWork], salt: bytes) -> list[Look]:
    """Gives a request its spans; ``salt`` stands for its tenant. Raises :class:`BadMedia` where they can't be its
    prompt's, or no model's.
    """
    looks: list[Look] = []
    for at in media:
        work, named = works.get(at.medium), NAMED[at.medium]
        if work is None:
            raise BadMedia(f"the model takes no {named.removeprefix('a ')}s")
        if not at.places:
            raise BadMedia(f"{named} has no place in its prompt")
        if not _lies(at, work.grids):
            raise BadMedia(f"the places of {named} are not those of its grid")
        if work.beside and len(looks) == HELD_FILES:
            raise BadMedia(f"the model attends to at most {HELD_FILES} pictures of a conversation; leave old ones out")
        looks.append(Look(work, at, salt))
    spans = [span for look in looks for span in look.spans()]
    borders = [0, *(border for span in spans for border in (span.start, span.end)), len(request.tokens)]
    if borders != sorted(borders) or any(span.count < 1 for span in spans):
        raise BadMedia("the places of its pictures and sounds are not in its prompt")
    request.embedded = spans
    return looks


def _lies(at: MediaAt, grids: bool) -> bool:
    """Whether a file says in what grid its places lie, all of them in one run, where a model wants to know."""
    if not grids or at.grid is None:
        return not grids and at.grid is None
    return len(at.places) == 1 and min(at.grid) > 0 and at.grid[0] * at.grid[1] == at.places[0][1]


async def look_at(looks: Sequence[Look], computed: int, ended: asyncio.Future[Any]) -> Failed | None:
    """Has the files encoded that are needed behind the first ``computed`` tokens; what to answer where one can't be.
    A request that has ``ended`` waits for no room.
    """
    wanted = [look for look in looks if look.needed(computed)]
    # At once for all of a medium: who had a part and waited for more might wait for one who does the same.
    for medium in sorted({look.at.medium for look in wanted}):
        own = [look for look in wanted if look.at.medium == medium]
        await own[0].hold(sum(look.places for look in own), ended)
    if ended.done():
        return None
    # Others may wait for the same one.
    asked: list[Any] = [asyncio.shield(asyncio.wrap_future(look.ask())) for look in wanted]
    found = await asyncio.gather(*asked, return_exceptions=True)
    for look, features in zip(wanted, found, strict=True):
        try:
            if isinstance(features, BaseException):
                raise features
            look.take(features)
        except (BadInput, BadMedia) as refused:
            return Failed(str(refused), refused=True)
        except Exception as error:  # another worker may do better
            log.warning("%s can't be encoded: %s: %s", look.named, type(error).__name__, error)
            return Failed(f"{look.named} can't be encoded here ({type(error).__name__})")
    return None
