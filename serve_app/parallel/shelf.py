"""What a rank beside rank 0 has for the pool and has from it: its parts of chunks, under names that rank 0 gives."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable

import numpy as np
from numpy.typing import NDArray

from serve_app.kv.parts import Payload
from serve_app.wire.parts import Part

# The pool asks for a chunk as soon as rank 0 has told it; this rank may be in a long step until then.
COMES_S = 20.0
# Chunks that the pool did not want.
LEFT_S = 60.0

Copy = Callable[[], NDArray[np.uint8]]


class Shelf:
    """Used by the thread that computes and by the one that answers the pool and rank 0. ``limit_bytes``: of parts that
    wait for the pool; beyond it the oldest go, which is a miss for somebody later and nothing more.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        # Which parts of a chunk this rank takes; set once it knows its layers.
        self.needs: Callable[[Part], bool] = lambda part: True
        # Bytes since the start.
        self.given_bytes = self.taken_bytes = 0
        self._changed = threading.Condition()
        # Chunk id -> until when, bytes, what gives them.
        self._leaving: OrderedDict[str, tuple[float, int, Copy]] = OrderedDict()
        self._leaving_bytes = 0
        self._held: dict[int, Payload] = {}
        # Given up before they had come.
        self._unwanted: set[int] = set()

    # -- to the pool ---------------------------------------------------------------------------------------------------

    def give(self, chunk_id: str, nbytes: int, copy: Copy) -> None:
        """Keeps this rank's part of a chunk until the pool comes for it; ``copy`` gives it, in any thread."""
        now = time.monotonic()
        with self._changed:
            self._pop(chunk_id)
            while self._leaving:
                until, _, _ = next(iter(self._leaving.values()))
                if until > now and self._leaving_bytes + nbytes <= self.limit_bytes:
                    break
                self._pop(next(iter(self._leaving)))
            self._leaving[chunk_id] = (now + LEFT_S, nbytes, copy)
            self._leaving_bytes += nbytes
            self._changed.notify_all()

    def take(self, chunk_id: str, wait_s: float = COMES_S) -> NDArray[np.uint8]:
        """Hands a part over and forgets it. Waits until it is here; raises KeyError where it does not come."""
        with self._changed:
            self._changed.wait_for(lambda: chunk_id in self._leaving, wait_s)
            copy = self._pop(chunk_id)
        if copy is None:
            raise KeyError(f"chunk {chunk_id} is not waiting for export")
        payload = copy()
        self.given_bytes += payload.nbytes
        return payload

    def _pop(self, chunk_id: str) -> Copy | None:
        found = self._leaving.pop(chunk_id, None)
        if found is None:
            return None
        self._leaving_bytes -= found[1]
        return found[2]

    # -- from the pool -------------------------------------------------------------------------------------------------

    def hold(self, ticket: int, payload: Payload) -> None:
        """Keeps what was read, until rank 0 has no use for it any more."""
        with self._changed:
            if ticket in self._unwanted:
                self._unwanted.remove(ticket)
            else:
                self._held[ticket] = payload
        self.taken_bytes += sum(array.nbytes for array in payload.arrays)

    def held(self, ticket: int) -> Payload:
        """Raises KeyError for one that is not held."""
        return self._held[ticket]

    def drop(self, tickets: Iterable[int]) -> None:
        with self._changed:
            for ticket in tickets:
                if self._held.pop(ticket, None) is None:
                    self._unwanted.add(ticket)

    def failed(self, ticket: int) -> None:
        """What was to be read under it does not come."""
        with self._changed:
            self._unwanted.discard(ticket)
