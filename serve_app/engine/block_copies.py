"""Blocks into a plane of a cache."""

from __future__ import annotations

import torch
from torch import Tensor


def write_blocks(plane: Tensor, blocks: list[int], index: Tensor, source: Tensor) -> None:
    """Overwrites ``blocks`` (and ``index``, the same on the plane's device) of ``plane`` [layers, sides, blocks, ...]
    with ``source`` [layers, sides, len(blocks), ...] of its dtype and device.

    A processor copies block by block: torch's ``index_copy_`` goes through elements there, and takes three to five
    times as long in 16 bits.
    """
    if plane.device.type != "cpu":
        plane.index_copy_(2, index, source)
        return
    for at, block in enumerate(blocks):
        plane[:, :, block].copy_(source[:, :, at])


def raw(plane: Tensor) -> Tensor:
    """Bytes instead of float8, which few of torch's operators know."""
    return plane.view(torch.uint8) if plane.dtype.itemsize == 1 else plane
