"""The EAGLE-3 proposer: a head beside the target reads each computed token's hidden states and drafts a chain.

It sees every step's hidden states (:meth:`EagleProposer.observe`) and keeps those the head has not read yet. The head
reads them when drafts are wanted, or once a block's worth has come together, so that its K/V follow the target's
through the prefix cache and the pool even while nobody drafts. Its K/V lie in the target's own blocks (see
``serve_app.models.heads.eagle``), so there is nothing to allocate, to free or to lose.

A token whose hidden states were never here (a prefix from the cache) needs none: its K/V came along. Where the head
never read a token, as at the end of a request that was found in the cache, its slot holds whatever was there before,
which can spoil a draft, not an answer.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from serve_app.engine.blocks import BLOCK_TOKENS, BlockPool
from serve_app.engine.kv_cache import KVCache
from serve_app.engine.request import EmbeddedSpan, Request
from serve_app.engine.speculation.proposer import Draft
from serve_app.engine.step import Batch, Scheduled, build_batch

log = logging.getLogger(__name__)


class Head(Protocol):
    """See :class:`serve_app.models.heads.eagle.EagleHead`."""

    layers: tuple[int, ...]

    def fuse(self, states: Tensor) -> Tensor: ...

    def __call__(self, batch: Batch, hidden: Tensor) -> tuple[Tensor, Tensor]: ...


@dataclass(slots=True)
class _Unread:
    """Hidden states [n, layers, hidden] of tokens ``start``.. that the head has not read yet."""

    start: int
    states: Tensor


@dataclass(slots=True)
class HeadRows(Scheduled):
    """Slots of the head: like the target's, but the tokens are the *following* ones, and the table may be longer."""

    ids: list[int] = field(default_factory=list)
    table: list[int] = field(default_factory=list)

    @property
    def blocks(self) -> list[int]:
        return self.table

    @property
    def embedded(self) -> list[EmbeddedSpan]:
        return []  # the head embeds placeholders; what it makes of them can spoil a draft only

    def token_ids(self) -> list[int]:
        return self.ids


class EagleProposer:
    """A :class:`~serve_app.engine.speculation.proposer.Proposer` and a :class:`~serve_app.engine.runner.StepObserver`.

    ``spare`` blocks are taken from ``blocks`` for good: a chain that runs over the end of a request's last block goes
    on in one of them.
    """

    name = "eagle3"
    free = False
    # A chain begins with the target's own hidden states, which there are none of behind somebody else's drafts.
    continues = False

    def __init__(self, head: Head, kv: KVCache, blocks: BlockPool, spare: int, *, limit: int = 16) -> None:
        self.limit = limit
        self._head = head
        self._kv = kv
        self._spare = blocks.allocate(spare)
        self._unread: dict[str, _Unread] = {}
        self._failing = False

    @property
    def layers(self) -> tuple[int, ...]:
        """Layers of the target whose input is wanted."""
        return self._head.layers

    @torch.inference_mode()
    def observe(self, scheduled: list[Scheduled], states: Tensor) -> None:
        """Takes over ``states`` [T, layers, hidden] of a step's tokens; called before the step's blocks can go."""
        try:
            rows, at = [], 0
            for item in scheduled:
                self._add(item, states[at : at + item.count])
                at += item.count
                rows += self._due(item.request)
            if rows:
                self._read(rows)
            self._failing = False
        except Exception as error:
            self._failed(error)

    @torch.inference_mode()
    def propose(self, requests: list[Request], count: int) -> dict[str, Draft]:
        ready = [r for r in requests if self._reaches_end(r)]
        if not ready or count == 0:
            return {}
        first = [self._take(r, len(r.tokens) - 1 - self._unread[r.id].start, samples=1) for r in ready]
        tokens, hidden = self._read(first)
        columns, chains, spare = [tokens], ready, iter(self._spare)
        tables = {r.id: r.blocks for r in ready}
        for step in range(1, count):
            chains, kept = self._with_room(chains, tables, step, spare)
            if not chains:
                break
            rows = [HeadRows(r, len(r.tokens) - 2 + step, 1, 1, [0], tables[r.id]) for r in chains]
            batch = build_batch(rows, self._kv)
            # The drafts stay on the device until the chain is complete.
            batch.input_ids, hidden = (tokens, hidden) if len(kept) == len(tokens) else (tokens[kept], hidden[kept])
            tokens, hidden = self._head(batch, hidden)
            columns.append(tokens)
        return {name: Draft(tokens) for name, tokens in self._chains(ready, tables, columns).items()}

    def forget(self, request_id: str) -> None:
        self._unread.pop(request_id, None)

    # -- what has been seen --------------------------------------------------------------------------------------------

    def _add(self, item: Scheduled, states: Tensor) -> None:
        """Appends a step's rows to those before; rows of rejected drafts go, and all of them where there is a gap."""
        known = self._unread.get(item.request.id)
        keep = item.start - known.start if known is not None else -1
        if known is None or not 0 <= keep <= len(known.states):
            self._unread[item.request.id] = _Unread(item.start, states.clone())
        else:
            known.states = torch.cat([known.states[:keep], states])

    def _due(self, request: Request) -> list[HeadRows]:
        """Rows to read now: a block's worth, or everything of a request that ends with its prompt."""
        unread = self._unread[request.id]
        if request.prefill_only:
            return [self._take(request, len(unread.states), samples=0)]
        followed = min(unread.start + len(unread.states), len(request.tokens) - 1) - unread.start
        return [self._take(request, followed, samples=0)] if followed >= BLOCK_TOKENS else []

    def _reaches_end(self, request: Request) -> bool:
        """Whether the states of the token before the last one are here: where a draft begins."""
        unread = self._unread.get(request.id)
        return unread is not None and 0 < len(request.tokens) - 1 - unread.start <= len(unread.states)

    def _take(self, request: Request, count: int, samples: int) -> HeadRows:
        start = self._unread[request.id].start
        ids = request.tokens[start + 1 : start + 1 + count]
        # The token after a prompt is sampled by the decode worker, so the last token is repeated in that slot.
        ids += request.tokens[-1:] * (count - len(ids))
        return HeadRows(request, start, count, samples, ids, list(request.blocks))

    def _read(self, rows: list[HeadRows]) -> tuple[Tensor, Tensor]:
        """The head's pass over target states, which are let go."""
        unread = [self._unread[row.request.id] for row in rows]
        states = torch.cat([u.states[: row.count] for u, row in zip(unread, rows, strict=True)])
        for u, row in zip(unread, rows, strict=True):
            u.start, u.states = u.start + row.count, u.states[row.count :].clone()
        return self._head(build_batch(rows, self._kv), self._head.fuse(states))

    # -- the chain -----------------------------------------------------------------------------------------------------

    def _with_room(
        self, chains: list[Request], tables: dict[str, list[int]], step: int, spare: Iterator[int]
    ) -> tuple[list[Request], list[int]]:
        """The requests with a slot for draft ``step`` - 1, and their rows among ``chains``."""
        going, kept = [], []
        for row, request in enumerate(chains):
            table = tables[request.id]
            if (len(request.tokens) - 2 + step) // BLOCK_TOKENS >= len(table):
                block = next(spare, None)
                if block is None:
                    continue
                tables[request.id] = [*table, block]
            going.append(request)
            kept.append(row)
        return going, kept

    def _chains(
        self, ready: list[Request], tables: dict[str, list[int]], columns: list[Tensor]
    ) -> dict[str, list[int]]:
        drafts: dict[str, list[int]] = {r.id: [] for r in ready}
        left = ready
        for step, column in enumerate(columns):
            left = [r for r in left if step == 0 or (len(r.tokens) - 2 + step) // BLOCK_TOKENS < len(tables[r.id])]
            for request, token in zip(left, column.tolist(), strict=True):
                drafts[request.id].append(token)
        return drafts

    def _failed(self, error: Exception) -> None:
        if not self._failing:
            log.warning(
                "decoding goes on without drafts: the EAGLE-3 head failed (%s: %s)", type(error).__name__, error
            )
        self._failing = True
        self._unread.clear()
