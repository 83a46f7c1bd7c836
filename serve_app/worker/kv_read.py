"""What is stored of a prompt: in the engine's own cache, in the pool, or arriving there from a prefill worker."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Awaitable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from serve_app.kv.cached_tokens import FOUND, SOURCES
from serve_app.kv.client import Fetched, KVClient
from serve_app.kv.keys import BLOCK_TOKENS, CHUNK_TOKENS, block_keys, state_key, tail_key
from serve_app.wire.generate import Prefilled, PromptPath
from serve_app.wire.load import Fetch, TierCost
from serve_app.worker.rank_store import reader_of
from serve_app.worker.tasks import Tasks

if TYPE_CHECKING:
    from serve_app.engine.engine import Engine
    from serve_app.engine.kv_io.transfer import StoredPrefix
    from serve_app.engine.loop import EngineLoop
    from serve_app.engine.request import Request

log = logging.getLogger(__name__)

# How long keys count as promised, and a look into the pool waits for them, before others are asked as well.
PROMISE_S = 120.0
ARRIVAL_WAIT_S = 0.2
LAST_WORD_S = 1.0
# A prefill that brings nothing for so long is not waited for: its replica may hang, or there may be none.
STALL_S = 10.0
_FARTHEST_LAST = ("node", "disk", "remote")


@dataclass(slots=True)
class Prompt:
    """A request and the names of its first ``wanted`` tokens, hashed once: the keys of full blocks are the request's,
    ``tail_keys`` name what is left over.
    """

    request: Request
    wanted: int
    tail_keys: list[bytes]

    @classmethod
    def of(cls, request: Request) -> Prompt:
        # The last token of a prompt is computed where the answer is sampled.
        wanted, media = len(request.tokens) - (0 if request.prefill_only else 1), request.media
        request.keys = block_keys(request.root, np.array(request.tokens[:wanted], np.int32), media=media)
        full = len(request.keys) * BLOCK_TOKENS
        tail = request.tokens[full:wanted]
        if not tail:
            return cls(request, wanted, [])
        parent = request.keys[-1] if request.keys else request.root
        return cls(request, wanted, [tail_key(parent, np.array(tail, np.int32), media=media, start=full)])


@dataclass(slots=True)
class Stored:
    """What there is of a prompt: ``prefix`` is what the engine's own cache lacks and the pool has; ``covered`` tokens
    are in either, ``held`` (from the first on) in the node's pool; None: the pool gets nothing of it.
    """

    prefix: StoredPrefix | None
    covered: int
    held: int | None
    moved: Moved = field(default_factory=lambda: Moved())


@dataclass(slots=True)
class Moved:
    """What was taken from the pool for a prompt, as (tier, first token, end), and what that cost: bytes moved, those
    among them that moved while prefill was still computing, and the seconds between the end of prefill and the start
    here, which is what the client waits for.
    """

    taken: list[tuple[str, int, int]] = field(default_factory=list)
    bytes: int = 0
    early_bytes: int = 0
    handover_s: float = 0.0
    coming: int = 0  # tokens that are found and not copied yet
    # On `time.perf_counter`: when prefill had ended.
    prefilled_at: float = 0.0

    def took(self, found: list[Fetched], *, early: bool = False) -> None:
        for piece, _ in found:
            size = piece.nbytes // piece.chunk_blocks * piece.n_blocks
            self.taken.append((piece.tier, piece.start_token, piece.end_token))
            self.bytes += size
            self.early_bytes += size if early else 0

    def path(self, request: Request, cached: int, ttft_s: float | None, began: float = 0.0) -> PromptPath:
        """Of a request that came when `time.perf_counter` was ``began``, and of whose tokens ``cached`` were computed
        by nobody for it.
        """
        prompt, present = request.prompt_len, request.cached
        found = dict.fromkeys(FOUND, 0)
        for tier, start, end in self.taken:
            found[tier] += max(0, min(end, cached) - start)
        found["own"] = max(0, cached - sum(found.values()))
        return PromptPath(
            **found,
            prefilled=max(0, present - cached),
            computed=max(0, prompt - present),
            bytes=self.bytes,
            early_bytes=self.early_bytes,
            handover_s=round(self.handover_s, 6),
            handover_share=round(self.handover_s / ttft_s, 4) if ttft_s else None,
            ttft_s=round(ttft_s, 6) if ttft_s else None,
            handover_at_s=round(max(0.0, self.prefilled_at - began), 6) if self.prefilled_at else 0.0,
            drafted_tokens=request.drafted,
            accepted_tokens=request.accepted,
        )


class PoolReader:
    """Lives on the worker's event loop."""

    def __init__(
        self, client: KVClient, engine: Engine, engine_loop: EngineLoop, states: KVClient | None = None
    ) -> None:
        """``states``: asks for chunks of states, of a model that keeps any."""
        self.client, self.states = client, states
        self.hits: Counter[str] = Counter()
        # The latest fetches, for whoever predicts what the next one takes.
        self.fetches: deque[Fetch] = deque(maxlen=16)
        self._engine, self._engine_loop = engine, engine_loop
        client.costs.prefill, client.costs.copies = engine.meter.prefill, engine.runner.kv.copies
        client.reader = reader_of(engine.runner.kv, engine_loop)
        client.busy_s = lambda: engine.scheduler.queued_tokens * client.costs.token_seconds
        self.several_nodes = False
        # States without keys and values lie in no chunk.
        self.pooled = bool(engine.runner.kv.shape.layers)
        self._arrived = 0  # tokens whose K/V are here and wait to be copied
        self._tasks = Tasks()

    def stats(self) -> dict[str, Any]:
        """Counts since the start: prompts' tokens by tier, and what fetching and computing cost."""
        return {"hits": {**dict.fromkeys(SOURCES, 0), **self.hits}, "costs": self.client.costs.report()}

    def done(
        self, request: Request, stored: Stored, cached: int, ttft_s: float | None, began: float = 0.0
    ) -> PromptPath:
        """What is told about a request that has ended; see :meth:`Moved.path`."""
        path = stored.moved.path(request, cached, ttft_s, began)
        self.hits.update({source: getattr(path, source) for source in SOURCES})
        return path

    async def stored(self, prompt: Prompt) -> Stored:
        """Looks into the engine's own cache, then into the pool."""
        from serve_app.engine.kv_io.transfer import StoredPrefix

        request, wanted = prompt.request, prompt.wanted
        # Reading the index from another thread is safe (the GIL) and a stale answer is only a hint.
        own = self._own(request)
        # Of a batch those that share a prefix come here one after another: less than a chunk is not worth the pool's
        # time, on the way there and back.
        small = request.share is not None and not request.prefill_only and wanted - own < CHUNK_TOKENS
        if small or not self.pooled:
            return Stored(None, own, None)
        if own >= wanted and not request.prefill_only:
            self._tasks.start(self._correct(request.id, request.keys))
            return Stored(None, own, own)
        if self.states is not None:
            return await self._with_states(prompt, own)
        began = time.perf_counter()
        held, found = await asyncio.gather(
            self.client.touch(request.keys, prompt.tail_keys) if own else _nothing(),
            self.client.fetch(request.keys, prompt.tail_keys, own) if own < wanted else _nothing(),
        )
        pieces = [self._piece(one) for one in found or ()]
        prefix = StoredPrefix(pieces) if pieces else None
        end = prefix.end if prefix is not None else 0
        stored = Stored(prefix, min(wanted, max(own, end)), held or 0 if own else end)
        stored.moved.took(found or [])
        if found:
            # The farthest tier is what a fetch of several waits for.
            tier = max((piece.tier for piece, _ in found), key=_FARTHEST_LAST.index)
            # It is of use once it is in the engine's blocks.
            copy_s = self.client.costs.copy_seconds(sum(piece.nbytes for piece, _ in found))
            seconds = time.perf_counter() - began + copy_s
            self.fetches.append(Fetch(tier, sum(piece.n_tokens for piece, _ in found), seconds))
        return stored

    async def computed(self, prompt: Prompt) -> Stored:
        """Of a prompt that is computed whatever is stored: only what the pool need not be given again."""
        if not self.pooled:
            return Stored(None, 0, None)
        held = await self.client.touch(prompt.request.keys, prompt.tail_keys)
        return Stored(None, 0, held or 0)

    async def arriving(self, prompt: Prompt, prefilled: asyncio.Future[Prefilled]) -> Stored:
        """Like :meth:`stored` while a prefill worker computes the prompt: takes chunks as they appear in the pool and
        copies them into the engine's cache between its steps, so that little is left to do when prefill has ended.

        ``prefilled`` says how it ended; if it failed, what is there is what there is. Whatever goes wrong, the engine
        computes what is missing.
        """
        from serve_app.engine.kv_io.transfer import StoredPrefix

        request = prompt.request
        own = self._own(request)
        if self.states is not None:
            node = await self._prefilled(prompt, prefilled)
            ended = time.perf_counter()
            stored = await self._with_states(prompt, self._own(request), node, weighed=False)
            stored.moved.prefilled_at, stored.moved.handover_s = ended, time.perf_counter() - ended
            return stored
        pieces: list[Any] = []
        moved = Moved()
        promised = [*request.keys[own // BLOCK_TOKENS :], *prompt.tail_keys]
        try:
            await self.client.announce(promised, PROMISE_S)
            prefilled.add_done_callback(lambda _: self._tasks.start(self.client.withdraw(promised)))
            told_at = await self._take_over(prompt, own, prefilled, pieces, moved)
            ended = told_at or time.perf_counter()  # all is here before the news that it is
            # It knows how much of the prompt was cached. If all is here and it does not say, somebody else computed it.
            await asyncio.wait([prefilled], timeout=LAST_WORD_S)
        finally:
            self._comes(moved, -moved.coming)
            if not prefilled.done():
                prefilled.set_result(Prefilled(request.id))
        moved.prefilled_at, moved.handover_s = ended, time.perf_counter() - ended
        if pieces and pieces[0].start > self._own(request):
            # What the engine held itself at first is gone.
            again = await self.stored(prompt)
            again.moved = moved
            return again
        end = pieces[-1].start + pieces[-1].tokens if pieces else own
        return Stored(StoredPrefix(pieces) if pieces else None, end, end, moved)

    async def _with_states(self, prompt: Prompt, own: int, node: str | None = None, *, weighed: bool = True) -> Stored:
        """What the pool has up to where it has states as well: the end of what is wanted, or its last border; ``node``
        has computed it. ``weighed``: not where computing it is predicted to be faster.
        """
        import torch

        from serve_app.engine.kv_io.transfer import StoredPrefix

        assert self.states is not None
        keys, tails, wanted = prompt.request.keys, prompt.tail_keys, prompt.wanted
        # A prefill has a token to compute in any case.
        whole = len(keys) - (prompt.request.prefill_only and not tails)
        ends = [(wanted, key) for key in tails if not prompt.request.prefill_only]
        ends += [(whole * BLOCK_TOKENS, keys[whole - 1])] if whole else []
        held = await self.client.touch(keys, tails) or 0
        for end, key in ends:
            if end <= own:
                break
            shape = self._engine.runner.kv.shape
            nbytes = shape.states.bytes + (end - own) * shape.token_bytes
            if weighed and not self.client.costs.worth("node", end - own, nbytes):
                break
            states = await self.states.fetch([state_key(key)], from_node=node)
            if not states:
                continue
            found = await self.client.fetch(
                keys[: end // BLOCK_TOKENS], tails if end == wanted else (), own, from_node=node
            )
            prefix = StoredPrefix([self._piece(one) for one in found], torch.from_numpy(states[0][1]), end)
            if not prefix.pieces or prefix.pieces[-1].start + prefix.pieces[-1].tokens < end:
                continue
            stored = Stored(prefix, end, max(held, end))
            stored.moved.took(found)
            return stored
        return Stored(None, own, held)

    async def _prefilled(self, prompt: Prompt, prefilled: asyncio.Future[Prefilled]) -> str | None:
        """The node of the prefill worker that has computed a prompt, once it has; None where it brings nothing."""
        last, seen = time.monotonic(), 0
        # What another node's pool has is not seen from here before prefill has ended.
        stall_s = PROMISE_S if self.several_nodes else STALL_S
        while not prefilled.done():
            await asyncio.wait([prefilled], timeout=1.0)
            held = await self.client.touch(prompt.request.keys, prompt.tail_keys) or 0
            if held > seen:
                last, seen = time.monotonic(), held
            elif time.monotonic() - last > stall_s:
                log.warning("prefill of %s has brought nothing for %g s", prompt.request.id, stall_s)
                if not prefilled.done():
                    prefilled.set_result(Prefilled(prompt.request.id))
        return prefilled.result().node

    async def _take_over(
        self, prompt: Prompt, at: int, prefilled: asyncio.Future[Prefilled], pieces: list[Any], moved: Moved
    ) -> float:
        """Fills ``pieces`` from token ``at`` on until they reach what is wanted or nothing more comes; says when
        prefill was seen to have ended (0: it has not).
        """
        from serve_app.engine.kv_io.preload import preload

        keys = prompt.request.keys
        told_at = 0.0
        last = time.monotonic()
        while at < prompt.wanted:
            over = prefilled.done()
            if over and not told_at:
                told_at = time.perf_counter()
            node = prefilled.result().node if over else None
            wait_s = 0.0 if over else ARRIVAL_WAIT_S
            found = await self.client.fetch(keys, prompt.tail_keys, at, wait_s=wait_s, first=True, from_node=node)
            moved.took(found, early=not prefilled.done())
            if found:
                self._comes(moved, sum(piece.n_tokens for piece, _ in found))
                last = time.monotonic()
            elif not prefilled.done() and time.monotonic() - last > STALL_S:
                log.warning(
                    "prefill of %s has brought nothing for %g s; computing the rest here", prompt.request.id, STALL_S
                )
                prefilled.set_result(Prefilled(prompt.request.id))
                break
            for one in found:
                piece = self._piece(one)
                pieces.append(piece)
                at = piece.start + piece.tokens
                # One at a time, each between two steps: streams that run meanwhile get their turn.
                await asyncio.wrap_future(self._engine_loop.call(partial(preload, keys=keys, piece=piece)))
                self._comes(moved, -piece.tokens)
            if not found and over:
                break
            if not found:
                await asyncio.wait([prefilled], timeout=ARRIVAL_WAIT_S)
        return told_at

    def on_the_way(self) -> int:
        """Tokens whose K/V are on their way into the engine's blocks."""
        return self._arrived + self.client.reading_tokens

    def tiers(self) -> tuple[TierCost, ...]:
        """What fetches are taken to cost here."""
        token = (1 << 40) / max(self.client.tokens(1 << 40), 1)
        found = self.client.costs.estimates()
        return tuple(TierCost(tier, first, each * token) for tier, (first, each) in found.items())

    def _comes(self, moved: Moved, tokens: int) -> None:
        moved.coming += tokens
        self._arrived += tokens

    def _own(self, request: Request) -> int:
        """Tokens of the request's prompt in the engine's own cache, from the first on."""
        scheduler = self._engine.scheduler
        held = len(scheduler.blocks.match(request.keys))
        return scheduler.states.match(request.keys[:held]) * BLOCK_TOKENS

    def _piece(self, fetched: Fetched) -> Any:
        import torch

        from serve_app.engine.kv_io.transfer import LoadedPiece

        piece, read = fetched
        payload = torch.from_numpy(read) if isinstance(read, np.ndarray) else read
        return LoadedPiece(piece.start_token, piece.n_tokens, payload, piece.first_block)

    async def _correct(self, request_id: str, keys: list[bytes]) -> None:
        """Tells the exporter what the pool has forgotten of a prompt that this engine still holds."""
        held = await self.client.touch(keys)
        if held is not None:
            self._engine_loop.call(lambda engine: engine.export_from(request_id, held))


def _nothing() -> Awaitable[None]:
    return asyncio.sleep(0)
