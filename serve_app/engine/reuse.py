"""What a request need not compute, since blocks and states of it are cached or stored."""

from __future__ import annotations

from dataclasses import dataclass

from serve_app.engine.blocks import BLOCK_TOKENS, BlockPool
from serve_app.engine.branches import find_tail, name_at
from serve_app.engine.request import Request
from serve_app.engine.state_slots import Stateless
from serve_app.engine.step import Prefix


@dataclass(slots=True)
class Reused:
    """``start``: the first token to be computed. ``hits`` are cached blocks of those before, ``tail`` the block to copy
    for the last of them, if there is one; ``state`` names the states behind them; ``stored``: some come from
    elsewhere.
    """

    start: int
    hits: list[int]
    tail: list[int]
    state: bytes | None
    stored: bool

    @property
    def taken(self) -> list[int]:
        return self.hits + self.tail


def reuse(request: Request, reusable: int, prefix: Prefix | None, blocks: BlockPool, states: Stateless) -> Reused:
    """``reusable``: so many of its tokens may come from a cache; ``request.keys`` has their blocks' names."""
    found = blocks.match(request.keys[: reusable // BLOCK_TOKENS])
    hits = found[: states.match(request.keys[: len(found)])]
    request.branch = len(found) * BLOCK_TOKENS
    start = len(hits) * BLOCK_TOKENS
    # What the pool was asked for began where our own cache ended then; those blocks may have been given away since.
    # States are those of its end and no other token.
    whole = not states.needed or (prefix is not None and prefix.state is not None and prefix.end <= reusable)
    if prefix is not None and whole and prefix.begin <= start < min(prefix.end, reusable):
        return Reused(min(prefix.end, reusable), hits, [], None, True)
    tail = find_tail(request, len(found), reusable, blocks) if request.shared else []
    if tail and states.holds(name := name_at(request, request.shared)):
        return Reused(request.shared, found, tail, name, False)
    return Reused(start, hits, [], request.keys[len(hits) - 1] if hits else None, False)
