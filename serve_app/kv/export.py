"""The worker's side of publishing: payloads wait here until the pool of the node comes for them."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable

import numpy as np
from numpy.typing import NDArray


class ExportBuffer:
    """Chunk id -> payload, bounded in bytes and time. Thread-safe: the engine's thread puts, the actor's
    loop takes.

    Chunks left behind (pool gone, chunk already held) go after ``ttl_s`` seconds or when room is needed,
    oldest first. Losing one is a miss for somebody later, nothing more.
    """

    def __init__(self, limit_bytes: int, ttl_s: float = 30.0, clock: Callable[[], float] = time.monotonic) -> None:
        self.limit_bytes = limit_bytes
        self._ttl_s = ttl_s
        self._clock = clock
        self._lock = threading.Lock()
        self._items: OrderedDict[str, tuple[float, NDArray[np.uint8]]] = OrderedDict()
        self._bytes = 0
        self._on_their_way = 0
        self._room = threading.Condition()
        self.dropped = 0

    def __len__(self) -> int:
        with self._lock:
            return len(self._items)

    @property
    def nbytes(self) -> int:
        with self._lock:
            return self._bytes

    def begin(self, nbytes: int, wait_s: float = 0.0) -> bool:
        """Makes a place for a payload from when it is cut out until the pool has it (:meth:`end`).

        False, after ``wait_s`` seconds: too much is on its way already, and this chunk is dropped.
        """
        with self._room:
            fits = self._room.wait_for(lambda: self._on_their_way + nbytes <= self.limit_bytes, wait_s)
            if fits:
                self._on_their_way += nbytes
            else:
                self.dropped += 1
            return fits

    def end(self, nbytes: int) -> None:
        """Gives the place of :meth:`begin` back."""
        with self._room:
            self._on_their_way -= nbytes
            self._room.notify_all()

    def put(self, chunk_id: str, payload: NDArray[np.uint8]) -> bool:
        """Keeps a flat uint8 array, which must not be written to any more. False: larger than the whole
        buffer.
        """
        if payload.dtype != np.uint8 or payload.ndim != 1:
            raise ValueError("a payload is a flat uint8 array")
        if payload.nbytes > self.limit_bytes:
            return False
        now = self._clock()
        with self._lock:
            self._pop(chunk_id)
            while self._items:
                oldest = next(iter(self._items))
                expired = self._items[oldest][0] <= now
                if not expired and self._bytes + payload.nbytes <= self.limit_bytes:
                    break
                self._pop(oldest)
            self._items[chunk_id] = (now + self._ttl_s, payload)
            self._bytes += payload.nbytes
        return True

    def take(self, chunk_id: str) -> NDArray[np.uint8]:
        """Hands a payload over and forgets it; raises KeyError when it is not (or no longer) here."""
        with self._lock:
            payload = self._pop(chunk_id)
        if payload is None:
            raise KeyError(f"chunk {chunk_id} is not waiting for export")
        return payload

    def discard(self, chunk_ids: Iterable[str]) -> None:
        with self._lock:
            for chunk_id in chunk_ids:
                self._pop(chunk_id)

    def _pop(self, chunk_id: str) -> NDArray[np.uint8] | None:
        item = self._items.pop(chunk_id, None)
        if item is None:
            return None
        self._bytes -= item[1].nbytes
        return item[1]
