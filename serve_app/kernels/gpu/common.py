"""What the kernels' launchers share."""

from __future__ import annotations

import functools
import os

import torch

# On a machine without a GPU, TRITON_INTERPRET=1 runs the kernels in Triton's interpreter, slowly and on CPU tensors.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def next_power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length() if n > 1 else 1


@functools.cache
def processors(device: torch.device) -> int:
    """Multiprocessors of a GPU; for the interpreter a small number that still makes it split."""
    if device.type != "cuda":
        return 8
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that one program may have on a GPU; for the interpreter those of a small one."""
    if device.type != "cuda":
        return 99 << 10
    properties = torch.cuda.get_device_properties(device)
    return int(getattr(properties, "shared_memory_per_block_optin", properties.shared_memory_per_block))


def widens(dtype: torch.dtype) -> bool:
    """Whether tiles are cast to float32 before a product: the interpreter's products know no bfloat16."""
    return INTERPRETED and dtype == torch.bfloat16
