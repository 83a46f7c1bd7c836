"""How a chunk that lies in several objects is divided among them."""

from __future__ import annotations

import msgspec


class Run(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """``layers`` layers of a model from ``layer`` on, and ``heads`` of their K/V heads from ``head`` on. ``sides``:
    keys and values, or 1 for what is both; ``width``: bytes of a head of a token.
    """

    layer: int
    layers: int
    head: int
    heads: int
    sides: int
    width: int


class Part(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """What one object has of a chunk: runs, in the order in which they lie there. ``away``: made on another node than
    the pool's.
    """

    runs: tuple[Run, ...]
    away: bool = False
