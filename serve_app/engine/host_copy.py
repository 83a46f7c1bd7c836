"""Bytes of a device on their way to host memory, beside the engine's steps."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


class HostCopy:
    """A flat uint8 tensor in host memory, fetched when it is asked for and from whatever thread asks.

    On a GPU the copy runs on a stream of its own, beside the engine's steps, and waits there for what made the tensor.
    """

    def __init__(self, data: Tensor) -> None:
        self._data = data
        self._made = None
        if data.is_cuda:
            self._made = torch.cuda.Event()
            self._made.record()

    def __call__(self) -> np.ndarray:
        """Blocks until the bytes are there."""
        if self._made is None:
            return self._data.numpy()
        stream = torch.cuda.Stream(self._data.device)
        with torch.cuda.stream(stream):
            stream.wait_event(self._made)
            host = torch.empty(self._data.shape, dtype=self._data.dtype, pin_memory=True)
            host.copy_(self._data, non_blocking=True)
            stream.synchronize()
        return host.numpy()
