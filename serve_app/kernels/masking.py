"""What a grammar forbids, as bits, applied to logits."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from serve_app.kernels.library import native
from serve_app.kernels.library.load import cpu_library


def mask_logits(logits: Tensor, rows: list[int], bits: NDArray[np.int32]) -> None:
    """Makes ``logits`` [S, V] float32 minus infinity in place, in ``rows`` [C], where ``bits`` [C, words >= V / 32] are
    zero, lowest token first.
    """
    # As many times fewer bytes to move to a device as a number has bits.
    words = torch.from_numpy(bits).to(logits.device, non_blocking=True)
    which = torch.tensor(rows, dtype=torch.int64)
    if logits.device.type == "cpu" and logits.is_contiguous() and (library := cpu_library()) is not None:
        native.mask_logits(library, logits, which, words)
        return
    shifts = torch.arange(32, dtype=torch.int32, device=logits.device)
    allowed = ((words.unsqueeze(-1) >> shifts) & 1).flatten(1)[:, : logits.shape[1]].bool()
    if len(rows) == len(logits):
        logits.masked_fill_(~allowed, -torch.inf)
    else:
        which = which.to(logits.device, non_blocking=True)
        logits[which] = logits[which].masked_fill(~allowed, -torch.inf)
