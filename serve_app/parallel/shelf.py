"""What a rank beside rank 0 has for the pool and has from it: its parts of chunks, under names that rank 0 gives."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from serve_app.kv.parts import Payload
from serve_app.wire.parts import Part

# The pool asks for a chunk as soon as rank 0 has told it; this rank may be in a long step until then.
COMES_S = 20.0
# So long chunks wait that the pool does not want, and names are known of what is of no use any more.
LEFT_S = 60.0

Copy = Callable[[], NDArray[np.uint8]]


class Shelf:
    """Used by the thread that computes and by the one that answers the pool and rank 0. ``limit_bytes``: of parts that
    wait for the pool, in host memory; beyond it the oldest go, which is a miss for somebody later and nothing more.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        # Which parts of a chunk this rank takes; set once it knows its layers.
        self.needs: Callable[[Part], bool] = lambda part: True
        # Bytes since the start.
        self.given_bytes = self.taken_bytes = 0
        self._changed = threading.Condition()
        # A device's memory is not where they wait.
        self._copies = ThreadPoolExecutor(1, thread_name_prefix="kv-copies")
        # Chunk id -> until when, bytes, what gives them.
        self._leaving: OrderedDict[str, tuple[float, int, Future[NDArray[np.uint8]]]] = OrderedDict()
        self._leaving_bytes = 0
        # What has gone unasked for, until when.
        self._gone: dict[str, float] = {}
        # None: it is being read.
        self._held: dict[int, Payload | None] = {}
        # Given up before this rank had heard of them, until when.
        self._unwanted: dict[int, float] = {}

    # -- to the pool ---------------------------------------------------------------------------------------------------

    def give(self, chunk_id: str, nbytes: int, copy: Copy) -> None:
        """Keeps this rank's part of a chunk until the pool comes for it; ``copy`` gives it, in any thread."""
        coming = self._copies.submit(copy)
        with self._changed:
            self._pop(chunk_id)
            while self._leaving and self._leaving_bytes + nbytes > self.limit_bytes:
                self._lose(next(iter(self._leaving)))
            self._gone.pop(chunk_id, None)
            self._leaving[chunk_id] = (time.monotonic() + LEFT_S, nbytes, coming)
            self._leaving_bytes += nbytes
            self._changed.notify_all()

    def take(self, chunk_id: str, wait_s: float = COMES_S) -> NDArray[np.uint8]:
        """Hands a part over and forgets it. Waits until it is here; raises KeyError where it does not come."""
        with self._changed:
            self._changed.wait_for(lambda: chunk_id in self._leaving or chunk_id in self._gone, wait_s)
            coming = self._pop(chunk_id)
        if coming is None:
            raise KeyError(f"chunk {chunk_id} is not waiting for export")
        payload = coming.result()
        with self._changed:
            self.given_bytes += payload.nbytes
        return payload

    def forget(self, chunk_ids: Iterable[str]) -> None:
        """The pool does not want these, though they may be still to come."""
        with self._changed:
            for chunk_id in chunk_ids:
                self._lose(chunk_id)

    def _lose(self, chunk_id: str) -> None:
        self._pop(chunk_id)
        self._gone[chunk_id] = time.monotonic() + LEFT_S
        self._changed.notify_all()

    def _pop(self, chunk_id: str) -> Future[NDArray[np.uint8]] | None:
        found = self._leaving.pop(chunk_id, None)
        if found is None:
            return None
        self._leaving_bytes -= found[1]
        return found[2]

    # -- from the pool -------------------------------------------------------------------------------------------------

    def expect(self, tickets: Sequence[int]) -> None:
        """These are being read."""
        with self._changed:
            self._held.update((ticket, None) for ticket in tickets if self._unwanted.pop(ticket, None) is None)

    def hold(self, ticket: int, payload: Payload) -> None:
        """Keeps what was read, until rank 0 has no use for it any more."""
        with self._changed:
            if ticket in self._held:
                self._held[ticket] = payload
                self.taken_bytes += sum(array.nbytes for array in payload.arrays)

    def held(self, ticket: int) -> Payload:
        """Raises KeyError for one that is not held."""
        payload = self._held[ticket]
        if payload is None:
            raise KeyError(f"what ticket {ticket} stands for has not been read")
        return payload

    def release(self, tickets: Iterable[int]) -> None:
        """These are not read after all."""
        with self._changed:
            for ticket in tickets:
                self._held.pop(ticket, None)

    def drop(self, tickets: Iterable[int]) -> None:
        """Rank 0 has no use for these any more, which may be before this rank has heard of them."""
        with self._changed:
            for ticket in tickets:
                if ticket in self._held:
                    del self._held[ticket]
                else:
                    self._unwanted[ticket] = time.monotonic() + LEFT_S

    # -- about it ------------------------------------------------------------------------------------------------------

    def look(self) -> tuple[int, int, int, int]:
        """Lets go of what has been here for too long. Bytes given and taken, bytes that wait for the pool, and how many
        tickets are held.
        """
        now = time.monotonic()
        with self._changed:
            for chunk_id in [name for name, (until, _, _) in self._leaving.items() if until <= now]:
                self._lose(chunk_id)
            self._gone = {name: until for name, until in self._gone.items() if until > now}
            self._unwanted = {ticket: until for ticket, until in self._unwanted.items() if until > now}
            return self.given_bytes, self.taken_bytes, self._leaving_bytes, len(self._held)
