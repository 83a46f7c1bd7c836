"""The resumable streams of one gateway: it runs them, stores them, and takes over those whose gateway is gone.

A frame is shown when the store has it, and not before. So whoever goes on with a stream knows everything that any
client has seen of it. A gateway writes only to streams of its own epoch: one that was thought dead and comes back finds
its streams taken, and can add nothing to them.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

from serve_app.api import sse
from serve_app.api.envelopes import openai_body
from serve_app.api.errors import ApiError, Gone, Internal, NotFound, OutOfCapacity, Stopped, StoreAway, as_api_error
from serve_app.gateway.resume.log import NotNow, StreamLog, number_of, split
from serve_app.gateway.resume.refused import Refused
from serve_app.state.errors import Away
from serve_app.state.kept.streams import CANCELLING, EXPIRED, LOST, RUNNING, Ending, Running, StreamPart, Taken
from serve_app.state.protocols import StreamStore
from serve_app.state.reader import in_time, plausible

log = logging.getLogger("ray.serve")

# How long a gateway may be silent before others take its streams over, and how often it says that it lives.
LEASE_S = 4.0
BEAT_S = 1.0
# The least time between two writes: what comes in between goes together.
GROUP_S = 0.04
# How often a reader looks for what another gateway has made, and how long one waits for a store that does not answer.
LOOK_S = 0.1
AWAY_S = 5.0
# How long a request that is taken over is tried again while its model has no room or is not up yet.
TRY_S = 600.0
# How long what needs no client is kept after its end.
UNATTENDED_KEEP_S = 600.0
TRIM_S = 30.0
# Streams at a time: of one account, and in all of this gateway by their bytes.
MAX_STREAMS = 256
MAX_TOTAL_BYTES = 256 << 20
TAKE = 16
_T = TypeVar("_T")


class Streams:
    """``again(taken, log)`` runs a request that another gateway had begun, up to :meth:`run`."""

    def __init__(self, store: StreamStore, keep_max_s: float) -> None:
        self.keep_max_s = keep_max_s
        self.again: Callable[[Taken, StreamLog], Awaitable[None]] | None = None
        self._store = store
        self.owner = secrets.token_hex(8)
        self._running: dict[str, StreamLog] = {}
        self._retried: set[str] = set()
        self._watched: Counter[str] = Counter()
        self._refused = Refused(store, self.owner)
        # How many need this gateway to say that it lives.
        self._needed = 0
        # One thread: what is asked of the store is answered in order.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="streams")
        self._readers = ThreadPoolExecutor(2, thread_name_prefix="streams-read")
        self._dirty = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._loops: list[asyncio.Task[None]] = []
        self._trimmed = time.monotonic()

    def start(self) -> None:
        """Needs a running loop. The first request that asks for it does it too."""
        if not self._loops:
            self._loops = [asyncio.ensure_future(self._writing()), asyncio.ensure_future(self._beating())]

    async def aclose(self) -> None:
        """Leaves what runs to other gateways."""
        for task in [*self._loops, *self._tasks]:
            task.cancel()
        await asyncio.gather(*self._loops, *self._tasks, return_exceptions=True)
        self.close()

    def close(self) -> None:
        if self._running or self._refused:
            self._thread.submit(self._release)
        self._thread.shutdown(wait=True)
        self._readers.shutdown(wait=False, cancel_futures=True)

    def _release(self) -> None:
        try:
            self._refused.tell()
            self._store.release(self.owner)
        except Away:
            log.info("the store is away: other gateways take streams over in %g s", LEASE_S)

    @contextmanager
    def living(self) -> Iterator[None]:
        """Says to others that this gateway lives, until the block ends."""
        self.start()
        self._needed += 1
        try:
            yield
        finally:
            self._needed -= 1

    # -- running

    def check_room(self, account: str) -> None:
        """Raises `OutOfCapacity`."""
        own = sum(one.head.account == account for one in self._running.values())
        if own >= MAX_STREAMS or sum(one.size for one in self._running.values()) > MAX_TOTAL_BYTES:
            raise OutOfCapacity("Too many resumable streams at the same time, please try again.", retry_after=5.0)

    async def run(self, stream: StreamLog, frames: AsyncIterator[bytes]) -> None:
        """Runs the stream from now on, whoever reads it. Returns when the store knows of it. Raises `StoreAway`."""
        self.start()
        self._running[stream.id] = stream
        stream.seen = time.monotonic()
        stream.task = asyncio.ensure_future(self._pump(stream, frames))
        self._tasks.add(stream.task)
        stream.task.add_done_callback(self._tasks.discard)
        if stream.stopping is not None:
            stream.task.cancel()
        self._dirty.set()
        try:
            await stream.stored_once(AWAY_S)
        except TimeoutError:
            if stream.lost:  # it goes on elsewhere, and is shown from there
                await asyncio.wait({stream.task})
                return
            log.warning("a resumable stream has not begun: the store has not taken it for %.1f s", AWAY_S)
            stream.lose()
            self._running.pop(stream.id, None)
            self._refused.add(stream.head)
            self._dirty.set()
            # Whoever closes its events must find nobody in them.
            await asyncio.wait({stream.task})
            if not await self._refused.ended_elsewhere(stream.head, self.look):
                raise StoreAway from None

    async def _pump(self, stream: StreamLog, frames: AsyncIterator[bytes]) -> None:
        ending: Ending | None = None
        last = b""
        try:
            async for made in frames:
                stream.append(made)
                self._dirty.set()
            if stream.behind:
                raise RuntimeError(f"stream {stream.id} ended before what was shown of it")
            ending = "done" if stream.stopping is None else "cancelled"
        except NotNow as later:
            # Whoever had it taken over tries again.
            self._running.pop(stream.id, None)
            log.info("stream %s cannot go on yet: %s", stream.id, later.__cause__)
        except asyncio.CancelledError:
            if stream.stopping is None or stream.lost:
                raise
            ending = "cancelled"
        except Exception as error:
            if not isinstance(error, ApiError):
                log.error("stream %s failed", stream.id, exc_info=error)
            ending, last = "failed", sse.frame(openai_body(as_api_error(error)))
        finally:
            # The work behind it ends here at the latest, and what it costs goes to the store with the stream's end.
            if hasattr(frames, "aclose"):
                await frames.aclose()
            if ending is not None:
                stream.end(ending, last)
            self._dirty.set()

    async def _writing(self) -> None:
        while True:
            await self._dirty.wait()
            self._dirty.clear()
            taken = [(one, part) for one in list(self._running.values()) if (part := self._take(one)) is not None]
            if taken:
                await self._write(taken)
            if self._refused and not await self._ask(self._thread, self._refused.tell):
                await asyncio.sleep(0.25)
                self._dirty.set()
            if taken:
                await asyncio.sleep(GROUP_S)

    def _take(self, stream: StreamLog) -> StreamPart | None:
        keep_s = UNATTENDED_KEEP_S if stream.head.keep_s is None else stream.head.keep_s
        return stream.take(time.time() + keep_s)

    async def _write(self, taken: list[tuple[StreamLog, StreamPart]]) -> None:
        while True:
            try:
                refused = await self._ask(self._thread, self._refused.write, [part for _, part in taken], LEASE_S)
                break
            except Away:
                await asyncio.sleep(0.25)
            except Exception as error:
                log.error("resumable streams cannot be stored", exc_info=error)
                await asyncio.sleep(1.0)
            taken = [(stream, part) for stream, part in taken if not stream.lost]
        for stream, part in taken:
            if stream.id in refused:
                self._lose(stream)
                continue
            if part.ending is not None:
                self._running.pop(stream.id, None)
            try:
                stream.stored(part)
            except Exception as error:
                # What one stream has to settle holds up no other.
                log.error("stream %s cannot be settled", stream.id, exc_info=error)
            if part.head is not None:
                self._dirty.set()  # its end may have waited for this

    def _lose(self, stream: StreamLog) -> None:
        log.warning("stream %s goes on in another gateway", stream.id)
        self._running.pop(stream.id, None)
        stream.lose()

    # -- living, and taking over

    async def _beating(self) -> None:
        while True:
            try:
                await self._beat()
            except Away:
                pass
            except Exception as error:
                log.error("resumable streams cannot be looked after", exc_info=error)
            await asyncio.sleep(BEAT_S)

    async def _beat(self) -> None:
        now = time.time()
        known = [stream for stream in self._running.values() if stream.begun]
        if self._running or self._watched or self._retried or self._needed or self._refused:
            mine = {one.id: one for one in await self._ask(self._thread, self._live, list(self._watched))}
            for stream in known:
                row = mine.get(stream.id)
                if row is None or row.epoch != stream.epoch:
                    if stream.ending is None:
                        self._lose(stream)
                elif row.cancelling:
                    stream.stop(Stopped())
                else:
                    self._look_after(stream, row)
        if self.again is not None:
            for stream_id in await self._ask(self._thread, self._store.orphans, now, TAKE):
                if stream_id not in self._running and stream_id not in self._retried:
                    await self._take_over(stream_id)
        if time.monotonic() - self._trimmed > TRIM_S:
            self._trimmed = time.monotonic()
            await self._ask(self._thread, self._store.trim, now)

    def _live(self, watched: Collection[str]) -> list[Running]:
        """Blocks. A lease begins when it is its turn to be written, which may be seconds after it was asked for."""
        now = time.time()
        return self._store.beat(self.owner, now + LEASE_S, watched, now)

    def _look_after(self, stream: StreamLog, row: Running) -> None:
        """Ends a stream that nobody has read for as long as it may go on so: by our own clock, since others' jump."""
        now = time.monotonic()
        if stream.readers or row.seen != stream.seen_elsewhere:
            stream.seen, stream.seen_elsewhere = now, row.seen
        elif stream.head.keep_s is not None and now - stream.seen > stream.head.keep_s:
            stream.stop(Stopped(f"No client was there for {stream.head.keep_s:g} seconds."))

    async def _take_over(self, stream_id: str) -> None:
        # Alive first, or another gateway would take it from us.
        await self._ask(self._thread, self._live, ())
        taken = await self._ask(self._thread, self._store.take, self.owner, stream_id, time.time())
        if taken is not None:
            log.warning("stream %s has lost its gateway and goes on here", stream_id)
            self._retried.add(stream_id)
            task = asyncio.ensure_future(self._go_on(taken))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _go_on(self, taken: Taken) -> None:
        """Runs the request again, as often as its model has no room."""
        assert self.again is not None
        until = time.monotonic() + TRY_S
        try:
            while True:
                stream = StreamLog(taken.head, taken.epoch, taken.parts)
                stream.last_try = time.monotonic() > until
                if taken.cancelling:
                    stream.stop(Stopped())
                try:
                    await self.again(taken, stream)
                except ApiError as error:
                    if error.status in (429, 503) and not stream.last_try:
                        await asyncio.sleep(BEAT_S)
                        continue
                    await self._fail(stream, error)
                except Exception as error:
                    log.error("stream %s cannot be run again", stream.id, exc_info=error)
                    await self._fail(stream, Internal())
                if stream.task is not None:
                    await asyncio.wait({stream.task})
                if stream.ending is not None or stream.lost:
                    return
                await asyncio.sleep(BEAT_S)
        finally:
            self._retried.discard(taken.head.id)

    async def _fail(self, stream: StreamLog, error: ApiError) -> None:
        stream.end("failed", sse.frame(openai_body(error)))
        self._running[stream.id] = stream
        self._dirty.set()

    # -- reading

    async def frames(self, account: str, stream_id: str, after: int) -> AsyncGenerator[bytes]:
        """What is shown of a stream of the account beyond its first ``after`` frames, and then as it comes, wherever it
        runs. Raises `NotFound`, `Gone` and `StoreAway` before it returns.
        """
        if self._own(account, stream_id) is None:
            await self._shown(account, stream_id, after)
        return self._follow(account, stream_id, after)

    async def _follow(self, account: str, stream_id: str, after: int) -> AsyncGenerator[bytes]:
        self._watched[stream_id] += 1
        self.start()
        try:
            while True:
                stream = self._own(account, stream_id)
                if stream is not None:
                    stream.readers += 1
                    try:
                        async for made in stream.read(after):
                            after = number_of(split(made)[-1])
                            yield made
                        if stream.complete:
                            return
                    finally:
                        stream.readers -= 1
                        stream.seen = time.monotonic()
                    continue
                try:
                    shown = await self._shown(account, stream_id, after)
                except StoreAway:
                    # It goes on, and can be read when the store is back.
                    await asyncio.sleep(LOOK_S)
                    continue
                for frames in shown.parts:
                    fresh = [frame for frame in split(frames) if number_of(frame) > after]
                    if fresh:
                        after = number_of(fresh[-1])
                        yield b"".join(fresh)
                if shown.parts:
                    continue
                if shown.status == LOST:
                    yield sse.frame(openai_body(Internal()))
                if shown.status not in (RUNNING, CANCELLING):
                    return
                await asyncio.sleep(LOOK_S)
        finally:
            self._watched[stream_id] -= 1
            if not self._watched[stream_id]:
                del self._watched[stream_id]

    async def cancel(self, account: str, stream_id: str) -> str:
        """Ends a stream of the account wherever it runs, and waits for that a little; its status. Raises `NotFound`,
        `Gone` and `StoreAway`.
        """
        await self._shown(account, stream_id, 0)
        status = await self.look(self._store.cancel, account, stream_id)
        if (own := self._own(account, stream_id)) is not None:
            own.stop(Stopped())
        until = time.monotonic() + AWAY_S
        while status in (RUNNING, CANCELLING) and time.monotonic() < until:
            await asyncio.sleep(LOOK_S / 2)
            status = (await self._shown(account, stream_id, 0)).status
        return "cancelling" if status in (RUNNING, CANCELLING) else str(status)

    async def status(self, account: str, stream_id: str) -> str:
        """ "running", "done", "failed", "cancelled"... Raises like :meth:`cancel`."""
        return (await self._shown(account, stream_id, 1 << 62)).status

    def _own(self, account: str, stream_id: str) -> StreamLog | None:
        stream = self._running.get(stream_id)
        return stream if stream is not None and stream.head.account == account and not stream.lost else None

    async def _shown(self, account: str, stream_id: str, after: int) -> Any:
        known = plausible(stream_id)
        shown = await self.look(self._store.shown, account, stream_id, after) if known else None
        if shown is None:
            raise NotFound("No such stream; only requests that were asked to be resumable have one.", param="id")
        if shown.status == EXPIRED:
            raise Gone("This stream has expired: it was kept for as long as was asked for. Send the request again.")
        return shown

    async def look(self, look: Callable[..., _T], *args: Any) -> _T:
        return await in_time(self._readers.submit(look, *args), look, AWAY_S)

    @staticmethod
    def _ask(pool: ThreadPoolExecutor, ask: Callable[..., _T], *args: Any) -> Awaitable[_T]:
        return asyncio.get_running_loop().run_in_executor(pool, ask, *args)
