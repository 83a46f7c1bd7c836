"""Streams that were refused since the store did not answer in time: it may have taken them all the same."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

from serve_app.api.errors import StoreAway
from serve_app.state.errors import Away
from serve_app.state.kept.streams import Head, StreamPart
from serve_app.state.protocols import StreamStore

log = logging.getLogger("ray.serve")


class Refused:
    """Those of the gateway ``owner`` of which the store has not been told."""

    def __init__(self, store: StreamStore, owner: str) -> None:
        self._store = store
        self._owner = owner
        self._heads: dict[str, Head] = {}

    def __len__(self) -> int:
        return len(self._heads)

    def add(self, head: Head) -> None:
        self._heads[head.id] = replace(head, request=b"")

    def write(self, parts: Sequence[StreamPart], lease_s: float) -> set[str]:
        """As the store's, for a lease that begins when the store has taken it. What has been refused by then is over
        before others see it; what is refused until that is confirmed, at once.
        """
        now, heads = time.time(), list[Head]()

        def last() -> tuple[float, list[Head]]:
            heads[:] = self._heads.values()
            return time.time() + lease_s, heads

        lost = self._store.write(self._owner, parts, now, now + lease_s, last)
        self._forget(heads)
        self.tell()
        return lost

    def tell(self) -> bool:
        """Nobody goes on with them: they would be charged, and their clients send them again. False: the store does not
        know of it yet. Blocks.
        """
        heads = list(self._heads.values())
        try:
            if heads:
                self._store.refuse(self._owner, heads, time.time())
        except Away:
            return False
        except Exception as error:
            log.error("the store cannot be told of refused streams", exc_info=error)
            return False
        self._forget(heads)
        return True

    async def ended_elsewhere(self, head: Head, look: Callable[..., Awaitable[set[str]]]) -> bool:
        """Whether another gateway has come to the stream's end by now, and charged it, so that it can be shown and not
        be refused. A store that can be asked keeps everybody from that otherwise. ``look`` asks it.
        """
        try:
            return head.id in await look(self._store.refuse, self._owner, [head], time.time())
        except StoreAway:
            return False
        except Exception as error:
            log.error("the store cannot be told of a refused stream", exc_info=error)
            return False

    def _forget(self, heads: Sequence[Head]) -> None:
        for head in heads:
            del self._heads[head.id]
