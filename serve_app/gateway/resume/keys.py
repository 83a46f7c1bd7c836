"""Requests by the keys of their clients: claimed in the store, which is told of each one's end however long it is away.

A claim that nobody ends would refuse its key for as long as this gateway lives. So what the store could not be told is
told again until it is there.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress

from serve_app.api.errors import StoreAway
from serve_app.gateway.resume.streams import AWAY_S, LEASE_S, Streams
from serve_app.state.kept.streams import KeyClaim, Known
from serve_app.state.protocols import AnswerStore, Row
from serve_app.state.reader import in_time

log = logging.getLogger("ray.serve")

AGAIN_S = 0.5
# Ends that wait for the store. The oldest are forgotten beyond that; and of answers, that they can be had again.
MAX_WAITING = 10_000
MAX_WAITING_BYTES = 32 << 20


class Keys:
    """Those of one gateway, which says that it lives (``streams``) while it has any."""

    def __init__(self, streams: Streams, store: AnswerStore) -> None:
        self._streams = streams
        self._store = store
        # Ends that the store has not taken: with the answer, or None where there is none.
        self.waiting: dict[KeyClaim, bytes | None] = {}
        self._telling: asyncio.Task[None] | None = None
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="keys")

    def close(self) -> None:
        """Keys of a gateway that is gone are free."""
        if self._telling is not None:
            with suppress(RuntimeError):  # its loop has ended
                self._telling.cancel()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def claim(self, account: str, key: str, print: str) -> KeyClaim | Known:
        """The claim is the caller's, who ends it by :meth:`end`; or what is known of the key. Raises `StoreAway`."""
        claim = KeyClaim(self._streams.owner, account, key, time.time())
        asked = self._threads.submit(self._store.claim, claim, claim.at + LEASE_S, print)
        loop = asyncio.get_running_loop()

        def unwanted(done: Future[Known | None]) -> None:
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(self._unwanted, claim, done)

        try:
            known = await in_time(asked, self._store.claim, AWAY_S)
        except BaseException:
            # It may be in the store all the same, or come there yet.
            asked.add_done_callback(unwanted)
            raise
        return claim if known is None else known

    async def end(self, claim: KeyClaim, answer: bytes | None, entries: Sequence[Row]) -> bool:
        """Keeps the answer with what it costs; None: the key is free again. False: the key is another's. Raises
        `StoreAway` where the store is told later, of the answer alone.
        """
        try:
            return await self._told(claim, answer, entries)
        except Exception:
            self._later(claim, answer)
            raise

    def _unwanted(self, claim: KeyClaim, asked: Future[Known | None]) -> None:
        """``asked`` has not begun, or is done."""
        if not asked.cancelled() and (asked.exception() is not None or asked.result() is None):
            self._later(claim, None)

    def _later(self, claim: KeyClaim, answer: bytes | None) -> None:
        if answer is not None and sum(map(len, filter(None, self.waiting.values()))) + len(answer) > MAX_WAITING_BYTES:
            answer = None
        if len(self.waiting) >= MAX_WAITING:
            del self.waiting[next(iter(self.waiting))]
        self.waiting[claim] = answer
        if self._telling is None or self._telling.done():
            self._telling = asyncio.ensure_future(self._tell_again())

    async def _tell_again(self) -> None:
        with self._streams.living():
            while self.waiting:
                await asyncio.sleep(AGAIN_S)
                for claim, answer in list(self.waiting.items()):
                    try:
                        await self._told(claim, answer, ())
                    except StoreAway:
                        break
                    except Exception as error:
                        log.error("the end of a request by its key cannot be stored", exc_info=error)
                    self.waiting.pop(claim, None)

    async def _told(self, claim: KeyClaim, answer: bytes | None, entries: Sequence[Row]) -> bool:
        return await in_time(self._threads.submit(self._tell, claim, answer, entries), self._tell, AWAY_S)

    def _tell(self, claim: KeyClaim, answer: bytes | None, entries: Sequence[Row]) -> bool:
        if answer is not None:
            return self._store.keep(claim, answer, entries)
        self._store.free(claim)
        return True
