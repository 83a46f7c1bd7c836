"""How requests have ended, as a worker tells a gateway: at once, and over its next connection while that is fresh."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import suppress

from serve_app.channel import frames
from serve_app.wire.message import BadMessage
from serve_app.wire.tokens import Ended, Ending

# What a connection that broke may have lost: how many, and for how many seconds they are kept. Gateways pass over what
# they know.
KEPT = 1024
FRESH_S = 60.0
# In a frame; each is some hundred bytes.
TOGETHER = 64


class Endings:
    """Of one gateway."""

    def __init__(self) -> None:
        self._new: list[Ending] = []
        self._told: deque[tuple[float, Ending]] = deque(maxlen=KEPT)

    def add(self, ending: Ending) -> bool:
        """Whether it is the first of those that :meth:`new` has."""
        self._new.append(ending)
        return len(self._new) == 1

    def new(self) -> Iterator[bytes]:
        """Frames of what was added since the last time."""
        endings, self._new = self._new, []
        now = time.monotonic()
        self._told.extend((now, ending) for ending in endings)
        return _frames(endings)

    def again(self) -> Iterator[bytes]:
        """Frames of all that is fresh."""
        since = time.monotonic() - FRESH_S
        return _frames([ending for at, ending in self._told if at >= since])


def _frames(endings: list[Ending]) -> Iterator[bytes]:
    for at in range(0, len(endings), TOGETHER):
        # What is larger than a frame is told by the call that brought the request.
        with suppress(BadMessage):
            yield frames.encode(Ended(tuple(endings[at : at + TOGETHER])))
