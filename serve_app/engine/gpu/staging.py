"""Small arrays to a device: one transfer from page-locked memory, which never waits for what the device is doing."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

# Triton compiles a kernel anew for pointers that are not multiples of 16; 64 also keeps lines of the cache apart.
ALIGNMENT = 64


def to_device(arrays: list[np.ndarray], device: torch.device) -> list[Tensor]:
    """The arrays (contiguous) as tensors on ``device``; on a CPU they share the arrays' memory."""
    if device.type == "cpu":
        return [torch.from_numpy(a) for a in arrays]
    return unpack(pack(arrays, pinned=True).to(device, non_blocking=True), arrays)


def pack(arrays: list[np.ndarray], *, pinned: bool) -> Tensor:
    """All arrays in one uint8 tensor, each from a multiple of 64 on."""
    # torch keeps page-locked memory that a transfer still reads from being handed out again.
    packed = torch.empty(offsets(arrays)[-1], dtype=torch.uint8, pin_memory=pinned)
    target = packed.numpy()
    for array, begin in zip(arrays, offsets(arrays)[:-1], strict=True):
        target[begin : begin + array.nbytes] = array.reshape(-1).view(np.uint8)
    return packed


def unpack(packed: Tensor, like: list[np.ndarray]) -> list[Tensor]:
    """Views of ``packed`` with the shapes and dtypes of the arrays that it was made of."""
    return [
        packed[begin : begin + a.nbytes].view(torch.from_numpy(a[:0]).dtype).view(a.shape)
        for a, begin in zip(like, offsets(like)[:-1], strict=True)
    ]


def offsets(arrays: list[np.ndarray]) -> list[int]:
    """Where each array begins, and where the last ends."""
    found = [0]
    for array in arrays:
        found.append(found[-1] + -(-array.nbytes // ALIGNMENT) * ALIGNMENT)
    return found
