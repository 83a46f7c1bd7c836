"""Rows of a batch by adapter, for kernels whose launches must not depend on which rows have which."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# Rows of one adapter that share a pass over its matrices; as few as a matrix product on a GPU takes.
TILE_ROWS = 16


@dataclass(slots=True)
class Tiles:
    """Tile g holds ``count[g]`` rows (0: it is not needed), ``order[first[g]]`` and those behind it, of the adapter in
    ``place[g]``. All on the device; how many tiles there are follows from the numbers of rows and places alone::

        adapters  [ 2 0 1 2 2 ]      order  [ 1 | 2 | 0 3 4 ]      place [ 1 2 . ]  first [ 1 2 . ]  count [ 1 3 0 ]
    """

    order: Tensor  # [T] int64
    place: Tensor  # [G] int64
    first: Tensor
    count: Tensor


def tile_rows(adapters: Tensor, places: int) -> Tiles:
    """Of ``adapters`` [T] int64, 0 for none. Nothing is read on the host, so a CUDA graph can hold it."""
    rows, device = len(adapters), adapters.device
    counts = torch.zeros(places + 1, dtype=torch.int64, device=device)
    counts.scatter_add_(0, adapters, torch.ones_like(adapters))
    tiles = (counts + (TILE_ROWS - 1)) // TILE_ROWS
    tiles[0] = 0
    ends = tiles.cumsum(0)
    number = torch.arange(min(rows, places) + rows // TILE_ROWS, device=device)
    place = torch.searchsorted(ends, number, right=True).clamp_(max=places)
    within = (number - (ends - tiles)[place]) * TILE_ROWS
    first = (counts.cumsum(0) - counts)[place] + within
    count = (counts[place] - within).clamp_(0, TILE_ROWS) * (number < ends[-1])
    return Tiles(torch.argsort(adapters, stable=True), place, first.clamp_(max=max(rows - 1, 0)), count)


def tiles_of(batch: Any, rows: Tensor | None, places: int) -> Tiles:
    """Of all rows of an ``engine.step.Batch`` that has adapters, or of its ``rows``; worked out once in a pass."""
    if rows is None or len(rows) == len(batch.adapters):
        if batch.tiles is None:
            batch.tiles = tile_rows(batch.adapters, places)
        return batch.tiles
    if batch.sampled_tiles is None:
        batch.sampled_tiles = tile_rows(batch.adapters[rows], places)
    return batch.sampled_tiles
