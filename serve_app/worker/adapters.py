"""A worker's adapters: which are in memory, which have a place in the model, and whose turn it is for one.

::

    file store --load--> host memory (bytes bounded) --put--> a place in the model (number bounded) --> requests

An adapter is loaded beside the event loop and the engine's thread, once for all requests that wait for it. Requests
with a place run; the others wait here, beside the batch. A place is given anew when its last request has ended. Where
every place is in use, the one with the fewest requests takes no new ones until whoever has waited longest has got it:
so nobody waits for longer than a request lasts, however often the other adapters are asked for.

Only requests that go on by themselves hold a place: one that waits for prefill elsewhere, whose worker may need a
place as well, asks for its own when that has ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Container
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Protocol

from serve_app.adapters.config import AdapterRefused
from serve_app.wire.generate import AdapterAt
from serve_app.wire.load import Fetch

log = logging.getLogger(__name__)

# Adapters that are loaded at the same time, and how many of those that wait are looked at.
LOADERS = 2
LOOKAHEAD = 16
# While it is loaded an adapter is in memory twice: as it came, and as the model takes it.
LOADING = 2
# How much less of a processor that others want a loader gets. With 10 it is a tenth.
NICE = 10


class Packed(Protocol):
    """An adapter as the model takes it."""

    @property
    def bytes(self) -> int: ...


class Bank(Protocol):
    """The places in a model (`serve_app.models`), from 1 on. Both calls come between two steps, for a place that no
    request has.
    """

    @property
    def places(self) -> int: ...

    def put(self, place: int, prepared: Any) -> None: ...

    def clear(self, place: int) -> None: ...


@dataclass(slots=True, eq=False)
class _Adapter:
    """``bytes``: reserved while it is loaded, and taken afterwards."""

    at: AdapterAt
    bytes: int = 0
    packed: Packed | None = None
    place: int = 0
    users: set[str] = field(default_factory=set)


class Adapters:
    """On a worker's event loop. ``load(at)`` runs in a thread and raises :class:`AdapterRefused`, or anything else
    where another worker may succeed. ``between_steps`` runs a function in the engine's thread, in the order in which it
    was told. ``lost(request, why)`` ends a request whose place could not be filled.
    """

    def __init__(
        self,
        bank: Bank,
        load: Callable[[AdapterAt], Packed],
        between_steps: Callable[[Callable[[], None]], Future[None]],
        lost: Callable[[str, str], None],
        *,
        cache_bytes: int,
    ) -> None:
        self._bank, self._load, self._between_steps, self._lost = bank, load, between_steps, lost
        self._limit = cache_bytes
        # By digest, the least recently used first.
        self._adapters: OrderedDict[str, _Adapter] = OrderedDict()
        self._bytes = 0
        # By digest, in order of arrival: requests that wait for a place.
        self._waiting: OrderedDict[str, dict[str, asyncio.Future[int]]] = OrderedDict()
        self._wanted: dict[str, AdapterAt] = {}
        self._using: dict[str, _Adapter] = {}
        self._free = list(range(bank.places, 0, -1))
        # Takes no new requests: somebody waits for its place.
        self._leaving: _Adapter | None = None
        self._loaders = ThreadPoolExecutor(LOADERS, "adapters", initializer=behind_the_step)
        self._loads: set[asyncio.Task[None]] = set()
        # The latest loads, for whoever predicts what the next one takes.
        self.loads: deque[Fetch] = deque(maxlen=16)
        self.loaded = self.evicted = self.swaps = 0

    def close(self) -> None:
        for task in self._loads:
            task.cancel()
        self._loaders.shutdown(wait=False, cancel_futures=True)

    @property
    def bytes(self) -> int:
        return self._bytes

    @property
    def held(self) -> list[str]:
        """Digests of those in memory, the most recently used first."""
        return [adapter.at.digest for adapter in reversed(self._adapters.values()) if adapter.packed is not None]

    def stats(self) -> dict[str, int]:
        return {
            "places": self._bank.places,
            "placed": sum(adapter.place > 0 for adapter in self._adapters.values()),
            "held": len(self.held),
            "bytes": self.bytes,
            "using": len(self._using),
            "waiting": sum(map(len, self._waiting.values())),
            "loaded": self.loaded,
            "evicted": self.evicted,
            "swaps": self.swaps,
        }

    def expect(self, at: AdapterAt) -> None:
        """A request for it will come: loads it if there is room."""
        if at.digest not in self._adapters and self._fits(at) and self._make_room(at, keep=self._waiting):
            self._start(at)

    async def place(self, request: str, at: AdapterAt, ended: asyncio.Future[Any]) -> int:
        """Waits until the request has a place, which is its own until :meth:`release`; 0 if it has ``ended`` before.
        Raises :class:`AdapterRefused`, or why the adapter could not be loaded.
        """
        adapter = self._adapters.get(at.digest)
        if adapter is not None and adapter.place and adapter is not self._leaving and at.digest not in self._waiting:
            return self._use(request, adapter)
        if not self._fits(at):
            raise AdapterRefused(
                f"the adapter has {at.size} bytes, and workers of this model keep {self._limit}: "
                "raise lora.cache_bytes in the model's record"
            )
        place: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(at.digest, {})[request] = place
        self._wanted[at.digest] = at
        try:
            self._serve()
            await asyncio.wait([place, ended], return_when=asyncio.FIRST_COMPLETED)
            return place.result() if place.done() else 0
        finally:
            if not place.done():
                self._leave(request, at.digest)

    def release(self, request: str) -> None:
        """The request has left the engine, or was told to before this; one without a place is no error."""
        adapter = self._using.pop(request, None)
        if adapter is None:
            return
        adapter.users.discard(request)
        if not adapter.users and self._waiting:
            self._serve()

    # -- inside --------------------------------------------------------------------------------------------------------

    def _fits(self, at: AdapterAt) -> bool:
        return at.size <= self._limit

    def _leave(self, request: str, digest: str) -> None:
        waiting = self._waiting.get(digest, {})
        waiting.pop(request, None)
        if not waiting:
            self._waiting.pop(digest, None)
            self._wanted.pop(digest, None)
            self._serve()

    def _use(self, request: str, adapter: _Adapter) -> int:
        adapter.users.add(request)
        self._using[request] = adapter
        self._adapters.move_to_end(adapter.at.digest)
        return adapter.place

    def _serve(self) -> None:
        """Gives those that have waited longest what they need next: a load, or a place."""
        before: set[str] = set()
        stuck = False
        for digest in list(islice(self._waiting, LOOKAHEAD)):
            adapter = self._adapters.get(digest)
            if adapter is None:
                at = self._wanted[digest]
                if self._make_room(at, keep=before):
                    self._start(at)
                else:
                    stuck = True
            elif adapter.packed is not None and adapter is not self._leaving:
                if adapter.place or self._take_place(adapter):
                    self._admit(adapter)
                else:
                    stuck = True
            before.add(digest)
        if not stuck:
            self._leaving = None
        elif self._leaving is None or not self._leaving.users:
            used = [adapter for adapter in self._adapters.values() if adapter.users]
            self._leaving = min(used, key=lambda adapter: len(adapter.users), default=None)

    def _admit(self, adapter: _Adapter) -> None:
        """All that wait for it: they share its place."""
        for request, place in self._forget_waiting(adapter.at.digest).items():
            if not place.done():
                place.set_result(self._use(request, adapter))

    def _forget_waiting(self, digest: str) -> dict[str, asyncio.Future[int]]:
        self._wanted.pop(digest, None)
        return self._waiting.pop(digest, {})

    def _take_place(self, adapter: _Adapter) -> bool:
        """Puts it into a place that is free or that nobody uses; False if there is none."""
        if self._free:
            place = self._free.pop()
        else:
            idle = next((other for other in self._adapters.values() if other.place and not other.users), None)
            if idle is None:
                return False
            place, idle.place = idle.place, 0
            if idle is self._leaving:
                self._leaving = None
        adapter.place = place
        self.swaps += 1
        packed = adapter.packed
        self._tell(lambda: self._bank.put(place, packed), lambda error: self._broken(adapter, place, error))
        return True

    def _broken(self, adapter: _Adapter, place: int, error: BaseException) -> None:
        """A place could not be filled: its requests end, and the adapter is forgotten."""
        log.error("adapter %s can't be put into the model: %s", adapter.at.digest[:16], error)
        if adapter.place != place:
            return
        adapter.place = 0
        self._free.append(place)
        if self._adapters.get(adapter.at.digest) is adapter:
            self._forget(adapter)
        for request in list(adapter.users):
            self._lost(request, f"its adapter can't be put into the model: {error}")

    def _make_room(self, at: AdapterAt, keep: Container[str]) -> bool:
        """Forgets what was used least recently, and neither is used nor is to be kept, until this one can be loaded."""
        room = self._limit - LOADING * at.size
        self._shrink(room, keep)
        return self._bytes <= room or not self._adapters

    def _shrink(self, limit: int, keep: Container[str]) -> None:
        """Forgets until ``limit`` bytes are left, or nothing that may go."""
        if self._bytes <= limit:
            return
        for digest, adapter in list(self._adapters.items()):
            if adapter.packed is not None and not adapter.users and digest not in keep:
                self._evict(adapter)
                if self._bytes <= limit:
                    return

    def _evict(self, adapter: _Adapter) -> None:
        self._forget(adapter)
        self.evicted += 1
        if adapter is self._leaving:
            self._leaving = None
        if place := adapter.place:
            adapter.place = 0
            self._free.append(place)
            self._tell(lambda: self._bank.clear(place))

    def _forget(self, adapter: _Adapter) -> None:
        del self._adapters[adapter.at.digest]
        self._bytes -= adapter.bytes

    def _hold(self, adapter: _Adapter, size: int) -> None:
        self._bytes += size - adapter.bytes
        adapter.bytes = size

    def _tell(self, function: Callable[[], None], failed: Callable[[BaseException], None] | None = None) -> None:
        """Runs it between two steps; what is told the engine later comes after it."""
        loop = asyncio.get_running_loop()

        def ended(future: Future[None]) -> None:
            error = future.exception()
            if error is not None and failed is not None and not loop.is_closed():
                loop.call_soon_threadsafe(failed, error)

        try:
            self._between_steps(function).add_done_callback(ended)
        except RuntimeError as error:  # the engine has stopped; whoever gives it a request will hear of it
            log.info("no adapter is placed any more: %s", error)

    def _start(self, at: AdapterAt) -> None:
        adapter = self._adapters[at.digest] = _Adapter(at)
        self._hold(adapter, LOADING * at.size)
        task = asyncio.ensure_future(self._fill(adapter))
        self._loads.add(task)
        task.add_done_callback(self._loads.discard)

    async def _fill(self, adapter: _Adapter) -> None:
        at = adapter.at
        began = time.perf_counter()
        try:
            adapter.packed = await asyncio.get_running_loop().run_in_executor(self._loaders, self._load, at)
            self._hold(adapter, adapter.packed.bytes)
            self.loaded += 1
            self.loads.append(Fetch("adapter", at.size, time.perf_counter() - began))
        except Exception as error:
            self._forget(adapter)
            for place in self._forget_waiting(at.digest).values():
                if not place.done():
                    place.set_exception(error)
        self._shrink(self._limit, self._waiting)  # what is loaded may be larger than its files
        self._serve()


def behind_the_step() -> None:
    """What a loader's thread is: while it computes, the threads of a step wait for the one whose processor it has."""
    import torch

    torch.set_num_threads(1)
    with contextlib.suppress(OSError):  # on Linux a thread has a priority of its own
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), os.getpriority(os.PRIO_PROCESS, 0) + NICE)
